"""What does a seed for each sample cost?

A DataLoader over a small map-style dataset, as it is and as ckptrun's training source makes it (an order of its own, a
seed a sample, the training process's random state put aside for each batch), in turn, in this process. The fastest of
the rounds counts, by processor time, so that others on the machine do not. Where there are loader workers the random
state need not be put aside: that row takes what a worker does, without the queue.

Prints a row a case and ends with 1 where a sample costs more than the limit of 15 µs.

    python benchmarks/sample_seeds.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckptrun.fit.data import TrainSource

LIMIT_US = 15.0
NUM_SAMPLES = 4096
BATCH_SIZES = (64, 32, 8, 4)


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.randn(NUM_SAMPLES, 16)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def seconds(batches: Callable[[], Iterable[Any]]) -> float:
    """Processor time of one pass, from the first batch on: how an epoch's order is made is not meant."""
    iterator = iter(batches())
    next(iterator)
    started = time.thread_time()
    for _ in iterator:
        pass
    return time.thread_time() - started


def as_a_worker(source: TrainSource) -> Iterable[Any]:
    loader = source.loader
    for placed in loader.batch_sampler:
        yield loader.dataset._fetch(placed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 20")
    num_rounds = 3 if parser.parse_args().quick else 20
    torch.set_num_threads(1)
    worst = 0.0
    print(f"{'case':32} {'plain':>9} {'seeded':>9} {'more':>9}   a sample, limit {LIMIT_US:g} µs more")
    for size in BATCH_SIZES:
        plain = DataLoader(Rows(), size, shuffle=True)
        source = TrainSource(DataLoader(Rows(), size, shuffle=True), seed=1)
        cases: dict[str, Callable[[], Iterable[Any]]] = {
            "plain": lambda plain=plain: plain,  # type: ignore[misc]
            "in this process": lambda source=source: source._iterate(0, 0),  # type: ignore[misc]
            "in a worker": lambda source=source: as_a_worker(source),  # type: ignore[misc]
        }
        best = dict.fromkeys(cases, float("inf"))
        for _ in range(num_rounds):
            for name, batches in cases.items():
                best[name] = min(best[name], seconds(batches))
        us = {name: took / (NUM_SAMPLES - size) * 1e6 for name, took in best.items()}
        for name in ("in this process", "in a worker"):
            more = us[name] - us["plain"]
            worst = max(worst, more)
            label = f"batches of {size}, {name}"
            print(f"{label:32} {us['plain']:6.2f} µs {us[name]:6.2f} µs {more:6.2f} µs")
    print(f"worst: {worst:.2f} µs more a sample, {worst / LIMIT_US:.2f} of the limit")
    return int(worst > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
