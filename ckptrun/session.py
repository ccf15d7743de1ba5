"""What is the story of one command that trains or evaluates?

    lease  ->  resolve  ->  is anything left to do?  ->  ledger  ->  ranks  ->  ledger, status, lease back

Both the command line and ``ckptrun.Trainer`` in a script tell it through here, so that rules, exit codes and files
are the same. Nothing heavy is imported before it is known that ranks will run.

Decision: a fit resolves while it holds the lease, so that nobody saves between the choice and the start; where the
run's folder does not exist yet it resolves once before, so that a reference that cannot be served creates nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptrun.checkpoint.commit import is_leftover
from ckptrun.checkpoint.commit import sweep as sweep_checkpoints
from ckptrun.checkpoint.manifest import MANIFEST_NAME
from ckptrun.environment.slurm_queue import Meaning
from ckptrun.environment.versions import versions
from ckptrun.errors import CkptrunError, IncompatibleError, NoCheckpointError, RunInUseError, UsageError
from ckptrun.launch.early import take
from ckptrun.launch.forced_end import ForcedEnd
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.inline import RankMain, run_inline
from ckptrun.launch.plan import LaunchPlan
from ckptrun.launch.requeue import ENDED, Policy, Requeue, comes_again
from ckptrun.launch.restarts import Tried, give_up
from ckptrun.launch.supervisor import Display, Supervision, Supervisor
from ckptrun.launch.universal import Wanted, Writing, adapted, problem
from ckptrun.launch.walltime import Walltime
from ckptrun.records import (
    DEFAULT_ON_SAVE_ERROR,
    AttemptRecord,
    CheckpointRecord,
    Damage,
    Fn,
    JobFacts,
    Outcome,
    Progress,
    Resolution,
    ResolutionError,
    SavedCheckpoint,
    Status,
    StopReason,
)
from ckptrun.resolve.finished import Limits, nothing_left
from ckptrun.resolve.gather import Gathered, gather, highest_epoch, rebuilt_registry, resolve_gathered
from ckptrun.resolve.quarantine import found_damage, nothing_else, quarantine
from ckptrun.resolve.rules import given_reference
from ckptrun.run.attempts import append_start, next_attempt
from ckptrun.run.evals import EvalFolder, begin_eval
from ckptrun.run.folder import RunFolder
from ckptrun.run.identity import ensure_identity, read_identity
from ckptrun.run.lease import Holder, Lease, live_holder
from ckptrun.run.rank_processes import end_leftovers
from ckptrun.run.registry import DamagedRegistryError, Registry, edit
from ckptrun.run.status import read_status, write_status
from ckptrun.run.sweep import sweep as sweep_run
from ckptrun.run.unbegun import Unbegun
from ckptrun.stop import DEFAULT_GRACE_S, StopListener, exit_code
from ckptrun.storage.files import write_atomic

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext
    from ckptrun.launch.hosts import Hosts

_FIRST_TASK_ENDS_S = 5.0
_IN_PROCESSES = ("torchrun", "deepspeed")  # launchers whose ranks are processes of their own
_FORCED_END_S = 10.0  # far more than a forced end takes
_NO_RESTART_HELPS = (
    2,
    4,
    5,
)  # exit codes: wrong config, in use by somebody else, a checkpoint that does not fit
_MOST_CHOICES = 5  # of an evaluation beside a fit that deletes what was chosen

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


def preview(spec: SessionSpec) -> tuple[Resolution, int, str | None]:
    """The answer that running ``spec`` would begin with, changing nothing.

    Returns:
        The resolution, the exit code that the command would end with where it would not start (else 0), and why
        there is nothing left to do (else None).
    """
    holder = None
    if spec.fn == "fit" and not spec.fast_dev_run:
        holder = live_holder(spec.folder.lease)
    gathered, resolution = _resolve(spec)
    if holder is not None and resolution.error is None:
        error = ResolutionError(
            RunInUseError.exit_code,
            f"run {spec.folder.name!r} is in use by {holder}",
            f"Wait for it to end, ask it to stop with `ckptrun stop {spec.folder.name}`, or choose another name with "
            "--run.",
        )
        return replace(resolution, error=error), error.exit_code, None
    code = 0 if resolution.error is None else resolution.error.exit_code
    return resolution, code, _nothing_left(spec, gathered, resolution)


def run_session(spec: SessionSpec) -> SessionResult:
    """Do it.

    Raises:
        CkptrunError: nothing was started, and there is no resolution that could say why.
    """
    spec.listener.grace_s = spec.grace_s
    if spec.plan.launcher in _IN_PROCESSES:
        _start_fork_server(spec)
    try:
        return _run(spec) if spec.plan.num_hosts == 1 else _run_on_several_hosts(spec)
    finally:
        if spec.fork_server is not None:
            spec.fork_server.close()


def _run(spec: SessionSpec) -> SessionResult:
    if spec.walltime is None:
        return _work(spec)
    with spec.walltime:
        return _see_to_the_job(spec, _work(spec))


def _see_to_the_job(spec: SessionSpec, result: SessionResult) -> SessionResult:
    """Have the SLURM job start again, where it was stopped for its time: after ledger and status are written."""
    outcome, job = result.outcome, _batch_job(spec)
    if job is None or outcome is None or not outcome.built:
        return result
    if outcome.stop_reason is StopReason.WALLTIME:
        code = _requeue(spec, job)
    elif getattr(outcome.error, "host_lost", False):
        code = _requeuer(spec, job).after_lost_node(result.exit_code)
    else:
        return result
    return replace(result, exit_code=code, requeued=code == ENDED)


def _requeue(spec: SessionSpec, job: JobFacts, *, wait: bool = True, began: bool = True) -> int:
    assert spec.walltime is not None
    return _requeuer(spec, job).after(_meaning(spec), ending=spec.walltime.ending, wait=wait, began=began)


def _requeuer(spec: SessionSpec, job: JobFacts) -> Requeue:
    return Requeue(job, spec.folder, spec.requeue, spec.listener, spec.echo)


def _batch_job(spec: SessionSpec) -> JobFacts | None:
    """The SLURM job that goes on in another start of it, where this is a fit in one."""
    is_fit = spec.fn == "fit" and not spec.fast_dev_run
    return spec.job if is_fit and spec.job is not None and spec.job.batch else None


def _meaning(spec: SessionSpec) -> Meaning | None:
    """What SLURM said that SIGTERM was for; None where no SIGTERM stopped the run, or it was not asked."""
    request = spec.listener.request
    if spec.walltime is None or request is None or _batch_job(spec) is None:
        return None
    is_sigterm = request.reason is StopReason.SIGTERM and request.signum == signal.SIGTERM
    return spec.walltime.meaning() if is_sigterm else None


def _judge(spec: SessionSpec, outcome: Outcome, code: int) -> tuple[Outcome, int]:
    """How an attempt ended, once it is known what SIGTERM was for: a preemption is the end of its time."""
    meaning = _meaning(spec)
    if meaning is None or outcome.stop_reason is not StopReason.SIGTERM:
        return outcome, code
    if comes_again(outcome.stop_reason, meaning):
        outcome = replace(outcome, stop_reason=StopReason.WALLTIME)
        code = exit_code(outcome, request=spec.listener.request)
    return outcome, code


def _forced_end(spec: SessionSpec, outcome: Outcome, code: int) -> int:
    job = _batch_job(spec)
    if job is None or spec.walltime is None or outcome.stop_reason is not StopReason.WALLTIME:
        return code
    return _requeue(spec, job, wait=False)


def _work(spec: SessionSpec) -> SessionResult:
    if spec.fn != "fit":
        return _evaluate(spec)
    if spec.fast_dev_run:
        return _fit_without_a_trace(spec)
    return _fit(spec)


def _start_fork_server(spec: SessionSpec) -> ForkServer:
    """The one that ranks come from, a new one where need be. It imports torch while the checkpoint is chosen."""
    if spec.fork_server is None or spec.fork_server.closed:
        # What DeepSpeed's launcher starts imports for itself; only something has to own it.
        method = "spawn" if spec.plan.launcher == "deepspeed" else spec.start_method
        spec.fork_server = take(spec.plan.env, method=method, fn=spec.fn)
    return spec.fork_server


# -- several hosts -------------------------------------------------------------------------------------------


def _run_on_several_hosts(spec: SessionSpec) -> SessionResult:
    """Meet the others; then lead them through the same story, or follow the one that does."""

    def lead(hosts: Hosts) -> SessionResult:
        spec.hosts = hosts
        return _run(spec)

    task = spec.plan.task
    watches = spec.walltime if task is not None and task.number == 0 else None
    with watches or contextlib.nullcontext():
        return _take_part(spec, lead)


def _stopped_before_all_had_met(spec: SessionSpec, code: int) -> SessionResult:
    """SLURM's task 0 sees to the job all the same, and the others do not cut it off by their end."""
    task, job, request = spec.plan.task, _batch_job(spec), spec.listener.request
    if task is None or job is None or request is None:
        return SessionResult(code)
    if task.number:
        spec.listener.await_term(_FIRST_TASK_ENDS_S)
    elif comes_again(request.reason, _meaning(spec)):
        code = _requeue(spec, job, began=False)
    return SessionResult(code, requeued=code == ENDED)


