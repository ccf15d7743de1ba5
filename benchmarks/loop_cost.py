"""What does a training step cost in ckptrun's loop, beside a hand-written loop of torch?

Both in this process, with one thread and the same model, optimizer and batches (ready in a list), in turn: in the
middle of a fit, at every so many steps, the hand-written loop makes as many steps of its own, so that a busy machine
slows both. A fit's turn is compared with the mean of the two turns of the hand-written loop around it, and the
median is taken over the turns. Since a median leaves out what happens once a second, what the threads beside the
loop cost (status, lease, bar) is measured apart and added in full, as if the loop always had to wait for them.

Prints a row for each case and ends with 1 where a ratio is over its limit:

    by hand   a step of the hand-written loop, by the wall clock
    own       what a step takes more than by hand, in processor time of the loop's thread
    threads   processor time of the other threads, in percent of the time that passes
    wall      the loop's ratio by the wall clock, for comparison: others on the machine move it by several percent
    ratio     by processor time, the threads included; this is held to the limit

    python benchmarks/loop_cost.py [--quick] [--only CASE]

Turned down: whole fits of seconds in turn with whole hand-written loops, by the wall clock. On a machine that others
use too, their ratio moves by more than what is measured.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ckptrun import Module, Trainer

Batch = tuple[Tensor, Tensor]
Work = Callable[[], object] | None
Times = tuple[float, float]  # by the wall clock, and of this thread's processor
NUM_BATCHES = 64  # different ones
NUM_TURNS = 600
WARM_UP_TURNS = 20
WORK_S = 0.005


@dataclass(frozen=True)
class Case:
    """One row: what is switched on, and how much the loop may cost then."""

    name: str
    title: str
    limit: float | None  # None: for information
    logs: bool = False
    log_every_n_steps: int = 50
    works: bool = False

    @property
    def steps_a_turn(self) -> int:
        return 1 if self.works else 50


CASES = (
    Case("plain", "nothing switched on", 1.15),
    Case("all", "progress bar, self.log every step, CSV logger", 1.4, logs=True),
    Case("all-1", "the same, log_every_n_steps=1", None, logs=True, log_every_n_steps=1),
    Case("5ms", "a step of 5 ms, nothing switched on", 1.01, works=True),
    Case("5ms-all", "a step of 5 ms, all of it", 1.01, logs=True, works=True),
)


class ByHand:
    """The loop that a person would write."""

    def __init__(self, work: Work) -> None:
        self.model = nn.Linear(32, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.work = work

    def run(self, batches: Sequence[Batch]) -> None:
        model, optimizer, work = self.model, self.optimizer, self.work
        for inputs, targets in batches:
            if work is not None:
                work()
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()


class Turns:
    """Lets the fit and the hand-written loop run in turn, and keeps their times (wall, processor) in seconds."""

    def __init__(self, hand: ByHand, batches: Sequence[Batch]) -> None:
        self.hand, self.batches = hand, batches
        self.fit: list[Times] = []
        self.by_hand: list[Times] = []
        self.threads_share = 0.0  # of one processor, over all turns that count
        self._turn = 0
        self._resumed_at: Times = (0.0, 0.0)
        self._counted_from: tuple[float, dict[int, float]] = (0.0, {})

    def change(self) -> None:
        """Called from the fit's step: its turn ends, that of the hand-written loop comes, its next begins."""
        started = _now()
        self.hand.run(self.batches)
        ended = _now()
        if self._turn == WARM_UP_TURNS:
            self._counted_from = time.perf_counter(), _thread_times()
        elif self._turn > WARM_UP_TURNS:
            self.fit.append(_between(self._resumed_at, started))
        if self._turn >= WARM_UP_TURNS:
            self.by_hand.append(_between(started, ended))
        self._turn += 1
        self._resumed_at = _now()

    def finish(self) -> None:
        """After the last turn, while the threads still run."""
        since, before = self._counted_from
        used = sum(seconds - before.get(ident, 0.0) for ident, seconds in _thread_times().items())
        self.threads_share = used / (time.perf_counter() - since)


def _now() -> Times:
    return time.perf_counter(), time.thread_time()


def _between(start: Times, end: Times) -> Times:
    return end[0] - start[0], end[1] - start[1]


def _thread_times() -> dict[int, float]:
    """Processor seconds of every other thread of Python."""
    me = threading.get_ident()
    return {
        thread.ident: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.ident != me
    }


