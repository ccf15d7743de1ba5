"""Does a shell stand between SLURM and this process, so that SLURM's signals do not come here?

Decision: asked of the processes and not guessed from variables. ``SLURM_TASK_PID`` is the process that slurmd
started; one above this one that is a shell, and does not handle the signal itself, is in the way. Where the script
says ``exec ckptrun`` that process is this one, and in a container with process numbers of its own it is not to be
found, which says nothing. Turned down: taking a missing step number for it, which finds ``exec ckptrun`` too, and
misses ``srun bash train.sh``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ckptrun.environment.slurm import VARIABLES, job_facts

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "ksh93", "mksh", "ash", "busybox", "csh", "tcsh", "fish"}


@dataclass(frozen=True)
class Shell:
    """The shell, and whether it is that of the batch script or of a task that srun started."""

    name: str
    pid: int
    in_script: bool


def shell_above(
    env: Mapping[str, str], signal_number: int, *, pid: int | None = None, root: str = "/"
) -> Shell | None:
    """The shell that SLURM has started in this process's place; None where there is none, or no batch job.

    Args:
        signal_number: one that the shell does not only pass on where it handles it.
        pid: of the process that is asked about; this one where None.
        root: where ``proc`` stands; for tests.
    """
    job = job_facts(env)
    started = env.get(VARIABLES["task_pid"], "")
    if job is None or not job.batch or not started.isdecimal():
        return None
    above = int(started)
    number = os.getpid() if pid is None else pid
    if number == above or not _is_below(number, above, root):
        return None
    name, status = _program(above, root), _status(above, root)
    if name not in _SHELLS or _handles(status, signal_number):
        return None
    return Shell(name, above, env.get(VARIABLES["step"]) is None)


def _program(pid: int, root: str) -> str:
    """The program's file: a script has its own file's name as that of the process (``slurm_script``)."""
    try:
        return os.path.basename(os.readlink(os.path.join(root, f"proc/{pid}/exe")))
    except OSError:
        return ""


def _is_below(pid: int, above: int, root: str) -> bool:
    while pid > 1:
        parent = _status(pid, root).get("PPid", "")
        pid = int(parent) if parent.isdecimal() else 0
        if pid == above:
            return True
    return False


def _handles(status: Mapping[str, str], signal_number: int) -> bool:
    bit = 1 << (signal_number - 1)
    return any(int(status.get(field, "0"), 16) & bit for field in ("SigCgt", "SigIgn"))


def _status(pid: int, root: str) -> dict[str, str]:
    try:
        with open(os.path.join(root, f"proc/{pid}/status"), encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in fields}
