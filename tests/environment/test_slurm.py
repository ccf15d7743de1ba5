"""What SLURM's variables mean."""

from __future__ import annotations

import pytest

from ckptrun.environment.slurm import array_task, job_facts
from ckptrun.records import JobFacts

SCRIPT = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "bash",  # the user's choice; says nothing
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "n1",
    "SLURM_TASK_PID": "77",
    "SLURM_PROCID": "0",
}
STEP = {**SCRIPT, "SLURM_STEP_ID": "0"}
WITHOUT_ENVIRONMENT = {name: value for name, value in STEP.items() if name != "ENVIRONMENT"}
SALLOC = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "interactive", "SLURM_NNODES": "1"}
PTY = {**WITHOUT_ENVIRONMENT, "SLURM_PTY_PORT": "34889", "SLURM_PTY_WIN_COL": "236"}


@pytest.mark.parametrize(
    ("env", "batch"),
    [
        pytest.param(SCRIPT, True, id="sbatch script"),
        pytest.param(STEP, True, id="srun in an sbatch script"),
        pytest.param(WITHOUT_ENVIRONMENT, True, id="srun --export=NONE in an sbatch script"),
        pytest.param({**SALLOC, "SLURM_RESTART_COUNT": "1"}, True, id="requeued"),
        pytest.param({**SCRIPT, "SLURM_PTY_PORT": "1"}, True, id="sbatch from within srun --pty"),
        pytest.param(SALLOC, False, id="salloc"),
        pytest.param(PTY, False, id="srun --pty bash"),
        pytest.param(
            {**WITHOUT_ENVIRONMENT, "SLURM_STEP_ID": "4294967290"},
            False,
            id="salloc with its shell on the node",
        ),
    ],
)
def test_batch_or_interactive(env: dict[str, str], batch: bool) -> None:
    facts = job_facts(env)
    assert facts is not None
    assert (facts.key, facts.batch) == ("1234", batch)


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_ARRAY_TASK_ID": "3"}, {"SLURM_JOB_ID": ""}, {"ENVIRONMENT": "BATCH"}]
)
def test_outside_of_slurm(env: dict[str, str]) -> None:
    assert job_facts(env) is None
    assert array_task(env) is None


def test_an_array_task_has_the_key_of_the_array_and_not_its_own_job_id() -> None:
    env = {**SCRIPT, "SLURM_JOB_ID": "1236", "SLURM_ARRAY_JOB_ID": "1230", "SLURM_ARRAY_TASK_ID": "4"}
    assert job_facts(env) == JobFacts("1230_4", True)
    assert array_task(env) == "4"


@pytest.mark.parametrize(("restarts", "count"), [("2", 2), ("", 0), ("many", 0)])
def test_restarts(restarts: str, count: int) -> None:
    facts = job_facts({**SCRIPT, "SLURM_RESTART_COUNT": restarts})
    assert facts is not None
    assert facts.restart_count == count


@pytest.mark.parametrize("jobs", ["12,11_3", "12 11_3", " 12, 11_3 "])
def test_jobs_it_was_resubmitted_from(jobs: str) -> None:
    facts = job_facts({**SCRIPT, "CKPTRUN_PREVIOUS_JOBS": jobs})
    assert facts is not None
    assert facts.previous == ("12", "11_3")
