"""A small project that trains in no time, and a run in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TASK = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from ckptrun import DataModule, Module


class Model(Module):
    def __init__(self, lr: float = 0.1, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == int(os.environ.get("FAIL_AT_STEP", "-1")):
            raise ValueError("a fault of the user's")
        print("the user prints")
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net(batch[0]).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        if os.environ.get("PREDICT_TEXT"):
            return f"text {batch_idx}"
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(DataModule):
    def __init__(self, num_samples: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.num_samples = num_samples

    def loader(self):
        samples = torch.randn(self.num_samples, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(samples), batch_size=8)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
"""

CONFIG = """
run: {name: demo}
trainer: {max_steps: 6, num_threads: 1}
model: {class_path: task.Model}
data: {class_path: task.Data}
callbacks:
  - class_path: ckptrun.callbacks.ModelCheckpoint
    init_args: {monitor: val_loss, save_last: true}
"""


def _write_project(folder: Path) -> None:
    (folder / "task.py").write_text(TASK)
    (folder / "ckptrun.yaml").write_text(CONFIG)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a task and a config; ``run_cli`` runs in it by default."""
    _write_project(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def _trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    _write_project(folder)
    command = [sys.executable, "-P", "-m", "ckptrun", "fit"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def trained(_trained_once: Path, tmp_path: Path) -> Path:
    """The project with a run that has ended: checkpoints of step 4 (best) and 6 (final). A copy for each
    test."""
    shutil.copytree(_trained_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    """``snapshot(folder)``: every file below it with its content, to see that nothing was written."""

    def take(folder: Path) -> dict[str, bytes]:
        paths = [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}

    return take
