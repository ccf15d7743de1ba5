"""Who may write in this run's folder now?

    lease.json   {"epoch": 3, "holder": {"host", "pid", ...} | null, "counter": 17, "sequence_at_takeover":
    42}

A holder raises ``counter`` about once a second; every acquisition raises ``epoch``, which is never used
twice. Reading, judging and writing happen under a file lock that is held for that moment only, so of two
that start at once one gets the lease; a holder that wakes up after it was taken over sees the other epoch
and writes nothing.

Decision: whether a holder lives is asked of the kernel on the same host, and told by the counter standing
still on another one, as seen by the clock of the reader alone. Turned down: a lock held for life (lost over
network mounts, mute about who holds it) and time stamps (clocks of hosts differ).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptrun.environment.process import ProcessName, this_process
from ckptrun.errors import RunInUseError
from ckptrun.records import JobFacts
from ckptrun.storage.file_lock import lock_within, locked
from ckptrun.storage.files import write_json_atomic

STALE_AFTER_S = 15.0
_LOCK_WAIT_S = 10.0
_SETTLE_S = 0.3  # where files cannot be locked: how long the other of two starters may need to write
_POLL_S = 0.1


@dataclass(frozen=True)
class Holder:
    """A process that holds a lease, or wants to."""

    host: str
    pid: int
    pid_start: int
    boot_id: str
    job: str | None = None
    restart_count: int = 0
    command: str = ""

    @classmethod
    def this_process(cls, *, job: JobFacts | None, command: str) -> Holder:
        """The process that asks, as part of ``job``."""
        me = this_process()
        count = 0 if job is None else job.restart_count
        return cls(me.host, me.pid, me.start, me.boot_id, None if job is None else job.key, count, command)

    @property
    def process(self) -> ProcessName:
        return ProcessName(self.host, self.pid, self.pid_start, self.boot_id)

    def is_earlier_start_of(self, other: Holder) -> bool:
        """Whether ``other`` is the same job or array task, requeued since."""
        return self.job is not None and self.job == other.job and self.restart_count < other.restart_count

    def __str__(self) -> str:
        job = "" if self.job is None else f" (job {self.job})"
        return f"process {self.pid} on {self.host}{job}: {self.command or 'unknown command'}"


@dataclass(frozen=True)
class LeaseState:
    """What ``lease.json`` says; ``holder`` is None once it was given back."""

    epoch: int
    holder: Holder | None
    counter: int = 0
    sequence_at_takeover: int = 0


class Lease:
    """A lease that this process holds. Made by :meth:`acquire`."""

    def __init__(self, path: str, state: LeaseState) -> None:
        self._path = path
        self._state = state

    @property
    def epoch(self) -> int:
        """How often this run's lease has been given out; manifests carry it."""
        return self._state.epoch

    @property
    def sequence_at_takeover(self) -> int:
        """The save counter noted at acquisition: what an older epoch wrote past it does not count."""
        return self._state.sequence_at_takeover

    @classmethod
    def acquire(
        cls,
        path: str,
        holder: Holder,
        *,
        noted: Callable[[], tuple[int, int]],
        stale_after_s: float = STALE_AFTER_S,
        on_wait: Callable[[str], object] | None = None,
    ) -> Lease:
        """Take the lease.

        A holder that is dead on this host is taken over at once, and so is an earlier start of the same job
        (its process, where it still lives here, is waited for). One on another host is watched first.

        Args:
            noted: the run's save counter, and the highest epoch known from elsewhere, should ``lease.json`` have been
                lost. Asked in the moment of taking over: who holds it till then goes on saving while it is waited for.
            stale_after_s: how long a counter must stand still until its holder counts as dead.
            on_wait: told in one sentence what is waited for, once.

        Raises:
            RunInUseError: somebody holds it and lives.
            OSError: the folder cannot be written.
        """
        while True:
            seen = read_lease(path)
            if seen is not None and seen.holder is not None:
                if seen.holder.is_earlier_start_of(holder):
                    _await_end(seen.holder, stale_after_s, on_wait)
                elif _lives(path, seen, stale_after_s, on_wait):
                    raise _in_use(path, seen.holder)
            with _locked(path) as locked:
                now = read_lease(path)
                beaten = now is not None and seen is not None and now.epoch == seen.epoch and now.holder
                if now != seen and not (beaten and beaten.is_earlier_start_of(holder)):
                    continue  # somebody was quicker, or woke up: judge anew
                sequence, known_epoch = noted()
                epoch = max(known_epoch, 0 if seen is None else seen.epoch) + 1
                state = LeaseState(epoch, holder, 0, sequence)
                _write(path, state, durable=True, point="lease-acquire")
            if not locked:
                time.sleep(_SETTLE_S)
                now = read_lease(path)
                if now is None or (now.epoch, now.holder) != (epoch, holder):
                    raise _in_use(path, None if now is None else now.holder)
            return cls(path, state)

    def beat(self) -> bool:
        """Raise the counter; about once a second. False once the lease is another's: write nothing more."""
        try:
            with _locked(self._path):
                if not self.still_mine():
                    return False
                self._state = replace(self._state, counter=self._state.counter + 1)
                _write(self._path, self._state, durable=False, point="lease-renew")
            return True
        except RunInUseError:  # somebody halted while holding the lock; the next beat tries again
            return self.still_mine()

    def still_mine(self) -> bool:
        """Whether nobody has taken over. Asked before each commit.

        Where the file is gone or damaged nobody has: who takes over writes it. The next beat writes it anew.

        Raises:
            OSError: the disk does not say.
        """
        now = read_lease(self._path)
        return now is None or (now.epoch, now.holder) == (self._state.epoch, self._state.holder)

    def release(self) -> None:
        """Give the lease back, if it is still ours."""
        try:
            with _locked(self._path):
                if self.still_mine():
                    _write(self._path, replace(self._state, holder=None), durable=True, point="lease-release")
        except RunInUseError:  # as in beat(); the next to come finds a dead holder, which is as good
            pass


