"""How does a user manage which checkpoint comes next, and which ones stay?

Decision: a pin stores the checkpoint's path, found when it was set, beside the words that found it, so that
`pin best` means the best of that moment and a later, better one does not move it. Turned down: resolving the
words anew at each start, which is what leaving out the pin does already.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ckptrun.checkpoint.manifest import MANIFEST_NAME
from ckptrun.errors import CkptrunError, IncompatibleError, NoCheckpointError, UsageError
from ckptrun.records import CheckpointRecord, ResolutionError
from ckptrun.resolve.gather import Gathered, gather, rebuilt_registry
from ckptrun.resolve.reference import nearest_word, parse
from ckptrun.resolve.rules import find
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import Registry, edit

T = TypeVar("T")

# ---- decisions


def pin_entry(reference: str, record: CheckpointRecord, now: float) -> dict[str, Any]:
    """The registry's ``pin``; ``now`` is in seconds since 1970."""
    return {"reference": reference, "path": record.path, "pinned_at": now}


def as_error(error: ResolutionError) -> CkptrunError:
    """The exception that carries the error of a resolution, with its exit code."""
    kind = {2: UsageError, 3: NoCheckpointError, 5: IncompatibleError}[error.exit_code]
    return kind(error.message, hint=error.hint)


# ---- acts


def pin(folder: RunFolder, reference: str) -> CheckpointRecord:
    """Make the next ``fit``, ``validate`` … without ``--ckpt`` start from what ``reference`` is now.

    Raises:
        UsageError: the reference names no checkpoint (``none``), or is not understood.
        NoCheckpointError: there is no such checkpoint, or it is damaged.
        OSError: the registry cannot be written.
    """
    record = _checkpoint_of(gather(folder), reference)
    entry = pin_entry(reference, record, time.time())

    def change(registry: Registry) -> None:
        _still_there(record)
        registry.pin = entry

    _edit(folder, change)
    return record


def unpin(folder: RunFolder) -> dict[str, Any] | None:
    """Remove the pin; returns what it was, None where none stood.

    Raises:
        OSError: the registry cannot be written.
    """

    def change(registry: Registry) -> dict[str, Any] | None:
        removed, registry.pin = registry.pin, None
        return removed

    return _edit(folder, change)


def keep(folder: RunFolder, reference: str) -> CheckpointRecord:
    """Protect the checkpoint that ``reference`` is now from deletion; raises as :func:`pin`."""
    record = _checkpoint_of(gather(folder), reference)
    _own(folder, record.path)

    def change(registry: Registry) -> None:
        _still_there(record)
        if record.name not in registry.keeps:
            registry.keeps.append(record.name)

    _edit(folder, change)
    return record


def unkeep(folder: RunFolder, reference: str) -> str | None:
    """End that protection; returns the checkpoint's path, None where it was not protected.

    The folder's name, or a path to it, also ends that of one that is gone or damaged.

    Raises:
        UsageError: the reference names no checkpoint, or is not understood.
        NoCheckpointError: there is no such checkpoint.
        OSError: the registry cannot be written.
    """

    def change(registry: Registry) -> bool:
        was_kept = name in registry.keeps
        registry.keeps = [kept for kept in registry.keeps if kept != name]
        return was_kept

    name = os.path.basename(reference.rstrip("/"))
    path = os.path.join(folder.checkpoints_dir, name)
    if name not in rebuilt_registry(folder).keeps:
        path = _own(folder, checkpoint_path(folder, reference))
        name = os.path.basename(path)
    return path if _edit(folder, change) else None


def checkpoint_path(folder: RunFolder, reference: str) -> str:
    """The folder of the checkpoint that ``reference`` leads to, or would if it were whole.

    Raises:
        UsageError: the reference names no checkpoint, or is not understood.
        NoCheckpointError: there is no such checkpoint.
    """
    gathered = gather(folder, fn="validate", reference=reference, allow_fallback=False)
    gathered.registry.quarantine.clear()
    found = find(reference, gathered.facts, gathered.registry, gathered.view)
    if isinstance(found.answer, CheckpointRecord):
        return found.answer.path
    rejected = [candidate.path for candidate in found.trail.candidates if candidate.verdict == "rejected"]
    if found.error is not None and found.error.exit_code == 3 and rejected:
        return rejected[-1] if reference.startswith(("step:", "epoch:", "seq:")) else rejected[0]
    if found.error is not None:
        raise _error(gathered, reference, found.error)
    raise UsageError(
        f"{reference} is no checkpoint of ckptrun.",
        hint="Name one that is there, as in last, best or step:N.",
    )


def _error(gathered: Gathered, reference: str, error: ResolutionError) -> CkptrunError:
    """As :func:`as_error`, but that a lone word that is no file gets a hint for commands without ``--ckpt``."""
    run_dir, run = gathered.facts.run_dir, gathered.facts.run_name
    if error.exit_code != 3 or "/" in reference or parse(reference).kind != "path":
        return as_error(error)
    if RunFolder(os.path.join(os.path.dirname(run_dir), reference)).exists():
        hint = f"{reference} is a run: name a checkpoint of it, as in last --run {reference}."
    elif os.path.lexists(reference):
        return as_error(error)
    else:
        word = nearest_word(reference)
        hint = "" if word in (None, "none") else f"Did you mean {word}? "
        hint += "A checkpoint is named by last, best, step:N or a path, its run by --run NAME."
    return NoCheckpointError(f"run {run!r} has no checkpoint {reference!r}.", hint=hint)


def _checkpoint_of(gathered: Gathered, reference: str) -> CheckpointRecord:
    found = find(reference, gathered.facts, gathered.registry, gathered.view)
    if not isinstance(found.answer, CheckpointRecord):
        # What cannot be trained on can still be evaluated; and only there is nothing at all an error.
        facts = replace(gathered.facts, fn="validate")
        found = find(reference, facts, gathered.registry, gathered.view)
    if found.error is not None:
        raise _error(gathered, reference, found.error)
    if not isinstance(found.answer, CheckpointRecord):
        raise UsageError(
            f"{reference} is no checkpoint of ckptrun.",
            hint="Name one that is there, as in last, best or step:N.",
        )
    return found.answer


def _own(folder: RunFolder, path: str) -> str:
    if os.path.dirname(path) != folder.checkpoints_dir:
        raise UsageError(
            f"{path} is not a checkpoint of run {folder.name!r}, which never deletes it anyway.",
            hint="Give the --run that it belongs to.",
        )
    return path


def _still_there(record: CheckpointRecord) -> None:
    """Asked with the registry locked, under which a live run deletes."""
    if not os.path.exists(os.path.join(record.path, MANIFEST_NAME)):
        raise NoCheckpointError(
            f"{record.name} was deleted at this very moment by the run, which no longer wanted it",
            hint="`ckptrun resolve --all` lists what is there.",
        )


def _edit(folder: RunFolder, change: Callable[[Registry], T]) -> T:
    return edit(folder.registry, change, otherwise=lambda: rebuilt_registry(folder))
