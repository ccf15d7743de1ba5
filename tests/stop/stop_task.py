"""The run that the stop matrix stops: a user's module whose hooks can be made to wait at a gate.

Copied as ``task.py`` into the working folder of each cell. The environment says where it waits:

    STOP_PHASE   the hook that waits (or raises), the first time that it is reached
    STOP_GATE    a folder: ``reached`` is written there on arrival, ``go`` is what it waits for
    STOP_HEARD   what this process must have heard before it goes on: ``request`` or ``save``
    STOP_RAISE   raise there instead of waiting
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptrun.stop
from ckptrun import DataModule, Module

PHASE = os.environ.get("STOP_PHASE")
GATE = Path(os.environ.get("STOP_GATE", "."))


def gate(phase: str) -> None:
    """Wait here, where this is the phase that the test is about."""
    reached = GATE / "reached"
    if phase != PHASE or reached.exists():
        return
    reached.touch()
    if "STOP_RAISE" in os.environ:
        raise RuntimeError(f"the user's own error in {phase}")
    while not (GATE / "go").exists() or not heard():
        time.sleep(0.002)


def heard() -> bool:
    """Whether the listener's thread has taken note of what the test has sent."""
    listener, what = ckptrun.stop._active, os.environ.get("STOP_HEARD")
    if listener is None or what is None:
        return True
    return listener.request is not None if what == "request" else listener.save_requested > 0


gate("import")


class Data(DataModule):
    """64 samples of a linear function, read by two workers."""

    def __init__(self, num_workers: int = 2) -> None:
        super().__init__()
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(64, 4, generator=generator)
        self.dataset = TensorDataset(x, x.sum(1, keepdim=True))

    def _loader(self, *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=4, shuffle=shuffle, num_workers=self.num_workers)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(shuffle=False)

    test_dataloader = predict_dataloader = val_dataloader


class Model(Module):
    """Random in training (dropout), so that a wrong random state shows in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def configure_callbacks(self) -> list[Any]:
        from ckptrun.callbacks import OnExceptionCheckpoint

        return [OnExceptionCheckpoint()] if "STOP_ON_EXCEPTION" in os.environ else []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def setup(self, stage: str) -> None:
        gate("set-up")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        gate("restore")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["global_step"] == 12:
            gate("save")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 4:
            gate("window" if batch_idx % 2 == 0 else "train")
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            if self.trainer.sanity_checking:
                gate("sanity check")
            elif self.trainer.state.fn == "validate":
                gate("validate")
            elif self.trainer.global_step == 6:
                gate("validation")
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        gate("test")
        self.log("test_loss", self.net(batch[0]).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        gate("predict")
        return self.net(batch[0])

    def teardown(self, stage: str) -> None:
        gate("teardown")
