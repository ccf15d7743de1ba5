"""DeepSpeed's own processes are signalled or killed while ranks train: how the command ends, and what is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_cli import Live

pytestmark = pytest.mark.deepspeed

PROJECT = """\
run: {name: demo}
trainer: {max_steps: 10000, num_threads: 1, limit_val_batches: 0}
strategy: {name: deepspeed, stage: 1}
launch: {launcher: deepspeed, nproc: 2}
model: {class_path: task.Model}
data: {class_path: task.Data}
"""
TASK = """\
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptrun import DataModule, Module


class Data(DataModule):
    def train_dataloader(self):
        x = torch.arange(64.0).view(32, 2) / 64
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2)


class Model(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
RUNNER, INNER = "bin/deepspeed", "deepspeed.launcher.launch"


def process_of(live: Live, command: str) -> int:
    (found,) = [line for line in live.survivors() if command in line]
    return int(found.split()[0])


def test_signals_to_deepspeeds_own_processes(start_cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(PROJECT)
    (tmp_path / "task.py").write_text(TASK)
    cases = ((RUNNER, signal.SIGKILL, 70), (INNER, signal.SIGKILL, 70), (RUNNER, signal.SIGTERM, 143))
    for attempt, (command, signum, code) in enumerate(cases, 1):
        live = start_cli("fit", "-c", "demo.yaml", "--ckpt", "last", cwd=tmp_path)
        live.wait_for(
            lambda n=attempt, run=live: trains(run, n), timeout_s=120.0, what=f"attempt {attempt} trains"
        )
        os.kill(process_of(live, command), signum)
        done = live.wait(timeout_s=25.0)
        assert done.code == code, f"{signum.name} to {command}\n{done}"
        assert live.survivors() == []
    saved = max((tmp_path / "runs/demo/checkpoints").iterdir())
    assert json.loads((saved / "manifest.json").read_text())["reason"] == "stop"


def trains(live: Live, attempt: int) -> bool:
    status = live.status("demo")
    return (status.get("attempt"), status.get("status")) == (attempt, "RUNNING") and status["step"] >= 2