def _take_part(spec: SessionSpec, lead: Callable[[Hosts], SessionResult]) -> SessionResult:
    from ckptrun.launch.together import Part, take_part

    return take_part(
        Part(
            spec.plan,
            spec.fn,
            spec.folder.path,
            spec.reference,
            spec.config_text,
            spec.rank_main,
            spec.listener,
            lambda: _start_fork_server(spec),
            spec.echo,
            spec.job,
        ),
        lead=lead,
        last_word=lambda result: (result.exit_code, _told_to_followers(result)),
        ended=SessionResult,
        stopped=lambda code: _stopped_before_all_had_met(spec, code),
    )


def _told_to_followers(result: SessionResult) -> str:
    if result.outcome is not None:
        how = f"{result.outcome.stop_reason} at step {result.outcome.step}"
        why = _one_line(result.outcome)
        return f"the leader ended: {how}{'' if why is None else f', {why}'}"
    if result.resolution is not None and result.resolution.error is not None:
        return f"the leader ended: {result.resolution.error.message}"
    return f"the leader ended: {result.nothing_left or 'nothing was started'}"


# -- resolving -----------------------------------------------------------------------------------------------


def _resolve(spec: SessionSpec) -> tuple[Gathered, Resolution]:
    gathered = gather(
        spec.folder,
        fn=spec.fn,
        reference=spec.reference,
        init_from=spec.init_from,
        allow_fallback=spec.allow_fallback,
        all_candidates=spec.all_candidates,
        fast_dev_run=spec.fast_dev_run,
        job=spec.job,
        command_key=_command_key(spec),
    )
    if spec.pin is not None:
        gathered.registry.pin = spec.pin
    resolution = resolve_gathered(gathered)
    if resolution.error is None and spec.check_config is not None:
        error, warnings = spec.check_config(spec.folder, resolution)
        resolution = replace(resolution, error=error, warnings=(*resolution.warnings, *warnings))
    if resolution.error is None and spec.fn == "fit":
        error = problem(resolution, _wanted(spec))
        resolution = resolution if error is None else replace(resolution, error=error)
    return gathered, resolution


