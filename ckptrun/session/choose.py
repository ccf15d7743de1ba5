"""Which checkpoint does a session begin with, and is anything left to do?"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

from ckptrun.checkpoint.catalogue import fault_in_files
from ckptrun.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ckptrun.errors import DamagedCheckpointError, NoCheckpointError
from ckptrun.inspect.deepspeed_files import NOTE, foreign
from ckptrun.launch.universal import Wanted, problem
from ckptrun.records import CheckpointRecord, Damage, FreshStart, Resolution, ResolutionError
from ckptrun.resolve.finished import nothing_left
from ckptrun.resolve.gather import Gathered, gather, resolve_gathered
from ckptrun.resolve.quarantine import nothing_else
from ckptrun.session.spec import SessionResult, SessionSpec


def resolve(spec: SessionSpec) -> tuple[Gathered, Resolution]:
    """What the run's files say, and the rules' answer to it; an error where config, ranks or stage do not fit it."""
    gathered = gather(
        spec.folder,
        fn=spec.fn,
        reference=spec.reference,
        init_from=spec.init_from,
        allow_fallback=spec.allow_fallback,
        all_candidates=spec.all_candidates,
        fast_dev_run=spec.fast_dev_run,
        job=spec.job,
        command_key=command_key(spec),
    )
    if spec.pin is not None:
        gathered.registry.pin = spec.pin
    resolution = resolve_gathered(gathered)
    if resolution.error is None and spec.check_config is not None:
        error, warnings = spec.check_config(spec.folder, resolution)
        resolution = replace(resolution, error=error, warnings=(*resolution.warnings, *warnings))
    if resolution.error is None:
        resolution = replace(resolution, error=_not_whole(resolution))
    if resolution.error is None and spec.fn == "fit":
        error = problem(resolution, wanted(spec), exact=spec.exact)
        resolution = resolution if error is None else replace(resolution, error=error)
    return gathered, resolution


def _not_whole(resolution: Resolution) -> ResolutionError | None:
    """Why weights cannot be had from shards of DeepSpeed; None where nothing says so."""
    start = resolution.answer
    path = start.init_from if isinstance(start, FreshStart) else None
    if path is None:
        return None
    try:
        if os.path.lexists(os.path.join(path, MANIFEST_NAME)):
            manifest = read_manifest(path)
            fault = fault_in_files(path, manifest)[0] if NOTE in manifest.extra else None
        else:
            found = foreign(path)
            missing = [] if found is None else found.missing()
            fault = f"lacks {', '.join(missing)}" if missing else None
    except (OSError, DamagedCheckpointError):
        return None  # whoever reads it says so
    if fault is None:
        return None
    why = f"--init-from {path}: a checkpoint of DeepSpeed that {fault}."
    return ResolutionError(
        NoCheckpointError.exit_code, why, "Copy what is missing there, or name another one."
    )


def wanted(spec: SessionSpec) -> Wanted:
    """What ranks there will be for the checkpoint to fit."""
    ranks = spec.plan.num_ranks * spec.plan.num_hosts
    return Wanted(spec.plan.strategy, ranks, spec.zero_stage, spec.takes_full_weights)


def command_key(spec: SessionSpec) -> str:
    """Names this command line in this folder, so that a loop in a script that starts it again is recognised."""
    words = "\0".join((os.getcwd(), *spec.command))
    return hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest()[:16]


def nothing_left_in(spec: SessionSpec, gathered: Gathered, resolution: Resolution) -> str | None:
    """Why there is nothing left to train from this answer; None where there is."""
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


def refused(resolution: Resolution) -> SessionResult:
    """The end of a session whose resolution has an error."""
    assert resolution.error is not None
    return SessionResult(resolution.error.exit_code, resolution)


def writer_of(resolution: Resolution) -> str:
    """The id of the run that wrote the checkpoint."""
    answer = resolution.answer
    return answer.run_id if isinstance(answer, CheckpointRecord) else ""


def not_the_same(again: Resolution, damage: Damage | None) -> Resolution:
    """``again``, an error where it leads to the damaged checkpoint once more: exactly that one was asked for."""
    if damage is None:
        return again
    # How its quarantine ends has just been said.
    told = tuple(notice for notice in again.notices if damage.checkpoint not in notice)
    again = replace(again, notices=told)
    if again.error is not None or again.path != damage.checkpoint:
        return again
    return replace(again, answer=None, error=nothing_else(damage, again))
