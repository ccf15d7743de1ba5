"""How long does training under DeepSpeed stand still for a save, beside the engine's own ``save_checkpoint``?

A training with two ranks saves now and then; between two saves the engine writes the same state by itself, into another
folder on the same disk. What counts is how long rank 0's training stood still: each from
the call to its return. Played twice:

    background  every periodic save (run.async_save, the default): copied, and written while training goes on
    at once     what a stop, an exception or the end of training saves, and all saves with run.async_save: false;
                the files are hashed and durable then, which the engine's are not

Prints medians and the ratio of background to the engine's own, and ends with 1 where that is over its limit.

    python benchmarks/deepspeed_save.py [--stage 1] [--mb 300] [--saves 7] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptrun import Callback, Module
from ckptrun.callbacks import ModelCheckpoint

LIMIT = 1.0
WIDTH, EVERY, NUM_RANKS = 1024, 6, 2

CONFIG = """
run: {{name: demo, root: {root}, async_save: {background}}}
trainer: {{max_steps: {steps}, num_threads: 1, enable_progress_bar: false, limit_val_batches: 0}}
strategy: {{name: deepspeed, stage: {stage}}}
loggers: []
model: {{class_path: deepspeed_save.Model, init_args: {{size_mb: {mb}, steps: {steps}}}}}
callbacks:
  - class_path: deepspeed_save.Saves
  - {{class_path: deepspeed_save.InTurn, init_args: {{report: {report}, folder: {engine}}}}}
"""


class Model(Module):
    """Layers of 4 MB."""

    def __init__(self, size_mb: int, steps: int) -> None:
        super().__init__()
        count = max(1, size_mb * 1_000_000 // (3 * 4 * WIDTH * WIDTH))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])
        self.steps = steps

    def train_dataloader(self) -> list[torch.Tensor]:
        return [torch.randn(2, WIDTH)] * (self.steps * NUM_RANKS + 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Saves(ModelCheckpoint):
    """Every so many steps, keeping the newest."""

    def __init__(self) -> None:
        super().__init__(every_n_train_steps=EVERY)


class InTurn(Callback):
    """Between two saves the engine saves by itself; notes how long each stopped training."""

    def __init__(self, report: str, folder: str) -> None:
        self.report, self.folder = report, folder
        self.ours: list[float] = []
        self.engines: list[float] = []

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        save = trainer.checkpoints.save

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return save(*arguments, **options)
            finally:
                self.ours.append(time.perf_counter() - started)

        trainer.checkpoints.save = timed

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step % EVERY == EVERY // 2:
            trainer.checkpoints.settle()  # the one before is on the disk, so that neither disturbs the other
            started = time.perf_counter()
            trainer.strategy._engine.save_checkpoint(self.folder, tag="engine")
            self.engines.append(time.perf_counter() - started)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            found = {"ours": self.ours[1:], "engine": self.engines[1:]}  # the first make buffers and folders
            Path(self.report).write_text(json.dumps(found))


def measure(*, stage: int, mb: int, saves: int, background: bool, folder: Path) -> tuple[float, float]:
    """Median seconds that training stood still: for ckptrun, and for the engine by itself."""
    here = Path(tempfile.mkdtemp(dir=folder))
    report = here / "report.json"
    (here / "demo.yaml").write_text(
        CONFIG.format(
            root=here / "runs",
            background=str(background).lower(),
            steps=EVERY * (saves + 1) + 1,
            stage=stage,
            mb=mb,
            report=report,
            engine=here / "engine",
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "ckptrun", "fit", "-c", str(here / "demo.yaml"), "--nproc", str(NUM_RANKS)],
        cwd=Path(__file__).resolve().parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    found = json.loads(report.read_text())
    shutil.rmtree(here)
    return statistics.median(found["ours"]), statistics.median(found["engine"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--mb", type=int, default=300, help="size of the state (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--folder", default=str(Path(__file__).parent.parent), help="on the disk to measure")
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, stage {args.stage}")
    ratios = {}
    with tempfile.TemporaryDirectory(prefix=".deepspeed-save-", dir=args.folder) as name:
        for kind, background in (("background", True), ("at once", False)):
            ours, engine = measure(
                stage=args.stage, mb=args.mb, saves=args.saves, background=background, folder=Path(name)
            )
            ratios[kind] = ours / engine
            print(
                f"{kind:12} ckptrun {1e3 * ours:7.0f} ms, the engine {1e3 * engine:7.0f} ms, "
                f"ratio {ratios[kind]:.2f}" + (f" (limit {LIMIT})" if background else "")
            )
    return 1 if ratios["background"] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
