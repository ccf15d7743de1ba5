"""One writer a run, with real processes."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptrun.errors import RunInUseError
from ckptrun.records import JobFacts
from ckptrun.run import lease as module
from ckptrun.run.lease import Holder, Lease, LeaseState, live_holder, read_lease
from ckptrun.storage.files import write_json_atomic

STALE_S = 0.4


@pytest.fixture
def path(tmp_path: Path) -> str:
    folder = tmp_path / "demo"
    folder.mkdir()
    return str(folder / "lease.json")


def me(**changes: object) -> Holder:
    return dataclasses.replace(Holder.this_process(job=None, command="ckptrun fit"), **changes)  # type: ignore[arg-type]


def elsewhere(**changes: object) -> Holder:
    return me(host="other-host", pid=12, **changes)


def acquire(path: str, holder: Holder | None = None, sequence: int = 0) -> Lease:
    return Lease.acquire(path, holder or me(), noted=lambda: (sequence, 0), stale_after_s=STALE_S)


def put(path: str, state: LeaseState) -> None:
    write_json_atomic(path, dataclasses.asdict(state), durable=False)


@pytest.fixture
def holder_process(path: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease until its stdin closes."""
    code = (
        "import sys; from ckptrun.run.lease import *\n"
        "holder = Holder.this_process(job=None, command='ckptrun fit -c x')\n"
        "lease = Lease.acquire(sys.argv[1], holder, noted=lambda: (7, 0))\n"
        "print(lease.epoch, flush=True)\n"
        "while sys.stdin.readline(): print(lease.beat(), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        yield process
        process.kill()


# -- one after the other -------------------------------------------------------------------------------------


def test_taken_beaten_given_back_and_taken_again(path: str) -> None:
    assert read_lease(path) is None
    assert live_holder(path) is None
    lease = acquire(path, sequence=41)
    assert (lease.epoch, lease.sequence_at_takeover) == (1, 41)
    assert live_holder(path) == me()
    assert lease.beat()
    assert lease.still_mine()
    on_disk = json.loads(Path(path).read_text())
    assert list(on_disk) == ["epoch", "holder", "counter", "sequence_at_takeover"]
    assert list(on_disk["holder"]) == [
        "host",
        "pid",
        "pid_start",
        "boot_id",
        "job",
        "restart_count",
        "command",
    ]
    assert on_disk["counter"] == 1
    lease.release()
    assert live_holder(path) is None
    assert not lease.still_mine()
    assert acquire(path).epoch == 2


def test_a_live_holder_keeps_it_and_is_named(path: str, holder_process: subprocess.Popen[str]) -> None:
    with pytest.raises(RunInUseError) as caught:
        acquire(path)
    assert caught.value.exit_code == 4
    assert f"run 'demo' is in use by process {holder_process.pid} on {os.uname().nodename}" in str(
        caught.value
    )
    assert "ckptrun fit -c x" in str(caught.value)
    assert live_holder(path).pid == holder_process.pid


def test_a_dead_holder_is_taken_over_at_once(path: str, holder_process: subprocess.Popen[str]) -> None:
    holder_process.kill()
    holder_process.wait()
    start = time.monotonic()
    lease = Lease.acquire(path, me(), noted=lambda: (9, 0), stale_after_s=60)
    assert time.monotonic() - start < 5
    assert (lease.epoch, lease.sequence_at_takeover) == (2, 9)


def test_a_number_that_is_used_again_is_not_the_holder(path: str) -> None:
    put(path, LeaseState(3, me(pid_start=1), 5))
    assert live_holder(path) is None
    assert acquire(path).epoch == 4


def test_a_lost_lease_goes_on_after_the_highest_epoch_known(path: str) -> None:
    Path(path).write_text("not json")
    assert Lease.acquire(path, me(), noted=lambda: (0, 8)).epoch == 9


# -- taken over ----------------------------------------------------------------------------------------------


def test_one_that_comes_back_writes_nothing(path: str, holder_process: subprocess.Popen[str]) -> None:
    put(path, LeaseState(2, elsewhere(), 3))
    taken = Path(path).read_text()
    assert holder_process.stdin is not None
    assert holder_process.stdout is not None
    holder_process.stdin.write("beat\n")
    holder_process.stdin.flush()
    assert holder_process.stdout.readline() == "False\n"
    assert Path(path).read_text() == taken


def test_only_the_own_lease_is_given_back(path: str) -> None:
    lease = acquire(path)
    put(path, LeaseState(2, elsewhere(), 3))
    lease.release()
    assert not lease.beat()
    assert read_lease(path) == LeaseState(2, elsewhere(), 3)


# -- another host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", [elsewhere(), me(boot_id="earlier")], ids=["other host", "other boot"])
def test_a_counter_that_stands_still_is_taken_over_after_a_while(path: str, holder: Holder) -> None:
    put(path, LeaseState(5, holder, 100))
    said: list[str] = []
    start = time.monotonic()
    lease = Lease.acquire(path, me(), noted=lambda: (0, 0), stale_after_s=STALE_S, on_wait=said.append)
    assert time.monotonic() - start >= STALE_S
    assert lease.epoch == 6
    assert len(said) == 1
    assert holder.host in said[0]


@pytest.fixture
def beating(path: str) -> Iterator[Callable[[Holder], None]]:
    """Raises the counter from another thread, as a holder elsewhere does."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def start(holder: Holder) -> None:
        def beat() -> None:
            counter = 0
            while not ended.wait(0.02):
                counter += 1
                state = read_lease(path)
                if state is not None and state.holder != holder:
                    return
                put(path, LeaseState(5, holder, counter))

        put(path, LeaseState(5, holder, 0))
        threads.append(threading.Thread(target=beat))
        threads[0].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()


def test_a_counter_that_moves_is_alive(path: str, beating: Callable[[Holder], None]) -> None:
    beating(elsewhere())
    start = time.monotonic()
    with pytest.raises(RunInUseError, match="other-host"):
        Lease.acquire(path, me(), noted=lambda: (0, 0), stale_after_s=30)
    assert live_holder(path, stale_after_s=30) == elsewhere()
    assert time.monotonic() - start < 20


def test_the_same_job_requeued_takes_over_at_once(path: str, beating: Callable[[Holder], None]) -> None:
    beating(elsewhere(job="1230_4", restart_count=1))
    again = Holder.this_process(job=JobFacts("1230_4", True, 2), command="ckptrun fit")
    lease = Lease.acquire(path, again, noted=lambda: (0, 0), stale_after_s=30)
    assert lease.epoch == 6


@pytest.mark.parametrize("job", [JobFacts("1230_4", True, 1), JobFacts("1230_5", True, 2), None])
def test_another_job_or_the_same_start_does_not(
    path: str, beating: Callable[[Holder], None], job: JobFacts | None
) -> None:
    beating(elsewhere(job="1230_4", restart_count=1))
    with pytest.raises(RunInUseError, match="job 1230_4"):
        acquire(path, Holder.this_process(job=job, command="x"))


def test_the_job_s_earlier_start_is_waited_for_where_it_still_lives_here(path: str) -> None:
    earlier = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = module.this_process()
    from ckptrun.processes import process_stat

    start = process_stat(earlier.pid).start_time
    put(path, LeaseState(1, Holder(stat.host, earlier.pid, start, stat.boot_id, "7", 0, "x"), 0))
    said: list[str] = []

    def ended(sentence: str) -> None:
        said.append(sentence)
        earlier.communicate()

    again = me(job="7", restart_count=1)
    lease = Lease.acquire(path, again, noted=lambda: (0, 0), stale_after_s=60, on_wait=ended)
    assert (lease.epoch, len(said)) == (2, 1)


# -- at once -------------------------------------------------------------------------------------------------

RACE = """
import sys
from ckptrun.errors import RunInUseError
from ckptrun.run.lease import *
holder = Holder.this_process(job=None, command="race")
print("ready", flush=True)
sys.stdin.readline()
try:
    lease = Lease.acquire(sys.argv[1], holder, noted=lambda: (0, 0), stale_after_s=float(sys.argv[2]))
    print("won", lease.epoch, flush=True)
except RunInUseError:
    print("lost", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("before", ["nobody", "dead here", "stale elsewhere"])
def test_of_several_that_start_at_once_one_gets_it(path: str, before: str) -> None:
    if before == "dead here":
        put(path, LeaseState(6, me(pid_start=1), 0))
    elif before == "stale elsewhere":
        put(path, LeaseState(6, elsewhere(), 0))
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, path, "0.3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    for one in starters:
        assert one.stdout.readline() == "ready\n"
    for one in starters:
        one.stdin.write("go\n")
        one.stdin.flush()
    said = [one.stdout.readline().split() for one in starters]
    for one in starters:
        one.communicate()
    won = [words for words in said if words[0] == "won"]
    assert won == [["won", "1" if before == "nobody" else "7"]]
    assert said.count(["lost"]) == 4


def test_where_files_cannot_be_locked_the_one_that_was_overwritten_finds_out(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(module, "_SETTLE_S", 0.01)
    assert acquire(path).epoch == 1
    monkeypatch.setattr(module.time, "sleep", lambda _: put(path, LeaseState(9, elsewhere(), 0)))
    put(path, LeaseState(1, None))
    with pytest.raises(RunInUseError, match="other-host"):
        acquire(path)


def test_a_lock_that_somebody_keeps_is_not_waited_for_without_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = acquire(path)
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    with open(os.path.join(os.path.dirname(path), ".lease.lock"), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lease.beat()  # still ours, not written this time
        lease.release()
        put(path, LeaseState(1, None))
        with pytest.raises(RunInUseError, match="same moment"):
            acquire(path)
