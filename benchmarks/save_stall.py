"""How long does training stand still for a save, beside a copy of the same state into a buffer that is kept?

One training with a state of 1 GB (weights and Adam's two moments) saves now and then, and in between copies the same
tensors into its own kept buffers, as the fastest thing that could be done. From the times between steps:

    stop       how much longer than usual the longest step around a save took, in copies
    loop       how much longer the steps from one save until its commit took together, in copies
    memory     the resident memory that saving took beside the state, in states (once, whatever the number of saves)

Prints medians over the saves, and ends with 1 where one is over its limit.

    python benchmarks/save_stall.py [--mb 1000] [--saves 5] [--every 16] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
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

LIMIT_STOP, LIMIT_LOOP, LIMIT_MEMORY = 1.3, 1.3, 1.1
WIDTH = 1024


class Model(Module):
    """Layers of 4 MB; a step is mostly the optimizer's."""

    def __init__(self, size_mb: int) -> None:
        super().__init__()
        count = max(1, size_mb * 1_000_000 // (3 * 4 * WIDTH * WIDTH))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Stopwatch(Callback):
    """Notes when each step ended; between the saves it copies the state itself, and notes how long that took."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.ended: dict[int, float] = {}  # by step
        self.copy_s: dict[int, float] = {}
        self.resident_bytes: list[int] = []
        self.committed: dict[int, float] = {}
        self._kept: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self.resident_bytes.append(resident_bytes())  # before anything is made ready for a save

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        # After everything that the step before had to do.
        step = trainer.global_step
        self.ended[step] = time.perf_counter()
        self.resident_bytes.append(resident_bytes())
        if trainer.checkpoints.head is not None:
            self.committed.setdefault(trainer.checkpoints.head.step, self.ended[step])
        if step and step % self.every == self.every // 2:
            tensors = [t for t in state_of(trainer) if t.numel() > 1]
            if not self._kept:
                self._kept = [torch.empty_like(tensor).fill_(0) for tensor in tensors]
            before = time.perf_counter()
            for kept, tensor in zip(self._kept, tensors, strict=True):
                kept.copy_(tensor)
            self.copy_s[step] = time.perf_counter() - before
            self.ended[step] = time.perf_counter()  # the copy is no part of a step


def state_of(trainer: Any) -> list[torch.Tensor]:
    moments = [v for state in trainer.optimizers[0].state.values() for v in state.values()]
    return [p.detach() for p in trainer.lightning_module.parameters()] + moments


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000, help="size of the state (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=16, help="steps from save to save (default: %(default)s)"
    )
    parser.add_argument("--folder", default=str(Path(__file__).parent.parent), help="on the disk to measure")
    options = parser.parse_args()
    watch, every = Stopwatch(options.every), options.every
    model = Model(options.mb)
    steps = every * options.saves + every // 2
    with tempfile.TemporaryDirectory(prefix=".save-stall-", dir=options.folder) as folder:
        trainer = Trainer(
            default_root_dir=folder,
            max_steps=steps,
            max_epochs=-1,
            callbacks=[ModelCheckpoint(every_n_train_steps=every), watch],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(model, [torch.randn(2, WIDTH)] * (steps + 1))
    took = {
        step: watch.ended[step] - watch.ended[step - 1] for step in watch.ended if step - 1 in watch.ended
    }
    saves = [every * number for number in range(1, options.saves + 1)]
    # A save at step n shows in the time until the hook of the next batch, which is booked under n.
    busy = {step for save in saves for step in range(save, save + every // 2)}
    usual = statistics.median(t for step, t in took.items() if step not in busy and step > 2)
    copy_s = statistics.median(list(watch.copy_s.values())[1:] or list(watch.copy_s.values()))
    stops, loops = [], []
    for save in saves:
        span = [step for step in range(save, save + every // 2) if step in took]
        stops.append((max(took[step] for step in span) - usual) / copy_s)
        loops.append((sum(took[step] for step in span) - usual * len(span)) / copy_s)
        late = watch.committed.get(save, float("inf")) > watch.ended[span[-1]]
        print(
            f"save at step {save}: longest stop {stops[-1]:.2f} copies, loop {loops[-1]:.2f} copies"
            + (", not committed within the steps that are counted: raise --every" if late else "")
        )
    state_bytes = 3 * sum(t.numel() * t.element_size() for t in model.parameters())
    own_copy = state_bytes
    memory = (max(watch.resident_bytes) - watch.resident_bytes[1] - own_copy) / state_bytes
    print(f"a step {usual * 1e3:.0f} ms, a copy of {state_bytes / 1e6:.0f} MB {copy_s * 1e3:.0f} ms")
    figures = (
        ("longest stop", statistics.median(stops), LIMIT_STOP),
        ("first save's stop", stops[0], LIMIT_STOP),
        ("loop lengthened", statistics.median(loops), LIMIT_LOOP),
        ("memory", memory, LIMIT_MEMORY),
    )
    for name, value, limit in figures:
        print(f"{name}: {value:.2f} (limit {limit})")
    return int(any(value > limit for _, value, limit in figures))


if __name__ == "__main__":
    sys.exit(main())
