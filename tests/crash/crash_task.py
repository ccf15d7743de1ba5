"""The run that the crash harness kills: a user's module, small, and with everything in it that a resume can get wrong.

Copied as ``task.py`` into the working folder of each chain. Dropout, shuffled data, randomness in ``__getitem__``, Adam
and a scheduler: whatever is not restored shows in the weights. ``CRASH_FIRST_STEP`` names a file that is made once this
attempt has done its first step, which is what random moments are counted from.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckptrun import DataModule, Module


class Noisy(Dataset[Any]):
    """A linear function of four numbers, seen through noise that is drawn anew each time a sample is read."""

    def __init__(self, num_samples: int, *, noise: float) -> None:
        generator = torch.Generator().manual_seed(num_samples)
        self.x = torch.randn(num_samples, 4, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        return x + self.noise * torch.randn(4), x.sum().reshape(1)


class Data(DataModule):
    """Shuffled for training; both loaders have ``num_workers`` workers."""

    def __init__(self, num_workers: int = 0, batch_size: int = 4, noise: float = 0.1) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.batch_size = batch_size
        self.noise = noise

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            Noisy(64, noise=self.noise), self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noisy(16, noise=0.0), self.batch_size, num_workers=self.num_workers)


class Model(Module):
    """A perceptron with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = os.environ.pop("CRASH_FIRST_STEP", None)
        if first is not None:
            Path(first).touch()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)
