"""What is one command to do, and what came of it?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptrun.errors import CkptrunError
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.inline import RankMain
from ckptrun.launch.plan import LaunchPlan
from ckptrun.launch.requeue import Policy
from ckptrun.launch.supervisor import Display
from ckptrun.launch.walltime import Walltime
from ckptrun.records import (
    DEFAULT_ON_SAVE_ERROR,
    Fn,
    JobFacts,
    Outcome,
    Progress,
    Resolution,
    ResolutionError,
)
from ckptrun.resolve.finished import Limits
from ckptrun.run.folder import RunFolder
from ckptrun.stop import DEFAULT_GRACE_S, StopListener

if TYPE_CHECKING:
    from ckptrun.launch.hosts import Hosts


ConfigCheck = Callable[[RunFolder, Resolution], tuple[ResolutionError | None, Sequence[str]]]


def _print(line: str, is_error: bool) -> None:
    print(line, file=sys.stderr if is_error else sys.stdout, flush=True)


@dataclass
class SessionSpec:
    """What is to be done. ``rank_main`` runs in each rank; everything else is the supervisor's."""

    fn: Fn
    folder: RunFolder
    rank_main: RankMain
    listener: StopListener
    plan: LaunchPlan
    reference: str | None = None
    init_from: str | None = None
    allow_fallback: bool = False
    trust: bool = False
    override: bool = False
    exact: bool = False
    pin: dict[str, Any] | None = None  # a path that a script manages itself; takes the place of the run's pin
    fast_dev_run: bool = False
    limits: Limits = field(default_factory=Limits)
    early_stopping_changed: Callable[[RunFolder], bool] = lambda _: False
    config_text: str | None = None  # what is stored as the run's config.yaml
    check_config: ConfigCheck | None = None
    grace_s: float = DEFAULT_GRACE_S
    save_on_stop: bool = True
    on_save_error: str = DEFAULT_ON_SAVE_ERROR
    async_save: bool = True
    job: JobFacts | None = None
    requeue: Policy = field(default_factory=Policy)
    hpc_save: bool = True
    walltime: Walltime | None = None  # watches the time, where there is an end
    command: Sequence[str] = ()
    on_resolution: Callable[[Resolution], None] = lambda _: None
    all_candidates: bool = False
    prepare: Callable[[], None] = lambda: None  # the first heavy work, once it is known that ranks will run
    echo: Callable[[str], None] = lambda _: None
    output: Callable[[str, bool], None] = (
        _print  # a line that rank 0 prints as another process; True: on stderr
    )
    max_restarts: int = 0
    hang_timeout_s: float | None = None
    make_display: Callable[[Progress, Callable[[], dict[str, float]]], Display] | None = None
    start_method: str = "fork"  # how ranks begin under torchrun
    fork_server: ForkServer | None = None
    hosts: Hosts | None = None  # the others, where this one leads several
    zero_stage: int | None = None  # under the strategy deepspeed
    takes_full_weights: bool = False  # ... which goes on from a checkpoint of another strategy all the same


@dataclass(frozen=True)
class SessionResult:
    """What came of it. ``outcome`` is None where no rank ran."""

    exit_code: int
    resolution: Resolution | None = None
    outcome: Outcome | None = None
    nothing_left: str | None = None
    eval_dir: str | None = None
    error: CkptrunError | None = None
    requeued: bool = False  # the SLURM job starts again by itself
