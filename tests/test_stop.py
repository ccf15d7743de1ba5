"""Stop requests, with real processes and real signals. A script says what it sees on stdout, line by line."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ckptrun import stop
from ckptrun.errors import IncompatibleError, MisconfigurationException
from ckptrun.processes import descendants, kill_descendants, process_stat
from ckptrun.records import Outcome, Status, StopReason
from ckptrun.stop import StopListener, StopRequest, exit_code, final_status, stop_reason

DEADLINE_S = 30.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


class Script:
    """A Python process that prints lines."""

    def __init__(self, code: str, *, ignoring: tuple[int, ...] = (), group: bool = False) -> None:
        def prepare() -> None:
            for signum in ignoring:
                signal.signal(signum, signal.SIG_IGN)

        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            preexec_fn=prepare,
            start_new_session=group,
        )
        assert self.process.stdout is not None
        self.out = self.process.stdout.fileno()
        self.buffer = b""

    def line(self, within_s: float = DEADLINE_S) -> str:
        deadline = time.monotonic() + within_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            assert left > 0, f"no line within {within_s} s"
            if select.select([self.out], [], [], left)[0]:
                data = os.read(self.out, 4096)
                assert data, f"the script ended with {self.process.wait()}"
                self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line.decode()

    def expect(self, *lines: str, within_s: float = DEADLINE_S) -> None:
        assert [self.line(within_s) for _ in lines] == list(lines)

    def send(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def ends(self) -> int:
        return self.process.wait(DEADLINE_S)


PRELUDE = """
import os, signal, sys, threading, time
from ckptrun.records import StopReason
from ckptrun.stop import StopListener
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def wait(condition):
    end = time.monotonic() + 30
    while not condition():
        if time.monotonic() > end:
            say("never"); os._exit(99)
        time.sleep(0.005)
