"""What does a training step cost under the strategy deepspeed with two ranks, beside a hand-written DeepSpeed loop?

As ddp_loop_cost.py has it: in the same two processes, with the same model, optimizer, stage and batches, in turn. A
fit's turn is compared with the mean of the two turns of the hand-written loop around it; the ratio is the median over
the turns, and what the threads of a rank beside its loop cost is added in full.

Prints the ratio with its limit, and ends with 1 where it is over.

    python benchmarks/deepspeed_loop_cost.py [--stage 1] [--turns 200] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import ddp_loop_cost
from ddp_loop_cost import NUM_RANKS, NUM_TURNS, STEPS_A_TURN, WARM_UP_TURNS, Batch, ratio_of
from torch import nn
from torch.nn.functional import cross_entropy

LIMIT = 1.03

CONFIG = """
run: {{name: demo, root: {root}}}
trainer: {{max_epochs: 1, num_threads: 1, enable_progress_bar: false}}
strategy: {{name: deepspeed, stage: {stage}}}
loggers: []
model:
  class_path: deepspeed_loop_cost.InTurn
  init_args: {{num_steps: {num_steps}, report: {report}, stage: {stage}}}
"""


class ByHand:
    """The loop that a person would write."""

    def __init__(self, stage: int) -> None:
        import deepspeed
        import torch

        model = nn.Linear(32, 2)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "steps_per_print": 2**31,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def run(self, batches: list[Batch]) -> None:
        engine = self.engine
        for inputs, targets in batches:
            loss = cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()


class InTurn(ddp_loop_cost.InTurn):
    """A fit in turn with the hand-written loop."""

    def __init__(self, num_steps: int, report: str, stage: int) -> None:
        super().__init__(num_steps, report)
        self.stage = stage

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.hand = ByHand(self.stage)  # type: ignore[assignment]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="turns of each side that count")
    parser.add_argument("--quick", action="store_true", help="a few turns, to see that it runs")
    args = parser.parse_args()
    turns = 5 if args.quick else args.turns
    num_steps = (WARM_UP_TURNS + turns) * STEPS_A_TURN + 1
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, report = folder / "demo.yaml", folder / "report"
        config.write_text(
            CONFIG.format(root=folder / "runs", stage=args.stage, num_steps=num_steps, report=report)
        )
        done = subprocess.run(
            [sys.executable, "-m", "ckptrun", "fit", "-c", str(config), "--nproc", str(NUM_RANKS)],
            cwd=Path(__file__).resolve().parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        ranks = [json.loads(Path(f"{report}-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    own = statistics.mean(map(ratio_of, ranks))
    share = max(found["threads_share"] for found in ranks)
    hand_s = statistics.median(ranks[0]["hand_s"]) / STEPS_A_TURN
    ratio = own * (1 + share)
    print(
        f"a step by hand {1e6 * hand_s:.0f} us, the loop's own ratio {own:.3f}, threads {100 * share:.2f} %"
    )
    print(f"loop beside a hand-written DeepSpeed loop, stage {args.stage}: {ratio:.3f} (limit {LIMIT})")
    return 1 if ratio > LIMIT and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
