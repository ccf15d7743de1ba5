"""How soon does a signal reach every rank, and how soon after it is the command over?

Two ranks train with gloo under ``ckptrun fit``. At a random moment a signal is sent to the supervisor, or to one rank
only, and what came of it is measured on the machine's monotonic clock, which all processes share:

    recorded   until the last rank has taken note of the request
    exit       until the command has ended, less one step and less the save that the stop asked for

Prints medians and the largest values with their limits, and ends with 1 where a largest value is over it.

    python benchmarks/signal_latency.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ckptrun import Module

LIMIT_RECORDED_S = 1.0
LIMIT_EXIT_S = 1.0
NUM_RANKS = 2
TIMEOUT_S = 120.0

CONFIG = """
run: {{name: demo, root: {root}}}
trainer: {{max_epochs: -1, num_threads: 1, enable_progress_bar: false}}
model:
  class_path: signal_latency.Model
  init_args: {{step_s: {step_s}, folder: {root}}}
"""


class Model(Module):
    """Trains in steps of a given length.

    Args:
        step_s: seconds that a step takes at least.
        folder: where each rank says that it is there, and when it had heard of the request.
    """

    def __init__(self, step_s: float, folder: str) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.step_s, self.folder = step_s, Path(folder)

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(1 << 16, 8)
        return DataLoader(TensorDataset(data), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self._write("trains", os.getpid())
        time.sleep(self.step_s)
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002
        self._note()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        self._note()

    def _note(self) -> None:
        """What this process, and not the agreement of all, has recorded."""
        request = self.trainer.context.stop.request
        if request is not None:
            self._write("heard", request.at_monotonic)

    def _write(self, what: str, value: float) -> None:
        path = self.folder / f"{what}-{self.trainer.global_rank}"
        path.with_suffix(".tmp").write_text(json.dumps(value))
        path.with_suffix(".tmp").rename(path)


@dataclass(frozen=True)
class Case:
    """One row."""

    name: str
    step_s: float
    whom: Callable[[int, list[int]], int]  # of (supervisor, ranks)
    signum: int = signal.SIGTERM


CASES = (
    Case("SIGTERM to the supervisor, a step of 5 ms", 0.005, lambda supervisor, _: supervisor),
    Case("SIGTERM to rank 1 only, a step of 5 ms", 0.005, lambda _, ranks: ranks[1]),
    Case("SIGINT to the supervisor, a step of 1.5 s", 1.5, lambda supervisor, _: supervisor, signal.SIGINT),
)


@dataclass
class Taken:
    """Seconds, one value a round."""

    recorded_s: list[float] = field(default_factory=list)
    exit_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)


def wait_for(paths: list[Path], process: subprocess.Popen[str]) -> list[Any]:
    """What the ranks have written; ends the benchmark where they never do."""
    deadline = time.monotonic() + TIMEOUT_S
    while not all(path.exists() for path in paths):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"the ranks never trained\n{process.communicate()[0]}")
        time.sleep(0.01)
    return [json.loads(path.read_text()) for path in paths]


def play(case: Case, folder: Path, taken: Taken) -> None:
    """One run that is stopped."""
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(root=folder, step_s=case.step_s))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptrun", "fit", "-c", str(config), "--nproc", str(NUM_RANKS)],
        cwd=Path(__file__).resolve().parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pids = wait_for([folder / f"trains-{rank}" for rank in range(NUM_RANKS)], process)
    time.sleep(random.uniform(1.0, 2.0))  # anywhere between two of the ranks' questions to each other
    sent_at = time.monotonic()
    os.kill(case.whom(process.pid, pids), case.signum)
    said, _ = process.communicate(timeout=TIMEOUT_S)
    ended_at = time.monotonic()
    if process.returncode != 128 + case.signum:
        sys.exit(f"{case.name}: exit {process.returncode}\n{said}")
    heard = [json.loads((folder / f"heard-{rank}").read_text()) for rank in range(NUM_RANKS)]
    ledger = (folder / "demo" / "attempts.jsonl").read_text().splitlines()
    save_s = float(json.loads(ledger[-1])["save_s"])
    taken.recorded_s.append(max(heard) - sent_at)
    taken.exit_s.append(ended_at - sent_at - case.step_s - save_s)
    taken.save_s.append(save_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each case is played")
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'seconds, median / largest':44} {'recorded':>15} {'exit':>15} {'the save':>10}", flush=True)
    over = False
    for case in CASES:
        taken = Taken()
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                play(case, Path(folder), taken)
        columns = [f"{statistics.median(s):.3f} / {max(s):.3f}" for s in (taken.recorded_s, taken.exit_s)]
        print(
            f"{case.name:44} {columns[0]:>15} {columns[1]:>15} {statistics.median(taken.save_s):10.3f}",
            flush=True,
        )
        over = over or max(taken.recorded_s) > LIMIT_RECORDED_S or max(taken.exit_s) > LIMIT_EXIT_S
    print(f"limits: recorded {LIMIT_RECORDED_S:g} s, exit {LIMIT_EXIT_S:g} s")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
