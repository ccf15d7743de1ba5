"""How soon do two ranks under ZeRO 1 make their first step, beside DeepSpeed's own command with a plain script?

Three sides in turn, as in start_ranks.py: ``deepspeed`` with a script that a person would write and that does the same;
``ckptrun fit --launcher deepspeed``; ``ckptrun fit --launcher torchrun``. The time runs from just before the process is
started until rank 0 has made its first step.

Prints medians and ratios, and ends with 1 where one is over its limit. The limits are those of a machine that has a
core for each rank and is not busy.

    python benchmarks/deepspeed_start.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from start_ranks import COMMON, OURS, Side, first_step

NUM_RANKS = 2
LIMITS = {"--launcher deepspeed": 1.05, "--launcher torchrun": 0.7}

CONFIG = """
run: {name: demo}
trainer: {max_steps: 2, num_threads: 1}
strategy: {name: deepspeed, stage: 1}
model: {class_path: ours.Model}
"""

BY_HAND = """
import deepspeed
import torch.distributed as dist
from common import DataLoader, loss_of, make_dataset, make_net, stepped, torch
from torch.utils.data import DistributedSampler

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    dataset = make_dataset()
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, shuffle=True))
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=CONFIG)
    for index, batch in enumerate(loader):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        if index == 0:
            stepped(dist.get_rank())
        if index == 1:
            break


if __name__ == "__main__":
    main()
"""


def sides() -> list[Side]:
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    ours = [sys.executable, "-m", "ckptrun", "fit", "-c", "ours.yaml", "--strategy", "deepspeed"]
    ours += ["--nproc", str(NUM_RANKS), "--launcher"]
    return [
        Side(
            "plain",
            [deepspeed, "--num_gpus", str(NUM_RANKS), "--no_local_rank", "by_hand.py"],
        ),
        *(Side(name, [*ours, name.split()[1]]) for name in LIMITS),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="how often each side is started")
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    all_sides = sides()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (
            ("common.py", COMMON),
            ("ours.py", OURS),
            ("ours.yaml", CONFIG),
            ("by_hand.py", BY_HAND),
        ):
            (folder / file).write_text(text)
        for number in range(args.rounds + 1):
            for side in all_sides:
                wall_s, cpu_s = first_step(side.command, folder)
                if number:  # the first compiles, fills the page cache and writes bytecode
                    side.wall_s.append(wall_s)
                    side.cpu_s.append(cpu_s)
    plain, over = all_sides[0], False
    print(
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {args.rounds} rounds in turn"
    )
    print(f"{'':24}{'s':>8}{'CPU s':>8}{'it / plain':>12}{'limit':>8}")
    for side in all_sides:
        line = f"{side.name:24}{statistics.median(side.wall_s):8.2f}{statistics.median(side.cpu_s):8.2f}"
        if side is not plain:
            ratio = statistics.median(a / b for a, b in zip(side.wall_s, plain.wall_s, strict=True))
            line += f"{ratio:12.2f}{LIMITS[side.name]:8}"
            over |= ratio > LIMITS[side.name]
        print(line)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
