"""What belongs to one attempt of a fit, from the ledger to how it ended?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptrun.checkpoint.commit import is_leftover
from ckptrun.checkpoint.commit import sweep as sweep_checkpoints
from ckptrun.environment.versions import versions
from ckptrun.errors import CkptrunError, UsageError
from ckptrun.launch.supervisor import Supervision, Supervisor
from ckptrun.launch.universal import Writing, adapted
from ckptrun.records import AttemptRecord, Outcome, Progress, Resolution, SavedCheckpoint, StopReason
from ckptrun.resolve.gather import Gathered, rebuilt_registry
from ckptrun.resolve.rules import given_reference
from ckptrun.run.attempts import append_start, next_attempt
from ckptrun.run.folder import RunFolder
from ckptrun.run.identity import ensure_identity, read_identity
from ckptrun.run.lease import Lease
from ckptrun.run.rank_processes import end_leftovers
from ckptrun.run.registry import edit
from ckptrun.run.sweep import sweep as sweep_run
from ckptrun.run.unbegun import Unbegun
from ckptrun.session.choose import command_key, wanted
from ckptrun.session.job import after_forced_end, hpc_for, judge, meaning_of_sigterm
from ckptrun.session.ranks import display_of, one_line, run_ranks
from ckptrun.session.spec import SessionResult, SessionSpec
from ckptrun.stop import exit_code
from ckptrun.storage.files import write_atomic

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext


def run_attempt(spec: SessionSpec, lease: Lease, gathered: Gathered, resolution: Resolution) -> SessionResult:
    """Enter an attempt in the ledger, run it, and write down how it ended.

    Raises:
        UsageError: the run's folder cannot be written.
    """
    folder = spec.folder
    try:
        before = Unbegun(folder)
        identity = ensure_identity(folder, spec.command)
        clear_away(spec)
        stored = _StoredConfig(spec, at_once=gathered.registry.committed_sequence == 0)
        if lease.epoch > 1:
            _note_takeover(folder, lease, identity.id)
        record = _enter(spec, gathered, resolution)
    except OSError as error:
        raise unwritable(folder, error) from error
    resolution, outcome, code = _supervise(spec, lease, gathered, resolution, record, identity.id, stored)
    if not outcome.built and not stored.by_a_save:
        try:
            if lease.still_mine():
                before.put_back(record.attempt)
        except OSError as error:
            spec.echo(f"the attempt, which started nothing, stays in the ledger: {error.strerror or error}")
    return SessionResult(code, resolution, outcome)


def _enter(spec: SessionSpec, gathered: Gathered, resolution: Resolution) -> AttemptRecord:
    """The attempt's entry in the ledger."""
    record = AttemptRecord(
        attempt=next_attempt(list(gathered.facts.attempts)),
        fn=spec.fn,
        started_at=time.time(),
        reference=given_reference(gathered.facts, gathered.registry),
        rule=resolution.rule,
        resolved=resolution.path,
        job=spec.job.key if spec.job is not None and spec.job.batch else None,
        command_key=command_key(spec),
        start_sequence=gathered.registry.committed_sequence,
        start_step=resolution.step or 0,
    )
    append_start(spec.folder.attempts, record, versions=versions())
    return record


class _StoredConfig:
    """The run's own config: stored at once in a run without checkpoints, else with the first one that it leads to, so
    that what the next attempt is compared with is what the newest checkpoint was made with."""

    def __init__(self, spec: SessionSpec, *, at_once: bool) -> None:
        self._spec = spec
        self.by_a_save = False
        if at_once:
            self._store()

    def saved(self, say: Callable[[str], None]) -> None:
        """A checkpoint is committed."""
        if self.by_a_save:
            return
        self.by_a_save = True
        try:
            self._store()
        except OSError as error:
            say(f"{self._spec.folder.config_yaml} could not be written: {error.strerror}.")

    def _store(self) -> None:
        if self._spec.config_text is not None:
            path = self._spec.folder.config_yaml
            write_atomic(path, self._spec.config_text.encode(), durable=True, point="config")


def _supervise(
    spec: SessionSpec,
    lease: Lease,
    gathered: Gathered,
    resolution: Resolution,
    record: AttemptRecord,
    run_id: str,
    stored: _StoredConfig,
) -> tuple[Resolution, Outcome, int]:
    """The ranks, and the supervisor that writes down what becomes of them.

    Returns:
        What they went on from, how they ended, and the exit code.
    """
    folder = spec.folder
    progress = Progress.starting(spec.fn, resolution.answer)
    if spec.walltime is not None:
        spec.walltime.follow(progress, [entry.get("save_s", 0.0) for entry in gathered.registry.saves])
    context_metrics: list[Callable[[], dict[str, float]]] = [dict]
    display = display_of(spec, progress, lambda: context_metrics[0]())
    supervisor = Supervisor(
        Supervision(
            run=folder,
            lease=lease,
            attempt=record,
            earlier_best_step=max((a.end_step or 0 for a in gathered.facts.attempts), default=0),
            checkpoint=resolution.path,
            sequence=gathered.registry.committed_sequence,
        ),
        listener=spec.listener,
        progress=progress,
        display=display,
        metrics=lambda: context_metrics[0](),
    )
    supervisor.judge = lambda outcome, code: judge(spec, outcome, code)
    supervisor.last_act = lambda outcome, code: after_forced_end(spec, outcome, code)
    supervisor.slurm = lambda: meaning_of_sigterm(spec)
    try:
        supervisor.start()
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        resolution, ended = _adapted(spec, lease, gathered, resolution, run_id, supervisor)
    except (CkptrunError, OSError) as error:
        told = unwritable(folder, error) if isinstance(error, OSError) else error
        ended = Outcome(StopReason.EXCEPTION, resolution.step or 0, error=told, built=False)
    if ended is None:
        context = _context(spec, lease, resolution, record, run_id, progress, supervisor, stored)
        context_metrics[0] = lambda: context.metrics()
        supervisor.restore_s = lambda: context.restore_s
        outcome, code = judge(spec, *run_ranks(spec, context, display, supervisor))
    else:
        outcome, code = judge(spec, ended, exit_code(ended, request=spec.listener.request))
    supervisor.finish(outcome, code, error=one_line(outcome))
    return resolution, outcome, code


