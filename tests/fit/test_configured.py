"""A learning rate or schedule that is changed before a resume is refused, and with override really put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from ckptrun import Module, Trainer
from ckptrun.errors import IncompatibleError
from ckptrun.fit.configured import configured, differences
from ckptrun.fit.optimizers import LRSchedulerConfig

STEPS = [torch.full((2, 3), float(index)) for index in range(6)]


class Model(Module):
    def __init__(self, lr: float = 0.1, schedule: Any = None, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.lr, self.schedule, self.weight_decay = lr, schedule, weight_decay
        self.rates: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.linear(batch).square().mean() * 1e-3

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        if self.schedule is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"},
        }


def fit(root: Path, model: Model, max_steps: int, **options: Any) -> Model:
    trainer = Trainer(
        root=root, max_steps=max_steps, logger=False, enable_progress_bar=False, seed=1, **options
    )
    trainer.fit(model, STEPS, ckpt_path="last" if max_steps > 2 else "none")
    return model


def halves(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def test_a_changed_rate_is_refused_with_both_values(tmp_path: Path) -> None:
    fit(tmp_path, Model(lr=0.1), 2)
    with pytest.raises(IncompatibleError, match=r"lr was 0\.1, is 0\.5") as caught:
        fit(tmp_path, Model(lr=0.5), 4)
    assert "--override" in str(caught.value)


def test_override_puts_the_new_rate_in(tmp_path: Path) -> None:
    fit(tmp_path, Model(lr=0.1), 2)
    assert fit(tmp_path, Model(lr=0.5, weight_decay=0.01), 4, override=True).rates == [0.5, 0.5]
    # From then on it is the run's own.
    assert fit(tmp_path, Model(lr=0.5, weight_decay=0.01), 6).rates == [0.5, 0.5]


def test_a_rate_that_a_scheduler_has_moved_is_scaled(tmp_path: Path) -> None:
    fit(tmp_path, Model(lr=0.1, schedule=halves), 2)
    changed = fit(tmp_path, Model(lr=0.4, schedule=halves), 4, override=True)
    assert changed.rates == pytest.approx([0.4 / 4, 0.4 / 8])


def test_a_schedule_with_another_length_is_refused_and_put_in(tmp_path: Path) -> None:
    fit(tmp_path, Model(schedule=lambda o: CosineAnnealingLR(o, T_max=4)), 2)
    longer = Model(schedule=lambda o: CosineAnnealingLR(o, T_max=400))
    with pytest.raises(IncompatibleError, match=r"scheduler 0: T_max was 4, is 400"):
        fit(tmp_path, longer, 4)
    model = fit(tmp_path, Model(schedule=lambda o: CosineAnnealingLR(o, T_max=400)), 4, override=True)
    assert model.trainer.lr_scheduler_configs[0].scheduler.T_max == 400


def test_what_a_run_moves_by_itself_is_no_difference(tmp_path: Path) -> None:
    def warm(optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: (step + 1) / 10)

    fit(tmp_path, Model(schedule=warm), 2)
    assert fit(tmp_path, Model(schedule=warm), 4).rates == pytest.approx([0.03, 0.04])


def test_options_that_only_one_side_knows_are_no_difference() -> None:
    optimizer = Adam([torch.nn.Parameter(torch.zeros(1))])
    now = configured([optimizer], [LRSchedulerConfig(halves(optimizer))])
    then = {"optimizers": [[dict(now["optimizers"][0][0])]], "schedulers": [dict(now["schedulers"][0])]}
    del then["optimizers"][0][0]["fused"]
    then["schedulers"][0]["gone"] = 1
    assert differences(then, now) == []
    then["optimizers"][0][0]["betas"] = (0.8, 0.999)
    assert differences(then, now) == ["optimizer 0, group 0: betas was (0.8, 0.999), is (0.9, 0.999)"]
