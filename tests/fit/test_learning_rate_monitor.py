"""Learning rates reach the loggers under Lightning's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.callbacks.learning_rate_monitor import LearningRateMonitor


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def scheduled(optimizer: Any, name: str | None = None, interval: str = "epoch") -> SimpleNamespace:
    return SimpleNamespace(scheduler=StepLR(optimizer, 1), name=name, interval=interval)


class Trainer:
    def __init__(self, optimizers: list[Any], configs: list[Any] | None = None, **options: Any) -> None:
        self.optimizers = optimizers
        self.lr_scheduler_configs = configs or []
        self.log_every_n_steps = 1
        self.global_step = 0
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.loggers = [self]
        self.is_global_zero = True
        self.fast_dev_run = False
        self.__dict__.update(options)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))


def names(trainer: Trainer, **options: Any) -> list[str]:
    """What is logged at the first step."""
    callback: Any = LearningRateMonitor("step", **options)
    callback.on_train_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 0)
    return list(trainer.rows[0][1])


def test_names_by_class() -> None:
    assert names(Trainer([Adam([parameter()])])) == ["lr-Adam"]
    optimizers = [kind([parameter()]) for kind in (SGD, Adam, SGD, SGD)]
    assert names(Trainer(optimizers)) == ["lr-SGD", "lr-Adam", "lr-SGD-1", "lr-SGD-2"]


def test_names_of_parameter_groups() -> None:
    assert names(Trainer([Adam([{"params": [parameter()]}, {"params": [parameter()]}])])) == [
        "lr-Adam/pg1", "lr-Adam/pg2",
    ]  # fmt: skip
    groups = [{"params": [parameter()], "name": "body"}, {"params": [parameter()]}]
    assert names(Trainer([Adam(groups)])) == ["lr-Adam/body", "lr-Adam/pg2"]
    assert names(Trainer([Adam([{"params": [parameter()], "name": "body"}])])) == ["lr-Adam/body"]


def test_names_of_schedulers() -> None:
    first, second, third = Adam([parameter()]), Adam([parameter()]), SGD([parameter()])
    trainer = Trainer([first, second, third], [scheduled(second), scheduled(first, "mine")])
    assert names(trainer) == ["lr-Adam", "mine", "lr-SGD"]


def test_a_wrapped_optimizer_is_known_by_its_own_class() -> None:
    optimizer = Adam([parameter()])
    wrapped = SimpleNamespace(optimizer=optimizer)
    assert names(Trainer([wrapped], [scheduled(optimizer)])) == ["lr-Adam"]
    assert names(Trainer([wrapped])) == ["lr-Adam"]


def test_momentum_and_weight_decay() -> None:
    trainer = Trainer([Adam([parameter()], betas=(0.8, 0.9)), SGD([parameter()], lr=0.1, momentum=0.7)])
    names(trainer, log_momentum=True, log_weight_decay=True)
    assert trainer.rows[0][1] == {
        "lr-Adam": 0.001, "lr-Adam-momentum": 0.8, "lr-Adam-weight_decay": 0.0,
        "lr-SGD": 0.1, "lr-SGD-momentum": 0.7, "lr-SGD-weight_decay": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "at_step", "at_epoch"),
    [
        ("step", ["by_step", "by_epoch", "lr-SGD"], []),
        ("epoch", [], ["by_step", "by_epoch", "lr-SGD"]),
        (None, ["by_step", "lr-SGD"], ["by_epoch", "lr-SGD"]),
    ],
)
def test_intervals(interval: Any, at_step: list[str], at_epoch: list[str]) -> None:
    first, second, third = Adam([parameter()]), Adam([parameter()]), SGD([parameter()])
    configs = [scheduled(first, "by_step", "step"), scheduled(second, "by_epoch")]
    trainer = Trainer([first, second, third], configs)
    callback: Any = LearningRateMonitor(interval)
    callback.on_train_start(trainer, None)
    callback.on_train_epoch_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 0)
    rows = {step: list(metrics) for step, metrics in trainer.rows}
    assert (rows.get(0, []), rows.get(1, [])) == (at_epoch, at_step)


def test_a_row_stands_under_the_step_that_uses_the_rate_and_once_in_a_window() -> None:
    optimizer = SGD([parameter()], lr=1.0)
    trainer = Trainer([optimizer], log_every_n_steps=2)
    callback: Any = LearningRateMonitor()
    callback.on_train_start(trainer, None)
    for step in range(4):
        trainer.global_step = step
        optimizer.param_groups[0]["lr"] = float(step + 1)
        for batch in range(3):
            callback.on_train_batch_start(trainer, None, None, batch)
    assert trainer.rows == [(2, {"lr-SGD": 2.0}), (4, {"lr-SGD": 4.0})]


def test_groups_that_come_later_are_seen() -> None:
    optimizer = SGD([parameter()], lr=1.0)
    trainer = Trainer([optimizer])
    callback: Any = LearningRateMonitor()
    callback.on_train_start(trainer, None)
    callback.on_train_batch_start(trainer, None, None, 0)
    optimizer.add_param_group({"params": [parameter()], "lr": 0.5})
    trainer.global_step = 1
    callback.on_train_batch_start(trainer, None, None, 1)
    assert trainer.rows[1][1] == {"lr-SGD/pg1": 1.0, "lr-SGD/pg2": 0.5}


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="logging_interval='batch'"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
    callback: Any = LearningRateMonitor()
    with pytest.raises(MisconfigurationException, match="no logger"):
        callback.on_train_start(Trainer([], loggers=[]), None)
    groups = [{"params": [parameter()], "name": "x"}, {"params": [parameter()], "name": "x"}]
    with pytest.raises(MisconfigurationException, match=r"lr-Adam share the name 'x'"):
        callback.on_train_start(Trainer([Adam(groups)]), None)
