"""What does a rank know of the run it works for? Everything that the supervisor decided, and whom to tell.

The supervisor fills it in; inline it is the same process, under a launcher the words come over a control channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ckptrun.errors import IncompatibleError
from ckptrun.records import DEFAULT_ON_SAVE_ERROR, FreshStart, Progress, Resolution, SavedCheckpoint
from ckptrun.run.folder import RunFolder
from ckptrun.stop import StopRequest


class StopSource(Protocol):
    """Where the loop looks for requests; two attribute reads a step."""

    request: StopRequest | None
    save_requested: int


@dataclass
class NoStop:
    """Nobody asks for anything."""

    request: StopRequest | None = None
    save_requested: int = 0


def _ignore(*_: object) -> None: ...


def _yes() -> bool:
    return True


@dataclass
class RankContext:
    """One attempt, as a rank sees it. ``run`` is None where nothing is to be written (``fast_dev_run``)."""

    run: RunFolder | None = None
    run_id: str = ""
    attempt: int = 1
    lease_epoch: int = 0
    resolution: Resolution = field(default_factory=lambda: Resolution(None, 7, FreshStart()))
    stop: StopSource = field(default_factory=NoStop)
    progress: Progress = field(default_factory=Progress)
    job: str | None = None
    save_on_stop: bool = True
    hpc_for: tuple[str, ...] = ("walltime",)
    """The stop reasons whose checkpoint is an hpc checkpoint."""
    on_save_error: str = DEFAULT_ON_SAVE_ERROR
    async_save: bool = True
    trust: bool = False
    override: bool = False
    """Go on although something that changes the result is set otherwise now."""
    exact: bool = False
    """Refuse to resume where the result would not be that of an undisturbed run."""
    strategy: str = "single"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    resume_past_early_stop: bool = False
    """The early-stopping callbacks changed since they ended the run, so their old verdict no longer holds."""
    # Whom to tell.
    saved: Callable[[SavedCheckpoint], None] = _ignore
    first_step_done: Callable[[], None] = _ignore
    stage_changed: Callable[[], None] = _ignore
    say: Callable[[str], None] = _ignore
    saving: Callable[[bool], None] = _ignore
    save_served: Callable[[str | None, str | None, int], None] = _ignore
    may_save: Callable[[], bool] = _yes
    """Whether the run is still ours; asked before each commit."""
    # What the rank offers to the supervisor's thread.
    metrics: Callable[[], dict[str, float]] = dict

    def not_exact(self, text: str, *, tell: bool = True) -> None:
        """Something makes the result another one than that of an undisturbed run, if only in its last bits: say so.

        Where ``exact`` is asked for it is kept for :meth:`refuse_what_is_not_exact`.

        Args:
            tell: whether this rank is the one that says it.
        """
        if self.exact:
            self.reasons.append(text)
        elif tell:
            self.say(text)

    def refuse_what_is_not_exact(self) -> None:
        """To be called once all has been restored, so that everything that differs is said at once.

        Raises:
            IncompatibleError: ``exact`` is asked for, and there was something to say.
        """
        reasons, self.reasons = self.reasons, []
        if reasons:
            told = "\n  and: ".join(reasons)  # whoever shows one line has the first of them
            raise IncompatibleError(f"--exact: {told}", hint="Restore what differs, or leave --exact out.")

    reasons: list[str] = field(default_factory=list)
    """Why it would not be exact, where ``exact`` is asked for."""

    restore_s: float = 0.0
    logs_dir: str | None = None
    """Where loggers write; None for nowhere."""
