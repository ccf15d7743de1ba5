"""What is the story of a fit: lease, choice, attempts, lease back?"""

from __future__ import annotations

from dataclasses import replace

from ckptrun.errors import UsageError
from ckptrun.launch.restarts import Tried, give_up
from ckptrun.records import CheckpointRecord, Outcome, Progress, Resolution, Status, StopReason
from ckptrun.resolve.gather import Gathered, highest_epoch
from ckptrun.resolve.quarantine import found_damage, quarantine
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import Holder, Lease
from ckptrun.run.registry import DamagedRegistryError, Registry
from ckptrun.run.status import read_status, write_status
from ckptrun.session.attempt import clear_away, run_attempt, unwritable
from ckptrun.session.choose import not_the_same, nothing_left_in, refused, resolve, writer_of
from ckptrun.session.ranks import display_of, one_line, prepare_once, ready_again, run_ranks
from ckptrun.session.spec import SessionResult, SessionSpec

# Exit codes: wrong config, in use by somebody else, a checkpoint that does not fit.
_NO_RESTART_HELPS = (2, 4, 5)


def run_fit(spec: SessionSpec) -> SessionResult:
    """Hold the lease, choose, and make attempts until one ends as it should.

    Raises:
        RunInUseError: somebody else trains this run.
        UsageError: the run's folder cannot be written.
    """
    folder = spec.folder
    if not folder.exists():
        _, resolution = resolve(spec)
        if resolution.error is not None:
            spec.on_resolution(resolution)
            return refused(resolution)
        # A config whose classes cannot be built must not leave an empty run behind.
        prepare_once(spec)
    holder = Holder.this_process(job=spec.job, command=" ".join(spec.command))
    try:
        folder.create()
        lease = Lease.acquire(folder.lease, holder, noted=lambda: _noted(folder), on_wait=spec.echo)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        gathered, resolution = resolve(spec)
        spec.on_resolution(resolution)
        if resolution.error is not None:
            return refused(resolution)
        done = nothing_left_in(spec, gathered, resolution)
        if done is not None:
            spec.echo(f"nothing left to do: {done}")
            _settle(spec)
            return SessionResult(0, resolution, nothing_left=done)
        prepare_once(spec)
        return _attempts(spec, lease, gathered, resolution)
    finally:
        try:
            lease.release()
        except OSError:
            pass  # a dead holder is taken over at once


def _settle(spec: SessionSpec) -> None:
    """Say that the run has finished, where the attempt that did the last of it died before it could."""
    folder = spec.folder
    try:
        clear_away(spec)
        record = read_status(folder)
        if record is not None and record.status is not Status.FINISHED:
            ended = replace(record, status=Status.FINISHED, stop_reason=str(StopReason.DONE), exit_code=0)
            write_status(folder.status, ended)
    except (UsageError, OSError):
        pass  # the run has what it is for, and nothing relies on this


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
    chosen, damaged_copies = spec, 0
    while True:
        result = run_attempt(spec, lease, gathered, resolution)
        outcome = result.outcome
        assert outcome is not None
        used = result.resolution or resolution  # a converted copy of what was chosen, it may be
        damage = found_damage(outcome.error, used)
        damaged_copy = damage is not None and used.path != resolution.path
        if damage is None:
            tried.append(_tried(outcome, resolution))
            why = give_up(tried, spec.max_restarts)
            if why is not None or spec.listener.request is not None:
                if why:
                    spec.echo(why)
                return result
            spec.echo(f"{one_line(outcome)}; restart {len(tried)} of {spec.max_restarts}")
        elif spec.listener.request is not None:
            return result
        else:  # no restart: nothing was trained, and each time another checkpoint is taken
            spec.echo(quarantine(spec.folder, damage, writer_of(used)))
            damaged_copies += damaged_copy
            if damaged_copies > 1:  # each time another one is made, and this disk spoils them
                return result
        if not ready_again(spec):
            return result
        gathered, again = resolve(chosen)
        if gathered.registry.committed_sequence > committed and not damaged_copy:
            # What was given holds for the first start; once something is saved, the newest save counts.
            chosen = replace(spec, reference="last", pin=None)
            gathered, again = resolve(chosen)
        again = not_the_same(again, damage)
        spec.on_resolution(again)
        if again.error is not None:
            return result if damage is None else refused(again)
        resolution = again


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


def fit_without_a_trace(spec: SessionSpec) -> SessionResult:
    """``fast_dev_run``: a few batches, and nothing is written."""
    from ckptrun.fit.context import RankContext

    _, resolution = resolve(spec)
    spec.on_resolution(resolution)
    if resolution.error is not None:
        return refused(resolution)
    spec.prepare()
    progress = Progress.starting(spec.fn, resolution.answer)
    context = RankContext(
        resolution=resolution, stop=spec.listener, progress=progress, say=spec.echo, save_on_stop=False
    )
    display = display_of(spec, progress, lambda: context.metrics())
    context.say = display.say
    outcome, code = run_ranks(spec, context, display)
    spec.listener.finished()
    return SessionResult(code, resolution, outcome)
