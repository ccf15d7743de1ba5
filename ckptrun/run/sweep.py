"""What did an attempt that died leave in the run's folder, outside of ``checkpoints/``?

Decision: the next holder of the lease clears it away before it begins, so that a request to stop that was
meant for a dead attempt does not stop the new one. Only names that ckptrun itself gives are touched. Turned
down: clearing by age, which needs clocks that agree.
"""

from __future__ import annotations

import os
import re

from ckptrun import faults
from ckptrun.processes import process_stat
from ckptrun.run.control import FILE_NAME
from ckptrun.run.folder import RunFolder

_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)(?:-(\d+))?")  # behind it the writer's process, and its thread


def sweep(folder: RunFolder) -> list[str]:
    """Remove half-written files and requests nobody will answer; call it right after the lease was taken.

    Returns:
        The paths that were removed.

    Raises:
        OSError: a leftover cannot be removed.
    """
    removed = []
    for path in (folder.path, folder.control_dir):
        try:
            names = sorted(os.listdir(path))
        except FileNotFoundError:
            continue
        for name in names:
            temporary = _TEMPORARY.fullmatch(name)
            if temporary is not None:
                # `ckptrun pin` or `save` may be writing at this moment.
                leftover = not _runs(int(temporary[1]), temporary[2])
            else:
                leftover = path == folder.control_dir and FILE_NAME.fullmatch(name) is not None
            if leftover:
                faults.reach("sweep:file", os.path.join(path, name))
                try:
                    os.unlink(os.path.join(path, name))
                except FileNotFoundError:
                    continue
                removed.append(os.path.join(path, name))
    return removed


def _runs(pid: int, thread: str | None) -> bool:
    """Whether the writer is still there. Its thread is asked for where the name has it: the number of a process that
    was killed is soon another's."""
    if thread is not None and os.path.isdir("/proc/self/task"):
        return os.path.isdir(f"/proc/{pid}/task/{thread}")
    return process_stat(pid) is not None
