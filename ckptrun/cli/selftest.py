"""Does training with this model and this data resume exactly?

    undisturbed          ──────────────────────────────────►  its trace is the reference
    undisturbed again    ──────────────────────────────────►  differs? then the set-up itself is not exact
    stopped and resumed  ────────►│──────►│───►│───────────►  differs? then something is not saved

Decision: each start is a process of its own that goes through the real session, in a root of its own: what a process
keeps to itself (a counter, a generator, the order of a set) is lost there as in a requeue. Each step leaves hashes of
all that it saw and left, so that the first difference has a name. Turned down: building the model once and rewinding it
in one process, which is exact where a requeue is not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Annotated, Any

import typer

from ckptrun.cli.options import ConfigOption, DebugOption, FnOptions, JsonOption, Overrides
from ckptrun.cli.output import note, print_json, say
from ckptrun.cli.settle import settle_fn
from ckptrun.config.support import check_supported
from ckptrun.errors import CkptrunError, UsageError
from ckptrun.launch.parent_death import die_with_parent
from ckptrun.run.step_trace import (
    VARIABLE,
    Difference,
    Line,
    Request,
    Stop,
    compare,
    events,
    plan_stops,
    read_trace,
)

_STEPS = 40
_FEWEST = 8  # enough for two stops with steps around them
_STOPPED, _DONE = 143, 0
_RUN = "selftest"
_SHOWN_LINES = 15  # of what a start that failed had to say


def selftest(
    overrides: Overrides = None,
    config: ConfigOption = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="N", help=f"Optimizer steps of each training ({_STEPS}).")
    ] = None,
    nproc: Annotated[str | None, typer.Option("--nproc", metavar="N", help="Ranks on this host.")] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="NAME", help="auto, single, ddp or deepspeed.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option("--launcher", metavar="NAME", help="auto, inline or torchrun.")
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Prove that training resumes exactly, with your own model and data.

    Two undisturbed trainings of a few dozen steps, then the same with stops in between, each start a process of its own
    in a folder of its own; your run is not touched. Exit code 0 where all is equal bit for bit, 1 with the first
    difference where it is not.
    """
    num_steps = _number_of_steps(steps)
    settled = settle_fn("fit", FnOptions(overrides=overrides, config=config, nproc=nproc), os.environ)
    check_supported(settled.config)
    if settled.config.model is None:
        raise UsageError("the config has no model to train", hint="Write model: {class_path: module.Class}.")
    command = _command(settled.config.files, overrides or (), num_steps, nproc, strategy, launcher)
    with _folder() as folder:
        result = _Selftest(folder, command, num_steps).run()
    if json:
        print_json(result.as_dict())
    else:
        for line in _lines(result):
            say(line)
    return 0 if result.exact else 1


def _number_of_steps(text: str | None) -> int:
    try:
        number = _STEPS if text is None else int(text)
    except ValueError:
        number = 0
    if number < _FEWEST:
        raise UsageError(f"--steps is {text!r}, expected a whole number of {_FEWEST} or more")
    return number


def _command(
    files: Sequence[str],
    overrides: Sequence[str],
    num_steps: int,
    nproc: str | None,
    strategy: str | None,
    launcher: str | None,
) -> list[str]:
    """What each start runs; the folder of its runs is added."""
    words = [sys.executable, "-P", "-m", "ckptrun", "fit", "--no-slurm", "--ckpt", "last", "--run", _RUN]
    for file in files:
        words += ["-c", file]
    for flag, value in (("--nproc", nproc), ("--strategy", strategy), ("--launcher", launcher)):
        words += [] if value is None else [flag, value]
    # Later ones win. What is logged goes into the temporary folder, as a logger may write to the user's own places;
    # without any, a callback that needs one would refuse to start.
    return [
        *words, "--grace-s", "3600", *overrides, f"trainer.max_steps={num_steps}", "trainer.max_time=null",
        "trainer.fast_dev_run=false", "trainer.enable_progress_bar=false", "run.save_on_stop=true",
        "loggers=[{class_path: ckptrun.loggers.CSVLogger}]",
        "launch.nnodes=1", "launch.max_restarts=0",
    ]  # fmt: skip


