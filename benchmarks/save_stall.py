"""How long does training stand still for a save, beside a copy of the same state into a buffer that is kept?

One training with a state of 1 GB (weights and Adam's two moments) does three things in turn, some steps apart:

    save       a checkpoint, as ckptrun makes it beside training
    copy       the same tensors into kept buffers of the benchmark's own, as the fastest thing that could be done
    raw write  another process writes as many bytes from its own memory, past the page cache where that goes

From how much longer the steps that follow were than the quiet ones between them, medians over all saves:

    stop       of the step that a save lengthened most, in copies; for the first save, the median of four trainings
    loop       of all steps from a save to its commit, in copies
    memory     how much more memory training needs at its peak than the same training without saves, in states

No loader worker is forked here; that a fork does not make the next copy slow is for a test to show.

Steps are mostly the optimizer's and so all memory traffic, which is the worst neighbour for a copy and a write. Bytes
that go to a disk pass through that memory too, and in a virtual machine through the host's processors. What that alone
costs is what the raw write shows; no save can be cheaper than it and a copy together, so the limit of the loop is 1.3
times both.

The writing thread needs a processor now and then. Training is therefore given all but one of those that there are, as
where a GPU does the work; the same with all of them is printed below, where what the thread takes comes on top.

Ends with 1 where a figure is over its limit.

    python benchmarks/save_stall.py [--mb 1000] [--saves 20] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import mmap
import os
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptrun import Callback, Module, Trainer
from ckptrun.callbacks import ModelCheckpoint

LIMIT_STOP, LIMIT_LOOP, LIMIT_MEMORY = 1.3, 1.3, 1.1
WIDTH = 1024
SHORT = 3  # saves

# In steps: a save at each multiple of EVERY is booked under that step, the others so many steps later.
EVERY, COPY, RAW, SPAN = 20, 8, 12, 5
QUIET = (*range(SPAN + 1, COPY), COPY + 1, COPY + 2, *range(RAW + SPAN, EVERY))


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
    """Notes when each step ended, and does what is done in turn with saves."""

    def __init__(self, raw: RawWriter) -> None:
        self.raw = raw
        self.ended: dict[int, float] = {}  # by step
        self.committed: dict[int, float] = {}
        self._kept: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        # After everything that the step before had to do: what follows is booked under the step to come.
        step = trainer.global_step
        self.ended[step] = time.perf_counter()
        if trainer.checkpoints.head is not None:
            self.committed.setdefault(trainer.checkpoints.head.step, self.ended[step])
        if step < EVERY:
            return
        if step % EVERY == COPY - 1:
            tensors = [t for t in state_of(trainer) if t.numel() > 1]
            if not self._kept:
                self._kept = [torch.empty_like(tensor).fill_(0) for tensor in tensors]
                self.ended[step] = time.perf_counter()
            for kept, tensor in zip(self._kept, tensors, strict=True):
                kept.copy_(tensor)
        if step % EVERY == RAW - 1:
            self.raw.begin()
        if step % EVERY == RAW + SPAN - 1:
            self.raw.ended_in_time()


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

    def ended_in_time(self) -> None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], 0)[0]:
            raise SystemExit("a raw write took longer than the steps that are counted")
        self.wait()

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
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        for start in range(0, len(memory), block_bytes):
            if os.write(fd, view[start : start + block_bytes]) != block_bytes:
                raise SystemExit("the disk took less than a block")
        os.fsync(fd)
        os.close(fd)
        os.unlink(path)
        print("written", flush=True)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """One training in this process."""
    torch.set_num_threads(options.threads)
    model, saves = Model(options.mb), options.child == "saves"
    state_bytes = 3 * sum(t.numel() * t.element_size() for t in model.parameters())
    watch = Stopwatch(RawWriter(state_bytes, options.folder))
    steps = EVERY * (options.saves + 1)
    with tempfile.TemporaryDirectory(prefix=".save-stall-", dir=options.folder) as folder:
        trainer = Trainer(
            default_root_dir=folder,
            max_steps=steps,
            max_epochs=-1,
            callbacks=[*([ModelCheckpoint(every_n_train_steps=EVERY)] if saves else []), watch],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=saves,
        )
        trainer.fit(model, [torch.randn(2, WIDTH)] * (steps + 1))
    watch.raw.close()
    return {
        "ended": watch.ended,
        "committed": watch.committed,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "state_bytes": state_bytes,
    }


def in_a_child(kind: str, threads: int, *more: str) -> dict[str, Any]:
    """What :func:`train` gives, from a process of its own: memory that was used once is not always given back."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", kind, "--threads", str(threads), *more]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@dataclass(frozen=True)
