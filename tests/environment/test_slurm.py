"""What SLURM's variables mean."""

from __future__ import annotations

import pytest

from ckptrun.environment.slurm import (
    array_task,
    end_time,
    job_facts,
    task_facts,
)
from ckptrun.errors import UsageError
from ckptrun.records import JobFacts, TaskFacts

SCRIPT = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "bash",  # the user's choice; says nothing
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "n1",
    "SLURM_TASK_PID": "77",
    "SLURM_PROCID": "0",
}
STEP = {**SCRIPT, "SLURM_STEP_ID": "0", "SRUN_DEBUG": "3"}
NO_SCRIPT = {name: value for name, value in STEP.items() if name != "ENVIRONMENT"}
EXPORT_NONE = {name: value for name, value in NO_SCRIPT.items() if name != "SRUN_DEBUG"}
SALLOC = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "interactive", "SLURM_NNODES": "1"}
PTY = {**NO_SCRIPT, "SLURM_PTY_PORT": "34889", "SLURM_PTY_WIN_COL": "236"}


@pytest.mark.parametrize(
    ("env", "batch"),
    [
        pytest.param(SCRIPT, True, id="sbatch script"),
        pytest.param(STEP, True, id="srun in an sbatch script"),
        pytest.param(EXPORT_NONE, True, id="srun --export=NONE in an sbatch script"),
        pytest.param({**STEP, "ENVIRONMENT": "production"}, True, id="somebody's own ENVIRONMENT"),
        pytest.param({**NO_SCRIPT, "SLURM_RESTART_COUNT": "1"}, True, id="a step of a requeued job"),
        pytest.param({**SALLOC, "SLURM_RESTART_COUNT": "1"}, True, id="requeued"),
        pytest.param({**SCRIPT, "SLURM_PTY_PORT": "1"}, True, id="sbatch from within srun --pty"),
        pytest.param(SALLOC, False, id="salloc"),
        pytest.param({**SALLOC, "SRUN_DEBUG": "3"}, False, id="salloc within a step"),
        pytest.param(NO_SCRIPT, False, id="srun in salloc or on a login node"),
        pytest.param(PTY, False, id="srun --pty bash"),
        pytest.param(
            {**EXPORT_NONE, "SLURM_STEP_ID": "4294967290"},
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
    assert job_facts(env) == JobFacts("1230_4", True, id="1236")
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


TASK = {
    **STEP,
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n2",
}


def test_which_task_of_a_step() -> None:
    facts = task_facts({**TASK, "SLURM_CPUS_PER_TASK": "6"}, at_terminal=False)
    assert facts == TaskFacts(3, 4, 1, 2, ("n1", "n2"), "n2", "0", cpus=6)
    assert facts.is_rank
    one = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    a_node = task_facts({**TASK, **one, "SLURM_LOCALID": "0"}, at_terminal=False)
    assert a_node is not None
    assert (a_node.num_tasks, a_node.number, a_node.is_rank) == (2, 1, False)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="outside of SLURM"),
        pytest.param(
            {**SCRIPT, "SLURM_NTASKS": "8"}, id="batch step, whose number of tasks means nobody yet"
        ),
        pytest.param({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, id="a step's only task"),
        pytest.param({**TASK, "SLURM_STEP_ID": "4294967290"}, id="the shell that salloc opens"),
        pytest.param({**TASK, "SLURM_JOB_ID": ""}, id="no job"),
    ],
)
def test_no_task_among_several(env: dict[str, str]) -> None:
    assert task_facts(env, at_terminal=False) is None


def test_a_shell_of_srun_pty_is_no_task_but_a_step_started_from_it_has_some() -> None:
    inherited = {**TASK, "SLURM_PTY_PORT": "34889"}
    assert task_facts(inherited, at_terminal=True) is None
    assert task_facts(inherited, at_terminal=False) is not None


@pytest.mark.parametrize("name", ["SLURM_HET_SIZE", "SLURM_PACK_SIZE"])
def test_a_heterogeneous_job_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="job 1234 is a heterogeneous one, with 2 components"):
        task_facts({**SCRIPT, name: "2"}, at_terminal=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        {"SLURM_STEP_TASKS_PER_NODE": ""},
        {"SLURM_STEP_NODELIST": "n[1-3]"},
        {"SLURM_NODEID": "2"},
        {"SLURM_LOCALID": "2"},
        {"SLURM_PROCID": "x"},
        {"SLURM_PROCID": "4"},
    ],
)
def test_what_does_not_fit_together_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="what SLURM says about this step cannot be used"):
        task_facts({**TASK, **wrong}, at_terminal=False)


def test_the_end_that_the_environment_knows() -> None:
    assert end_time({**SCRIPT, "SLURM_JOB_END_TIME": "1796070724"}) == 1796070724.0
    assert end_time(SCRIPT) is None
