"""Which processes has this one started, and how are they ended?

Decision: ``/proc`` is read, and a process is named by its number and its start time. Turned down: process
groups (a shell wrapper or a library makes its own) and psutil (a dependency for three fields).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_LOOK_EVERY_S = 0.05
_HALT_S = 0.2  # one that waits for a disk takes no signal


class ProcessStat(NamedTuple):
    """What ``/proc/<pid>/stat`` says. ``start_time`` is in clock ticks since boot; with the pid it names one
    process for good, also after the number has been used again."""

    pid: int
    parent: int
    state: str
    start_time: int

    @property
    def ended(self) -> bool:
        return self.state in "ZXx"


def process_stat(pid: int) -> ProcessStat | None:
    """Read one process; None where none has that number (any more), or where it is hidden from this user."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name in parentheses may itself hold spaces and parentheses: what counts stands behind the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def descendants(pid: int) -> list[ProcessStat]:
    """All living processes below ``pid``, parents before their children."""
    children: dict[int, list[ProcessStat]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := process_stat(int(name))) is not None:
            children.setdefault(stat.parent, []).append(stat)
    found: list[ProcessStat] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += [stat for stat in below if not stat.ended]
        queue += [stat.pid for stat in below]
    return found


def kill_descendants(pid: int | None = None, *, timeout_s: float = 2.0) -> list[int]:
    """SIGKILL all processes below ``pid`` (default: this one) and wait until they are gone.

    They are halted first, until no new ones turn up: a process that forks while its parent is being killed
    would otherwise slip away to init.

    Returns:
        The ids of those that still live after ``timeout_s`` seconds, or that may not be signalled.
    """
    root = os.getpid() if pid is None else pid
    halted: set[ProcessStat] = set()
    give_up_at = time.monotonic() + _HALT_S
    while True:
        new = [s for s in descendants(root) if s._replace(state="") not in halted]
        for stat in new:
            halted.add(stat._replace(state=""))
            _send(stat, signal.SIGSTOP)
        # A signal that was sent is not yet taken: until then a process on another processor may fork once more.
        if not new and (time.monotonic() > give_up_at or all(map(_is_halted, halted))):
            break
    for stat in halted:
        _send(stat, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while living := [stat.pid for stat in halted if _lives(stat)]:
        if time.monotonic() >= deadline:
            return sorted(living)
        time.sleep(0.005)
    return []


def run_unless_stopped(
    command: Sequence[str], stop_requested: Callable[[], bool], *, env: Mapping[str, str] | None = None
) -> tuple[int, str] | None:
    """Run a command to its end, or until a stop is requested, which ends it and all that it has started.

    Returns:
        Its exit code and all that it printed; None where a stop ended it.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess  # 10 ms that a listener for signals need not pay

    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    )
    try:
        while True:
            try:
                said, _ = process.communicate(timeout=_LOOK_EVERY_S)
                return process.returncode, said.decode(errors="replace")
            except subprocess.TimeoutExpired:
                if stop_requested():
                    return None
    finally:
        if process.poll() is None:
            kill_descendants(process.pid)  # some give what they start a process group of its own
            process.kill()
            process.communicate()


def last_line(said: str) -> str:
    """The last line that is not empty: with most tools, what went wrong."""
    return (said.strip().splitlines() or [""])[-1]


def reap_orphans() -> None:
    """Wait for children of this process that have ended, also those that it did not start but adopted."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        stat = process_stat(int(name)) if name.isdigit() else None
        if stat is not None and stat.parent == me and stat.ended:
            try:
                os.waitpid(stat.pid, os.WNOHANG)
            except ChildProcessError:
                pass


def _is_halted(stat: ProcessStat) -> bool:
    now = process_stat(stat.pid)
    return now is None or now.start_time != stat.start_time or now.ended or now.state in "Tt"


def _lives(stat: ProcessStat) -> bool:
    now = process_stat(stat.pid)
    return now is not None and now.start_time == stat.start_time and not now.ended


def _send(stat: ProcessStat, signum: int) -> None:
    if _lives(stat):
        try:
            os.kill(stat.pid, signum)
        except (ProcessLookupError, PermissionError):
            pass
