"""How is a wish to stop recorded, and what exit code does the end of the work get?

    signal --C handler--> byte in a pipe --thread--> request, save_requested, forced   (read by the loop)
                                               \\---> on_force, on_grace_over, or the end at once

Decision: CPython's own C handler writes the number of a signal into a pipe (``signal.set_wakeup_fd``) the
moment it arrives, and a thread reads the pipe, counts and keeps the timers. So a signal is recorded while the
main thread is inside a long call or an import, and nothing is ever done inside a handler. Turned down: a
handler that sets a flag, because Python runs it only once the main thread is back in the interpreter, and the
grace period of a process that hangs would never end. (C code that keeps the interpreter lock stops the thread
too: the signal waits in the pipe and is acted on as soon as the lock is free.)
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

from ckptrun.errors import CkptrunError
from ckptrun.processes import kill_descendants
from ckptrun.records import Outcome, Status, StopReason

SAME_PRESS_S = (
    0.5  # SIGINTs to one process closer than this are one press: terminal and launcher both pass it on
)
DEFAULT_GRACE_S = 30.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR2
DEFAULT_WALLTIME_SIGNALS = (signal.SIGUSR1,)

_REASONS: dict[int, StopReason] = {
    signal.SIGINT: StopReason.KEYBOARD,
    signal.SIGTERM: StopReason.SIGTERM,
    signal.SIGHUP: StopReason.SIGTERM,
}
_EXIT_CODES = {
    StopReason.DONE: 0,
    StopReason.EXCEPTION: 1,
    StopReason.RANK_LOST: 70,
    StopReason.HANG: 70,
    StopReason.WALLTIME: 75,
    StopReason.KEYBOARD: 130,
    StopReason.SIGTERM: 143,
    StopReason.REQUESTED: 143,
}
_LEAST_LEFT_S = 1.0
_POLL_S = 0.05
_LONGEST_WAIT_S = 3600.0  # poll takes no year
_REPLACED_BY_FAILED_SAVE = (0, 129, 130, 143)
_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class StopTraining(Exception):  # noqa: N818 - said like StopIteration: a wish, not an error
    """Raise it in any hook to end the work as if it were done: teardown, ``FINISHED``, exit code 0.

    Several ranks have to raise it at the same place. In ``on_train_batch_end`` one is enough: all end at one step soon
    after.
    """


@dataclass(frozen=True)
class StopRequest:
    """The first wish to stop. ``signum`` is None where no signal brought it, ``at_monotonic`` in seconds.

    ``no_save``: the time that is left is too short to begin a save.
    """

    reason: StopReason
    signum: int | None
    at_monotonic: float
    no_save: bool = False


def stop_reason(
    signum: int, *, walltime_signals: Iterable[int] = DEFAULT_WALLTIME_SIGNALS
) -> StopReason | None:
    """Why a run stops on this signal; None where the signal does not stop it."""
    if signum in walltime_signals:
        return StopReason.WALLTIME
    return _REASONS.get(signum)


def exit_code(outcome: Outcome, *, request: StopRequest | None = None) -> int:
    """The exit code of the whole command, by the README's table of exit codes.

    Args:
        outcome: how the work ended; it decides, so a request that came after the end changes nothing.
        request: the stop request that was acted on; tells SIGHUP (129) from SIGTERM (143).
    """
    reason = outcome.stop_reason
    code = _EXIT_CODES[reason]
    if reason is StopReason.EXCEPTION and isinstance(outcome.error, CkptrunError) and not outcome.user_error:
        code = outcome.error.exit_code
    elif reason is StopReason.SIGTERM and request is not None and request.signum == signal.SIGHUP:
        code = 129
    if outcome.save_error is not None and code in _REPLACED_BY_FAILED_SAVE:
        return 1
    return code


def final_status(outcome: Outcome) -> Status:
    """The status a run is left in."""
    return Status.FINISHED if outcome.stop_reason is StopReason.DONE else Status.INTERRUPTED


def end_now(request: StopRequest | None) -> None:
    """End this process and all that it started, at once and without saving; does not return."""
    kill_descendants()
    reason = StopReason.KEYBOARD if request is None else request.reason
    os._exit(exit_code(Outcome(reason), request=request))


class StopListener:
    """Records signals and requests for one process.

    The loop reads ``request`` (None until the first wish to stop), ``save_requested`` (how often a save was
    asked for) and ``forced`` (no more saving, end at once); all three are plain attributes. ``grace_s`` and
    the callbacks may be set at any time after :meth:`install`, which stands before anything heavy is
    imported. The callbacks run in a thread of their own, so that one that blocks does not keep the next press
    from counting.

    Attributes:
        grace_s: seconds from the first SIGTERM or SIGHUP until ``on_grace_over``.
        walltime_signals: signals that say that the walltime draws near.
        on_force: called at the second Ctrl-C.
        on_grace_over: called when the grace period is over and :meth:`finished` was not called.
        on_ending: called before each of these two, and before the end at the third Ctrl-C, with whether the stacks of
            threads are wanted: what has to be known elsewhere before this process ends at once.
        on_request: called, and meant to return at once, with the first wish to stop.
        time_left_s: how long a stop for the walltime may take until it is forced, None where there is no end.
        no_time_to_save: whether that is too short to begin a save.
        num_terms: how often SIGTERM has come, also once the work has ended.
        on_change: called, and meant to return at once, when ``request`` or ``save_requested`` has changed.
        report: in a rank, takes the number of each signal instead of it being counted here: only the supervisor
            counts.
    """

    def __init__(
        self,
        *,
        grace_s: float = DEFAULT_GRACE_S,
        walltime_signals: Iterable[int] = DEFAULT_WALLTIME_SIGNALS,
        on_force: Callable[[StopRequest], object] = end_now,
        on_grace_over: Callable[[StopRequest], object] = end_now,
        report: Callable[[int], object] | None = None,
    ) -> None:
        self.request: StopRequest | None = None
        self.save_requested = 0
        self.forced = False
        self.grace_s = grace_s
        self.walltime_signals = tuple(walltime_signals)
        self.on_force = on_force
        self.on_grace_over = on_grace_over
        self.report = report
        self.on_ending: Callable[[StopRequest, bool], object] = lambda *_: None
        self.on_change: Callable[[], object] = lambda: None
        self.on_request: Callable[[StopRequest], object] = lambda _: None
        self.time_left_s: Callable[[], float | None] = lambda: None
        self.no_time_to_save: Callable[[], bool] = lambda: False
        self.num_terms = 0
        self._lock = threading.Lock()
        self._presses: dict[str, tuple[int, float]] = {}  # by origin: how many, and when the last
        self._grace_from: float | None = None
        self._time_over_at: float | None = None
        self._grace_over = False
        self._finished = False
        self._installed = False
        self._handlers: dict[int, _Handler] = {}
        self._previous_fd = -1
        self._takes_signals = False
        self._read_fd = self._write_fd = -1
        self._thread: threading.Thread | None = None

    # -- installing ------------------------------------------------------------------------------------------

    def install(self, signals: Iterable[int] | None = None) -> str | None:
        """Take over the signals and start the thread.

        Args:
            signals: those to take; SIGINT, SIGTERM, SIGHUP, SIGUSR2 and ``walltime_signals`` where not given.
                A signal that came in ignored is taken too, but for SIGHUP: what runs under nohup stays there.

        Returns:
            None, or a warning for the user where signals cannot be caught because this is not the main
            thread; requests by :meth:`request_stop` and :meth:`request_save` work all the same.
        """
        global _active
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._installed = True
        warning = None
        if threading.current_thread() is threading.main_thread():
            self._take_signals(
                (*STOP_SIGNALS, SAVE_SIGNAL, *self.walltime_signals) if signals is None else signals
            )
            _active = self
        else:
            warning = (
                "Started from a thread that is not the main one: Python lets only the main thread catch "
                "signals, so Ctrl-C, SIGTERM and the other stop signals act here as they did before. "
                "`ckptrun stop` and `ckptrun save` work."
            )
        self._thread = threading.Thread(target=self._listen, name="ckptrun-stop", daemon=True)
        self._thread.start()
        return warning

    def _take_signals(self, signals: Iterable[int]) -> None:
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._takes_signals = True  # though there may be none
        for signum in dict.fromkeys(signals):
            previous = signal.getsignal(signum)
            if signum == signal.SIGHUP and previous == signal.SIG_IGN:
                continue
            self._handlers[signum] = previous
            signal.signal(signum, self._handle)

    def restore(self) -> None:
        """Put the handlers and the wake-up descriptor back as they were, and end the thread.

        A handler that somebody else has put in place of ours since then stays.
        """
        global _active
        if not self._installed:
            return
        if self._takes_signals and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopListener.restore() belongs in the thread that called install()")
        self._installed = False
        if _active is self:
            _active = None
        if self._takes_signals:
            self._takes_signals = False
            for signum, previous in self._handlers.items():
                if signal.getsignal(signum) == self._handle:
                    # None: it was set by C code and cannot be named from here.
                    signal.signal(signum, signal.SIG_DFL if previous is None else previous)
            self._handlers.clear()
            current = signal.set_wakeup_fd(self._previous_fd)
            if current != self._write_fd:
                signal.set_wakeup_fd(current)
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1

    def outlast_the_interpreter(self) -> None:
        """For a process of our own: a signal that comes while the interpreter ends does not change its exit code.

        Python gives up all handlers then, and the signal's own way is to end the process by itself.
        """
        atexit.register(self._ignore_from_now_on)  # what is registered first runs last

    def _ignore_from_now_on(self) -> None:
        for signum in self._handlers:
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, signal.SIG_IGN)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        current = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if current != self._write_fd:
            # Somebody, an asyncio loop for one, has taken the descriptor since: the byte went there.
            if current != -1:
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            self._wake(signum)
        previous = self._handlers.get(signum)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(signum, frame)

    # -- requests that no signal brings ----------------------------------------------------------------------

    def request_stop(self, reason: StopReason, *, signum: int | None = None) -> bool:
        """Ask for a stop, as the first Ctrl-C does. False where one was asked for before: the first wins."""
        with self._lock:
            if self.request is not None:
                return False
            now, walltime = time.monotonic(), reason is StopReason.WALLTIME
            request = StopRequest(reason, signum, now, no_save=walltime and self.no_time_to_save())
            left_s = self.time_left_s() if walltime else None
            if left_s is not None:
                self._time_over_at = now + max(_LEAST_LEFT_S, left_s)
            self.request = request
        self._wake()
        self.on_request(request)
        self.on_change()
        return True

    def request_save(self) -> None:
        """Ask for a checkpoint, as SIGUSR2 does."""
        with self._lock:
            self.save_requested += 1
        self.on_change()

    def await_term(self, timeout_s: float, *, since: int | None = None) -> None:
        """Wait until SIGTERM comes, once more.

        Args:
            since: how often it had come when the wait was decided on.
        """
        before = self.num_terms if since is None else since
        deadline = time.monotonic() + timeout_s
        while self.num_terms == before and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def begins(self) -> None:
        """Work begins, for the first time or once more: the grace period counts."""
        self._finished = False

    def finished(self) -> None:
        """The work has ended and is saved: the grace period can no longer run out."""
        self._finished = True

    # -- the thread ------------------------------------------------------------------------------------------

    def _wake(self, byte: int = 0) -> None:
        try:
            os.write(self._write_fd, bytes((byte,)))
        except OSError:  # 64 KiB of signals wait there already, or nobody listens
            pass

    @property
    def has_finished(self) -> bool:
        """Whether the work has ended and is saved."""
        return self._finished

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        while self._installed:
            deadline = self._grace_deadline()
            wait_s = None if deadline is None else min(_LONGEST_WAIT_S, max(0.0, deadline - time.monotonic()))
            if poll.poll(None if wait_s is None else wait_s * 1000 + 1):
                for signum in os.read(self._read_fd, 4096):
                    if signum and self._installed:
                        self._count(signum, time.monotonic())
            elif (deadline := self._grace_deadline()) is not None and time.monotonic() >= deadline:
                self._grace_over = True
                self._call(self.on_grace_over, stacks=True)

    def _grace_deadline(self) -> float | None:
        if self._grace_over or self._finished or self.forced:
            return None
        ends = [] if self._grace_from is None else [self._grace_from + self.grace_s]
        return min([*ends, *([] if self._time_over_at is None else [self._time_over_at])], default=None)

    def grace_left_s(self) -> float | None:
        """How much of the grace period is left, also once the work has ended; None where none has begun."""
        if self._grace_from is None:
            return None
        return max(0.0, self._grace_from + self.grace_s - time.monotonic())

    @property
    def allowed_s(self) -> float:
        """How long the work may take to end, from the request on."""
        if self._time_over_at is None or self.request is None:
            return self.grace_s
        left_s = self._time_over_at - self.request.at_monotonic
        return left_s if self._grace_from is None else min(left_s, self.grace_s)

    def count(self, signum: int, origin: str) -> None:
        """Count a signal that another process received.

        Args:
            origin: names that process. One press reaches many, and the word of a busy one comes late: so only two
                presses at one process are two.
        """
        self._count(signum, time.monotonic(), origin)

    def _count(self, signum: int, now: float, origin: str = "") -> None:
        self.num_terms += signum == signal.SIGTERM
        if self.report is not None:
            self.report(signum)
            return
        if self._previous_fd != -1:
            try:
                os.write(self._previous_fd, bytes((signum,)))
            except OSError:  # its owner has closed it
                self._previous_fd = -1
        if signum == SAVE_SIGNAL and signum not in self.walltime_signals:
            self.request_save()
            return
        reason = stop_reason(signum, walltime_signals=self.walltime_signals)
        if reason is None:
            return
        presses = 0
        if reason is StopReason.KEYBOARD:
            presses, last = self._presses.get(origin, (0, float("-inf")))
            if now - last < SAME_PRESS_S:
                return
            presses += 1
            self._presses[origin] = presses, now
        first = self.request_stop(reason, signum=signum)
        if reason is StopReason.SIGTERM and self._grace_from is None:
            # Also after a Ctrl-C: whoever sends SIGTERM sends SIGKILL next, however it began.
            self._grace_from = now
        if first or reason is not StopReason.KEYBOARD:
            return
        if presses > 2:
            self._kill()
        elif presses == 2 and not self.forced:
            self.forced = True
            self._call(self.on_force)

    def _call(self, callback: Callable[[StopRequest], object], *, stacks: bool = False) -> None:
        request = self.request
        assert request is not None

        def end() -> None:
            try:
                self.on_ending(request, stacks)
            finally:
                callback(request)

        threading.Thread(target=end, name="ckptrun-stop-callback", daemon=True).start()

    @property
    def ends_at_once(self) -> bool:
        """Whether a thread of ours is ending this process: no outcome of the work counts any more."""
        return self.forced or self._grace_over

    def _kill(self) -> None:
        try:
            if self.request is not None:
                self.on_ending(self.request, False)
            kill_descendants()
        finally:
            os._exit(130)

    def _leave_to_parent(self) -> None:
        """In a forked child: the pipe is the parent's, whose presses are counted there and not here."""
        self._installed = False
        self._thread = None
        signal.set_wakeup_fd(-1)
        for signum in self._handlers:
            # SIGTERM is how a parent ends its children (multiprocessing does); the others come to the whole
            # process group and are the parent's to judge.
            signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.SIG_IGN)
        self._handlers.clear()
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1


_active: StopListener | None = None  # the one whose signals a forked child has to let go


def _after_fork_in_child() -> None:
    global _active
    listener, _active = _active, None
    if listener is not None:
        listener._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


def ignore_stop_signals_in_child(parent_pid: int) -> None:
    """Call it first in a loader worker or another helper process: stop signals are its parent's to judge.

    The stop and save signals are ignored, and the kernel kills the process when its parent ends. (Strictly,
    when the thread that started it ends; start helpers from a thread that lives as long as they do.) Where
    the parent has ended already, this process does so now.

    Args:
        parent_pid: the process that started this one, as it was told by it.
    """
    import ctypes  # 10 ms that the supervisor need not pay

    for signum in (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
