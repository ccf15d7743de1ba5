"""Which processes did this run's last attempt start, and is any of them still there?

    control/ranks.json   {"host", "boot_id", "processes": [[pid, start], ...]}

Decision: numbers with start times, written when ranks start, so that the next holder of the lease waits for what an
attempt left behind on this host and ends it, and never touches a process that only has the same number. Turned down:
searching the process table for names, which finds other people's runs.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable

from ckptrun.environment.process import boot_id, host_name, is_alive
from ckptrun.processes import process_stat
from ckptrun.run.folder import RunFolder
from ckptrun.storage.files import write_json_atomic

_PATIENCE_S = 2.0  # ranks end by themselves within this when their supervisor is gone
_POLL_S = 0.05


def note_processes(folder: RunFolder, pids: Iterable[int]) -> None:
    """Note the processes that an attempt has started on this host.

    Raises:
        OSError: the run's folder cannot be written.
    """
    stats = [stat for pid in pids if (stat := process_stat(pid)) is not None]
    value = {
        "host": host_name(),
        "boot_id": boot_id(),
        "processes": [[stat.pid, stat.start_time] for stat in stats],
    }
    write_json_atomic(_path(folder), value, durable=False, point="ranks")


def end_leftovers(folder: RunFolder) -> list[int]:
    """Wait for what the last attempt left behind on this host, and end what does not end by itself.

    Returns:
        The processes that had to be killed.
    """
    try:
        with open(_path(folder), encoding="utf-8") as file:
            value = json.load(file)
        if (value["host"], value["boot_id"]) != (host_name(), boot_id()):
            return []
        processes = [(int(pid), int(start)) for pid, start in value["processes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    _await(processes, _PATIENCE_S)
    killed = []
    for pid, start in processes:
        if is_alive(pid, start):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    _await(processes, _PATIENCE_S)
    return killed


def _await(processes: list[tuple[int, int]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_alive(*each) for each in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _path(folder: RunFolder) -> str:
    return os.path.join(folder.control_dir, "ranks.json")
