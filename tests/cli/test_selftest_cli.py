"""`ckptrun selftest`: proven, not proven, and not provable; nothing of the user's is touched."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_cli import Finished, Live

TASK = """
import torch
from torch.utils.data import DataLoader, Dataset
from ckptrun import DataModule, Module


class Numbers(Dataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        noise = torch.randn(4, generator=self.generator) if OWN_GENERATOR else torch.randn(4)
        return index + noise


class Net(Module):
    def __init__(self, by_hash: bool = False):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        if by_hash:  # as where layers are made in the order of a set of names
            torch.nn.init.constant_(self.net[0].bias, hash("a name") % 1000)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(Numbers(), batch_size=4, shuffle=True)
"""
CONFIG = """\
trainer: {num_threads: 1, max_epochs: 3}
model: {class_path: task.Net}
"""


@pytest.fixture
def project(in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (in_tmp_path / "task.py").write_text(f"OWN_GENERATOR = False\n{TASK}")
    (in_tmp_path / "ckptrun.yaml").write_text(CONFIG)
    (in_tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(in_tmp_path / "temporary"))
    return in_tmp_path


def untouched(project: Path) -> bool:
    """Nothing was left: no run, no temporary folder of ours."""
    ours = [name for name in os.listdir(project / "temporary") if name.startswith("ckptrun")]
    return not (project / "runs").exists() and not ours


def test_two_ranks_are_exact(project: Path, run_cli: Callable[..., Finished]) -> None:
    # It is about this host alone: what the config says of others and of restarts does not hold for it.
    (project / "ckptrun.yaml").write_text(
        f"{CONFIG}launch: {{nnodes: 2, rdzv_endpoint: '127.0.0.1:1', max_restarts: 3}}\n"
    )
    done = run_cli("selftest", "--steps", "10", "--nproc", "2")
    assert done.code == 0, done
    assert "10 steps over 3 epochs, 2 ranks" in done.stdout
    assert "undisturbed, twice: equal bit for bit" in done.stdout
    assert "exact: after 2 stops all is equal bit for bit" in done.stdout
    assert "at an epoch's end (step 4)" in done.stdout
    assert untouched(project)


def test_a_generator_that_nobody_saves(project: Path, run_cli: Callable[..., Finished]) -> None:
    (project / "task.py").write_text(f"OWN_GENERATOR = True\n{TASK}")
    done = run_cli("selftest", "--steps", "10", "--json")
    assert done.code == 1, done
    document = json.loads(done.stdout)
    assert (document["exact"], document["noise"], document["num_ranks"]) == (False, False, 1)
    difference = document["difference"]
    assert (difference["kind"], difference["what"], difference["start"]) == ("batch", "batch", 2)
    assert [stop["moment"] for stop in document["stops"]] == ["batch"]
    assert untouched(project)


def test_where_two_undisturbed_ones_differ_nothing_can_be_proven(
    project: Path, run_cli: Callable[..., Finished]
) -> None:
    done = run_cli("selftest", "--steps", "8", "model.init_args.by_hash=true")
    assert done.code == 1, done
    assert "undisturbed, twice: the first difference is initial parameter: net.0.bias" in done.stdout
    assert "exactness cannot be proven" in done.stdout
    assert untouched(project)


def test_what_cannot_be_trained(project: Path, run_cli: Callable[..., Finished]) -> None:
    def says(*words: str) -> str:
        done = run_cli("selftest", *words)
        assert done.code == 2, done
        return done.stderr

    assert "--steps is '3'" in says("--steps", "3")
    assert "Did you mean task.Net" in says("model.class_path=task.Nat")
    assert untouched(project)


def test_ended_from_outside(
    project: Path, start_cli: Callable[..., Live], wait_until: Callable[..., Any]
) -> None:
    live = start_cli("selftest")
    wait_until(lambda: list((project / "temporary").rglob("start-*.txt")))
    live.signal(signal.SIGTERM)
    assert live.wait().code == 143
    assert untouched(project)
