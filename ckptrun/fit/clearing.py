"""Which of the run's checkpoints go now, and in which order does that happen?

    with the registry locked:  take over what the user decided, decide, forget, take out of every reader's sight
    after that:                the files go

So a checkpoint that `ckptrun keep` or `pin` has just named stays, and where the registry cannot be written (a full
disk, another process that has taken the run over) nothing is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.commit import remove, take_away
from ckptrun.checkpoint.retention import PASSING, decide, names_to_delete
from ckptrun.fit.context import RankContext
from ckptrun.records import CheckpointRecord
from ckptrun.run import best_k
from ckptrun.run.evals import in_use
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import HELD_REASONS, Registry


def freed(
    catalogue: Catalogue,
    registry: Registry,
    before: list[dict[str, Any]],
    now: list[dict[str, Any]],
    head: CheckpointRecord,
) -> dict[str, list[str]]:
    """What is no longer wanted where callbacks keep fewer than before, by the callback's state key.

    Args:
        before: the callbacks' entries as the registry had them.
        now: those of the callbacks as they are set now, with what they took over from before.
    """
    limits = {entry["state_key"]: entry.get("save_top_k", 1) for entry in before}
    found = {}
    for entry in now:
        was, limit = limits.get(entry["state_key"], 0), entry.get("save_top_k", 1)
        if limit == -1 or (was != -1 and was <= limit):
            continue
        others = [each for each in now if each is not entry]
        names = {save["name"] for save in registry.saves} | set(entry.get("best_k") or {})
        examined = [catalogue.examine(name) for name in sorted(names)]
        records = [each for each in examined if isinstance(each, CheckpointRecord)]
        goes = [
            set(
                names_to_delete(
                    decide(records, head, replace(registry, callbacks=callbacks), run_id=registry.run_id)
                )
            )
            for callbacks in (before, [*others, _cut(entry, limit)])
        ]
        found[entry["state_key"]] = sorted(goes[1] - goes[0])
    return {key: names for key, names in found.items() if names}


def _cut(entry: dict[str, Any], limit: int) -> dict[str, Any]:
    """The entry once the callback keeps ``limit`` of its best, as it does with its next save."""
    if limit == 0 or entry.get("monitor") is None:
        return entry
    kept = best_k.cut(entry.get("best_k") or {}, mode=entry.get("mode") or "min", limit=limit)
    return {**entry, "best_k": kept}


class Clearing:
    """Deletes what nobody wants any more; belongs to the rank that writes."""

    def __init__(
        self, context: RankContext, run: RunFolder, catalogue: Catalogue, registry: Registry
    ) -> None:
        self._context = context
        self._run = run
        self._catalogue = catalogue
        self._registry = registry
        # What an evaluation read or an attempt began from when it was not wanted any more. At the beginning all are
        # looked at: an attempt that was killed may have had no time to.
        self._look_again = {save["name"] for save in registry.saves}

    def clear(
        self, names: Iterable[str], head: CheckpointRecord | None, resumed: CheckpointRecord | None
    ) -> None:
        """Delete of ``names`` what nobody wants; and of the saves for a stop, an exception or a walltime those that
        a newer one of their kind replaces; and what an evaluation or this attempt's start kept from going before.

        Args:
            names: what a callback no longer wants.
            head: the newest committed checkpoint, which replaces what goes.
            resumed: what this attempt began from.
        """
        looked_at = list(dict.fromkeys([*names, *self._old()]))
        # A link is the user's own doing: what it leads to was moved there, and is not this run's to delete.
        looked_at = [name for name in looked_at if not os.path.islink(f"{self._run.checkpoints_dir}/{name}")]
        examined = [self._catalogue.examine(name) for name in looked_at]
        self._delete([each for each in examined if isinstance(each, CheckpointRecord)], head, resumed)

    def _old(self) -> list[str]:
        registry = self._registry
        held = set(registry.holds.values())
        return [
            save["name"]
            for save in registry.saves
            if save["name"] not in held
            and (
                save["name"] in self._look_again
                or not HELD_REASONS.isdisjoint((save["reason"], *save["notes"]))
            )
        ]

    def _delete(
        self,
        candidates: list[CheckpointRecord],
        head: CheckpointRecord | None,
        resumed: CheckpointRecord | None,
    ) -> None:
        if not candidates or head is None:
            return
        registry, folder = self._registry, self._run.checkpoints_dir
        known, look_again = registry.known(), self._look_again | {record.name for record in candidates}
        if not self.still_ours():
            self._look_again = (
                look_again  # should this process go on all the same: the disk may not have said
            )
            return
        try:
            with registry.exclusively(self._run.registry):
                decisions = decide(
                    candidates,
                    head,
                    registry,
                    run_id=self._context.run_id,
                    resumed_from=() if resumed is None else (resumed.name, resumed.path),
                    in_use=in_use(self._run),
                )
                self._look_again -= {record.name for record in candidates}
                self._look_again |= {each.name for each in decisions if each.why in PASSING}
                names = names_to_delete(decisions)
                if not names:
                    return
                registry.forget(names)
                registry.write(self._run.registry)
                trash = [self._take_away(folder, name) for name in names]
        except OSError as error:
            registry.put_back(known)
            self._look_again = look_again  # with a later save
            self._context.say(f"Nothing is deleted now: {error.filename}: {error.strerror or error}.")
            return
        for path in trash:
            if path is not None:
                remove(path)

    def _take_away(self, folder: str, name: str) -> str | None:
        try:
            trash = take_away(folder, name)
            self._registry.note_gone(name)
            return trash
        except OSError as error:
            self._context.say(f"{name} is no longer wanted and could not be deleted: {error.strerror}.")
            return None

    def still_ours(self) -> bool:
        """Whether this process may alter or delete what is there: one that was overtaken while it saved must not."""
        try:
            return self._context.may_save()
        except OSError:
            return False  # what is not deleted now goes with a later save
