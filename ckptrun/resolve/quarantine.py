"""What becomes of a checkpoint that was found damaged when it was read?

    a rank reads it twice -> the attempt ends -> noted in registry.json -> resolved again: turned down, with its reason
    `ckptrun verify` reads it and finds it good -> the note is taken away

Decision: a note in the registry, by an edit that a live run beside it takes over; nothing on the disk is touched. Which
reference takes another checkpoint then and which is an error is the rules' to say: the same question is simply asked
again. Turned down: renaming the folder (whoever reads it at that moment loses it, and a disk that erred may recover),
and a list of its own of references that fall back.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.errors import CkptrunError, NoCheckpointError
from ckptrun.records import CheckpointRecord, Damage, Resolution, ResolutionError
from ckptrun.resolve.gather import rebuilt_registry
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import DamagedRegistryError, Registry, edit

_CHECKSUMS = re.compile(r"found the checksum \S+, expected [^\s,;]+")
_NEAR = 20  # so many are looked at for a good one


def found_damage(error: BaseException | None, resolution: Resolution) -> Damage | None:
    """The damage of the checkpoint that was chosen, where that is what ended the work; None otherwise."""
    damage: Damage | None = getattr(error, "damage", None)
    return damage if damage is not None and damage.checkpoint == resolution.path else None


def quarantine(folder: RunFolder, damage: Damage, run_id: str) -> str:
    """Note a damaged checkpoint of this run, so that no keyword leads to it again.

    Args:
        run_id: of the run that wrote the checkpoint, by its manifest.

    Returns:
        What was done, in one line for the user. A checkpoint of another run is left alone.
    """
    name = os.path.basename(damage.checkpoint)
    inside = os.path.realpath(os.path.dirname(damage.checkpoint)) == os.path.realpath(folder.checkpoints_dir)

    def note(registry: Registry) -> bool:
        if registry.run_id and run_id and run_id != registry.run_id:
            return False
        registry.quarantine[name] = {
            "why": shortly(damage),
            "at": time.time(),
            "file": damage.file,
            "expected": damage.expected,
            "found": damage.found,
        }
        return True

    found = f"{name} is damaged, in two reads: {shortly(damage)}"
    if not inside or not os.path.lexists(damage.checkpoint):
        return f"{found}."
    try:
        noted = edit(folder.registry, note, otherwise=lambda: rebuilt_registry(folder))
    except (OSError, CkptrunError) as error:
        return f"{found}. It could not be put into quarantine: {error}"
    if not noted:
        return f"{found}."
    return f"{found}; in quarantine until `ckptrun verify {damage.checkpoint}` finds it good."


def shortly(damage: Damage) -> str:
    """What is wrong, without the path and the checksums, which stand beside it or in the registry."""
    why = damage.why.replace(f"{damage.checkpoint}{os.sep}", "").replace(f"{damage.checkpoint}: ", "")
    return _CHECKSUMS.sub("wrong checksum", why)


def lift(folder: RunFolder, name: str) -> dict[str, Any] | None:
    """Take a checkpoint out of quarantine; returns the note, None where there was none.

    Raises:
        OSError: the registry cannot be read or written.
    """

    def change(registry: Registry) -> dict[str, Any] | None:
        return registry.quarantine.pop(name, None)

    return edit(folder.registry, change, otherwise=lambda: rebuilt_registry(folder))


def nothing_else(damage: Damage, resolution: Resolution) -> ResolutionError:
    """The answer where exactly the damaged checkpoint was asked for: which good one is near it."""
    asked = damage.checkpoint if resolution.ref is None else f"--ckpt {resolution.ref}"
    near = nearest_good(damage.checkpoint)
    hint = (
        "There is no good one near it."
        if near is None
        else f"The nearest good one is {near.path} (step {near.step}), by sizes; its checksums are compared when it "
        "is read."
    )
    return ResolutionError(NoCheckpointError.exit_code, f"{asked} cannot be used: {shortly(damage)}.", hint)


def nearest_good(path: str) -> CheckpointRecord | None:
    """The checkpoint in the same folder that is nearest to ``path`` by save counter and can be used.

    Where it is a run's folder, none that is in quarantine there.
    """
    folder, name = os.path.split(os.path.abspath(path))
    catalogue, own = Catalogue(folder), naming.parse(name)
    sequence = own.sequence if own is not None else 0

    def distance(other: str) -> int:
        parsed = naming.parse(other)
        return abs((parsed.sequence if parsed is not None else 0) - sequence)

    passed_over = {name, *_quarantined_in(folder)}
    try:
        names = sorted((other for other in catalogue.names() if other not in passed_over), key=distance)
    except NoCheckpointError:
        return None
    for other in names[:_NEAR]:
        record = catalogue.examine(other)
        if isinstance(record, CheckpointRecord):
            return record
    return None


def _quarantined_in(checkpoints_dir: str) -> set[str]:
    """What is in quarantine there; nothing where there is no registry beside it that can be read."""
    run = RunFolder(os.path.dirname(checkpoints_dir))
    if run.checkpoints_dir != checkpoints_dir:
        return set()
    try:
        return set(Registry.load(run.registry).quarantine)
    except (OSError, DamagedRegistryError):
        return set()
