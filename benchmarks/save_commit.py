"""How long does a commit take, checksums included, beside writing and fsyncing the same bytes raw?

Both sides write to the same disk, in turn, with one thread. Prints medians and the median of the rounds'
ratios, and ends with 1 where that is over the limit.

    python benchmarks/save_commit.py [--mb 512] [--rounds 9] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
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


def commit_s(state: dict[str, torch.Tensor], folder: str, sequence: int) -> float:
    """Seconds from the call of commit to its return."""
    name = folder_name(sequence, step_label(sequence))
    manifest = Manifest(run_id="benchmark", sequence=sequence, step=sequence, epoch=0, reason="periodic")
    started = time.perf_counter()
    commit(folder, name, {"state.ckpt": lambda f: write_state(f, state)}, manifest)
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
        raw_write_s(state, os.path.join(folder, "raw"))  # both sides warm up once
        commit_s(state, folder, 1)
        raw, ours = [], []
        for number in range(options.rounds):
            if number % 2:  # neither side always finds the disk as the other left it
                ours.append(commit_s(state, folder, number + 2))
            raw.append(raw_write_s(state, os.path.join(folder, "raw")))
            if not number % 2:
                ours.append(commit_s(state, folder, number + 2))
    ratio = statistics.median(o / r for o, r in zip(ours, raw, strict=True))
    print(f"{options.mb} MB, {len(state)} tensors, {options.rounds} rounds")
    print(f"raw write and fsync   {statistics.median(raw):.3f} s")
    print(f"commit                {statistics.median(ours):.3f} s")
    print(f"ratio                 {ratio:.2f}   limit {LIMIT}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
