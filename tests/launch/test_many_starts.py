"""Ranks that are forked from a process which has imported all of torch start and end, every time.

What torch imports may start threads or register what runs at exit, and neither survives a fork. How often is tried:
``CKPTRUN_TEST_STARTS=100 .venv/bin/pytest tests/launch/test_many_starts.py``; two times without it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from live_cli import Live

NUM_STARTS = int(os.environ.get("CKPTRUN_TEST_STARTS", "2"))
START_TIMEOUT_S = 120.0  # many times what a start takes on a busy machine

CONFIG = """\
run: {name: demo}
trainer: {max_steps: 3, num_threads: 1, enable_progress_bar: false}
model: {class_path: task.Model}
"""
TASK = """\
import sys

import torch
from ckptrun import Module


class Model(Module):
    def __init__(self):
        super().__init__()
        # Preloading is worth nothing where the optimizer has to import it after all.
        assert "torch._dynamo" in sys.modules
        self.net = torch.nn.Linear(4, 1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
"""


@pytest.fixture
def project(in_tmp_path: Path) -> Path:
    (in_tmp_path / "ckptrun.yaml").write_text(CONFIG)
    (in_tmp_path / "task.py").write_text(TASK)
    return in_tmp_path


@pytest.mark.timeout(NUM_STARTS * START_TIMEOUT_S)
def test_every_start_ends(project: Path, start_cli: Callable[..., Live]) -> None:
    for number in range(NUM_STARTS):
        live = start_cli("fit", "--nproc", "2", "--run", f"run-{number}")
        done = live.wait(START_TIMEOUT_S)
        assert done.code == 0, done
        assert live.survivors() == []
        assert live.status(f"run-{number}")["status"] == "FINISHED"


def test_a_stop_while_everything_is_imported(project: Path, start_cli: Callable[..., Live]) -> None:
    live = start_cli("fit", "--nproc", "2")
    live.wait_for(lambda: live.status("demo"), what="the attempt begins")
    live.signal(signal.SIGTERM)
    assert live.wait().code == 143


def test_a_config_that_is_wrong_leaves_no_early_server(project: Path, start_cli: Callable[..., Live]) -> None:
    live = start_cli("fit", "--nproc", "2", "trainer.max_stepz=3")
    assert live.wait().code == 2
    assert live.survivors() == []


def test_the_supervisor_never_imports_torch(project: Path, start_cli: Callable[..., Live]) -> None:
    live = start_cli("fit", "--nproc", "2", "trainer.max_steps=1000000")
    live.wait_for_step(1, "demo")
    assert "libtorch" not in Path(f"/proc/{live.pid}/maps").read_text()
    live.signal(signal.SIGTERM)
    assert live.wait().code == 143