def read_lease(path: str) -> LeaseState | None:
    """What ``lease.json`` says, None where there is none.

    A damaged one (it is only ever replaced whole, so a user or a disk did that) counts as none.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        holder = value["holder"]
        return LeaseState(
            epoch=int(value["epoch"]),
            holder=_holder(holder) if holder else None,
            counter=int(value.get("counter", 0)),
            sequence_at_takeover=int(value.get("sequence_at_takeover", 0)),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _holder(value: dict[str, Any]) -> Holder:
    return Holder(**{name: value[name] for name in Holder.__dataclass_fields__ if name in value})


def live_holder(path: str, *, stale_after_s: float = STALE_AFTER_S) -> Holder | None:
    """Who holds the lease and lives; changes nothing.

    A holder on another host is watched: an answer takes about a second where it lives and ``stale_after_s``
    where it does not.
    """
    seen = read_lease(path)
    if seen is None or seen.holder is None or not _lives(path, seen, stale_after_s, None):
        return None
    return seen.holder


def _lives(
    path: str, seen: LeaseState, stale_after_s: float, on_wait: Callable[[str], object] | None
) -> bool:
    assert seen.holder is not None
    if seen.holder.process.here:
        return seen.holder.process.alive
    if on_wait is not None:
        on_wait(
            f"waiting up to {stale_after_s:.0f} s to see whether the run's holder still lives: {seen.holder}"
        )
    deadline = time.monotonic() + stale_after_s
    while time.monotonic() < deadline:
        time.sleep(min(_POLL_S, stale_after_s / 4))
        now = read_lease(path)
        if now is None or now.holder is None:
            return False
        if now != seen:
            return True
    return False


def _await_end(holder: Holder, timeout_s: float, on_wait: Callable[[str], object] | None) -> None:
    process = holder.process
    deadline = time.monotonic() + timeout_s
    if process.here and process.alive and on_wait is not None:
        on_wait(f"waiting for the job's earlier start to end: {holder}")
    while process.here and process.alive and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _in_use(path: str, holder: Holder | None) -> RunInUseError:
    run = os.path.basename(os.path.dirname(os.path.abspath(path)))
    who = "another process, which took it at the same moment" if holder is None else str(holder)
    return RunInUseError(
        f"run {run!r} is in use by {who}",
        hint=f"Wait for it to end, ask it to stop with `ckptrun stop {run}`, or choose another name with --run.",
    )


def _write(path: str, state: LeaseState, *, durable: bool, point: str) -> None:
    write_json_atomic(path, asdict(state), durable=durable, point=point)


def _locked(path: str) -> contextlib.AbstractContextManager[bool]:
    """Hold the lock beside ``path``. Gives False where the file system does not lock."""
    return locked(os.path.join(os.path.dirname(path), ".lease.lock"), lambda fd: _lock(fd, path))


def _lock(fd: int, path: str) -> bool:
    try:
        return lock_within(fd, _LOCK_WAIT_S)
    except BlockingIOError:
        raise _in_use(path, None) from None