def _context(
    spec: SessionSpec,
    lease: Lease,
    resolution: Resolution,
    record: AttemptRecord,
    run_id: str,
    progress: Progress,
    supervisor: Supervisor,
    stored: _StoredConfig,
) -> RankContext:
    """What the ranks are given."""
    from ckptrun.fit.context import RankContext

    folder = spec.folder

    def saved(checkpoint: SavedCheckpoint) -> None:
        supervisor.saved(checkpoint)
        if spec.walltime is not None:
            spec.walltime.saved(checkpoint.save_s)
        stored.saved(supervisor.say)

    return RankContext(
        run=folder,
        run_id=run_id,
        attempt=record.attempt,
        lease_epoch=lease.epoch,
        resolution=resolution,
        stop=spec.listener,
        progress=progress,
        job=record.job,
        strategy=spec.plan.strategy,
        save_on_stop=spec.save_on_stop,
        hpc_for=hpc_for(spec),
        on_save_error=spec.on_save_error,
        async_save=spec.async_save,
        trust=spec.trust,
        override=spec.override,
        exact=spec.exact,
        versions=versions(),
        resume_past_early_stop=spec.early_stopping_changed(folder),
        saved=saved,
        stage_changed=supervisor.stage_changed,
        saving=supervisor.saving,
        save_served=supervisor.save_served,
        say=supervisor.say,
        may_save=lambda: not supervisor.lease_lost and lease.still_mine(),
        first_step_done=lambda: _remove_pin(folder, supervisor.say) if resolution.removes_pin else None,
        logs_dir=folder.logs_dir,
    )


def _adapted(
    spec: SessionSpec,
    lease: Lease,
    gathered: Gathered,
    resolution: Resolution,
    run_id: str,
    supervisor: Supervisor,
) -> tuple[Resolution, Outcome | None]:
    """A resolution from which as many ranks can go on as there will be; or how the attempt ended before that."""

    def may_save() -> bool:
        return not supervisor.lease_lost and lease.still_mine()

    fitting = adapted(
        resolution,
        wanted(spec),
        Writing(
            spec.folder,
            run_id,
            next_attempt(list(gathered.facts.attempts)),
            lease.epoch,
            supervisor.say,
            lambda: spec.listener.request is not None,
            may_save,
        ),
    )
    if fitting is not None:
        return fitting, None
    request = spec.listener.request
    reason = StopReason.RANK_LOST if request is None else request.reason
    return resolution, Outcome(reason, resolution.step or 0)


def _note_takeover(folder: RunFolder, lease: Lease, run_id: str) -> None:
    from ckptrun.checkpoint.catalogue import Catalogue
    from ckptrun.checkpoint.rebuild import rebuild_registry

    edit(
        folder.registry,
        lambda registry: registry.note_takeover(lease.epoch, lease.sequence_at_takeover),
        otherwise=lambda: rebuild_registry(Catalogue(folder.checkpoints_dir), run_id=run_id),
    )


def _remove_pin(folder: RunFolder, say: Callable[[str], None]) -> None:
    def change(registry: Any) -> None:
        registry.pin = None

    try:
        edit(folder.registry, change, otherwise=lambda: rebuilt_registry(folder))
    except OSError as error:
        say(f"The pin could not be removed: {error.strerror or error}. `ckptrun unpin` does it.")


def clear_away(spec: SessionSpec) -> None:
    """End and remove what an attempt that was killed has left."""
    killed = end_leftovers(spec.folder)
    if killed:
        spec.echo(
            f"ended {len(killed)} processes that an earlier attempt had left: {', '.join(map(str, killed))}"
        )
    sweep_run(spec.folder)
    identity = read_identity(spec.folder)
    run_id = None if identity is None else identity.id
    for name in sweep_checkpoints(spec.folder.checkpoints_dir, run_id=run_id):
        if not is_leftover(name):
            spec.echo(f"{name} was never committed and is removed: its save was killed")


def unwritable(folder: RunFolder, error: OSError) -> UsageError:
    """The error that is told where nothing can be written into the run's folder."""
    return UsageError(
        f"the run's folder {folder.path} cannot be written: {error.strerror or error}",
        hint="Check its permissions and the space on its disk, or name another place with --root.",
    )
