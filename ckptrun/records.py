"""What the parts of ckptrun tell each other: plain data, no behaviour that reads or writes anything.

Everything here can be built in a test from literals, so that whoever decides (resolution, retention, the
exit code) is a pure function from these records to these records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Fn = Literal["fit", "validate", "test", "predict"]
FNS: tuple[Fn, ...] = ("fit", "validate", "test", "predict")
DEFAULT_ON_SAVE_ERROR = "retry"


class Status(StrEnum):
    """What a run is doing. LOST is never written: a reader that finds RUNNING with nobody behind it says it."""

    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    INTERRUPTED = "INTERRUPTED"
    LOST = "LOST"


class Stage(StrEnum):
    """The phase within an attempt."""

    SETUP = "set-up"
    RESTORE = "restore"
    SANITY_CHECKING = "sanity check"
    TRAINING = "train"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"
    TEARDOWN = "teardown"


class StopReason(StrEnum):
    """Why a run stopped."""

    DONE = "done"
    KEYBOARD = "keyboard"
    SIGTERM = "sigterm"
    WALLTIME = "walltime"
    REQUESTED = "requested"
    EXCEPTION = "exception"
    RANK_LOST = "rank-lost"
    HANG = "hang"


class SaveReason(StrEnum):
    """Why a checkpoint was written (``reason`` in the manifest)."""

    PERIODIC = "periodic"
    BEST = "best"
    STOP = "stop"
    EXCEPTION = "exception"
    HPC = "hpc"
    FINAL = "final"
    MANUAL = "manual"


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint. ``checksum`` is ``<algorithm>:<hex>``."""

    path: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Damage:
    """What is wrong with a file of a checkpoint, seen in two reads.

    ``checkpoint`` is the folder, absolute; ``expected`` and ``found`` are checksums or sizes, where it is about those.
    """

    checkpoint: str
    file: str  # its path inside the folder
    why: str  # one sentence, with the file's path
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """A committed checkpoint, as its manifest tells it.

    ``line`` holds the save counters of the checkpoint and its ancestors as inclusive ranges, so that
    whether another checkpoint is on the same line is answered without walking the parents.
    """

    name: str
    path: str  # the folder, absolute
    sequence: int
    step: int
    epoch: int
    reason: str
    exact: bool = True
    weights_only: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    parent: str | None = None
    line: tuple[tuple[int, int], ...] = ()
    run_id: str = ""
    attempt: int = 1
    lease_epoch: int = 0
    saved_at: float = 0.0  # seconds since 1970
    size_bytes: int = 0
    saved_for: tuple[str, ...] = ()  # state keys of the callbacks that asked for it, at once or later
    noted: tuple[str, ...] = ()  # further reasons for its state, noted later
    job: str | None = None  # SLURM job or array task that wrote it

    def on_line_of(self, head: CheckpointRecord) -> bool:
        """Whether this checkpoint is ``head`` or one of its ancestors."""
        return any(first <= self.sequence <= last for first, last in head.line) or self.name == head.name


@dataclass(frozen=True)
class RejectedRecord:
    """A checkpoint folder that cannot be used, and why."""

    name: str
    path: str
    sequence: int | None
    why: str
    step: int | None = None
    reason_saved: str | None = None
    committed: bool = False  # it has a manifest, so it was whole once
    unreadable: bool = False  # an I/O or permission error: it may be good, so it is not skipped
    line: tuple[tuple[int, int], ...] = ()  # as in CheckpointRecord, where the manifest could be read


@dataclass(frozen=True)
class Candidate:
    """One line of the explanation of a resolution."""

    path: str
    step: int | None
    sequence: int | None
    reason_saved: str | None
    verdict: Literal["taken", "rejected", "not reached"]
    why: str


@dataclass(frozen=True)
class ResolutionError:
    """Why there is no answer."""

    exit_code: int
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class FreshStart:
    """Start from step 0, from ``init_from``'s weights where given. Its own value, so that nothing else means it."""

    init_from: str | None = None


@dataclass(frozen=True)
class Resolution:
    """The answer to a reference, with the rule that gave it and every candidate that was looked at."""

    ref: str | None  # the reference that was applied, None where a rule chose without one
    rule: int
    answer: CheckpointRecord | FreshStart | str | None  # str: a path that is not a ckptrun checkpoint
    warnings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    num_not_reached: int = 0
    error: ResolutionError | None = None
    removes_pin: bool = False  # rule 2: once the first step is done

    @property
    def fresh(self) -> bool:
        return isinstance(self.answer, FreshStart)

    @property
    def path(self) -> str | None:
        if isinstance(self.answer, CheckpointRecord):
            return self.answer.path
        return self.answer if isinstance(self.answer, str) else None

    @property
    def step(self) -> int | None:
        return self.answer.step if isinstance(self.answer, CheckpointRecord) else None


