"""How long does training stand still for a save, beside a copy of the same state into a buffer that is kept?

One training with a state of 1 GB (weights and Adam's two moments) saves now and then, and in between copies the same
tensors into its own kept buffers, as the fastest thing that could be done. From the times between steps:

    stop       how much longer the longest step after a save was than the longest of as many without one, in copies
    loop       how much longer the steps from a save until its commit took than as many steps without one, in copies
    memory     how much more memory training needs at its peak than the same training without saves, in states

The writing thread needs a processor now and then. Training is therefore given all but one of those that there are, as
where a GPU does the work; the same with all of them is printed below, where what the thread takes comes on top.

Bytes that go to a disk pass through the memory that training uses too. What that alone costs is the third thing that is
measured: in a training without saves another process writes as many bytes from its own memory, at the same steps, as
fast as it can be done. Where a copy is quick and the disk slow, that is about a copy, and no save can be cheaper than
both together: the limit of the loop is 1.3 copies, or 1.3 times a copy and such a raw write where that is more.

Prints medians over the saves, and ends with 1 where one is over its limit.

    python benchmarks/save_stall.py [--mb 1000] [--saves 20] [--every 14] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptrun import Callback, Module, Trainer
from ckptrun.callbacks import ModelCheckpoint

LIMIT_STOP, LIMIT_LOOP, LIMIT_MEMORY = 1.3, 1.3, 1.1
WIDTH = 1024


class Model(Module):
    """Layers of 4 MB; a step is mostly the optimizer's."""

    def __init__(self, size_mb: int) -> None:
        super().__init__()
        count = max(1, size_mb * 1_000_000 // (3 * 4 * WIDTH * WIDTH))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Stopwatch(Callback):
    """Notes when each step ended; between the saves it copies the state itself, and notes how long that took.

    Args:
        raw: writes as many bytes, in place of a save, whenever one is due.
    """

    def __init__(self, every: int, raw: RawWriter | None) -> None:
        self.every, self.raw = every, raw
        self.ended: dict[int, float] = {}  # by step
        self.copy_s: list[float] = []
        self.committed: dict[int, float] = {}
        self._kept: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        # After everything that the step before had to do.
        step = trainer.global_step
        self.ended[step] = time.perf_counter()
        if trainer.checkpoints.head is not None:
            self.committed.setdefault(trainer.checkpoints.head.step, self.ended[step])
        if self.raw is not None and step and step % self.every == 0:
            self.raw.begin()
        if step and step % self.every == self.every // 2:
            if self.raw is not None and step > self.every:
                self.raw.wait()
            tensors = [t for t in state_of(trainer) if t.numel() > 1]
            if not self._kept:
                self._kept = [torch.empty_like(tensor).fill_(0) for tensor in tensors]
            before = time.perf_counter()
            for kept, tensor in zip(self._kept, tensors, strict=True):
                kept.copy_(tensor)
            self.copy_s.append(time.perf_counter() - before)
            self.ended[step] = time.perf_counter()  # the copy is no part of a step


def state_of(trainer: Any) -> list[torch.Tensor]:
    moments = [v for state in trainer.optimizers[0].state.values() for v in state.values()]
    return [p.detach() for p in trainer.lightning_module.parameters()] + moments


class RawWriter:
    """Another process that writes from memory of its own, each time it is told to."""

    def __init__(self, size_bytes: int, folder: str) -> None:
        command = [
            sys.executable,
            __file__,
            "--child",
            "write",
            "--bytes",
            str(size_bytes),
            "--folder",
            folder,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.wait()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("the process that writes has ended")

    def close(self) -> None:
        self._process.communicate()


def write_when_told(size_bytes: int, folder: str) -> None:
    """What :class:`RawWriter`'s process does: past the page cache, where the file system allows that."""
    block_bytes = 4 << 20
    memory = mmap.mmap(-1, max(1, size_bytes // block_bytes) * block_bytes)
    memory.write(b"\1" * len(memory))
    view, path = memoryview(memory), os.path.join(folder, f".save-stall-raw-{os.getpid()}")
    print("ready", flush=True)
    for _ in sys.stdin:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            fd = os.open(path, flags)
        for start in range(0, len(memory), block_bytes):
            os.write(fd, view[start : start + block_bytes])
        os.fsync(fd)
        os.close(fd)
        os.unlink(path)
        print("written", flush=True)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """One training in this process."""
    if options.threads:
        torch.set_num_threads(options.threads)
    model = Model(options.mb)
    state_bytes = 3 * sum(t.numel() * t.element_size() for t in model.parameters())
    raw = RawWriter(state_bytes, options.folder) if options.child == "raw" else None
    every, watch = options.every, Stopwatch(options.every, raw)
    steps = every * options.saves + every
    saving = [] if raw is not None else [ModelCheckpoint(every_n_train_steps=every)]
    with tempfile.TemporaryDirectory(prefix=".save-stall-", dir=options.folder) as folder:
        trainer = Trainer(
            default_root_dir=folder,
            max_steps=steps,
            max_epochs=-1,
            callbacks=[*saving, watch],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=bool(saving),
        )
        trainer.fit(model, [torch.randn(2, WIDTH)] * (steps + 1))
    if raw is not None:
        raw.close()
    return {
        "ended": watch.ended,
        "committed": watch.committed,
        "copy_s": statistics.median(watch.copy_s),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "state_bytes": state_bytes,
    }


def in_a_child(kind: str, threads: int) -> dict[str, Any]:
    """What :func:`train` gives, from a process of its own: memory that was used once is not always given back."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", kind, "--threads", str(threads)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def stalls(found: dict[str, Any], every: int, saves: int) -> tuple[list[float], list[float]]:
    """For each save the longest stop and how much the loop was lengthened, in copies."""
    ended = {int(step): at for step, at in found["ended"].items()}
    took = {step: at - ended[step - 1] for step, at in ended.items() if step - 1 in ended}
    span = every // 2 - 1
    stops, loops = [], []
    for save in (every * number for number in range(1, saves + 1)):
        # A save at step n shows in the time until the hook of the next batch, which is booked under n.
        after = [took[step] for step in range(save, save + span)]
        before, later = range(save - span, save), range(save + span + 2, save + 2 * span + 2)
        quiet = [[took[step] for step in steps if step in took] for steps in (before, later)]
        stops.append((max(after) - statistics.mean(map(max, quiet))) / found["copy_s"])
        loops.append((sum(after) - statistics.mean(map(statistics.mean, quiet)) * span) / found["copy_s"])
        if found["committed"] and found["committed"].get(str(save), math.inf) > ended[save + span - 1]:
            raise SystemExit(f"the save at step {save} ended after the steps that are counted: raise --every")
    return stops, loops


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000, help="size of the state (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=14, help="steps from save to save (default: %(default)s)"
    )
    parser.add_argument("--folder", default=str(Path(__file__).parent.parent), help="on the disk to measure")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "write":
        write_when_told(options.bytes, options.folder)
        return 0
    if options.child:
        print(json.dumps(train(options)))
        return 0
    cores = len(os.sched_getaffinity(0))
    free = in_a_child("saves", max(1, cores - 1))
    raw = in_a_child("raw", max(1, cores - 1))
    stops, loops = stalls(free, options.every, options.saves)
    _, raw_loops = stalls(raw, options.every, options.saves)
    memory = (free["peak_bytes"] - raw["peak_bytes"]) / free["state_bytes"]
    raw_loop = statistics.median(raw_loops)
    print(f"a copy of {free['state_bytes'] / 1e6:.0f} MB takes {free['copy_s'] * 1e3:.0f} ms")
    print(f"as many bytes written raw by another process lengthen the loop by {raw_loop:.2f} copies")
    figures = (
        ("longest stop", statistics.median(stops), LIMIT_STOP),
        ("first save's stop", stops[0], LIMIT_STOP),
        ("loop lengthened", statistics.median(loops), LIMIT_LOOP * max(1.0, 1.0 + raw_loop)),
        ("memory", memory, LIMIT_MEMORY),
    )
    for name, value, limit in figures:
        print(f"{name}: {value:.2f} (limit {limit:.2f})")
    stops, loops = stalls(in_a_child("saves", cores), options.every, options.saves)
    print(
        f"with all {cores} processors busy training: longest stop {statistics.median(stops):.2f}, "
        f"loop {statistics.median(loops):.2f}"
    )
    return int(any(value > limit for _, value, limit in figures))


if __name__ == "__main__":
    sys.exit(main())
