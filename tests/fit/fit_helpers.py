"""What tests of the training core share: tiny models, ways to stop at a chosen moment, and a picture of the end."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptrun import Callback, Module, Trainer
from ckptrun.fit.random_state import capture_random_state

SEED = 7


def samples(count: int = 20) -> TensorDataset:
    """The same data always, whatever the global random state is."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x @ torch.randn(4, 2, generator=generator))


def loader(count: int = 20, *, batch_size: int = 4, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=batch_size, shuffle=shuffle, **options)


class Tiny(Module):
    """Linear regression that logs in every way and notes the batches that it was given."""

    def __init__(self, layers: nn.Module | None = None, *, scheduler: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = layers or nn.Linear(4, 2)
        self.scheduler = scheduler
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(float(batch[0].sum()))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if self.scheduler == "step":
            steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}
        if self.scheduler == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        return optimizer


class At(Callback):
    """Do something once, in the named hook, the ``nth`` time (from 1) that it is called."""

    def __init__(self, hook: str, nth: int, act: Callable[[Any], object]) -> None:
        self.left = nth
        self.act = act
        setattr(self, hook, self._count)

    def _count(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.act(trainer)


def send(signum: int) -> Callable[[Any], None]:
    """A signal to this process; returns when it has been recorded, so that the moment is exact."""

    def act(trainer: Any) -> None:
        stop = trainer.context.stop
        saves = stop.save_requested
        os.kill(os.getpid(), signum)
        deadline = time.monotonic() + 30
        while stop.request is None and stop.save_requested == saves:
            assert time.monotonic() < deadline, "the signal was not recorded"
            time.sleep(0.0005)

    return act


CTRL_C = send(signal.SIGINT)


def make_trainer(root: Path, run: str = "demo", **options: Any) -> Trainer:
    chosen: dict[str, Any] = {
        "max_epochs": 3, "seed": SEED, "log_every_n_steps": 1, "enable_progress_bar": False,
    } | options  # fmt: skip
    return Trainer(root=root, run=run, **chosen)


def disturb_random() -> None:
    """What another process would find: global generators in any state."""
    torch.manual_seed(999)
    random.seed(999)
    np.random.seed(999)


class Picture:
    """All that has to be equal, bit for bit, at the end of two trainings."""

    def __init__(self, trainer: Any, model: Module, root: Path, run: str) -> None:
        self.state = {
            "weights": {name: value.clone() for name, value in model.state_dict().items()},
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "schedulers": [_plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            "metrics": dict(trainer.callback_metrics),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "callbacks": {
                callback.state_key: callback.state_dict()
                for callback in trainer.callbacks
                if callback.state_dict() and not hasattr(callback, "registry_entry")
            },
            "random": capture_random_state(),
        }
        table = root / run / "logs" / "metrics.csv"
        self.table = table.read_text() if table.exists() else ""

    def assert_equal(self, other: Picture) -> None:
        assert_same(self.state, other.state)
        assert self.table == other.table


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not callable(value)}


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal in every bit (NaN equals NaN)."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), where
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b) or (a.isnan().any() and torch.allclose(a, b, 0, 0, equal_nan=True)), where
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{where}: {list(a)} != {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (one, two) in enumerate(zip(a, b, strict=True)):
            assert_same(one, two, f"{where}[{index}]")
    else:
        assert a == b, f"{where}: {a} != {b}"


class Scenario:
    """A training that can be made anew as often as needed; everything random in it comes from seeds.

    Args:
        model: makes the module.
        data: makes the training data.
        val: makes the validation data, None for none.
        callbacks: makes further callbacks.
        options: of the Trainer.
    """

    def __init__(
        self,
        model: Callable[[], Module] = Tiny,
        data: Callable[[], Any] = loader,
        val: Callable[[], Any] | None = lambda: loader(8, shuffle=False),
        callbacks: Callable[[], Sequence[Callback]] = tuple,
        **options: Any,
    ) -> None:
        self.model, self.data, self.val, self.callbacks, self.options = model, data, val, callbacks, options

    def fit(
        self, root: Path, run: str, *extra: Callback, ckpt_path: str | None = None, **options: Any
    ) -> tuple[Any, Module]:
        """One process's part: everything made anew, then ``Trainer.fit``, whatever it raises."""
        disturb_random()
        model = self.model()
        trainer = make_trainer(
            root, run, callbacks=[*self.callbacks(), *extra], **{**self.options, **options}
        )
        with warnings.catch_warnings():
            # torch's own, about the order in which optimizers and schedulers step.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            trainer.fit(model, self.data(), None if self.val is None else self.val(), ckpt_path=ckpt_path)
        return trainer, model

    def picture(self, root: Path, run: str, **arguments: Any) -> Picture:
        trainer, model = self.fit(root, run, **arguments)
        return Picture(trainer, model, root, run)