def _wanted(spec: SessionSpec) -> Wanted:
    ranks = spec.plan.num_ranks * spec.plan.num_hosts
    return Wanted(spec.plan.strategy, ranks, spec.zero_stage, spec.takes_full_weights)


def _command_key(spec: SessionSpec) -> str:
    """Names this command line in this folder, so that a loop in a script that starts it again is recognised."""
    words = "\0".join((os.getcwd(), *spec.command))
    return hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest()[:16]


def _nothing_left(spec: SessionSpec, gathered: Gathered, resolution: Resolution) -> str | None:
    if (
        spec.fn != "fit"
        or resolution.error is not None
        or not isinstance(resolution.answer, CheckpointRecord)
    ):
        return None
    finished, taken = gathered.registry.finished, resolution.answer
    if finished is not None and resolution.ref in ("last", "auto") and finished["sequence"] > taken.sequence:
        # A training that StopTraining ended inside a step: that save is the end all the same, though not exact.
        end = gathered.view.by_name(finished["name"])
        taken = end if isinstance(end, CheckpointRecord) and not end.exact else taken
    return nothing_left(
        finished,
        taken,
        spec.limits,
        early_stopping_changed=spec.early_stopping_changed(spec.folder),
    )


def _refused(resolution: Resolution) -> SessionResult:
    assert resolution.error is not None
    return SessionResult(resolution.error.exit_code, resolution)


# -- fit -------------------------------------------------------------------------------------------------------


