"""Does it take longer to resume far into an epoch than at its beginning?

A map-style dataset of 10,000,320 samples whose reading is counted; a training source is made and brought to a position,
and the first batch is taken, at sample 0 and at sample 10,000,000 in turn, in this process. The fastest of the rounds
counts, by processor time, so that others on the machine do not: it is what a user waits for beyond the rest of a start,
for nothing is read. Shuffled, the order of the whole epoch is drawn in both cases.

Prints a row a case with the ratio and ends with 1 where it is over the limit of 1.1, or where getting there read
samples.

    python benchmarks/resume_position.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckptrun.fit.data import TrainSource

LIMIT = 1.1
BATCH_SIZE = 32
FAR = 10_000_000
NUM_SAMPLES = FAR + 10 * BATCH_SIZE


class Counted(Dataset[Any]):
    num_read = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        Counted.num_read += 1
        return torch.zeros(16)


def first_batch(sample: int, **options: Any) -> tuple[float, int]:
    """Processor seconds from a loader to the batch that begins at ``sample``, and how many samples were read for it."""
    source = TrainSource(DataLoader(Counted(), BATCH_SIZE, **options), seed=1)
    state = source.state_dict(epoch=0)
    Counted.num_read = 0
    started = time.thread_time()
    iterator = source.resume(
        state, epoch=0, batch=sample // BATCH_SIZE, goes_on=True, read_again=lambda _: None
    )
    assert iterator is not None
    next(iterator)
    return time.thread_time() - started, Counted.num_read


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 15")
    num_rounds = 5 if parser.parse_args().quick else 15
    torch.set_num_threads(1)
    failed = False
    for name, options in (("in order", {}), ("shuffled", {"shuffle": True})):
        took: dict[int, list[float]] = {0: [], FAR: []}
        for _ in range(num_rounds):
            for sample, times in took.items():
                seconds, num_read = first_batch(sample, **options)
                times.append(seconds)
                failed |= num_read != BATCH_SIZE
        begin, far = min(took[0]), min(took[FAR])
        ratio = far / begin
        # Without an order to draw it is a fraction of a millisecond, less than the clock of a busy machine is good for.
        failed |= ratio > LIMIT and far - begin > 0.001
        print(
            f"{name:10} at sample 0: {begin * 1e3:9.3f} ms   at {FAR:,}: {far * 1e3:9.3f} ms   ratio {ratio:.3f}"
        )
    print(f"samples read: {Counted.num_read} for a batch of {BATCH_SIZE}; limit of the ratio {LIMIT}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