@contextmanager
def _folder() -> Iterator[str]:
    """A folder for all of it, gone at the end, after SIGTERM too."""
    folder = tempfile.mkdtemp(prefix="ckptrun-selftest-")

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


# -- the trainings ---------------------------------------------------------------------------------------------


class _StartFailedError(CkptrunError):
    """A training did not end as it should; its own words are in the message."""


@dataclass(frozen=True)
class Result:
    """What came of it. ``noise``: the difference is one between two undisturbed trainings."""

    num_steps: int
    num_epochs: int
    num_ranks: int
    stops: tuple[Stop, ...]
    compared: dict[str, int]
    difference: Difference | None
    noise: bool

    @property
    def exact(self) -> bool:
        return self.difference is None

    def as_dict(self) -> dict[str, Any]:
        """The document of ``selftest --json``."""
        return {
            "exact": self.exact,
            "noise": self.noise,
            "num_steps": self.num_steps,
            "num_epochs": self.num_epochs,
            "num_ranks": self.num_ranks,
            "stops": [asdict(stop) for stop in self.stops],
            "compared": self.compared,
            "difference": None if self.difference is None else asdict(self.difference),
        }


class _Selftest:
    def __init__(self, folder: str, command: list[str], num_steps: int) -> None:
        self._folder = folder
        self._command = command
        self._num_steps = num_steps

    def run(self) -> Result:
        note(f"ckptrun: selftest: an undisturbed training of {self._num_steps} steps")
        reference = self._train("first", [None])
        note("ckptrun: selftest: the same once more")
        again = self._train("second", [None])
        difference = _difference(reference, again)
        if difference is not None:
            return self._result(reference, (), difference, noise=True)
        stops = plan_stops(reference[0][0])
        if not stops:
            raise UsageError(
                f"the training ended after {len(events(reference[0][0], 'batch'))} batches, too few to be stopped "
                "in between",
                hint="Give it more data or more epochs; --steps says how many steps there may be.",
            )
        found: list[list[list[Line]]] = []
        for number, stop in enumerate([*stops, None], 1):
            to = "to the end" if stop is None else f"to a stop {stop}"
            note(f"ckptrun: selftest: start {number} of {len(stops) + 1}, {to}")
            found.append(self._start("stopped", number, stop))
            # Rank by rank, what all starts so far have made.
            traces = [[start[rank] for start in found] for rank in range(len(reference))]
            difference = _difference(reference, traces, complete=stop is None)
            if difference is not None:
                return self._result(reference, stops[: number - 1], difference, noise=False)
        return self._result(reference, stops, None, noise=False)

    def _train(self, name: str, stops: Sequence[Stop | None]) -> list[list[list[Line]]]:
        """Each rank's starts."""
        starts = [self._start(name, number, stop) for number, stop in enumerate(stops, 1)]
        return [[start[rank] for start in starts] for rank in range(len(starts[0]))]

    def _start(self, name: str, number: int, stop: Stop | None) -> list[list[Line]]:
        """One process, as it would be started by a requeue; returns each rank's trace."""
        root = os.path.join(self._folder, name)
        os.makedirs(root, exist_ok=True)
        request = Request(root, number, stop)
        output = os.path.join(root, f"start-{number:04d}.txt")
        parent = os.getpid()
        with open(output, "wb") as written:
            process = subprocess.Popen(
                [*self._command, "--root", os.path.join(root, "runs")],
                env={**os.environ, VARIABLE: request.to_json()},
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code != (_DONE if stop is None else _STOPPED):
            raise _failed(number, code, stop, output)
        traces: list[list[Line]] = []
        while os.path.exists(request.path(len(traces))):
            traces.append(read_trace(request.path(len(traces))))
        if not traces:
            raise _failed(number, code, stop, output)
        return traces

    def _result(
        self,
        reference: list[list[list[Line]]],
        stops: Sequence[Stop],
        difference: Difference | None,
        *,
        noise: bool,
    ) -> Result:
        lines = [line for rank in reference for start in rank for line in start]
        after = events(reference[0][0], "after")
        return Result(
            num_steps=max((line["step"] for line in after), default=0),
            num_epochs=len({line["epoch"] for line in after}),
            num_ranks=len(reference),
            stops=tuple(stops),
            compared={
                "batches": len(events(lines, "batch")),
                "learning rates": sum(len(line["learning rate"]) for line in events(lines, "update")),
                "parameters": max((len(line["parameter"]) for line in after), default=0),
                "buffers": max((len(line["buffer"]) for line in after), default=0),
                "optimizer states": max((len(line["optimizer state"]) for line in after), default=0),
            },
            difference=difference,
            noise=noise,
        )


def _difference(
    reference: list[list[list[Line]]], other: list[list[list[Line]]], *, complete: bool = True
) -> Difference | None:
    """The earliest difference of any rank."""
    found = [
        compare(mine[0], theirs, rank=rank, complete=complete)
        for rank, (mine, theirs) in enumerate(zip(reference, other, strict=True))
    ]
    return min(
        (each for each in found if each is not None),
        key=lambda each: (each.start, each.epoch, each.batch, each.rank),
        default=None,
    )


def _failed(number: int, code: int, stop: Stop | None, output: str) -> CkptrunError:
    with open(output, encoding="utf-8", errors="replace") as file:
        said = file.read().rstrip().splitlines()[-_SHOWN_LINES:]
    expected = "the end (0)" if stop is None else f"a stop {stop} (143)"
    error = _StartFailedError(
        f"start {number} of the training ended with exit code {code}; {expected} was expected. It said:\n  "
        + "\n  ".join(said),
        hint="`ckptrun fit` with the same config and trainer.max_steps shows it whole.",
    )
    error.exit_code = code if 0 < code < 6 else 1
    return error


# -- the report --------------------------------------------------------------------------------------------------

_MEANS = {
    "batch": "the data are not the same: a generator that the dataset, a sampler or collate_fn made itself is in no "
    "checkpoint. Draw from torch's, NumPy's or Python's own generators, or from the sample's index.",
    "random state": "something drew random numbers that the resumed training did not draw, or drew others.",
    "learning rate": "the learning rate depends on something that is in no checkpoint. Use an LR scheduler that "
    "configure_optimizers returns, or keep what it depends on in on_save_checkpoint.",
    "parameter": "the update depends on something that is in no checkpoint. Keep it in a buffer "
    "(register_buffer), or in on_save_checkpoint and on_load_checkpoint.",
    "buffer": "a buffer depends on something that is in no checkpoint.",
    "optimizer state": "the optimizer's state depends on something that is in no checkpoint.",
    "steps": "the trainings did not make the same steps.",
    "initial parameter": "the model does not begin the same: its weights are not drawn from the seeded generators.",
}
_NOISE = (
    "Two trainings that nobody stopped differ already, so exactness cannot be proven. On a GPU "
    "trainer.deterministic=true may help; else look for time, process ids, the order of sets, or generators without a "
    "seed."
)


def _lines(result: Result) -> list[str]:
    num, ranks = result.compared, result.num_ranks
    told = [
        f"{result.num_steps} steps over {result.num_epochs} epoch{'s' * (result.num_epochs != 1)}, "
        f"{ranks} rank{'s' * (ranks != 1)}",
        f"compared at each step: the batch ({num['batches']} in all), random states, learning rates, "
        f"{num['parameters']} parameters, {num['buffers']} buffers, {num['optimizer states']} optimizer states",
    ]
    difference = result.difference
    if not result.noise:
        told.append("undisturbed, twice: equal bit for bit")
        told += [f"stopped {stop} and resumed" for stop in result.stops]
    if difference is None:
        return [*told, f"exact: after {len(result.stops)} stops all is equal bit for bit"]
    where = "undisturbed, twice" if result.noise else f"start {difference.start}"
    told += [
        f"{where}: the first difference is {difference}",
        f"  expected {difference.expected}, found {difference.found}",
        f"  {_MEANS[difference.kind]}",
    ]
    return [*told, _NOISE if result.noise else "not exact"]
