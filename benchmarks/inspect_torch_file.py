"""How much sooner is ``ckptrun inspect`` than ``torch.load``, and does it grow with the file?

    python benchmarks/inspect_torch_file.py            files of 100 MB and 1 GB
    python benchmarks/inspect_torch_file.py --large    and one of 4 GB

Both sides are whole processes, taken in turns on the same warm file with one thread each: ``python -m ckptrun
inspect FILE --json`` against a process that does ``torch.load(FILE, mmap=True, weights_only=True)``. The
files are those of ``torch.save``, with a model's and an optimizer's tensors; their bytes are real.

Limits: at least 7 times sooner, a peak memory under 60 MB, and the same time at every size (within 25 %).
The exit code is 1 where one of them is not kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT_RATIO, LIMIT_RSS_MB, LIMIT_GROWTH = 7.0, 60.0, 1.25
MB, GB = 10**6, 10**9

SAVE = """
import sys, torch
path, size = sys.argv[1], int(sys.argv[2])
layers = 96
width = int((size / 4 / 3 / layers) ** 0.5)
weights = {f"layers.{n}.weight": torch.randn(width, width) for n in range(layers)}
moments = {n: {"step": torch.tensor(1.0), "exp_avg": w.clone(), "exp_avg_sq": w.square()}
           for n, w in enumerate(weights.values())}
groups = [{"lr": 1e-3, "params": list(moments)}]
torch.save({"epoch": 1, "global_step": 100, "state_dict": weights,
            "optimizer_states": [{"state": moments, "param_groups": groups}]}, path)
"""
LOAD = "import sys, torch; torch.load(sys.argv[1], mmap=True, weights_only=True)"


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds of a whole process, and the peak of its resident memory in MB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command} failed with {process.returncode}")
    return seconds, usage.ru_maxrss / 1024


def compare(path: str, rounds: int) -> tuple[float, float, float]:
    """Medians of both sides in seconds, and the highest memory of inspect in MB."""
    inspect = [sys.executable, "-m", "ckptrun", "inspect", path, "--json"]
    load = [sys.executable, "-c", LOAD, path]
    measure(inspect), measure(load)  # bytecode and page cache
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(measure(inspect))
        theirs.append(measure(load))
    return (
        statistics.median(seconds for seconds, _ in ours),
        statistics.median(seconds for seconds, _ in theirs),
        max(memory for _, memory in ours),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="a file of 4 GB too")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    sizes = [100 * MB, GB, *([4 * GB] if options.large else [])]
    folder = tempfile.mkdtemp(prefix="ckptrun-benchmark-")
    try:
        results = []
        for size in sizes:
            path = os.path.join(folder, f"{size}.pt")
            subprocess.run([sys.executable, "-c", SAVE, path, str(size)], check=True)
            ours, theirs, memory = compare(path, options.rounds)
            results.append((theirs / ours, memory, ours))
            print(
                f"{os.path.getsize(path) / MB:7.0f} MB: inspect {ours * 1000:5.0f} ms, torch.load "
                f"{theirs * 1000:5.0f} ms, ratio {theirs / ours:5.1f} (limit {LIMIT_RATIO:g}), peak memory "
                f"{memory:3.0f} MB (limit {LIMIT_RSS_MB:g})",
                flush=True,
            )
            os.unlink(path)
    finally:
        shutil.rmtree(folder)
    growth = max(ours for _, _, ours in results) / results[0][2]
    print(f"slowest against 100 MB: {growth:.2f} (limit {LIMIT_GROWTH:g})")
    kept = all(ratio >= LIMIT_RATIO and memory < LIMIT_RSS_MB for ratio, memory, _ in results)
    return 0 if kept and growth <= LIMIT_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
