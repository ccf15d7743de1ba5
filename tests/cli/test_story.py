"""The README's session with a small model: start, Ctrl-C, the same line again, and all that looks at the run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TASK = """
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptrun import DataModule, Module


class Numbers(DataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(40, 4, generator=generator)
        self.dataset = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=20)

    test_dataloader = predict_dataloader = val_dataloader


class Sum(Module):
    def __init__(self, lr: float = 0.02, wait_at: int = 13):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        while self.global_step == 13 and Path("wait").exists():
            Path("waiting").touch()
            time.sleep(0.002)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return [f"the sum is about {value:.3f}" for value in self.net(batch[0]).flatten().tolist()]
"""
CONFIG = """\
trainer: {max_steps: 30, num_threads: 1, log_every_n_steps: 5}
model: {class_path: task.Sum}
data: {class_path: task.Numbers}
callbacks:
  - class_path: ckptrun.callbacks.ModelCheckpoint
    init_args: {monitor: val_loss, save_last: true}
"""
FIT = ("fit", "-c", "sums.yaml", "--ckpt", "last")


def state_of(run: Path) -> dict[str, Any]:
    """What the newest checkpoint holds of training itself."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    state = torch.load(newest / "state.ckpt", weights_only=True)
    ranks = torch.load(newest / "rank-0000.ckpt", weights_only=True)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")
    return {**{name: state[name] for name in names}, "random": ranks["random"]}


def same(a: Any, b: Any) -> bool:
    """Equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def attempts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def test_the_story_of_a_run(
    run_cli: Callable[..., Any], start_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "sums.yaml").write_text(CONFIG)
    run = tmp_path / "runs" / "sums"

    # The first start: there is nothing to go on from, and it says so.
    (tmp_path / "wait").touch()
    live = start_cli(*FIT)
    live.wait_for((tmp_path / "waiting").exists, what="it reached step 13")
    status = run_cli("status", "sums", "--json").document
    assert (status["status"], status["stage"]) == ("RUNNING", "train")
    live.signal(signal.SIGINT)
    (tmp_path / "wait").unlink()
    stopped = live.wait()
    assert stopped.code == 130, stopped
    assert "fresh" in stopped.stderr
    status = run_cli("status", "sums", "--json").document
    step = status["step"]
    assert 13 < step < 30
    assert (status["status"], status["stop_reason"], status["exit_code"]) == ("INTERRUPTED", "keyboard", 130)
    assert f"stopped by Ctrl-C at step {step}; last checkpoint: {status['checkpoint']}" in stopped.stderr
    assert "to go on: ckptrun fit --config sums.yaml --ckpt last" in stopped.stderr

    # The very same line goes on from there.
    document = run_cli("resolve", *FIT[1:], "--json").document
    assert (document["path"], document["step"], document["fresh"]) == (status["checkpoint"], step, False)
    assert document["candidates"][0]["reason_saved"] == "stop"
    resumed = run_cli(*FIT)
    assert resumed.code == 0, resumed
    assert f"step {step} from {status['checkpoint']}" in resumed.stderr
    assert "finished at step 30 (max_steps)" in resumed.stderr
    gained = [line["steps_gained"] for line in attempts(run) if line["event"] == "end"]
    assert gained == [step, 30 - step]

    # Once more: nothing is left, and nothing is started.
    again = run_cli(*FIT)
    assert again.code == 0, again
    assert "nothing left to do" in again.stderr
    assert len(attempts(run)) == 4

    # It ended as a run that was never stopped.
    undisturbed = run_cli(*FIT, "--run", "undisturbed")
    assert undisturbed.code == 0, undisturbed
    assert same(state_of(run), state_of(tmp_path / "runs" / "undisturbed"))

    # What it has learned.
    for fn, told in (("validate", "val_loss"), ("test", "test_loss"), ("predict", "the sum is about")):
        done = run_cli(fn, "--run", "sums", "--ckpt", "best")
        assert done.code == 0, done
        assert told in done.stdout
    document = run_cli("test", "--run", "sums", "--json").document  # best is the default
    assert document["results"][0]["test_loss"] > 0
    assert document["resolution"]["rule"] == 8
    assert len(list((run / "evals").iterdir())) == 4

    # A limit that is raised just applies.
    further = run_cli(*FIT, "trainer.max_steps=34")
    assert further.code == 0, further
    assert "step 30 from" in further.stderr
    assert "finished at step 34" in further.stderr

    # What changes the result is refused, until it is meant.
    changed = (*FIT, "trainer.max_steps=36", "model.init_args.lr=0.5")
    before = attempts(run)
    refused = run_cli(*changed)
    assert refused.code == 5, refused
    for words in ("model.init_args.lr", "0.5", "--override", "--run"):
        assert words in refused.stderr
    assert attempts(run) == before
    meant = run_cli(*changed, "--override")
    assert meant.code == 0, meant
    assert "finished at step 36" in meant.stderr

    # Whoever asks is answered.
    status = run_cli("status", "sums", "--json").document
    assert (status["status"], status["step"], status["attempt"]) == ("FINISHED", 36, 4)
    assert [r["run"] for r in run_cli("runs", "--json").document["runs"]] == ["sums", "undisturbed"]
    assert "FINISHED" in run_cli("status", "sums").stdout
    assert "undisturbed" in run_cli("runs").stdout
    document = run_cli("inspect", status["checkpoint"], "--json").document
    assert (document["step"], document["resumable"], document["num_parameters"]) == (36, True, 49)
    assert "net.0.weight" in run_cli("inspect", status["checkpoint"]).stdout

    # A pin stands until it is taken away.
    pinned = run_cli("pin", "best", "--run", "sums")
    assert pinned.code == 0, pinned
    document = run_cli("resolve", "-c", "sums.yaml", "--json").document
    assert document["rule"] == 3
    assert run_cli("unpin", "--run", "sums").code == 0
    refused = run_cli("resolve", "-c", "sums.yaml")
    assert refused.code == 2, refused
    assert "--ckpt last" in refused.stderr
