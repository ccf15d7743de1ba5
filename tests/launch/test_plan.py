"""From options to what will be started, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from ckptrun.errors import UsageError
from ckptrun.launch.plan import make_plan

COMMAND = ("ckptrun", "fit", "--run", "a b")


def plan(**options: Any) -> Any:
    return make_plan(
        **{"launcher": "auto", "strategy": "single", "num_ranks": 1, "command": COMMAND, **options}
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("inline", "single", 1)),
        ({"strategy": "auto"}, ("inline", "single", 1)),
        ({"launcher": "inline"}, ("inline", "single", 1)),
        ({"num_ranks": 2, "num_cores": 2}, ("torchrun", "ddp", 2)),
        ({"strategy": "ddp"}, ("torchrun", "ddp", 1)),
        ({"supervised": True}, ("torchrun", "single", 1)),
        ({"launcher": "torchrun"}, ("torchrun", "single", 1)),
    ],
)
def test_launcher_strategy_and_ranks(options: dict[str, Any], expected: tuple[str, str, int]) -> None:
    found = plan(**options)
    assert (found.launcher, found.strategy, found.num_ranks) == expected
    assert found.argv == COMMAND


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "srun"}, "launcher is 'srun'"),
        ({"launcher": "inline", "num_ranks": 2}, "runs one rank"),
        ({"launcher": "inline", "strategy": "ddp"}, "'ddp'"),
        ({"num_ranks": 3, "num_gpus": 2}, "3 ranks are asked for, and this host has 2 GPUs"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**options)


def test_threads_are_shared_out_and_too_many_ranks_are_a_warning() -> None:
    assert plan(num_ranks=2, num_cores=8).env == {"OMP_NUM_THREADS": "4"}
    assert plan(num_ranks=2, num_cores=8, num_threads=1).env == {"OMP_NUM_THREADS": "1"}
    crowded = plan(num_ranks=4, num_cores=2)
    assert crowded.env == {"OMP_NUM_THREADS": "1"}
    assert crowded.warnings == ("4 ranks share 2 cores; they will take turns",)
    assert plan(num_ranks=4, num_cores=8).warnings == ()


def test_it_reads_as_what_will_be_typed() -> None:
    assert str(plan()) == "ckptrun fit --run 'a b'\n  1 rank in this process, strategy single"
    assert "2 ranks by torchrun, strategy ddp" in str(plan(num_ranks=2, num_cores=2))