class Lengthened:
    """By how much the steps were longer than quiet ones, in seconds."""

    copy_s: float
    raw_s: float  # all steps beside a raw write
    save_s: float  # all steps from a save to its commit
    stop_s: float  # the one that a save lengthened most
    first_stop_s: float  # of the first save, which finds nothing prepared by one before
    quiet_s: float  # how long a quiet step takes


def lengthened(found: dict[str, Any], saves: int) -> Lengthened:
    ended = {int(step): at for step, at in found["ended"].items()}
    took = {step: at - ended[step - 1] for step, at in ended.items() if step - 1 in ended}
    starts = [EVERY * number for number in range(1, saves + 1)]
    for start in starts:
        if found["committed"].get(str(start), math.inf) > ended[start + SPAN - 1]:
            raise SystemExit(f"the save at step {start} took longer than the steps that are counted")
    # Each time is compared with the quiet steps around it: a shared machine is not the same all the while.
    quiet_s = {start: statistics.median(took[start + at] for at in QUIET) for start in starts}

    def more_s(start: int, steps: range) -> list[float]:
        return [took[start + at] - quiet_s[start] for at in steps]

    after_save = [more_s(start, range(SPAN)) for start in starts]
    return Lengthened(
        copy_s=statistics.median(more_s(start, range(COPY, COPY + 1))[0] for start in starts),
        raw_s=statistics.median(sum(more_s(start, range(RAW, RAW + SPAN))) for start in starts),
        save_s=statistics.median(map(sum, after_save)),
        stop_s=statistics.median(map(max, after_save)),
        first_stop_s=after_save[0][0],
        quiet_s=statistics.median(quiet_s.values()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000, help="size of the state (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=20, help="(default: %(default)s)")
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
    found = in_a_child("saves", max(1, cores - 1))
    free = lengthened(found, options.saves)
    # Short ones, of one length: what is free for a moment in the heap makes a peak grow a little with every step.
    short = [in_a_child("saves", max(1, cores - 1), "--saves", str(SHORT)) for _ in range(3)]
    without = in_a_child("none", max(1, cores - 1), "--saves", str(SHORT))
    first = statistics.median(run.first_stop_s for run in (free, *(lengthened(run, SHORT) for run in short)))
    peak_bytes = statistics.median(run["peak_bytes"] for run in short)
    raw = free.raw_s / free.copy_s
    print(
        f"state {found['state_bytes'] / 1e6:.0f} MB, quiet step {free.quiet_s:.3f} s, copy {free.copy_s:.3f} s"
    )
    print(f"loop lengthened by a raw write: {raw:.2f} copies")
    figures = (
        ("longest stop", free.stop_s / free.copy_s, LIMIT_STOP),
        ("first save's stop", first / free.copy_s, LIMIT_STOP),
        ("loop lengthened by a save", free.save_s / free.copy_s, LIMIT_LOOP * (1 + max(0.0, raw))),
        ("memory", (peak_bytes - without["peak_bytes"]) / found["state_bytes"], LIMIT_MEMORY),
    )
    for name, value, limit in figures:
        print(f"{name}: {value:.2f} (limit {limit:.2f})")
    busy = lengthened(in_a_child("saves", cores), options.saves)
    print(
        f"with all {cores} processors busy training: copy {busy.copy_s:.3f} s, longest stop "
        f"{busy.stop_s / busy.copy_s:.2f}, loop {busy.save_s / busy.copy_s:.2f}, raw {busy.raw_s / busy.copy_s:.2f}"
    )
    return int(any(value > limit for _, value, limit in figures))


if __name__ == "__main__":
    sys.exit(main())
