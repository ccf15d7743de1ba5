"""What a job hands on to one that is handed in from within it, how that is found, and what nobody has started yet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptrun.environment.slurm import gpus_on_node, outside_of_the_job, tasks_not_started
from ckptrun.environment.slurm_successor import successor_of

USER = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "x", "CKPTRUN_CONFIG": "c.yaml"}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURMD_NODENAME": "n1",
    "SRUN_CPUS_PER_TASK": "4",
    "ENVIRONMENT": "BATCH",
    "CKPTRUN_PREVIOUS_JOBS": "5",
}


def test_the_new_job_knows_nothing_of_the_old_one() -> None:
    assert outside_of_the_job({**USER, **JOB}) == USER


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        ({}, 0),
        (JOB, 0),
        ({**JOB, "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}, 8),
        ({**JOB, "SLURM_JOB_NUM_NODES": "2"}, 2),
        ({**JOB, "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}, 0),
        ({**JOB, "SLURM_NTASKS": "8", "ENVIRONMENT": ""}, 0),
    ],
)
def test_tasks_that_nobody_has_started(env: dict[str, str], tasks: int) -> None:
    assert tasks_not_started(env) == tasks


def test_gpus_of_the_node() -> None:
    assert gpus_on_node({"SLURM_GPUS_ON_NODE": "4"}) == 4
    assert gpus_on_node({}) is None


def test_a_script_whose_name_is_in_another_encoding_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "squeue"
    path.write_bytes(
        "#!/bin/sh\necho '4|/x/entra\u00eenement.sh'\necho '8|/x/job.sh 7,5'\n".encode("latin-1")
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert successor_of("7") == "8"
