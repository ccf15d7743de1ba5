"""What must be known to choose a checkpoint?

Decision: everything that the rules look at is gathered into these records first, and the disk behind them is
one small protocol that a list can stand in for, so that the rules are pure functions and are tested as a
table. Turned down: rules that read files where they need them, as one function that chooses and loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from ckptrun.records import AttemptRecord, CheckpointRecord, Fn, JobFacts, RejectedRecord

Examined: TypeAlias = CheckpointRecord | RejectedRecord

NUM_LISTED = 20  # candidates that were not reached and are listed all the same


@dataclass(frozen=True)
class ResolveFacts:
    """What is asked, by whom, and what the run's other files say.

    Args:
        reference: what stands after ``--ckpt``, None where it is not given.
        init_from: what stands after ``--init-from``.
        root_state: ``listed``, ``empty``, ``absent`` (it does not exist yet) or ``unreadable: why``.
        job: the SLURM job, None outside one.
        command_key: the same whenever the user starts this same command again; stands in for the job.
        num_listed: how many candidates that were not reached are listed; None for all.
    """

    fn: Fn = "fit"
    reference: str | None = None
    init_from: str | None = None
    allow_fallback: bool = False
    fast_dev_run: bool = False
    run_name: str = ""
    run_dir: str = ""
    root_state: str = "listed"
    job: JobFacts | None = None
    command_key: str | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    num_listed: int | None = NUM_LISTED

    @property
    def requeued(self) -> bool:
        return self.job is not None and self.job.requeued


@dataclass(frozen=True)
class OtherFile:
    """A path that is no ckptrun checkpoint.

    ``kind``: ``missing``, ``torch-file`` (looks like a file of ``torch.save``), ``not-a-checkpoint`` or
    ``unreadable``. ``near`` are existing names or paths that may have been meant.
    """

    path: str
    kind: Literal["missing", "torch-file", "deepspeed", "not-a-checkpoint", "unreadable"]
    why: str
    near: tuple[str, ...] = ()


class CatalogueView(Protocol):
    """The checkpoints of the run, with what the registry holds against them already applied."""

    def names(self) -> Sequence[str]:
        """All names, newest first. Raises NoCheckpointError where they cannot be listed."""

    def path_of(self, name: str) -> str:
        """The folder of the checkpoint ``name``, absolute; nothing is looked up."""

    def by_name(self, name: str) -> Examined:
        """One checkpoint, examined; a name that is not there is rejected as gone."""

    def by_path(self, path: str) -> Examined | OtherFile:
        """Whatever ``path`` is, inside the run's folder or outside it."""
