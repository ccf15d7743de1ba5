"""From the command to the first resumed step with a large checkpoint, beside the shortest script that does the same.

The script imports torch, builds the same model, reads the same file, puts weights and optimizer back and makes one
step. Both start as processes of their own, in turn, with the file in the page cache and the same number of threads.
Prints medians and the median of the rounds' ratios, and ends with 1 where that is over the limit.

    python benchmarks/resume_large.py [--mb 1000] [--rounds 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptrun import DataModule, Module

LIMIT = 1.1
WIDTH = 1024

CONFIG = """
run: {{name: large, root: {root}}}
trainer: {{max_steps: 100, num_threads: 1, enable_progress_bar: false}}
loggers: []
model: {{class_path: resume_large.Model, init_args: {{size_mb: {size_mb}}}}}
data: {{class_path: resume_large.Data}}
"""


def make_layers(size_mb: int) -> nn.Sequential:
    """Weights that take a third of ``size_mb``; Adam's moments take the rest. Filled with a constant: what a model
    costs to make at random is its own affair, and the same on both sides."""
    count = max(1, size_mb * 1_000_000 // (3 * 4 * WIDTH * WIDTH))
    layers = [nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(count)]
    return nn.Sequential(*layers)


class Model(Module):
    """Says when its first step is done and goes down; where there is nothing to tell it stops after the first one."""

    def __init__(self, size_mb: int) -> None:
        super().__init__()
        self.layers = make_layers(size_mb)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def on_train_batch_end(self, *_: Any) -> None:
        told = os.environ.get("TELL")
        if told:
            Path(told).write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGTERM)  # saves, and can be gone on from


class Data(DataModule):
    """Batches that cost nothing."""

    def train_dataloader(self) -> Any:
        return [torch.randn(2, WIDTH) for _ in range(100)]


def by_hand(path: str, size_mb: int) -> None:
    """The script."""
    torch.set_num_threads(1)
    layers = make_layers(size_mb)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-4)
    state = torch.load(path, weights_only=True)
    layers.load_state_dict({key.removeprefix("layers."): v for key, v in state["state_dict"].items()})
    optimizer.load_state_dict(state["optimizer_states"][0])
    layers(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()
    print(repr(time.time()))


SCRIPT = """
import sys, time
import torch
from torch import nn
WIDTH = {width}
{make_layers}
{by_hand}
by_hand({path!r}, {size_mb})
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000, help="size of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--folder", default=str(Path(__file__).parent.parent), help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".resume-large-", dir=options.folder) as folder:
        return compare(Path(folder), options.mb, options.rounds)


def compare(folder: Path, size_mb: int, rounds: int) -> int:
    import inspect

    config = folder / "large.yaml"
    config.write_text(CONFIG.format(root=folder / "runs", size_mb=size_mb))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    env.pop("TELL", None)
    fit = [sys.executable, "-m", "ckptrun", "fit", "-c", str(config), "--ckpt", "last"]
    stopped = subprocess.run(fit, env=env, check=False, capture_output=True, text=True)
    if stopped.returncode != 128 + signal.SIGTERM:
        raise SystemExit(stopped.stderr)
    (checkpoint,) = (folder / "runs" / "large" / "checkpoints").iterdir()
    script = folder / "by_hand.py"
    script.write_text(
        SCRIPT.format(
            width=WIDTH,
            make_layers=inspect.getsource(make_layers),
            by_hand=inspect.getsource(by_hand),
            path=str(checkpoint / "state.ckpt"),
            size_mb=size_mb,
        )
    )
    told = folder / "told"

    def ours_s() -> float:
        told.unlink(missing_ok=True)
        started = time.time()
        done = subprocess.run(fit, env={**env, "TELL": str(told)}, check=False, capture_output=True)
        if not told.exists():
            raise SystemExit(done.stderr.decode())
        return float(told.read_text()) - started

    def theirs_s() -> float:
        started = time.time()
        done = subprocess.run(
            [sys.executable, str(script)], env=env, check=True, capture_output=True, text=True
        )
        return float(done.stdout) - started

    ours_s(), theirs_s()
    ours, theirs = [], []
    for number in range(rounds):
        for measure, into in ((ours_s, ours), (theirs_s, theirs))[:: 1 if number % 2 else -1]:
            into.append(measure())
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    print(f"ckptrun {statistics.median(ours):.2f} s, by hand {statistics.median(theirs):.2f} s")
    print(f"from the command to the first resumed step: {ratio:.2f} (limit {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
