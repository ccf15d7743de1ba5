"""Which checkpoints may be deleted?

Decision: a pure function that asks of each candidate "who still wants it?" and names the first that does;
only what nobody wants may go. Turned down: counting and cutting a sorted list, which deletes the newest where
its score is poor, and another callback's, and another run's.

It is conservative on purpose: where it is not known who wanted a checkpoint, it stays.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptrun.records import CheckpointRecord, SaveReason
from ckptrun.run.registry import HELD_REASONS, Registry

# Protections that end by themselves: what they keep is looked at again at the next save.
PASSING = ("an attempt resumed from it", "an evaluation reads it")


@dataclass(frozen=True)
class Decision:
    """Whether one checkpoint may be deleted, and why or why not."""

    name: str
    delete: bool
    why: str


def decide(
    candidates: Iterable[CheckpointRecord],
    head: CheckpointRecord,
    registry: Registry,
    *,
    run_id: str,
    resumed_from: Collection[str] = (),
    in_use: Collection[str] = (),
) -> tuple[Decision, ...]:
    """What retention makes of each candidate.

    Args:
        head: the newest committed checkpoint, which replaces what goes.
        run_id: this run's; what another run wrote is never deleted.
        resumed_from: names or paths of checkpoints that an attempt started from.
        in_use: names or paths that an evaluation is reading.
    """
    decisions = []
    for record in candidates:
        why = _protection(record, head, registry, run_id, resumed_from, in_use)
        decisions.append(Decision(record.name, why is None, why or "no callback wants it any more"))
    return tuple(decisions)


def names_to_delete(decisions: Iterable[Decision]) -> list[str]:
    """The names that may go."""
    return [decision.name for decision in decisions if decision.delete]


def _protection(
    record: CheckpointRecord,
    head: CheckpointRecord,
    registry: Registry,
    run_id: str,
    resumed_from: Collection[str],
    in_use: Collection[str],
) -> str | None:
    """The first reason why ``record`` must stay, None where there is none."""
    if record.run_id != run_id:
        return "another run wrote it"
    if record.sequence >= head.sequence:
        return "the newest"
    if not record.on_line_of(head):
        return "on an abandoned line"
    # By the folder's name alone: the same path may be written in other ways, through a link for one.
    for paths, why in ((resumed_from, PASSING[0]), (in_use, PASSING[1])):
        if record.name in map(os.path.basename, paths):
            return why
    if registry.pin is not None and record.name == os.path.basename(registry.pin["path"]):
        return "pinned"
    if record.name in registry.quarantine:
        return "in quarantine"
    if record.name in registry.keeps:
        return "kept by the user"
    for reason, name in registry.holds.items():
        if name == record.name:
            return f"the newest save by {reason}"
    for entry in registry.checkpoint_callbacks:
        wish = _wish(entry, record)
        if wish is not None:
            return wish
    return _unclear(record, registry)


def _wish(entry: Mapping[str, Any], record: CheckpointRecord) -> str | None:
    """Why the callback of ``entry`` wants to keep ``record``."""
    who = entry.get("class") or entry.get("state_key")
    if entry.get("best") == record.name:
        return f"the best of {who}"
    if record.name in (entry.get("best_k") or {}):
        return f"among the best {entry.get('save_top_k')} of {who}"
    if entry.get("last") == record.name:
        return f"the last of {who}"
    return None


def _unclear(record: CheckpointRecord, registry: Registry) -> str | None:
    """Why somebody may want it of whom the callbacks' own state does not tell."""
    save = registry.find_save(record.name)
    owners = set(record.saved_for) | set(save["saved_for"] if save else ())
    reasons = {record.reason, *record.noted, *(save["notes"] if save else ())}
    known = {entry.get("state_key"): entry for entry in registry.checkpoint_callbacks}
    for owner in sorted(owners):
        if owner not in known:
            return f"saved for {owner}, which is not set now"
        if known[owner].get("save_top_k") == -1:
            return f"{known[owner].get('class') or owner} keeps every checkpoint"
    if SaveReason.MANUAL in reasons:
        return "the user asked for it"
    # Only the newest hundred saves have their later notes; an older one may be noted for such a callback.
    if save is None and any(entry.get("save_top_k") == -1 for entry in known.values()):
        return "older than the registry's notes, while a callback keeps every checkpoint"
    if not owners and not reasons & HELD_REASONS:
        return "it is not known for whom it was saved"
    return None