@dataclass(frozen=True)
class JobFacts:
    """What the scheduler says about the process that asks.

    ``key`` names the job or array task (``1234`` or ``1230_4``) and is the same after a requeue;
    ``previous`` are the keys of the jobs it was resubmitted from, newest first; ``id`` is the job's own number, which
    an array task has besides.
    """

    key: str
    batch: bool  # a batch job or a step of one, not an interactive shell or a step started from one
    restart_count: int = 0
    previous: tuple[str, ...] = ()
    id: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """All by which the work of this job is known: its own key and those of the jobs before it."""
        return (self.key, *self.previous)

    @property
    def requeued(self) -> bool:
        """Whether this is not the first start of the work: requeued, or resubmitted where that was refused."""
        return self.restart_count > 0 or bool(self.previous)

    @property
    def came_back(self) -> str:
        """How a job that is ``requeued`` came to this start, in words that follow ``the job``."""
        return "was requeued" if self.restart_count else f"was resubmitted from job {self.previous[0]}"


@dataclass(frozen=True)
class TaskFacts:
    """One of several tasks of a SLURM step, each of which runs the same command.

    ``number`` is its place among all of them, ``local`` that among those of its node, which are ``num_local``.
    """

    number: int
    num_tasks: int
    local: int
    num_local: int
    nodes: tuple[str, ...]
    node: str
    step: str
    cpus: int = 0  # of this task, where SLURM was asked for so many

    @property
    def is_rank(self) -> bool:
        """Whether each task is one rank: a node has several."""
        return self.num_tasks > len(self.nodes)


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt as the ledger tells it; the end fields are None while it runs or where it died."""

    attempt: int
    fn: str
    started_at: float
    reference: str | None = None  # the reference or pin that was given
    rule: int | None = None
    resolved: str | None = None  # path it started from, None for a fresh start
    job: str | None = None
    command_key: str | None = None
    start_sequence: int = 0  # the save counter of the newest checkpoint committed when it started
    start_step: int = 0
    ended_at: float | None = None
    status: str | None = None
    stop_reason: str | None = None
    exit_code: int | None = None
    end_step: int | None = None
    end_sequence: int | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a rank tells the supervisor once a checkpoint is committed."""

    name: str
    path: str
    sequence: int
    step: int
    epoch: int
    reason: str
    save_s: float
    size_bytes: int
    blocked_s: float = 0.0
    """For how long training stood still for it."""


@dataclass
class Progress:
    """Where a rank is. Written by the loop with plain attribute stores, read by the supervisor's thread;
    a torn read shows an old number for a second, nothing more."""

    fn: Fn = "fit"
    stage: Stage = Stage.SETUP
    step: int = 0
    max_steps: int | None = None
    epoch: int = 0
    max_epochs: int | None = None
    batch: int = 0  # batches of this epoch or evaluation that are done
    num_batches: int | None = None
    eval_batch: int = 0  # batches of the running validation that are done
    num_eval_batches: int | None = None
    start_step: int = 0  # step at which this attempt began
    metrics: dict[str, float] = field(default_factory=dict)  # those logged with prog_bar=True
    message: str | None = None  # one line about what goes on now, e.g. "saving"
    beats: int = 0  # counts signs of life where none of the numbers above moves

    @classmethod
    def starting(cls, fn: Fn, answer: object) -> Progress:
        """Where the work begins, so that what is said before the first step is not about step 0.

        Args:
            answer: the resolution's.
        """
        if not isinstance(answer, CheckpointRecord):
            return cls(fn=fn)
        return cls(fn=fn, step=answer.step, start_step=answer.step, epoch=answer.epoch)


@dataclass(frozen=True)
class Outcome:
    """How a rank's work ended."""

    stop_reason: StopReason
    step: int = 0
    epoch: int = 0
    error: BaseException | None = None
    user_error: bool = False  # the traceback is the user's own
    save_error: str | None = None  # the last save failed and none after it succeeded
    finished_by: str | None = (
        None  # max_steps, max_epochs, max_time, early_stopping, stop_training, no_batches
    )
    results: Any = None  # what validate, test and predict return
    built: bool = (
        True  # False: what the config names could not be made or restored, so nothing of the work has begun
    )
