"""What does a training step cost under DDP with two ranks, beside a hand-written DDP loop?

Both in the same two processes, with gloo, one thread a rank and the same model, optimizer and batches (ready in a
list), in turn: in the middle of a fit, at every so many steps, the hand-written loop makes as many steps of its own.
A fit's turn is compared with the mean of the two turns of the hand-written loop around it; the ratio is the median
over the turns. What the threads of a rank beside its loop cost is measured apart and added in full, as in
loop_cost.py. Whether the ranks agree on a stop costs the fit's turns, and is counted once more by itself in a fit
without turns: seconds inside the agreement's calls, in percent of the time that training took.

Prints each with its limit, and ends with 1 where one is over it.

    python benchmarks/ddp_loop_cost.py [--turns 200] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ckptrun import Module

Batch = tuple[Tensor, Tensor]
LIMIT = 1.05
LIMIT_ASKED = 0.01
NUM_RANKS = 2
NUM_BATCHES = 64  # different ones
STEPS_A_TURN = 50
NUM_TURNS = 200
WARM_UP_TURNS = 10

CONFIG = """
run: {{name: {name}, root: {root}}}
trainer: {{max_epochs: 1, num_threads: 1, enable_progress_bar: false}}
loggers: []
model:
  class_path: ddp_loop_cost.{model}
  init_args: {{num_steps: {num_steps}, report: {report}}}
"""


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 32, generator=generator), torch.randint(2, (4,), generator=generator))
        for _ in range(NUM_BATCHES)
    ]


class ByHand:
    """The loop that a person would write."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(nn.Linear(32, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def run(self, batches: list[Batch]) -> None:
        model, optimizer = self.model, self.optimizer
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def thread_times() -> dict[int, float]:
    """Processor seconds of every other thread of Python in this process."""
    me = threading.get_ident()
    return {
        thread.ident: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.ident != me
    }


class Classifier(Module):
    """A fit without turns: says how long it took, and how much of that went into asking.

    Args:
        num_steps: of this rank.
        report: each rank writes ``<report>-<rank>.json``.
    """

    def __init__(self, num_steps: int, report: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 2)
        self.num_steps, self.report = num_steps, report
        self.found: dict[str, Any] = {}

    def train_dataloader(self) -> list[Batch]:
        batches = make_batches()
        return [batches[index % NUM_BATCHES] for index in range(self.num_steps * NUM_RANKS)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002
        inputs, targets = batch
        return cross_entropy(self.linear(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        self.began = time.perf_counter()
        self.asked_before = self.asked_s()

    def asked_s(self) -> float:
        agreement = self.trainer.agreement
        assert agreement is not None
        return agreement.asked_s

    def on_train_epoch_end(self) -> None:
        self.found["train_s"] = time.perf_counter() - self.began
        self.found["asked_s"] = self.asked_s() - self.asked_before
        self.found["num_steps"] = self.trainer.global_step
        Path(f"{self.report}-{self.trainer.global_rank}.json").write_text(json.dumps(self.found))


class InTurn(Classifier):
    """A fit in turn with the hand-written loop."""

    def on_fit_start(self) -> None:
        self.hand, self.batches = ByHand(), make_batches()[:STEPS_A_TURN]
        self.fit_s: list[float] = []
        self.hand_s: list[float] = []
        self.turn = 0
        self.resumed_at = 0.0
        self.found.update(fit_s=self.fit_s, hand_s=self.hand_s)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:  # noqa: ARG002
        if batch_idx % STEPS_A_TURN:
            return
        started = time.perf_counter()
        self.hand.run(self.batches)
        ended = time.perf_counter()
        if self.turn == WARM_UP_TURNS:
            self.counted_from, self.threads_before = ended, thread_times()
        elif self.turn > WARM_UP_TURNS:
            self.fit_s.append(started - self.resumed_at)
        if self.turn >= WARM_UP_TURNS:
            self.hand_s.append(ended - started)
        if batch_idx == self.num_steps - 1:
            used = sum(s - self.threads_before.get(ident, 0.0) for ident, s in thread_times().items())
            self.found["threads_share"] = used / (ended - self.counted_from)
        self.turn += 1
        self.resumed_at = time.perf_counter()


def fit(model: str, num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Run one fit on the command line; returns what each rank found."""
    config, report = folder / f"{model}.yaml", folder / model
    config.write_text(
        CONFIG.format(name=model, root=folder / "runs", model=model, num_steps=num_steps, report=report)
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-m", "ckptrun", "fit", "-c", str(config), "--nproc", str(NUM_RANKS)],
        cwd=here,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{model}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return [json.loads(Path(f"{report}-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def ratio_of(found: dict[str, Any]) -> float:
    """The loop's own ratio on one rank."""
    hand_s = found["hand_s"]
    around = [(before + after) / 2 for before, after in itertools.pairwise(hand_s)]
    ratios: list[float] = [fit / hand for fit, hand in zip(found["fit_s"], around, strict=True)]
    return statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="turns of each side that count")
    parser.add_argument(
        "--quick", action="store_true", help="a few turns, to see that it runs; judges nothing"
    )
    args = parser.parse_args()
    turns = 10 if args.quick else args.turns
    num_steps = (WARM_UP_TURNS + turns) * STEPS_A_TURN + 1
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        ranks = fit("InTurn", num_steps, Path(name))
        plain = fit("Classifier", num_steps, Path(name))
    own = statistics.mean(map(ratio_of, ranks))
    share = max(found["threads_share"] for found in ranks)
    hand_s = statistics.median(ranks[0]["hand_s"]) / STEPS_A_TURN
    step_s = plain[0]["train_s"] / plain[0]["num_steps"]
    asked = max(found["asked_s"] / found["train_s"] for found in plain)
    ratio = own * (1 + share)
    print(
        f"a step by hand {1e6 * hand_s:.0f} us, the loop's own ratio {own:.3f}, threads {100 * share:.2f} %"
    )
    print(f"{'loop beside a hand-written DDP loop':46} {ratio:7.3f}   limit {LIMIT}")
    print(
        f"{f'asking, at a step of {1e6 * step_s:.0f} us':46} {100 * asked:5.2f} %   limit {100 * LIMIT_ASKED:g} %"
    )
    over = ratio > LIMIT or asked > LIMIT_ASKED
    return 1 if over and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
