"""What would the registry say, going by the manifests alone?

Decision: every manifest carries the callbacks' entries of its moment, so a registry that is lost, damaged or
older than the disk (the process died between commit and note) is completed from them; only pins, keeps and
quarantine notes are nowhere else. Turned down: refusing until a human repairs it, and a second copy of the
registry, which a crash leaves behind in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.manifest import Manifest, read_manifest
from ckptrun.errors import DamagedCheckpointError
from ckptrun.run import best_k
from ckptrun.run.registry import Registry


def rebuild_registry(catalogue: Catalogue, *, run_id: str | None = None) -> Registry:
    """A registry from all manifests on disk.

    Args:
        run_id: the run's id where it is known; else that of the newest manifest. What another run wrote is
            left out.

    Raises:
        NoCheckpointError: the folder cannot be listed.
    """
    found = list(catalogue.manifests())
    registry = Registry(run_id=run_id or (found[0][1].run_id if found else ""))
    found = [(name, manifest) for name, manifest in found if manifest.run_id == registry.run_id]
    registry.takeovers = _takeovers(manifest for _, manifest in found)
    _note(registry, found)
    # A counter handed out for what was never committed is not used twice.
    registry.sequence = max(registry.sequence, catalogue.highest_sequence())
    return registry


def catch_up(registry: Registry, catalogue: Catalogue) -> list[str]:
    """Note what was committed after the registry was last written; returns the names, oldest first.

    What was about to be deleted when the process died, and is still there, is noted as well, so that whoever trains
    next looks at it again.

    Costs nothing where the registry is up to date: only what it does not list is looked into.

    Raises:
        NoCheckpointError: the folder cannot be listed.
    """
    newest_noted = registry.committed_sequence
    oldest_noted = min((entry["sequence"] for entry in registry.saves), default=newest_noted)
    listed = {entry["name"] for entry in registry.saves}
    there = catalogue.names()
    window = itertools.takewhile(lambda name: _sequence(name) >= oldest_noted, there)
    going, registry.going = registry.going, []
    found: list[tuple[str, Manifest]] = []
    for name in dict.fromkeys((*window, *(name for name in going if name in there))):
        if name in listed:
            continue
        try:
            manifest = read_manifest(f"{catalogue.path}/{name}")
        except (OSError, DamagedCheckpointError):
            registry.going += [name] if name in going else []  # it may be readable next time
            continue
        if registry.run_id not in ("", manifest.run_id):
            continue
        if manifest.sequence > newest_noted:
            found.append((name, manifest))
        elif not _ignored(registry, manifest):
            registry.note_forgotten(manifest.to_record(name), manifest.saved_for, save_s=manifest.save_s)
    return _note(registry, found)


def _sequence(name: str) -> int:
    parsed = naming.parse(name)
    return parsed.sequence if parsed is not None else -1


def ignored_by_takeover(
    takeovers: Iterable[Mapping[str, int]], lease_epoch: int, sequence: int
) -> int | None:
    """The save counter at which the holder of ``lease_epoch`` lost the run, if ``sequence`` is past it."""
    for takeover in takeovers:
        if lease_epoch < takeover["lease_epoch"] and sequence > takeover["sequence"]:
            return takeover["sequence"]
    return None


def _ignored(registry: Registry, manifest: Manifest) -> bool:
    return ignored_by_takeover(registry.takeovers, manifest.lease_epoch, manifest.sequence) is not None


def _note(registry: Registry, found: list[tuple[str, Manifest]]) -> list[str]:
    """Note manifests, given newest first, as the run would have; returns their names, oldest first."""
    noted = []
    for name, manifest in reversed(found):
        if _ignored(registry, manifest):
            continue
        if manifest.callbacks:
            registry.callbacks = [dict(entry) for entry in manifest.callbacks]
        registry.note_saved(manifest.to_record(name), manifest.saved_for, save_s=manifest.save_s)
        for note in manifest.noted:
            registry.note_again(name, str(note.get("reason")), note.get("owner"), job=note.get("job"))
        registry.finished = manifest.finished
        for entry in registry.callbacks:
            if entry.get("state_key") in (
                *manifest.saved_for,
                *(note.get("owner") for note in manifest.noted),
            ):
                _score(entry, name, manifest)
        noted.append(name)
    return noted


def _score(entry: dict[str, Any], name: str, manifest: Manifest) -> None:
    """Count ``name`` among the best of a callback, whose entry may be from before this save."""
    if entry.get("save_last"):
        entry["last"] = name
    score = manifest.metrics.get(entry["monitor"]) if entry.get("monitor") else None
    if score is None:
        return
    scores, mode, limit = entry.get("best_k") or {}, entry.get("mode") or "min", entry.get("save_top_k", 1)
    others = {known: value for known, value in scores.items() if known != name}
    if best_k.comes_in(others, score, mode=mode, limit=limit):
        scores = best_k.entered(others, name, score, mode=mode, limit=limit)
    entry["best_k"] = best_k.cut(scores, mode=mode, limit=limit)
    first = best_k.best(entry["best_k"], mode)
    if first is not None:
        entry["best"], entry["best_score"] = first, entry["best_k"][first]


def _takeovers(manifests: Iterable[Manifest]) -> list[dict[str, int]]:
    """Each lease epoch but the first took over just before its own first save."""
    first_save: dict[int, int] = {}
    for manifest in manifests:
        known = first_save.get(manifest.lease_epoch, manifest.sequence)
        first_save[manifest.lease_epoch] = min(known, manifest.sequence)
    epochs = sorted(first_save)
    return [{"lease_epoch": epoch, "sequence": first_save[epoch] - 1} for epoch in epochs[1:]]
