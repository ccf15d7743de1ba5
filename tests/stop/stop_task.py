"""The run that the stop matrix stops: a user's module whose hooks can be made to wait at a gate.

Copied as ``task.py`` into the working folder of each cell. The environment says where it waits:

    STOP_PHASE   the hook in which each rank waits (or raises), the first time that it gets there
    STOP_GATE    a folder: ``reached-<rank>`` is written there on arrival and holds the process's id; ``go`` is what
                 every rank waits for
    STOP_HEARD   what a rank's process must have heard before it goes on: ``request`` or ``save``
    STOP_RAISE   the rank that raises there, or ``all``; nobody waits then

All ranks wait in the same hook, between two collectives: none hangs in one because of the gate.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptrun.fit.agreement
import ckptrun.stop
from ckptrun import DataModule, Module

PHASE = os.environ.get("STOP_PHASE")
GATE = Path(os.environ.get("STOP_GATE", "."))
RANK, WORLD_SIZE = (
    int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
)

# Ranks ask each other in every step, so that it is known at which one they stop.
ckptrun.fit.agreement.ASK_EVERY_S = 0.0


def gate(phase: str) -> None:
    """Wait here, where this is the phase that the test is about."""
    reached = GATE / f"reached-{RANK}"
    if phase != PHASE or reached.exists():
        return
    (GATE / f"arriving-{RANK}").write_text(str(os.getpid()))
    os.replace(GATE / f"arriving-{RANK}", reached)
    raises = os.environ.get("STOP_RAISE")
    if raises is not None:
        if raises in ("all", str(RANK)):
            raise RuntimeError(f"the user's own error in {phase}")
        return
    while not (GATE / "go").exists() or not heard():
        time.sleep(0.002)


def heard() -> bool:
    """Whether this process knows of what the test has sent: from its own listener, as a rank from the supervisor."""
    what, source = os.environ.get("STOP_HEARD"), _source()
    if source is None or what is None:
        return True
    return source.request is not None if what == "request" else source.save_requested > 0


def _source() -> Any:
    if "RANK" not in os.environ:
        return ckptrun.stop._active
    from ckptrun.launch.rank_process import RemoteStop

    # It is there before anything of the user's is, and a module that is being imported is given no trainer.
    (source,) = [each for each in gc.get_objects() if type(each) is RemoteStop]
    return source


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
        # The same steps with any number of ranks.
        batch_size = 4 // WORLD_SIZE
        return DataLoader(self.dataset, batch_size, shuffle=shuffle, num_workers=self.num_workers)

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
