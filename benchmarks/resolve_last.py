"""`resolve --ckpt last` in a run with 10,000 checkpoints, against one `os.scandir` of their folder.

Both inside this process and interleaved, so that a busy machine slows both; the ratio of the medians is printed
with its limit, and the exit status says whether it holds.

    python benchmarks/resolve_last.py [--num 10000] [--rounds 41]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.records import CheckpointRecord, FileRecord
from ckptrun.resolve.explain import to_json
from ckptrun.resolve.gather import resolve_run
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import Registry

LIMIT = 3.0


def build(root: str, num: int) -> RunFolder:
    """A run whose checkpoints are small and otherwise like real ones, with the registry it would have."""
    folder = RunFolder.at(root, "many")
    os.makedirs(folder.checkpoints_dir)
    registry = Registry(run_id="b" * 32)
    for sequence in range(1, num + 1):
        name = naming.folder_name(sequence, naming.step_label(100 * sequence))
        path = os.path.join(folder.checkpoints_dir, name)
        os.mkdir(path)
        manifest = Manifest(
            run_id=registry.run_id,
            sequence=sequence,
            step=100 * sequence,
            epoch=sequence // 50,
            reason="periodic",
            line=((1, sequence),),
            metrics={"val_loss": 1.0 / sequence},
            saved_for=("ModelCheckpoint",),
            files=(FileRecord("state.ckpt", 5, "xxh3_64:0"), FileRecord("rank-0000.ckpt", 5, "xxh3_64:0")),
        )
        for file in manifest.files:
            with open(os.path.join(path, file.path), "wb") as out:
                out.write(b"state")
        with open(os.path.join(path, "manifest.json"), "wb") as out:
            out.write(manifest.to_json())
        registry.note_saved(manifest.to_record(path), manifest.saved_for)
    registry.save(folder.registry)
    return folder


def scan(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return [entry.name for entry in entries]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=10_000, help="checkpoints in the run")
    parser.add_argument("--rounds", type=int, default=41, help="measurements of each side")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = build(root, args.num)
        resolve_s, scan_s = [], []
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            scan(folder.checkpoints_dir)
            between = time.perf_counter()
            resolution = resolve_run(folder, reference="last")
            to_json(resolution)
            resolve_s.append(time.perf_counter() - between)
            scan_s.append(between - start)
        assert isinstance(resolution.answer, CheckpointRecord)
        assert resolution.answer.sequence == args.num
    ours, peer = statistics.median(resolve_s[1:]), statistics.median(scan_s[1:])
    ratio = ours / peer
    print(f"resolve --ckpt last, {args.num} checkpoints: {1000 * ours:.2f} ms")
    print(f"one os.scandir of their folder: {1000 * peer:.2f} ms")
    print(f"ratio {ratio:.2f} (limit {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