def _fit(spec: SessionSpec) -> SessionResult:
    folder = spec.folder
    if not folder.exists():
        _, resolution = _resolve(spec)
        if resolution.error is not None:
            spec.on_resolution(resolution)
            return _refused(resolution)
        # A config whose classes cannot be built must not leave an empty run behind.
        _prepare(spec)
    holder = Holder.this_process(job=spec.job, command=" ".join(spec.command))
    try:
        folder.create()
        lease = Lease.acquire(folder.lease, holder, noted=lambda: _noted(folder), on_wait=spec.echo)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        gathered, resolution = _resolve(spec)
        spec.on_resolution(resolution)
        if resolution.error is not None:
            return _refused(resolution)
        done = _nothing_left(spec, gathered, resolution)
        if done is not None:
            spec.echo(f"nothing left to do: {done}")
            _settle(spec)
            return SessionResult(0, resolution, nothing_left=done)
        _prepare(spec)
        return _attempts(spec, lease, gathered, resolution)
    finally:
        try:
            lease.release()
        except OSError:
            pass  # a dead holder is taken over at once


def _clear_away(spec: SessionSpec) -> None:
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


def _settle(spec: SessionSpec) -> None:
    """Say that the run has finished, where the attempt that did the last of it died before it could."""
    folder = spec.folder
    try:
        _clear_away(spec)
        record = read_status(folder)
        if record is not None and record.status is not Status.FINISHED:
            ended = replace(record, status=Status.FINISHED, stop_reason=str(StopReason.DONE), exit_code=0)
            write_status(folder.status, ended)
    except (UsageError, OSError):
        pass  # the run has what it is for, and nothing relies on this


def _prepare(spec: SessionSpec) -> None:
    """Once."""
    prepare, spec.prepare = spec.prepare, lambda: None
    prepare()


def _unwritable(folder: RunFolder, error: OSError) -> UsageError:
    return UsageError(
        f"the run's folder {folder.path} cannot be written: {error.strerror or error}",
        hint="Check its permissions and the space on its disk, or name another place with --root.",
    )


def _noted(folder: RunFolder) -> tuple[int, int]:
    """The highest save counter and the highest epoch of the lease that checkpoints and registry know of.

    The lease is renewed without waiting for the disk, so power loss may take it; an epoch that began anew would make
    all readers ignore what is saved under it.
    """
    from ckptrun.checkpoint.catalogue import Catalogue

    catalogue = Catalogue(folder.checkpoints_dir)
    newest = next((manifest.lease_epoch for _, manifest in catalogue.manifests()), 0)
    try:
        takeovers = Registry.load(folder.registry).takeovers
    except (FileNotFoundError, DamagedRegistryError):
        takeovers = []
    epochs = (newest, highest_epoch(folder), *(each.get("lease_epoch", 0) for each in takeovers))
    return catalogue.highest_sequence(), max(epochs)


def _attempts(spec: SessionSpec, lease: Lease, gathered: Gathered, resolution: Resolution) -> SessionResult:
    """Attempts until one ends as it should, or no restart helps any more; each is resolved anew."""
    tried: list[Tried] = []
    committed = gathered.registry.committed_sequence
    while True:
        result = _attempt(spec, lease, gathered, resolution)
        outcome = result.outcome
        assert outcome is not None
        damage = found_damage(outcome.error, resolution)
        if damage is None:
            tried.append(_tried(outcome, resolution))
            why = give_up(tried, spec.max_restarts)
            if why is not None or spec.listener.request is not None:
                if why:
                    spec.echo(why)
                return result
            spec.echo(f"{_one_line(outcome)}; restart {len(tried)} of {spec.max_restarts}")
        elif spec.listener.request is not None:
            return result
        else:  # no restart: nothing was trained, and each time another checkpoint is taken
            spec.echo(quarantine(spec.folder, damage, _writer(resolution)))
        if not _ready_again(spec):
            return result
        gathered, again = _resolve(spec)
        if gathered.registry.committed_sequence > committed:
            # What was given holds for the first start; once something is saved, the newest save counts.
            gathered, again = _resolve(replace(spec, reference="last", pin=None))
        again = _not_the_same(again, damage)
        spec.on_resolution(again)
        if again.error is not None:
            return result if damage is None else _refused(again)
        resolution = again


def _ready_again(spec: SessionSpec) -> bool:
    """Get what ranks need once more: a server to come from, and the other hosts. False where those do not come."""
    if spec.plan.launcher in _IN_PROCESSES:
        _start_fork_server(spec)
    return spec.hosts is None or spec.hosts.meet_again(_start_fork_server(spec), spec.echo)


