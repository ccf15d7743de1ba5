"""Every form in which configure_optimizers may return what it configures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from ckptrun import MisconfigurationException
from ckptrun.fit.optimizers import CountedOptimizer, parse_configured


def sgd() -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


OPTIMIZER = sgd()
OTHER = sgd()
SCHEDULER = StepLR(OPTIMIZER, 1)
OTHER_SCHEDULER = StepLR(OTHER, 1)
PLATEAU = ReduceLROnPlateau(OPTIMIZER)


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedulers"),
    [
        (None, [], []),
        (OPTIMIZER, [OPTIMIZER], []),
        ([OPTIMIZER, OTHER], [OPTIMIZER, OTHER], []),
        ((OPTIMIZER, OTHER), [OPTIMIZER, OTHER], []),
        (([OPTIMIZER], [SCHEDULER]), [OPTIMIZER], [(SCHEDULER, "epoch", 1)]),
        ([[OPTIMIZER], SCHEDULER], [OPTIMIZER], [(SCHEDULER, "epoch", 1)]),
        (
            ([OPTIMIZER, OTHER], [{"scheduler": SCHEDULER, "interval": "step"}, OTHER_SCHEDULER]),
            [OPTIMIZER, OTHER],
            [(SCHEDULER, "step", 1), (OTHER_SCHEDULER, "epoch", 1)],
        ),
        ({"optimizer": OPTIMIZER}, [OPTIMIZER], []),
        ({"optimizer": OPTIMIZER, "lr_scheduler": SCHEDULER}, [OPTIMIZER], [(SCHEDULER, "epoch", 1)]),
        (
            {
                "optimizer": OPTIMIZER,
                "lr_scheduler": {"scheduler": SCHEDULER, "interval": "step", "frequency": 3},
            },
            [OPTIMIZER],
            [(SCHEDULER, "step", 3)],
        ),
        (
            ({"optimizer": OPTIMIZER, "lr_scheduler": SCHEDULER}, {"optimizer": OTHER}),
            [OPTIMIZER, OTHER],
            [(SCHEDULER, "epoch", 1)],
        ),
    ],
)
def test_forms(returned: Any, optimizers: list[Any], schedulers: list[Any]) -> None:
    found, configs = parse_configured(returned)
    assert found == optimizers
    assert [(config.scheduler, config.interval, config.frequency) for config in configs] == schedulers


def test_a_plateau_scheduler_and_the_metric_it_watches() -> None:
    inside = {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": PLATEAU, "monitor": "val_loss"}}
    beside = {"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU, "monitor": "val_loss"}
    for returned in (inside, beside):
        _, (config,) = parse_configured(returned)
        assert (config.reduce_on_plateau, config.monitor, config.strict) == (True, "val_loss", True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (5, "returned int"),
        ([OPTIMIZER, SCHEDULER], "returned StepLR"),
        ({"optimiser": OPTIMIZER}, "found a dict with 'optimiser'"),
        ({"optimizer": OPTIMIZER, "scheduler": SCHEDULER}, "expected 'optimizer' and"),
        ({"optimizer": OPTIMIZER, "lr_scheduler": {"interval": "step"}}, "no key 'scheduler'"),
        (
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": SCHEDULER, "intervall": "step"}},
            "unknown key 'intervall'.*Did you mean 'interval'",
        ),
        (
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": SCHEDULER, "interval": "batch"}},
            "interval is 'batch'",
        ),
        ({"optimizer": OPTIMIZER, "lr_scheduler": PLATEAU}, "needs the metric to watch"),
        ({"optimizer": OPTIMIZER, "lr_scheduler": OTHER}, "found SGD where an LR scheduler"),
    ],
)
def test_wrong_forms_are_named(returned: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        parse_configured(returned)


def test_a_counted_optimizer_is_the_optimizer_but_for_step() -> None:
    calls: list[Any] = []
    counted = CountedOptimizer(OPTIMIZER, lambda *args, **kwargs: calls.append(args))
    counted.step()
    assert calls == [(OPTIMIZER, None)]
    assert counted.param_groups is OPTIMIZER.param_groups
    counted.zero_grad()
