"""What is expected where a run is stopped in each phase, in each way: the table "Stopping" of the README as data.

Training takes 16 steps of two batches, in two epochs, under each launcher. A checkpoint is saved after every fourth
step and a validation runs after steps 3, 6, 11 and 14; the gates of :mod:`stop_task` stand at step 4, 6 or 12 of it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

LAST_STEP = 16
Saved = tuple[str, int]  # reason in the manifest, and step


@dataclass(frozen=True)
class Launcher:
    """How the ranks run; ``arguments`` are the command line's."""

    name: str
    num_ranks: int = 1
    arguments: tuple[str, ...] = ()
    needs_all: bool = False  # a save needs every rank

    @property
    def num_processes(self) -> int:
        """With all that is not a loader worker: beside the ranks the supervisor, the fork server, and the elastic agent
        or the two processes of DeepSpeed's launcher."""
        return {"inline": 1, "deepspeed": 4 + self.num_ranks}.get(self.name, 3 + self.num_ranks)


INLINE = Launcher("inline")
TORCHRUN = Launcher("torchrun", 2, ("--launcher", "torchrun", "--nproc", "2", "--strategy", "ddp"))
_ZERO = ("--nproc", "2", "--strategy", "deepspeed", "strategy.stage=1")
DEEPSPEED = Launcher("deepspeed", 2, ("--launcher", "deepspeed", *_ZERO), needs_all=True)
ZERO_BY_TORCHRUN = Launcher("torchrun, ZeRO", 2, ("--launcher", "torchrun", *_ZERO), needs_all=True)
LAUNCHERS = (INLINE, TORCHRUN, DEEPSPEED, ZERO_BY_TORCHRUN)


@dataclass(frozen=True)
class Phase:
    """Where the run is when it is stopped.

    ``before`` is the newest checkpoint by then, ``at`` the step that training has reached, and ``boundary`` the
    one at which a graceful stop ends: 0 where there is nothing to save. ``saved_anyway`` is the checkpoint of
    that boundary that exists whether it is stopped or not, where a stop is only noted.
    """

    name: str
    fn: str = "fit"
    starts_from: Literal["nothing", "step 5", "the end"] = "nothing"
    before: Saved | None = None
    at: int = 0
    boundary: int = 0
    saved_anyway: Saved | None = None
    has_workers: bool = False


_END = ("final", LAST_STEP)
PHASES = (
    Phase("import"),
    Phase("set-up"),
    Phase("restore", starts_from="step 5", before=("stop", 5), at=5, boundary=5, saved_anyway=("stop", 5)),
    Phase("sanity check", has_workers=True),
    Phase("train", before=("periodic", 4), at=4, boundary=5, has_workers=True),
    Phase("window", before=("periodic", 4), at=4, boundary=5, has_workers=True),
    Phase("validation", before=("periodic", 4), at=6, boundary=6, has_workers=True),
    Phase(
        "save", before=("periodic", 8), at=12, boundary=12, saved_anyway=("periodic", 12), has_workers=True
    ),
    Phase("teardown", before=("periodic", 16), at=16, boundary=16, saved_anyway=("periodic", 16)),
    Phase("validate", fn="validate", starts_from="the end", has_workers=True),
    Phase("test", fn="test", starts_from="the end", has_workers=True),
    Phase("predict", fn="predict", starts_from="the end", has_workers=True),
)


@dataclass(frozen=True)
class Event:
    """What comes, and what the README says happens then.

    ``ends``: ``gracefully`` at the boundary, ``at once`` without saving, ``killed`` with SIGKILL, by an
    ``error`` of the user's, because a rank is ``lost``, or None where the run goes on. ``keeps`` is the reason of the
    checkpoint it saves.
    """

    name: str
    ends: Literal["gracefully", "at once", "killed", "error", "lost"] | None
    code: int
    stop_reason: str
    keeps: str | None = None
    signals: tuple[signal.Signals, ...] = ()  # SIGINTs come more than half a second apart
    to: Literal["the command", "its group", "rank 1"] = "the command"  # whom the signals are sent
    only_rank: int | None = None  # the one that raises; None for each
    asks: Literal["save", "stop"] | None = None  # by a ckptrun command beside it
    arguments: tuple[str, ...] = ()
    ignored: tuple[signal.Signals, ...] = ()  # the run is started with these ignored
    sticks: bool = False  # writing the ledger's last line never returns
    hooks_save: bool = False  # an OnExceptionCheckpoint is set


INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
_ONE_SECOND = ("--grace-s", "1")
EVENTS = (
    Event("SIGINT", "gracefully", 130, "keyboard", "stop", (INT,)),
    Event("SIGINT to its group", "gracefully", 130, "keyboard", "stop", (INT,), to="its group"),
    Event("SIGINT to rank 1", "gracefully", 130, "keyboard", "stop", (INT,), to="rank 1"),
    Event("SIGINT that came in ignored", "gracefully", 130, "keyboard", "stop", (INT,), ignored=(INT,)),
    Event("SIGINT twice", "at once", 130, "keyboard", None, (INT, INT)),
    Event("SIGINT three times", "at once", 130, "keyboard", None, (INT, INT, INT), sticks=True),
    Event("SIGTERM", "gracefully", 143, "sigterm", "stop", (TERM,)),
    Event("SIGTERM to its group", "gracefully", 143, "sigterm", "stop", (TERM,), to="its group"),
    Event("SIGTERM to rank 1", "gracefully", 143, "sigterm", "stop", (TERM,), to="rank 1"),
    Event("SIGTERM, and it hangs", "at once", 143, "sigterm", None, (TERM, TERM), arguments=_ONE_SECOND),
    Event("SIGHUP", "gracefully", 129, "sigterm", "stop", (HUP,)),
    Event("SIGHUP under nohup", None, 0, "done", None, (HUP,), ignored=(HUP,)),
    Event("SIGUSR1", "gracefully", 75, "walltime", "hpc", (signal.SIGUSR1,)),
    Event("SIGUSR2", None, 0, "done", "manual", (signal.SIGUSR2,)),
    Event("ckptrun save", None, 0, "done", "manual", asks="save"),
    Event("ckptrun stop", "gracefully", 143, "requested", "stop", asks="stop"),
    Event("exception", "error", 1, "exception"),
    Event("exception in rank 1", "error", 1, "exception", only_rank=1),
    Event("exception, OnExceptionCheckpoint", "error", 1, "exception", "exception", hooks_save=True),
    Event("rank 1 killed", "lost", 70, "rank-lost", None, (KILL,), to="rank 1"),
    Event("command killed", "killed", -KILL, "LOST", None, (KILL,)),
)