"""


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    started: list[Script] = []

    def start(code: str, **options: object) -> Script:
        started.append(Script(code, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            kill_descendants(one.process.pid)
            one.process.kill()
            one.process.wait()
        one.process.stdout.close()  # type: ignore[union-attr]


# -- the table -----------------------------------------------------------------------------------------------


SIGHUP = StopRequest(StopReason.SIGTERM, signal.SIGHUP, 0.0)
SIGTERM = StopRequest(StopReason.SIGTERM, signal.SIGTERM, 0.0)


@pytest.mark.parametrize(
    ("outcome", "options", "code", "status"),
    [
        (Outcome(StopReason.DONE), {}, 0, Status.FINISHED),
        (Outcome(StopReason.DONE, finished_by="stop_training"), {}, 0, Status.FINISHED),
        (Outcome(StopReason.DONE), {"request": SIGTERM}, 0, Status.FINISHED),
        (Outcome(StopReason.EXCEPTION, error=ValueError(), user_error=True), {}, 1, Status.INTERRUPTED),
        (Outcome(StopReason.EXCEPTION, error=ValueError()), {}, 1, Status.INTERRUPTED),
        (Outcome(StopReason.EXCEPTION, error=IncompatibleError("x")), {}, 5, Status.INTERRUPTED),
        (
            Outcome(StopReason.EXCEPTION, error=MisconfigurationException("x"), user_error=True),
            {},
            1,
            Status.INTERRUPTED,
        ),
        (Outcome(StopReason.KEYBOARD), {}, 130, Status.INTERRUPTED),
        (Outcome(StopReason.SIGTERM), {"request": SIGTERM}, 143, Status.INTERRUPTED),
        (Outcome(StopReason.SIGTERM), {}, 143, Status.INTERRUPTED),
        (Outcome(StopReason.SIGTERM), {"request": SIGHUP}, 129, Status.INTERRUPTED),
        (Outcome(StopReason.REQUESTED), {}, 143, Status.INTERRUPTED),
        (Outcome(StopReason.WALLTIME), {}, 75, Status.INTERRUPTED),
        (Outcome(StopReason.RANK_LOST), {}, 70, Status.INTERRUPTED),
        (Outcome(StopReason.HANG), {}, 70, Status.INTERRUPTED),
        # the last save failed: in place of 0, 130, 129 and 143, never of 75
        (Outcome(StopReason.DONE, save_error="disk full"), {}, 1, Status.FINISHED),
        (Outcome(StopReason.KEYBOARD, save_error="disk full"), {}, 1, Status.INTERRUPTED),
        (Outcome(StopReason.SIGTERM, save_error="disk full"), {"request": SIGHUP}, 1, Status.INTERRUPTED),
        (Outcome(StopReason.SIGTERM, save_error="disk full"), {}, 1, Status.INTERRUPTED),
        (Outcome(StopReason.REQUESTED, save_error="disk full"), {}, 1, Status.INTERRUPTED),
        (Outcome(StopReason.WALLTIME, save_error="disk full"), {}, 75, Status.INTERRUPTED),
        (Outcome(StopReason.RANK_LOST, save_error="disk full"), {}, 70, Status.INTERRUPTED),
    ],
)
def test_exit_code_and_status(outcome: Outcome, options: dict, code: int, status: Status) -> None:
    assert exit_code(outcome, **options) == code
    assert final_status(outcome) == status


@pytest.mark.parametrize(
    ("signum", "reason"),
    [
        (signal.SIGINT, StopReason.KEYBOARD),
        (signal.SIGTERM, StopReason.SIGTERM),
        (signal.SIGHUP, StopReason.SIGTERM),
        (signal.SIGUSR1, StopReason.WALLTIME),
        (signal.SIGUSR2, None),
        (signal.SIGRTMIN + 1, None),
    ],
)
def test_reason_of_a_signal(signum: int, reason: StopReason | None) -> None:
    assert stop_reason(signum) == reason


def test_signals_of_the_config_come_before_the_table() -> None:
    assert stop_reason(signal.SIGTERM, walltime_signals=(signal.SIGTERM,)) is StopReason.WALLTIME
    assert stop_reason(signal.SIGUSR1, walltime_signals=(signal.SIGRTMIN,)) is None


# -- recording -----------------------------------------------------------------------------------------------

RECORD = """
listener = StopListener()
listener.install()
say("ready")
wait(lambda: listener.request)
say(listener.request.reason, listener.request.signum)
"""


@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGINT, f"keyboard {signal.SIGINT:d}"),
        (signal.SIGTERM, f"sigterm {signal.SIGTERM:d}"),
        (signal.SIGHUP, f"sigterm {signal.SIGHUP:d}"),
        (signal.SIGUSR1, f"walltime {signal.SIGUSR1:d}"),
    ],
)
def test_each_stop_signal_is_recorded(script, signum: int, said: str) -> None:
    one = script(RECORD)
    one.expect("ready")
    one.send(signum)
    one.expect(said)
    assert one.ends() == 0


@pytest.mark.parametrize(
    "busy",
    [
        "import hashlib; hashlib.pbkdf2_hmac('sha256', b'a', b'b', 2**62 >> 32)",
        "exec(compile('while True: pass', 'an import', 'exec'))",
        "threading.Lock().acquire() or threading.Event().wait()",
        "time.sleep(1000)",
        "os.read(os.pipe()[0], 1)",
    ],
)
def test_recorded_while_the_main_thread_does_not_come_back(script, busy: str) -> None:
    one = script(
        f"""
        listener = StopListener()
        listener.install()
        def watch():
            wait(lambda: listener.request)
            say(listener.request.reason)
            os._exit(0)
        threading.Thread(target=watch).start()
        say("ready")
        {busy}
        """
    )
    one.expect("ready")
    one.send(signal.SIGTERM)
    one.expect("sigterm", within_s=1.0 + 4.0)  # one second is the promise, the rest is for a busy machine
    assert one.ends() == 0


def test_what_came_while_c_code_kept_the_interpreter_lock_is_recorded_after_it(script) -> None:
    one = script(
        """
        listener = StopListener()
        listener.install()
        say("ready")
        sum(range(3 * 10**7))
        wait(lambda: listener.request)
        say(listener.request.reason)
        """
    )
    one.expect("ready")
    one.send(signal.SIGINT)
    one.expect("keyboard")
    assert one.ends() == 0


def test_an_ignored_interrupt_is_taken_all_the_same_and_nohup_stays(script) -> None:
    one = script(
        RECORD.replace('say("ready")', 'say("ready", signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)'),
        ignoring=(signal.SIGINT, signal.SIGHUP),
    )
    one.expect("ready True")
    one.send(signal.SIGHUP)
    one.send(signal.SIGINT)
    one.expect(f"keyboard {signal.SIGINT:d}")
    assert one.ends() == 0


def test_saves_are_counted_and_stop_nothing(script) -> None:
    one = script(
        """
        listener = StopListener()
        listener.install()
        say("ready")
        for number in (1, 2):
            wait(lambda: listener.save_requested == number)
            say(listener.save_requested, listener.request)
        """
    )
    one.expect("ready")
    one.send(signal.SIGUSR2)
    one.expect("1 None")
    one.send(signal.SIGUSR2)
    one.expect("2 None")
    assert one.ends() == 0


# -- counting, with a clock of its own -----------------------------------------------------------------------


@pytest.fixture
def counted() -> Iterator[tuple[StopListener, list[str]]]:
    calls: list[str] = []
    listener = StopListener(
        on_force=lambda request: calls.append(f"force {request.reason}"),
        on_grace_over=lambda request: calls.append(f"grace {request.reason}"),
    )
    listener._kill = lambda: calls.append("kill")  # type: ignore[method-assign]
    yield listener, calls
    eventually(lambda: not _threads("ckptrun-stop"), "the callbacks' threads end")


def _threads(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.mark.parametrize(
    ("presses", "forced", "expected"),
    [
        ([0.0], False, []),
        ([0.0, 0.1, 0.49], False, []),  # the terminal, torchrun and a hasty finger are one press
        ([0.0, 0.5], True, ["force keyboard"]),
        ([0.0, 0.3, 0.6], True, ["force keyboard"]),
        ([0.0, 0.5, 0.7], True, ["force keyboard"]),
        ([0.0, 0.5, 1.0], True, ["force keyboard", "kill"]),
    ],
)
def test_presses(counted, presses: list[float], forced: bool, expected: list[str]) -> None:
    listener, calls = counted
    for at in presses:
        listener._count(signal.SIGINT, at)
        eventually(lambda: not _threads("ckptrun-stop-callback"), "a callback ends")
    assert (listener.forced, calls) == (forced, expected)
    assert listener.request.reason is StopReason.KEYBOARD


def test_one_press_that_reaches_many_processes_is_one_whenever_each_says_so(counted) -> None:
    listener, calls = counted
    listener._count(signal.SIGINT, 0.0)
    for number, at in enumerate((0.1, 0.7, 5.0, 9.0)):  # ranks that were busy when it came
        listener._count(signal.SIGINT, at, f"rank {number}")
    listener._count(signal.SIGINT, 9.0, "host a")
    assert (listener.forced, calls) == (False, [])
    listener._count(signal.SIGINT, 9.1, "rank 2")
    eventually(lambda: calls == ["force keyboard"], "forced")
    for at, origin in ((9.2, "rank 1"), (9.3, "")):  # the second press, at the others
        listener._count(signal.SIGINT, at, origin)
    eventually(lambda: not _threads("ckptrun-stop-callback"), "callbacks end")
    assert calls == ["force keyboard"]
    listener._count(signal.SIGINT, 9.9, "rank 2")
    assert calls == ["force keyboard", "kill"]


def test_the_first_stop_wins_and_more_sigterms_change_nothing(counted) -> None:
    listener, calls = counted
    for at, signum in enumerate(
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM)
    ):
        listener._count(signum, float(at))
    assert listener.request.reason is StopReason.KEYBOARD
    assert listener._grace_from == 1.0  # whoever sends SIGTERM sends SIGKILL next
    assert (listener.forced, calls) == (False, [])
    assert not listener.request_stop(StopReason.REQUESTED)


def test_ctrl_c_twice_forces_a_stop_that_began_otherwise(counted) -> None:
    listener, calls = counted
    assert listener.request_stop(StopReason.REQUESTED)
    listener._count(signal.SIGINT, 0.0)
    assert not listener.forced
    listener._count(signal.SIGINT, 1.0)
    eventually(lambda: calls == ["force requested"], "forced")


def test_what_has_to_be_known_elsewhere_is_told_before_the_end(counted) -> None:
    listener, calls = counted
    listener.on_ending = lambda request, stacks: calls.append(f"ending {request.reason}, stacks: {stacks}")
    listener._count(signal.SIGINT, 0.0)
    listener._count(signal.SIGINT, 1.0)
    eventually(lambda: calls == ["ending keyboard, stacks: False", "force keyboard"], "forced")
    listener._call(listener.on_grace_over, stacks=True)
    eventually(lambda: calls[2:] == ["ending keyboard, stacks: True", "grace keyboard"], "the grace is over")


def test_a_callback_that_blocks_does_not_keep_the_third_press_from_killing(script) -> None:
    one = script(
        """
        listener = StopListener(on_force=lambda r: (say("force"), time.sleep(1000)))
        listener.install()
        say("ready")
        wait(lambda: listener.request)
        say("first")
        time.sleep(1000)
        """
    )
    one.expect("ready")
    one.send(signal.SIGINT)
    one.expect("first")
    time.sleep(stop.SAME_PRESS_S + 0.05)
    one.send(signal.SIGINT)
    one.expect("force")
    time.sleep(stop.SAME_PRESS_S + 0.05)
    one.send(signal.SIGINT)
    assert one.ends() == 130


# -- the grace period ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_when_the_grace_period_is_over_everything_ends(script, signum: int, code: int) -> None:
    one = script(
        """
        import subprocess
        listener = StopListener()
        listener.install()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        listener.grace_s = 0.2   # known only once the config is read
        say(child.pid)
        time.sleep(1000)
        """
    )
    child = int(one.line())
    one.send(signum)
    assert one.ends() == code
    eventually(lambda: (stat := process_stat(child)) is None or stat.ended, "the child is gone")


def test_the_grace_period_ends_with_the_work(script) -> None:
    one = script(
        """
        listener = StopListener(grace_s=3600, on_grace_over=lambda r: say("grace"))
        listener.install()
        say("ready")
        wait(lambda: listener.request)
        say(listener._grace_deadline() is None)
        listener.finished()
        listener.grace_s = 0.0   # were it to count still, it would be over
        say(listener._grace_deadline() is None)
        for number in (1, 2):   # the thread has gone round since
            os.kill(os.getpid(), signal.SIGUSR2)
            wait(lambda: listener.save_requested == number)
        listener.restore()
        say("end")
        """
    )
    one.expect("ready")
    one.send(signal.SIGTERM)
    one.expect("False")
    one.expect("True")
    one.expect("end")


def test_the_grace_period_is_over_once_even_when_more_sigterms_come(script) -> None:
    one = script(
        """
        listener = StopListener(grace_s=0.2, on_grace_over=lambda r: say("grace"))
        listener.install()
        say("ready")
        time.sleep(1000)
        """
    )
    one.expect("ready")
    one.send(signal.SIGTERM)
    one.expect("grace")
    for _ in range(3):
        one.send(signal.SIGTERM)
    with pytest.raises(AssertionError, match="no line"):
        one.line(within_s=0.6)


# -- handlers of others --------------------------------------------------------------------------------------


def test_handlers_that_stood_before_are_called_and_put_back(script) -> None:
    one = script(
        """
        def theirs(signum, frame):
            say("theirs", signum)
        signal.signal(signal.SIGTERM, theirs)
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(write_fd)
        listener = StopListener()
        listener.install()
        say("ready")
        wait(lambda: listener.request)
        say("ours")
        say(list(os.read(read_fd, 10)))
        listener.restore()
        say(signal.getsignal(signal.SIGTERM) is theirs)
        say(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        say(signal.set_wakeup_fd(-1) == write_fd, threading.active_count())
        """
    )
    one.expect("ready")
    one.send(signal.SIGTERM)
    assert {one.line(), one.line()} == {"theirs 15", "ours"}
    one.expect("[15]", "True", "True", "True 1")
    assert one.ends() == 0


def test_a_wakeup_descriptor_that_somebody_took_is_survived(script) -> None:
    one = script(
        """
        import asyncio
        listener = StopListener()
        listener.install()
        async def other():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGWINCH, lambda: None)
            say("inside")
            while not listener.request:
                await asyncio.sleep(0.01)
            say(listener.request.reason)
        asyncio.run(other())          # leaves no descriptor behind
        say("after")
        wait(lambda: listener.save_requested)
        say(listener.save_requested)
        """
    )
    one.expect("inside")
    one.send(signal.SIGTERM)
    one.expect("sigterm", "after")
    one.send(signal.SIGUSR2)
    one.expect("1")
    assert one.ends() == 0


def test_a_handler_set_later_by_somebody_else_stays(script) -> None:
    one = script(
        """
        listener = StopListener()
        listener.install()
        later = lambda signum, frame: None
        signal.signal(signal.SIGTERM, later)
        listener.restore()
        listener.restore()
        say(signal.getsignal(signal.SIGTERM) is later, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
        """
    )
    one.expect("True True")


def test_another_thread_than_the_main_one_works_with_a_warning(script) -> None:
    one = script(
        """
        def run():
            listener = StopListener()
            say(listener.install().split(":")[0])
            listener.request_stop(StopReason.REQUESTED)
            listener.request_save()
            say(listener.request.reason, listener.save_requested)
            listener.restore()
            say(threading.active_count())
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        say(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """
    )
    one.expect("Started from a thread that is not the main one", "requested 1", "2", "True")


# -- children ------------------------------------------------------------------------------------------------


def test_a_forked_child_does_not_count_for_its_parent(script) -> None:
    one = script(
        """
        listener = StopListener()
        listener.install()
        child = os.fork()
        if child == 0:
            say("child", signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
            time.sleep(1000)
        say("parent")
        wait(lambda: listener.save_requested)
        say(listener.request, listener.save_requested)
        os.kill(child, signal.SIGTERM)   # as multiprocessing ends its workers
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert {one.line(), one.line()} == {"child True", "parent"}
    child = descendants(one.process.pid)[0].pid
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGUSR2)
    one.send(signal.SIGUSR2)
    one.expect("None 1", "-15")


def test_a_helper_ignores_stop_signals_and_ends_with_its_parent(script) -> None:
    one = script(
        """
        from ckptrun.stop import ignore_stop_signals_in_child
        listener = StopListener()
        listener.install()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            ignore_stop_signals_in_child(parent)
            say(os.getpid())
            time.sleep(1000)
        time.sleep(1000)
        """
    )
    child = int(one.line())
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(child, signum)
    stat = process_stat(child)
    assert stat is not None
    assert not stat.ended
    one.process.kill()
    eventually(lambda: (stat := process_stat(child)) is None or stat.ended, "the helper is gone")


def test_a_helper_whose_parent_is_gone_ends(script) -> None:
    one = script(
        """
        from ckptrun.stop import ignore_stop_signals_in_child
        ignore_stop_signals_in_child(1 << 22)
        say("still here")
        """
    )
    assert one.ends() == -signal.SIGKILL


def test_it_loads_without_anything_heavy() -> None:
    heavy = {"ctypes", "socket", "subprocess", "logging", "json"}
    code = f"import sys, ckptrun.stop; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_restore_gives_the_descriptor_back_where_no_signal_was_taken() -> None:
    listener = StopListener()
    listener.install(signals=())
    listener.restore()
    assert signal.set_wakeup_fd(-1) == -1
