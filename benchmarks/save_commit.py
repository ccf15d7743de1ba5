"""How long does a commit take, checksums included, beside writing and fsyncing the same bytes raw?

All sides write to the same disk, in turn, with one thread: the raw write, a commit as for a stop, through the page
cache, and one as beside training, past it. Prints medians and the median of the rounds' ratios, and ends with 1 where
one is over the limit.

    python benchmarks/save_commit.py [--mb 512] [--rounds 9] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.naming import folder_name, step_label
from ckptrun.checkpoint.state_file import write_state

LIMIT = 1.2  # at most so many times as long as the raw write
WRITE_BYTES = 8 << 20  # the raw side's piece, which was the fastest of 256 kB to 8 MB


def make_state(size_mb: int) -> dict[str, torch.Tensor]:
    """Tensors of the sizes that a model has: one large, the rest of 4 MB and smaller."""
    left = size_mb * 1_000_000 // 4
    sizes = [left // 8]
    left -= sizes[0]
    while left > 0:
        for size in (1_000_000, 250_000, 1000):
            sizes.append(min(size, left))
            left -= sizes[-1]
    return {f"layers.{number}": torch.randn(size) for number, size in enumerate(sizes) if size}


def raw_write_s(state: dict[str, torch.Tensor], path: str) -> float:
    """Seconds to write and fsync the tensors' bytes into one file."""
    views = [memoryview(cast(Any, tensor.numpy())).cast("B") for tensor in state.values()]
    started = time.perf_counter()
    with open(path, "xb", buffering=0) as file:
        for view in views:
            rest = view
            while rest:
                rest = rest[file.write(rest[:WRITE_BYTES]) :]
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    os.unlink(path)
    return seconds


def commit_s(state: dict[str, torch.Tensor], folder: str, sequence: int, *, past_cache: bool) -> float:
    """Seconds from the call of commit to its return."""
    name = folder_name(sequence, step_label(sequence))
    manifest = Manifest(run_id="benchmark", sequence=sequence, step=sequence, epoch=0, reason="periodic")
    started = time.perf_counter()
    commit(folder, name, {"state.ckpt": lambda f: write_state(f, state)}, manifest, past_cache=past_cache)
    seconds = time.perf_counter() - started
    shutil.rmtree(os.path.join(folder, name))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=512, help="size of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--folder", default=str(Path(__file__).parent.parent), help="on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = make_state(options.mb)
    with tempfile.TemporaryDirectory(prefix=".save-commit-", dir=options.folder) as folder:
        numbers = itertools.count(1)
        sides: dict[str, Callable[[], float]] = {
            "raw write and fsync": lambda: raw_write_s(state, os.path.join(folder, "raw")),
            "commit, as of a stop": lambda: commit_s(state, folder, next(numbers), past_cache=False),
            "commit, beside training": lambda: commit_s(state, folder, next(numbers), past_cache=True),
        }
        took: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):
            # No side always finds the disk as the same other one left it.
            for name in (*sides, *sides)[number % 3 : number % 3 + 3]:
                took[name].append(sides[name]())
    print(f"{options.mb} MB, {len(state)} tensors, {options.rounds} rounds")
    over, (raw, *_) = 0, took.values()
    for name, seconds in took.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds[1:], raw[1:], strict=True))
        print(f"{name:25} {statistics.median(seconds[1:]):.3f} s   ratio {ratio:.2f} (limit {LIMIT})")
        over += ratio > LIMIT
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
