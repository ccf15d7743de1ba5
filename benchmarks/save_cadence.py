"""How much longer is a run that saves every 50 steps than one that never saves?

The same training in the same process, in turn: with ModelCheckpoint(every_n_train_steps=50) and without checkpoints
(but for the end's, which both have). One model is larger, and judged; of the other 50 steps take no more than an eighth
of a second, so that a save costs most in proportion. Training has one thread, so there is a processor for the writer;
seven saves lie between the first step's end and the last one's, which is the time that counts. Prints the median of
the rounds' ratios, and ends with 1 where that of the larger one is over the limit.

    python benchmarks/save_cadence.py [--rounds 7] [--steps 400] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptrun import Callback, Module, Trainer
from ckptrun.callbacks import ModelCheckpoint

LIMIT = 1.03
EVERY = 50
MODELS = {
    "25 MB": (512, 8),
    "3 MB": (256, 4),
}  # size of the state: width and number of layers; the first is judged


class Model(Module):
    """A step is some matrix products: about what a small network costs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        )

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Span(Callback):
    """From the end of the first step to the last batch's."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.ended = time.perf_counter()
        if trainer.global_step == 1:
            self.began = self.ended


def train_s(folder: Path, name: str, model: Model, batches: list[torch.Tensor], *, saves: bool) -> float:
    span = Span()
    trainer = Trainer(
        root=folder,
        run=name,
        max_epochs=1,
        num_threads=1,
        callbacks=[span, *([ModelCheckpoint(every_n_train_steps=EVERY)] if saves else [])],
        enable_checkpointing=saves,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, batches)
    return span.ended - span.began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="(default: %(default)s)")
    parser.add_argument("--folder", default=str(Path(__file__).parent.parent), help="on the disk to measure")
    options = parser.parse_args()
    over = 0
    for size, (width, depth) in MODELS.items():
        batches = [torch.randn(128, width)] * options.steps
        ratios, with_s, without_s = [], [], []
        with tempfile.TemporaryDirectory(prefix=".save-cadence-", dir=options.folder) as folder:
            for number in range(options.rounds + 1):
                took = {
                    saves: train_s(
                        Path(folder), f"{number}-{saves}", Model(width, depth), batches, saves=saves
                    )
                    for saves in ((True, False) if number % 2 else (False, True))
                }
                if number:  # the first round warms up
                    ratios.append(took[True] / took[False])
                    with_s.append(took[True])
                    without_s.append(took[False])
        ratio = statistics.median(ratios)
        over += ratio > LIMIT and size == next(iter(MODELS))
        print(
            f"a state of {size}, {statistics.median(without_s) / options.steps * 1e3:.1f} ms a step: saving every "
            f"{EVERY} steps {ratio:.3f} (rounds {', '.join(f'{r:.3f}' for r in sorted(ratios))}; limit {LIMIT})"
        )
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
