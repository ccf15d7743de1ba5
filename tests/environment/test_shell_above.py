"""A shell in the way of SLURM's signals, in a process table that the test writes and in a real one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptrun.environment.shell_above import Shell, shell_above

USR1 = int(signal.SIGUSR1)
SCRIPT = {"SLURM_JOB_ID": "7", "ENVIRONMENT": "BATCH", "SLURMD_NODENAME": "n1", "SLURM_TASK_PID": "100"}
STEP = {**SCRIPT, "SLURM_STEP_ID": "0"}


def processes(root: Path, *table: tuple[int, int, str], caught: int = 0, ignored: int = 0) -> str:
    """A ``/proc`` with (number, parent, program) each; what the one of number 100 does with signals."""
    for pid, parent, name in table:
        folder = root / "proc" / str(pid)
        folder.mkdir(parents=True)
        masks = f"SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n" if pid == 100 else ""
        (folder / "exe").symlink_to(f"/usr/bin/{name}")
        (folder / "status").write_text(
            f"Name:\tslurm_script\nUmask:\t0022\nPid:\t{pid}\nPPid:\t{parent}\n{masks}"
        )
    return str(root)


SLURMSTEPD = (90, 1, "slurmstepd")
BASH = (100, 90, "bash")


@pytest.mark.parametrize(
    ("env", "table", "shell"),
    [
        pytest.param(SCRIPT, [(101, 100, "ckptrun")], Shell("bash", 100, True), id="a bare line"),
        pytest.param(SCRIPT, [(150, 100, "conda"), (101, 150, "ckptrun")], Shell("bash", 100, True), id="conda run"),
        pytest.param(STEP, [(101, 100, "ckptrun")], Shell("bash", 100, False), id="srun bash"),
        pytest.param({}, [(101, 100, "ckptrun")], None, id="no job"),
        pytest.param({**SCRIPT, "ENVIRONMENT": "", "SLURM_PTY_PORT": "5"},
                     [(101, 100, "ckptrun")], None, id="srun --pty bash"),
        pytest.param(STEP, [(101, 99, "ckptrun"), (99, 90, "x")], None, id="of another task"),
        pytest.param({**SCRIPT, "SLURM_TASK_PID": "x"}, [(101, 100, "ckptrun")], None, id="no number"),
        pytest.param(SCRIPT, [(101, 1, "ckptrun")], None, id="numbers of a container"),
        pytest.param(SCRIPT, [], None, id="nothing is known"),
    ],
)  # fmt: skip
def test_who_stands_above(
    env: dict[str, str], table: list[tuple[int, int, str]], shell: Shell | None, tmp_path: Path
) -> None:
    root = processes(tmp_path, SLURMSTEPD, BASH, *table)
    assert shell_above(env, USR1, pid=101, root=root) == shell


def test_exec_leaves_no_shell(tmp_path: Path) -> None:
    root = processes(tmp_path, SLURMSTEPD, (100, 90, "ckptrun"))
    assert shell_above(SCRIPT, USR1, pid=100, root=root) is None


def test_a_program_that_starts_ckptrun_is_no_shell(tmp_path: Path) -> None:
    root = processes(tmp_path, SLURMSTEPD, (100, 90, "apptainer"), (101, 100, "ckptrun"))
    assert shell_above(STEP, USR1, pid=101, root=root) is None


@pytest.mark.parametrize("mask", ["caught", "ignored"])
@pytest.mark.parametrize(("number", "found"), [(signal.SIGUSR1, False), (signal.SIGUSR2, True)])
def test_a_shell_with_a_trap_is_the_users_own_way(
    mask: str, number: int, found: bool, tmp_path: Path
) -> None:
    root = processes(tmp_path, SLURMSTEPD, BASH, (101, 100, "ckptrun"), **{mask: 1 << (USR1 - 1)})
    assert (shell_above(SCRIPT, int(number), pid=101, root=root) is not None) == found


PROGRAM = f"""
import json, os, sys
from ckptrun.environment.shell_above import shell_above
found = shell_above({{**{SCRIPT!r}, "SLURM_TASK_PID": sys.argv[1]}}, {USR1})
print(json.dumps(None if found is None else [found.name, found.pid == int(sys.argv[1]), found.in_script]))
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('"$@" $$; true', ["bash", True, True]),
        ('exec "$@" $$', None),
        ('trap "" USR1; "$@" $$; true', None),
        ('trap : USR1; "$@" $$ & wait', None),
        ('trap : USR2; "$@" $$; true', ["bash", True, True]),
    ],
)
def test_with_real_processes(line: str, expected: list[object] | None) -> None:
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == expected