class Classifier(Module):
    """The model of the fit."""

    def __init__(self, turns: Turns, work: Work, case: Case, num_steps: int) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 2)
        self.turns, self.work, self.case = turns, work, case
        self.every, self.last = case.steps_a_turn, num_steps - 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx % self.every == 0:
            self.turns.change()
            if batch_idx == self.last:
                self.turns.finish()
        if self.work is not None:
            self.work()
        inputs, targets = batch
        return cross_entropy(self.linear(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LoggingClassifier(Classifier):
    """The same, and each step's loss is logged."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, prog_bar=True)
        return loss


def make_work() -> Callable[[], object]:
    """Some multiplications of matrices, which take about ``WORK_S`` together."""
    left, right, out = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)

    def multiply(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=out)
        return (time.perf_counter() - started) / count

    multiply(20)
    count = max(1, round(WORK_S / min(multiply(5) for _ in range(30))))
    return lambda: multiply(count)


@contextmanager
def terminal() -> Iterator[None]:
    """Standard error is a terminal that somebody reads, in a process of its own."""
    reading_end, writing_end = pty.openpty()
    reader = subprocess.Popen(
        ["cat"], stdin=reading_end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(reading_end)
    before = sys.stderr
    sys.stderr = io.TextIOWrapper(os.fdopen(writing_end, "wb"), line_buffering=True)
    try:
        yield
    finally:
        sys.stderr.close()
        sys.stderr = before
        reader.wait()


@dataclass(frozen=True)
class Cost:
    """What a case came to."""

    hand_s: float  # a step by hand
    own_s: float  # what a step takes more in ckptrun's loop
    threads_share: float
    wall_ratio: float  # of the loop alone
    cpu_ratio: float

    @property
    def ratio(self) -> float:
        return self.cpu_ratio * (1 + self.threads_share)


def measure(case: Case, *, num_turns: int, root: str) -> Cost:
    """One fit, with the hand-written loop in turn."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 32, generator=generator), torch.randint(2, (4,), generator=generator))
        for _ in range(NUM_BATCHES)
    ]
    num_steps = (WARM_UP_TURNS + num_turns) * case.steps_a_turn + 1
    work = make_work() if case.works else None
    turns = Turns(ByHand(work), batches[: case.steps_a_turn])
    trainer = Trainer(
        run=case.name,
        root=root,
        max_epochs=1,
        logger=case.logs,
        enable_progress_bar=case.logs,
        enable_checkpointing=False,
        log_every_n_steps=case.log_every_n_steps,
    )
    model = (LoggingClassifier if case.logs else Classifier)(turns, work, case, num_steps)
    trainer.fit(model, [batches[index % NUM_BATCHES] for index in range(num_steps)])
    wall, cpu = (_ratio(turns, clock) for clock in (0, 1))
    hand_s, hand_cpu_s = (
        statistics.median(times[clock] for times in turns.by_hand) / case.steps_a_turn for clock in (0, 1)
    )
    return Cost(hand_s, (cpu - 1) * hand_cpu_s, turns.threads_share, wall, cpu)


def _ratio(turns: Turns, clock: int) -> float:
    hand = [times[clock] for times in turns.by_hand]
    around = [(before + after) / 2 for before, after in itertools.pairwise(hand)]
    return statistics.median(times[clock] / by_hand for times, by_hand in zip(turns.fit, around, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="turns of each side that count")
    parser.add_argument(
        "--quick", action="store_true", help="a few turns, to see that it runs; judges nothing"
    )
    parser.add_argument(
        "--only", choices=[case.name for case in CASES], action="append", help="this case (repeatable)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TERM"] = "xterm-256color"
    cases = [case for case in CASES if not args.only or case.name in args.only]
    print(
        f"{'':46} {'by hand':>10} {'own':>9} {'threads':>8} {'wall':>6} {'ratio':>6} {'limit':>6}", flush=True
    )
    over = False
    with tempfile.TemporaryDirectory() as root:
        for case in cases:
            with terminal():
                cost = measure(case, num_turns=20 if args.quick else args.turns, root=root)
            limit = "" if case.limit is None else f"{case.limit:.2f}"
            print(
                f"{case.title:46} {1e6 * cost.hand_s:7.1f} us {1e6 * cost.own_s:6.1f} us "
                f"{100 * cost.threads_share:6.2f} % {cost.wall_ratio:6.3f} {cost.ratio:6.3f} {limit:>6}",
                flush=True,
            )
            over = over or (case.limit is not None and cost.ratio > case.limit)
    return 1 if over and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
