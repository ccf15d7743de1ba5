"""Mixed precision: autocast, a scaler of gradients that is part of a checkpoint, and what is left out by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import Scenario, Tiny
from torch import nn

from ckptrun import Callback, MisconfigurationException
from ckptrun.fit.precision import make_precision


class Sees(Callback):
    """What the hooks are given."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.losses: list[float] = []
        self.gradients: list[float] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.losses.append(float(loss.detach()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.gradients.append(float(nn.utils.get_total_norm([p.grad for p in parameters])))


class Small(Tiny):
    """Its gradients fit into float16 at the first scale."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * 0.01


class Overflows(Small):
    """Too large for float16 in the third step."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss * 1e9 if self.training and self.global_step == 2 else loss


def trained(root: Path, model: Any, **options: Any) -> tuple[Any, Any, Sees]:
    sees = Sees()
    scenario = Scenario(model, callbacks=lambda: [sees], precision="16-mixed", max_epochs=1, **options)
    trainer, module = scenario.fit(root, "demo")
    return trainer, module, sees


def test_hooks_see_a_scaled_loss_and_true_gradients(tmp_path: Path) -> None:
    trainer, _, sees = trained(tmp_path, Small)
    assert sees.scales == [65536.0] * 5
    for loss in sees.losses:
        assert loss > 100
    assert all(0 < norm < 100 for norm in sees.gradients)
    assert trainer.precision == "16-mixed"
    assert trainer.global_step == 5


def test_a_step_that_is_left_out_counts(tmp_path: Path) -> None:
    """And halves the scale, as torch's scaler does."""
    trainer, model, sees = trained(tmp_path, Overflows)
    assert trainer.global_step == 5
    assert sees.scales == [65536.0] * 3 + [32768.0] * 2
    assert not torch.isfinite(torch.tensor(sees.gradients[2]))
    assert trainer.optimizers[0].state_dict()["state"][0]["step"] == 4  # Adam's own count
    assert all(torch.isfinite(p).all() for p in model.parameters())
    (name,) = os.listdir(tmp_path / "demo" / "checkpoints")
    saved = torch.load(tmp_path / "demo" / "checkpoints" / name / "state.ckpt", weights_only=True)
    assert saved["MixedPrecision"]["scale"] == 32768.0
    assert saved["MixedPrecision"]["_growth_tracker"] == 2


def test_gradients_are_unscaled_before_they_are_clipped(tmp_path: Path) -> None:
    norms = []

    class Looks(Small):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any) -> None:
            super().configure_gradient_clipping(optimizer, *args)
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    trained(tmp_path, Looks, gradient_clip_val=0.001)
    assert norms == [pytest.approx(0.001, rel=1e-2)] * 5


class ClipsItself(Small):
    """Two optimizers whose gradients are there before either is stepped; clipped by hand."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        self.automatic_optimization = False
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            self.clip_gradients(optimizer, 0.001, "norm")
            self.norms.append(
                float(nn.utils.get_total_norm([p.grad for g in optimizer.param_groups for p in g["params"]]))
            )
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in self.layers]


def test_a_manual_clip_sees_true_gradients(tmp_path: Path) -> None:
    _, model, _ = trained(tmp_path, ClipsItself)
    assert model.norms == [pytest.approx(0.001, rel=1e-2)] * 10


def test_the_scale_moves_after_the_last_optimizer() -> None:
    precision = make_precision("16-mixed", "cpu")
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
    loss = sum(layer(torch.ones(1)).sum() for layer in layers)
    precision.scale(loss).backward()
    layers[0].weight.grad.fill_(float("inf"))
    for optimizer in optimizers:
        precision.step(optimizer)
    assert layers[1].weight.grad == 1.0
    assert precision.state_dict()["scale"] == 65536.0
    precision.steps_are_done()
    assert precision.state_dict()["scale"] == 32768.0
    # A backward pass after a step: the scale moves before it.
    layers[1].zero_grad()
    precision.scale(layers[1](torch.ones(1)).sum()).backward()
    assert layers[1].weight.grad == 32768.0


class SkipsBatches(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)


def test_a_batch_without_a_loss_is_no_update(tmp_path: Path) -> None:
    trainer, _, sees = trained(tmp_path, SkipsBatches)
    assert trainer.global_step == 5
    assert trainer.optimizers[0].state_dict()["state"][0]["step"] == 3
    assert len(sees.losses) == 3


class Lbfgs(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_an_optimizer_that_evaluates_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="LBFGS with a closure"):
        trained(tmp_path, Lbfgs)


def test_a_checkpoint_of_another_precision_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Scenario(max_epochs=1).fit(tmp_path, "demo")
    trainer, _ = Scenario(max_epochs=2, precision="16-mixed").fit(tmp_path, "demo", ckpt_path="last")
    assert trainer.global_step == 10
    assert "its scaler starts anew" in capsys.readouterr().err
    trainer, _ = Scenario(max_epochs=3).fit(tmp_path, "demo", ckpt_path="last")
    assert trainer.global_step == 15
