"""What a job hands on to one that is handed in from within it, and what nobody has started in it yet."""

from __future__ import annotations

import pytest

from ckptrun.environment.slurm import gpus_on_node, outside_of_the_job, tasks_not_started

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
