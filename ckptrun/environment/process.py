"""Which process is this, and does another one still live?

Decision: a process is named by host, boot, number and start time, so that a number which is used again,
after a reboot too, is never taken for the process that had it before. Turned down: a file lock held for
life, which says nothing to a reader and is lost on file systems that do not lock.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from ckptrun.processes import process_stat


class ProcessName(NamedTuple):
    """A process, for good. ``start`` is in clock ticks since boot."""

    host: str
    pid: int
    start: int
    boot_id: str

    @property
    def here(self) -> bool:
        """Whether it belongs to this host and boot, so that :attr:`alive` can be asked."""
        return self.host == host_name() and self.boot_id == boot_id()

    @property
    def alive(self) -> bool:
        """Whether it lives. Only for one that is :attr:`here`."""
        return is_alive(self.pid, self.start)


def this_process() -> ProcessName:
    """The process that asks."""
    pid = os.getpid()
    stat = process_stat(pid)
    return ProcessName(host_name(), pid, 0 if stat is None else stat.start_time, boot_id())


def is_alive(pid: int, start: int) -> bool:
    """Whether the process of this number and start time lives on this host. A zombie does not."""
    stat = process_stat(pid)
    return stat is not None and stat.start_time == start and not stat.ended


def host_name() -> str:
    """The name of this host."""
    return os.uname().nodename


@functools.cache
def boot_id() -> str:
    """What tells apart sets of process ids: the boot of the machine and, behind a colon, the PID namespace.

    Two containers may share host name and boot and yet have processes of the same numbers.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