def _writer(resolution: Resolution) -> str:
    """The id of the run that wrote the checkpoint."""
    answer = resolution.answer
    return answer.run_id if isinstance(answer, CheckpointRecord) else ""


def _not_the_same(again: Resolution, damage: Damage | None) -> Resolution:
    """``again``, an error where it leads to the damaged checkpoint once more: exactly that one was asked for."""
    if damage is None:
        return again
    # How its quarantine ends has just been said.
    told = tuple(notice for notice in again.notices if damage.checkpoint not in notice)
    again = replace(again, notices=told)
    if again.error is not None or again.path != damage.checkpoint:
        return again
    return replace(again, answer=None, error=nothing_else(damage, again))


def _tried(outcome: Outcome, resolution: Resolution) -> Tried:
    start, error = resolution.answer, outcome.error
    return Tried(
        outcome.stop_reason,
        resolution.path,
        resolution.step or 0,
        outcome.step,
        before=start.parent if isinstance(start, CheckpointRecord) else None,
        final=not outcome.user_error and getattr(error, "exit_code", None) in _NO_RESTART_HELPS,
    )


def _attempt(spec: SessionSpec, lease: Lease, gathered: Gathered, resolution: Resolution) -> SessionResult:
    folder = spec.folder
    found_versions = versions()
    try:
        before = Unbegun(folder)
        identity = ensure_identity(folder, spec.command)
        _clear_away(spec)
        fitting = _adapted(spec, lease, gathered, resolution, identity.id)
        if fitting is None:
            assert spec.listener.request is not None
            outcome = Outcome(spec.listener.request.reason, resolution.step or 0, built=False)
            return SessionResult(exit_code(outcome, request=spec.listener.request), resolution, outcome)
        resolution = fitting
        if gathered.registry.committed_sequence == 0:
            _store_config(spec)
        if lease.epoch > 1:
            _note_takeover(folder, lease, identity.id)
        record = AttemptRecord(
            attempt=next_attempt(list(gathered.facts.attempts)),
            fn=spec.fn,
            started_at=time.time(),
            reference=given_reference(gathered.facts, gathered.registry),
            rule=resolution.rule,
            resolved=resolution.path,
            job=spec.job.key if spec.job is not None and spec.job.batch else None,
            command_key=_command_key(spec),
            start_sequence=gathered.registry.committed_sequence,
            start_step=resolution.step or 0,
        )
        append_start(folder.attempts, record, versions=found_versions)
    except OSError as error:
        raise _unwritable(folder, error) from error
    progress = Progress.starting(spec.fn, resolution.answer)
    if spec.walltime is not None:
        spec.walltime.follow(progress, [entry.get("save_s", 0.0) for entry in gathered.registry.saves])
    context_metrics: list[Callable[[], dict[str, float]]] = [dict]
    display = _display(spec, progress, lambda: context_metrics[0]())
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
    from ckptrun.fit.context import RankContext

    def saved(checkpoint: SavedCheckpoint) -> None:
        supervisor.saved(checkpoint)
        if spec.walltime is not None:
            spec.walltime.saved(checkpoint.save_s)
        if not stored:
            stored.append(True)
            try:
                _store_config(spec)
            except OSError as error:
                supervisor.say(f"{folder.config_yaml} could not be written: {error.strerror}.")

    stored: list[bool] = []
    context = RankContext(
        run=folder,
        run_id=identity.id,
        attempt=record.attempt,
        lease_epoch=lease.epoch,
        resolution=resolution,
        stop=spec.listener,
        progress=progress,
        job=record.job,
        strategy=spec.plan.strategy,
        save_on_stop=spec.save_on_stop,
        hpc_for=_hpc_for(spec),
        on_save_error=spec.on_save_error,
        async_save=spec.async_save,
        trust=spec.trust,
        override=spec.override,
        exact=spec.exact,
        versions=found_versions,
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
    context_metrics[0] = lambda: context.metrics()
    supervisor.restore_s = lambda: context.restore_s
    supervisor.judge = lambda outcome, code: _judge(spec, outcome, code)
    supervisor.last_act = lambda outcome, code: _forced_end(spec, outcome, code)
    supervisor.slurm = lambda: _meaning(spec)
    try:
        supervisor.start()
    except OSError as error:
        raise _unwritable(folder, error) from error
    outcome, code = _judge(spec, *_ranks(spec, context, display, supervisor))
    supervisor.finish(outcome, code, error=_one_line(outcome))
    if not outcome.built and not stored:
        try:
            before.put_back(record.attempt)
        except OSError as error:
            spec.echo(f"the attempt, which started nothing, stays in the ledger: {error.strerror or error}")
    return SessionResult(code, resolution, outcome)


def _hpc_for(spec: SessionSpec) -> tuple[str, ...]:
    if not spec.hpc_save:
        return ()
    in_job = _batch_job(spec) is not None
    return (StopReason.WALLTIME, StopReason.SIGTERM) if in_job else (StopReason.WALLTIME,)


def _adapted(
    spec: SessionSpec, lease: Lease, gathered: Gathered, resolution: Resolution, run_id: str
) -> Resolution | None:
    """A resolution from which as many ranks can go on as there will be; None where a stop came first."""
    return adapted(
        resolution,
        _wanted(spec),
        Writing(
            spec.folder,
            run_id,
            next_attempt(list(gathered.facts.attempts)),
            lease.epoch,
            spec.echo,
            lambda: spec.listener.request is not None,
        ),
    )


def _store_config(spec: SessionSpec) -> None:
    """Keep the config as the run's own: at once in a run without checkpoints, else with the first one that it leads
    to, so that what the next attempt is compared with is what the newest checkpoint was made with."""
    if spec.config_text is not None:
        write_atomic(spec.folder.config_yaml, spec.config_text.encode(), durable=True, point="config")


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


def _fit_without_a_trace(spec: SessionSpec) -> SessionResult:
    """``fast_dev_run``: a few batches, and nothing is written."""
    from ckptrun.fit.context import RankContext

    _, resolution = _resolve(spec)
    spec.on_resolution(resolution)
    if resolution.error is not None:
        return _refused(resolution)
    spec.prepare()
    progress = Progress.starting(spec.fn, resolution.answer)
    context = RankContext(
        resolution=resolution, stop=spec.listener, progress=progress, say=spec.echo, save_on_stop=False
    )
    display = _display(spec, progress, lambda: context.metrics())
    context.say = display.say
    outcome, code = _ranks(spec, context, display)
    spec.listener.finished()
    return SessionResult(code, resolution, outcome)


# -- validate, test, predict -----------------------------------------------------------------------------------


def _resolve_and_mark(spec: SessionSpec) -> tuple[Resolution, EvalFolder | None]:
    """Choose the checkpoint and note that it is being read, before anything slow: a live fit beside it deletes what
    it no longer wants. One that went between the choice and the note is chosen anew."""
    for _ in range(_MOST_CHOICES):
        _, resolution = _resolve(spec)
        if resolution.error is not None or spec.fast_dev_run:
            return resolution, None
        evaluation = begin_eval(spec.folder, spec.fn, resolution.path)
        answer = resolution.answer
        if not isinstance(answer, CheckpointRecord) or os.path.exists(f"{answer.path}/{MANIFEST_NAME}"):
            return resolution, evaluation
        evaluation.discard()
    raise NoCheckpointError(
        f"{resolution.path} was deleted while it was chosen, and so was each of the {_MOST_CHOICES - 1} before it",
        hint="The run saves and deletes faster than a checkpoint can be opened: keep more (save_top_k).",
    )


def _evaluate(spec: SessionSpec) -> SessionResult:
    damage: Damage | None = None
    while True:
        resolution, evaluation = _resolve_and_mark(spec)
        again = _not_the_same(resolution, damage)
        if again.error is not None and evaluation is not None:
            evaluation.discard()
        spec.on_resolution(again)
        if again.error is not None:
            spec.listener.finished()
            return _refused(again)
        result = _evaluate_one(spec, again, evaluation)
        damage = found_damage(None if result.outcome is None else result.outcome.error, again)
        over = damage is None or evaluation is None or spec.listener.request is not None
        if damage is not None and not over:
            spec.echo(quarantine(spec.folder, damage, _writer(again)))
        if over or not _ready_again(spec):
            spec.listener.finished()
            return result


def _evaluate_one(spec: SessionSpec, resolution: Resolution, evaluation: EvalFolder | None) -> SessionResult:
    from ckptrun.fit.context import RankContext

    _prepare(spec)
    forced = ForcedEnd(spec.listener, None if evaluation is None else evaluation.path, spec.echo)
    identity = read_identity(spec.folder)
    progress = Progress.starting(spec.fn, resolution.answer)
    context = RankContext(
        run=spec.folder,
        run_id=identity.id if identity is not None else "",
        resolution=resolution,
        stop=spec.listener,
        progress=progress,
        trust=spec.trust,
        versions=versions(),
        save_on_stop=False,
        logs_dir=evaluation.path if evaluation is not None else None,
    )
    display = _display(spec, progress, lambda: context.metrics())
    context.say = display.say
    outcome, code = _ranks(spec, context, display, forced=forced)
    if evaluation is not None:
        metrics = outcome.results if spec.fn != "predict" else None
        try:
            evaluation.end(metrics=metrics, status=str(outcome.stop_reason))
        except OSError as error:
            spec.echo(f"The end could not be noted in {evaluation.path}: {error.strerror or error}.")
    return SessionResult(
        code, resolution, outcome, eval_dir=evaluation.path if evaluation is not None else None
    )


# -- ranks -----------------------------------------------------------------------------------------------------


class _Quiet:
    """No bar: lines go where notices go."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo

    def start(self) -> None: ...

    def stop(self, final_line: str | None = None) -> None:
        if final_line is not None:
            self._echo(final_line.removeprefix("ckptrun: "))

    def say(self, text: str) -> None:
        self._echo(text)


class _Told:
    """The bar, above which lines look like all others of ckptrun."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.start, self.stop = display.start, display.stop

    def say(self, text: str) -> None:
        self._display.say(f"ckptrun: {text}")


def _display(spec: SessionSpec, progress: Progress, metrics: Callable[[], dict[str, float]]) -> Display:
    return _Quiet(spec.echo) if spec.make_display is None else _Told(spec.make_display(progress, metrics))


def _ranks(
    spec: SessionSpec,
    context: RankContext,
    display: Display,
    supervisor: Supervisor | None = None,
    forced: ForcedEnd | None = None,
) -> tuple[Outcome, int]:
    context.strategy = spec.plan.strategy
    display.start()
    try:
        if spec.plan.launcher == "inline":
            outcome = run_inline(spec.rank_main, context)
        else:
            outcome = _torchrun(spec, context, supervisor, forced)
    finally:
        if spec.listener.ends_at_once:
            # Its workers were killed under it, so what it says is not how this ends: the listener's thread, which
            # shows and writes that, ends the process.
            time.sleep(_FORCED_END_S)
        display.stop()
    request = spec.listener.request
    # A rank that ended in its set-up knows of no step yet; the run is where it was.
    outcome = replace(outcome, step=max(outcome.step, context.progress.step))
    code = exit_code(outcome, request=request)
    begun = context.progress.step > context.progress.start_step
    if code == UsageError.exit_code and begun:
        code = 1  # 2 says that nothing was started
    if code == IncompatibleError.exit_code and not begun and not outcome.user_error:
        outcome = replace(
            outcome, built=False
        )  # 5 says so too: the checkpoint was refused while it was restored
    return outcome, code


def _torchrun(
    spec: SessionSpec, context: RankContext, supervisor: Supervisor | None, forced: ForcedEnd | None
) -> Outcome:
    from ckptrun.launch.start_ranks import run_torchrun

    server = spec.fork_server
    assert server is not None

    def dump_with(dump: Callable[[], None]) -> None:
        if supervisor is not None:
            supervisor.dump_stacks = dump
        if forced is not None:
            forced.dump_ranks = dump

    return run_torchrun(
        spec.rank_main,
        context,
        server,
        nproc=spec.plan.num_ranks,
        listener=spec.listener,
        hang_timeout_s=spec.hang_timeout_s,
        output=spec.output,
        started=supervisor.ranks if supervisor is not None else lambda *_: None,
        dump_with=dump_with,
        hosts=spec.hosts,
        local=spec.plan.local,
        plan=spec.plan,
    )


def _one_line(outcome: Outcome) -> str | None:
    if outcome.error is None:
        return outcome.save_error
    text = str(outcome.error).strip().splitlines()
    name = getattr(outcome.error, "type_name", type(outcome.error).__name__)
    return f"{name}: {text[0]}" if text and name else (text or [name])[0]
