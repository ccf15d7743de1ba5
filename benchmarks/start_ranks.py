"""How soon do several ranks make their first training step, beside torchrun and Lightning?

Each side is a process of its own that trains the same small model on the same data with the same optimizer, with gloo
and one thread a rank: ``ckptrun fit --nproc N``; ``torchrun`` with a script that a person would write; where
``--lightning`` names a Python that has it, Lightning's DDP, which starts its ranks itself. They run in turn. The
time runs from just before the process is started until rank 0 has made its first step, which says so with the wall
clock's time. "CPU" is what all processes of that side had used by then, in seconds: it moves less than the time where
a machine is busy with other things, but says nothing of what was done side by side.

Prints medians and ratios, and ends with 1 where one is over its limit. The limits are those of a machine that has a
core for each of two ranks and is not busy.

    python benchmarks/start_ranks.py [--rounds 9] [--nproc 2 --nproc 4] [--lightning .../bin/python]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMITS = {2: 0.8, 4: 0.55}  # of torchrun's time, by number of ranks
LIMIT_TO_LIGHTNING = 0.6  # with 2 ranks
TIMEOUT_S = 300.0
WORD = "FIRST STEP AT"

COMMON = f"""
import time

import torch
from torch.utils.data import DataLoader, TensorDataset


def make_net():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))


def make_dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(4096, 32, generator=generator), torch.randint(2, (4096,), generator=generator)
    )


def loss_of(net, batch):
    inputs, targets = batch
    return torch.nn.functional.cross_entropy(net(inputs), targets)


def stepped(rank):
    if rank == 0:
        print("{WORD}", time.time(), flush=True)
"""

OURS = """
from common import DataLoader, loss_of, make_dataset, make_net, stepped, torch
from ckptrun import Module


class Model(Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def train_dataloader(self):
        return DataLoader(make_dataset(), batch_size=16, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            stepped(self.trainer.global_rank)
"""

CONFIG = """
run: {name: demo}
trainer: {max_steps: 2, num_threads: 1}
model: {class_path: ours.Model}
"""

BY_HAND = """
import torch.distributed as dist
from common import DataLoader, loss_of, make_dataset, make_net, stepped, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = make_dataset()
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, shuffle=True))
    net = DistributedDataParallel(make_net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for index, batch in enumerate(loader):
        loss = loss_of(net, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if index == 0:
            stepped(dist.get_rank())
        if index == 1:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

LIGHTNING = """
import sys

import lightning
from common import DataLoader, loss_of, make_dataset, make_net, stepped, torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def train_dataloader(self):
        return DataLoader(make_dataset(), batch_size=16, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            stepped(self.global_rank)


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp")
    trainer.fit(Model())
"""


@dataclass
class Side:
    """One way of starting, and what it took."""

    name: str
    command: list[str]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def cpu_of_tree(root: int) -> float:
    """Processor seconds of a process and all below it until now, ended children included."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            used[int(entry)] = sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(int(entry))
    ticks, left = 0, [root]
    while left:
        process = left.pop()
        ticks += used.get(process, 0)
        left += children.get(process, ())
    return ticks / os.sysconf("SC_CLK_TCK")


def environment() -> dict[str, str]:
    """The same for all sides: one thread a rank, and bytecode is kept as it is for users."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CKPTRUN_"))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def first_step(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Start it and let it end; returns seconds until its first step, and processor seconds by then."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    started = time.time()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    stepped_at, cpu_s, said = None, 0.0, []
    try:
        for line in process.stdout:
            said.append(line)
            if WORD in line:
                cpu_s = cpu_of_tree(process.pid)
                stepped_at = float(line.rpartition(WORD)[2])
        code = process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if (
        stepped_at is None
    ):  # what comes after the first step is not measured; a rank may abort at its exit there
        sys.exit(f"{' '.join(command)}: exit {code}\n{''.join(said)}")
    return stepped_at - started, cpu_s


def sides(nproc: int, lightning: str | None) -> list[Side]:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    found = [
        Side("ckptrun", [sys.executable, "-m", "ckptrun", "fit", "-c", "ours.yaml", "--nproc", str(nproc)]),
        Side("torchrun", [torchrun, "--nproc-per-node", str(nproc), "by_hand.py"]),
    ]
    if lightning is not None:
        found.append(Side("lightning", [lightning, "with_lightning.py", str(nproc)]))
    return found


def compare(nproc: int, *, rounds: int, lightning: str | None, folder: Path) -> list[str]:
    """Measure and print; returns what is over its limit."""
    all_sides = sides(nproc, lightning)
    for number in range(rounds + 1):
        for side in all_sides:
            wall_s, cpu_s = first_step(side.command, folder)
            if number:  # the first fills the page cache and writes bytecode
                side.wall_s.append(wall_s)
                side.cpu_s.append(cpu_s)
    ours, over = all_sides[0], []
    print(f"\n{nproc} ranks, {rounds} rounds in turn, medians; until rank 0 has made its first step")
    print(f"{'':12}{'s':>8}{'CPU s':>8}{'ckptrun / it':>15}{'limit':>8}{'CPU ratio':>12}")
    for side in all_sides:
        wall_s, cpu_s = statistics.median(side.wall_s), statistics.median(side.cpu_s)
        line = f"{side.name:12}{wall_s:8.2f}{cpu_s:8.2f}"
        if side is not ours:
            # Each round's own ratio: what else the machine did then slowed both.
            ratio = statistics.median(a / b for a, b in zip(ours.wall_s, side.wall_s, strict=True))
            cpu_ratio = statistics.median(a / b for a, b in zip(ours.cpu_s, side.cpu_s, strict=True))
            limit = (
                LIMITS.get(nproc) if side.name == "torchrun" else LIMIT_TO_LIGHTNING if nproc == 2 else None
            )
            line += f"{ratio:15.2f}{limit if limit is not None else '':>8}{cpu_ratio:12.2f}"
            if limit is not None and ratio > limit:
                over.append(f"{nproc} ranks: {ratio:.2f} of {side.name}, at most {limit}")
        print(line, flush=True)
    return over


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="how often each side is started")
    parser.add_argument("--nproc", type=int, action="append", help="ranks (repeatable; 2 and 4)")
    parser.add_argument("--lightning", metavar="PYTHON", help="a Python that has lightning installed")
    args = parser.parse_args()
    over = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (
            ("common.py", COMMON),
            ("ours.py", OURS),
            ("ours.yaml", CONFIG),
            ("by_hand.py", BY_HAND),
            ("with_lightning.py", LIGHTNING),
        ):
            (folder / file).write_text(text)
        print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
        for nproc in args.nproc or [2, 4]:
            over += compare(
                nproc, rounds=args.rounds, lightning=args.lightning if nproc == 2 else None, folder=folder
            )
    for line in over:
        print(f"OVER: {line}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
