"""From options to a plan."""

from __future__ import annotations

from typing import Any

import pytest

from ckptrun.errors import UsageError
from ckptrun.launch.plan import make_plan
from ckptrun.records import TaskFacts


def plan(**options: Any) -> Any:
    chosen = {
        "launcher": "auto",
        "strategy": "auto",
        "num_ranks": 1,
        "command": ["ckptrun", "fit"],
        "num_cores": 8,
    }
    return make_plan(**{**chosen, **options})


@pytest.mark.parametrize(
    ("options", "launcher", "strategy", "threads"),
    [
        ({}, "inline", "single", None),
        ({"num_ranks": 2}, "torchrun", "ddp", "4"),
        ({"num_ranks": 3}, "torchrun", "ddp", "2"),
        ({"num_ranks": 16}, "torchrun", "ddp", "1"),
        ({"num_ranks": 2, "num_threads": 3}, "torchrun", "ddp", "3"),
        ({"strategy": "ddp"}, "torchrun", "ddp", "8"),
        ({"supervised": True}, "torchrun", "single", "8"),
        ({"launcher": "torchrun"}, "torchrun", "single", "8"),
        ({"num_hosts": 2, "rdzv_endpoint": "h:1"}, "torchrun", "ddp", "8"),
        ({"strategy": "deepspeed"}, "torchrun", "deepspeed", "8"),
        ({"strategy": "deepspeed", "num_ranks": 2}, "torchrun", "deepspeed", "4"),
    ],
)
def test_plans(options: dict[str, Any], launcher: str, strategy: str, threads: str | None) -> None:
    made = plan(**options)
    assert (made.launcher, made.strategy, made.num_ranks) == (launcher, strategy, options.get("num_ranks", 1))
    assert made.env.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "inline", "num_ranks": 2}, "the inline launcher runs one rank"),
        ({"launcher": "inline", "strategy": "ddp"}, "the inline launcher runs one rank"),
        ({"launcher": "inline", "strategy": "deepspeed"}, "the inline launcher runs one rank"),
        ({"strategy": "single", "num_ranks": 2}, "the strategy single is for one rank, and 2 are asked for"),
        ({"launcher": "srun"}, "launcher is 'srun'"),
        ({"num_hosts": 2}, "2 hosts are asked for, and no place where they meet"),
        ({"num_hosts": 2, "rdzv_endpoint": "h:1", "launcher": "inline"}, "one rank on one host"),
        (
            {"num_hosts": 2, "rdzv_endpoint": "h:1", "strategy": "single"},
            "is for one rank, and 2 hosts are asked for",
        ),
        ({"num_ranks": 4, "num_gpus": 2}, "this host has 2 GPUs"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**options)


def test_more_ranks_than_cores_is_a_warning() -> None:
    assert plan(num_ranks=9).warnings == ("9 ranks share 8 cores; they will take turns",)
    assert plan(num_ranks=8).warnings == ()
    assert plan(num_ranks=2, num_cores=1).warnings == ("2 ranks share 1 core; they will take turns",)


def test_a_plan_for_several_hosts_says_where_they_meet() -> None:
    text = str(plan(num_ranks=2, num_hosts=3, rdzv_endpoint="host1:29500"))
    assert text.endswith("2 ranks on this host, one of 3 that meet at host1:29500, by torchrun, strategy ddp")


def test_an_endpoint_for_one_host_is_a_warning() -> None:
    made = plan(num_ranks=2, rdzv_endpoint="host1:29500")
    assert made.rdzv_endpoint is None
    assert made.warnings == ("--rdzv-endpoint is for several hosts (--nnodes); this one meets nobody",)


def task(num_tasks: int, num_local: int, **more: Any) -> TaskFacts:
    nodes = tuple(f"n{each}" for each in range(1, num_tasks // num_local + 1))
    return TaskFacts(0, num_tasks, 0, num_local, nodes, "n1", "0", **more)


@pytest.mark.parametrize(
    ("task_of", "options", "hosts", "ranks", "threads", "local"),
    [
        pytest.param(task(2, 1), {}, 2, 1, "8", None, id="a task a node"),
        pytest.param(task(2, 1), {"num_ranks": 4, "num_hosts": 2}, 2, 4, "2", None, id="with several ranks"),
        pytest.param(task(4, 2), {}, 4, 1, "4", (0, 2), id="a task a rank, which share the cores"),
        pytest.param(
            task(4, 2, cpus=3), {}, 4, 1, "3", (0, 2), id="a task a rank, each with cores of its own"
        ),
        pytest.param(task(4, 4, cpus=1), {"num_gpus": 4}, 4, 1, "1", (0, 4), id="a GPU for each of them"),
        pytest.param(task(4, 4, cpus=1), {"num_gpus": 1}, 4, 1, "1", (0, 4), id="each sees its own alone"),
        pytest.param(task(4, 4, cpus=1), {"num_gpus": 2}, 4, 1, "1", (0, 4), id="each sees two of its own"),
    ],
)
def test_plans_of_tasks(
    task_of: TaskFacts,
    options: dict[str, Any],
    hosts: int,
    ranks: int,
    threads: str,
    local: tuple[int, int] | None,
) -> None:
    made = plan(task=task_of, **options)
    assert (made.launcher, made.strategy) == ("torchrun", "ddp")
    assert (made.num_hosts, made.num_ranks, made.local) == (hosts, ranks, local)
    assert made.env["OMP_NUM_THREADS"] == threads
    assert made.rdzv_endpoint is None
    assert ", ".join(task_of.nodes) in str(made)


@pytest.mark.parametrize(
    ("task_of", "options", "message"),
    [
        (task(2, 1), {"num_hosts": 4}, "4 hosts are asked for, and this step runs on 2: n1, n2"),
        (task(4, 2), {"num_ranks": 2}, "2 tasks on this node, and each is asked for 2 ranks"),
        (task(2, 1), {"num_ranks": 8, "num_gpus": 4}, "8 ranks are asked for, and this host has 4 GPUs"),
        (task(2, 1), {"launcher": "inline"}, "asked for are 2 hosts"),
        (task(2, 1), {"strategy": "single"}, "2 hosts are asked for"),
    ],
)
def test_tasks_that_do_not_fit_what_is_asked_for(
    task_of: TaskFacts, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan(task=task_of, **options)