@dataclass(frozen=True)
class Cell:
    """One run to be stopped: under ``launcher``, in ``phase``, by ``event``."""

    launcher: Launcher
    phase: Phase
    event: Event

    @property
    def name(self) -> str:
        return f"{self.launcher.name}: {self.phase.name}: {self.event.name}"

    @property
    def hears(self) -> bool:
        """Whether the hook returns once its rank has heard of the event."""
        return self.event.ends in ("gracefully", None)

    @property
    def opens(self) -> bool:
        """Whether the hook returns at all."""
        return self.hears or self.event.ends == "lost"

    @property
    def before_attempt(self) -> bool:
        """Whether no attempt has begun: inline, the config's objects are made before one does."""
        return self.phase.name == "import" and self.launcher is INLINE


@dataclass(frozen=True)
class Expected:
    """How a cell ends. ``status`` and ``stop_reason`` are None where the run's files say nothing of it."""

    code: int
    status: str | None
    stop_reason: str | None
    step: int | None
    newest: Saved | None  # the newest committed checkpoint
    noted: str | None = None  # a further reason for that checkpoint, in the registry
    has: Saved | None = None  # a checkpoint among the others
    asked: int = 0  # exit code of the `ckptrun save` or `stop`


def impossible(cell: Cell) -> str | None:
    """Why a cell cannot occur, else None."""
    phase, event = cell.phase, cell.event
    if cell.launcher is INLINE and (event.to == "rank 1" or event.only_rank is not None):
        return "there is no rank 1; rank 0 is the command itself"
    if event.asks is not None and phase.fn != "fit":
        return "an evaluation runs beside the fit, whose state is what `save` and `stop` ask"
    if event.sticks and (phase.fn != "fit" or cell.before_attempt):
        return "no ledger is written (yet), so nothing can hang in the way of the second press"
    if event.hooks_save and (
        phase.fn != "fit" or phase.name in ("import", "set-up", "restore", "sanity check")
    ):
        return "the same as without the callback: there is no boundary"
    if event.hooks_save and phase.name == "teardown":
        return "the same as without the callback: on_exception was not asked for, training is done"
    return None


def expected(cell: Cell) -> Expected:
    """The design's answer for a cell that can occur."""
    phase, event = cell.phase, cell.event
    if phase.fn != "fit":
        # The run is somebody else's and stays as it was.
        return Expected(event.code, "FINISHED", "done", LAST_STEP, ("periodic", LAST_STEP))
    if phase.name == "import" and event.ends == "error":
        # Nothing was started.
        return Expected(event.code, None, None, None, None)
    if cell.before_attempt and event.ends in ("at once", "killed"):
        return Expected(event.code, None, None, None, None)
    if cell.before_attempt and event.asks is not None:
        # Nothing tells of the run yet; the command says so, and training goes on.
        return Expected(0, "FINISHED", "done", LAST_STEP, ("periodic", LAST_STEP), asked=2)
    if phase.name == "teardown" and cell.hears:
        # What is done is done.
        return Expected(0, "FINISHED", "done", LAST_STEP, ("periodic", LAST_STEP))
    if event.ends is None:
        saved = None
        if event.keeps is not None:
            saved = phase.saved_anyway or (event.keeps, phase.boundary or 1)
        return Expected(0, "FINISHED", "done", LAST_STEP, ("periodic", LAST_STEP), has=saved)
    if event.ends == "gracefully":
        newest, noted = phase.before, None
        if phase.boundary and phase.saved_anyway is not None:
            newest = phase.saved_anyway
            noted = event.keeps if phase.name == "save" else None  # set-up ends before there is a loop
        elif phase.boundary:
            newest = (str(event.keeps), phase.boundary)
        return Expected(event.code, "INTERRUPTED", event.stop_reason, phase.boundary, newest, noted)
    if event.ends == "killed" or event.sticks:
        return Expected(event.code, "LOST", None, phase.at, phase.before)
    newest, noted = phase.before, None
    if cell.launcher.needs_all:
        # Once a rank has failed nothing is saved, and what only some have begun to save is none.
        return Expected(event.code, "INTERRUPTED", event.stop_reason, phase.at, newest)
    if phase.name == "save" and (event.ends == "lost" or event.only_rank is not None):
        newest = phase.saved_anyway  # rank 0 writes, and has all that it needs for that
    if event.hooks_save and newest is not None and newest[1] == phase.at:
        noted = "exception"  # this very state is saved already
    elif event.hooks_save:
        newest = ("exception", phase.at)
    return Expected(event.code, "INTERRUPTED", event.stop_reason, phase.at, newest, noted)


CELLS = tuple(Cell(launcher, phase, event) for launcher in LAUNCHERS for phase in PHASES for event in EVENTS)
