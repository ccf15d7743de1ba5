"""What a command in a SLURM job is told before it starts, by which of its tasks. With real processes: tests/slurm/."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptrun.cli.job_check import job_warnings
from ckptrun.cli.options import FnOptions
from ckptrun.cli.settle import settle_fn
from ckptrun.environment import machine
from ckptrun.errors import UsageError
from ckptrun.launch.plan import make_plan
from ckptrun.records import Fn, TaskFacts

# This process is the one that SLURM has started.
SCRIPT = {
    "SLURM_JOB_ID": "7",
    "ENVIRONMENT": "BATCH",
    "SLURMD_NODENAME": "n1",
    "SLURM_TASK_PID": str(os.getpid()),
    "SLURM_NTASKS": "4",
}
STEP = {**SCRIPT, "SLURM_STEP_ID": "0"}
INTERACTIVE = {name: value for name, value in STEP.items() if name != "ENVIRONMENT"} | {"SRUN_DEBUG": "3"}
TASK = TaskFacts(number=0, num_tasks=4, local=0, num_local=2, nodes=("n1", "n2"), node="n1", step="0", cpus=1)


def told(
    env: dict[str, str], *, fn: Fn = "fit", task: TaskFacts | None = None, workers: int = 0, cores: int = 8
) -> list[str]:
    options = FnOptions(overrides=[f"data.init_args.num_workers={workers}"])
    settled = settle_fn(fn, options, env)
    plan = make_plan(
        launcher="auto", strategy="auto", num_ranks=1, command=["ckptrun", fn], num_cores=cores, task=task
    )
    return list(job_warnings(settled, plan, env))


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(machine, "num_cores", lambda: 8)


def test_outside_of_a_batch_job_nothing_is_said() -> None:
    assert told({}, workers=20) == []
    assert told({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, workers=20) == []  # a shell of salloc
    assert told(INTERACTIVE, workers=20) == []


def test_tasks_that_nobody_has_started() -> None:
    (warning,) = told(SCRIPT)
    assert warning.startswith("the job has 4 tasks, none of which runs")
    assert told(SCRIPT, fn="validate") == []
    assert told({**SCRIPT, "SLURM_NTASKS": "1"}) == []
    assert told(STEP) == []


def test_cores_of_a_task_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(STEP, workers=7) == []
    assert "1 rank with 8 loader workers each on 8 cores" in told(STEP, workers=8)[0]
    assert "on 1 core, " in told(STEP, task=TASK, workers=1)[0]
    # Where SLURM does not say how many each has, they share what they see.
    assert told(STEP, task=replace(TASK, cpus=0), workers=3) == []
    assert "on 4 cores, " in told(STEP, task=replace(TASK, cpus=0), workers=4)[0]
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    four = replace(TASK, cpus=0, num_local=4)
    assert "1 rank on less than a core, " in told(STEP, task=four)[0]
    assert told(STEP, task=replace(four, num_local=2)) == []


def test_one_task_warns_for_all_and_each_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(TASK, number=1, local=1)
    assert len(told(INTERACTIVE, task=TASK, workers=1)) == 1  # srun in salloc
    assert len(told(STEP, task=TASK, workers=1)) == 1
    assert told(STEP, task=other, workers=1) == []
    monkeypatch.setattr(machine, "num_gpus", lambda env: 1)
    for task in (TASK, other):
        with pytest.raises(UsageError, match="gave them 1 GPU"):
            told({**STEP, "SLURM_GPUS_ON_NODE": "1"}, task=task)
