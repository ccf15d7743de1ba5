"""Where is it written down that a checkpoint was saved, why, and by whom; and what goes for it?

The registry, notes in the manifests from which it can be rebuilt, and the deletion of what a newer save replaces.
Belongs to the rank that writes, and there to one thread at a time: the writer's while a save is in flight, else the
one that trains. What the callbacks want is therefore passed in, and never asked of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.manifest import MANIFEST_NAME, Manifest, amend
from ckptrun.checkpoint.rebuild import catch_up, rebuild_registry
from ckptrun.errors import DamagedCheckpointError, UsageError
from ckptrun.fit.clearing import Clearing
from ckptrun.records import CheckpointRecord, SaveReason
from ckptrun.run.registry import DamagedRegistryError, Registry

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext
    from ckptrun.run.folder import RunFolder

Entries = list[dict[str, Any]]
"""The callbacks' entries for the registry, as they are now."""


class SaveBooks:
    """Registry, notes and clearing of one run."""

    def __init__(self, context: RankContext, run: RunFolder, catalogue: Catalogue) -> None:
        self._context = context
        self._run = run
        self.registry = self._load(catalogue)
        self._clearing = Clearing(context, run, catalogue, self.registry)

    def _load(self, catalogue: Catalogue) -> Registry:
        try:
            registry = Registry.load(self._run.registry)
        except FileNotFoundError:
            registry = rebuild_registry(catalogue, run_id=self._context.run_id)
        except DamagedRegistryError as error:
            self._context.say(
                f"{error}; it is rebuilt from the manifests. Pins, keeps and quarantine are lost."
            )
            registry = rebuild_registry(catalogue, run_id=self._context.run_id)
        registry.run_id = self._context.run_id
        catch_up(registry, catalogue)
        return registry

    def register(self, entries: Entries) -> None:
        """Enter the callbacks before anything is saved, so that a process that never trained knows them.

        Raises:
            UsageError: the registry cannot be written.
        """
        if entries == self.registry.callbacks and self.registry.finished is None:
            return
        self.registry.callbacks = entries
        self.registry.finished = None
        try:
            self.registry.save(self._run.registry)
        except OSError as error:
            raise UsageError(
                f"{self._run.registry} cannot be written: {error.strerror or error}.",
                hint="Check the folder's permissions and the space on its disk.",
            ) from error

    # -- saves -------------------------------------------------------------------------------------------

    def enter(
        self,
        record: CheckpointRecord,
        owner: str | None,
        save_s: float,
        entries: Entries,
        further: Sequence[tuple[SaveReason, str | None]] = (),
    ) -> None:
        """A checkpoint is committed."""
        self.registry.note_saved(record, [owner] if owner else [], save_s=save_s)
        for reason, other in further:
            self.registry.note_again(record.name, reason, other, job=self._context.job)
        self._write(entries)

    def enter_again(
        self, name: str, path: str, reason: SaveReason, owner: str | None, entries: Entries
    ) -> None:
        """A further reason for a state that is saved already."""
        self.registry.note_again(name, reason, owner, job=self._context.job)
        notes = self.notes([(reason, owner)])
        self._amend(path, lambda manifest: noted_again(manifest, notes))
        self._write(entries)

    def finish(self, path: str, finished: dict[str, Any], entries: Entries) -> None:
        """Training has come to its end, with the checkpoint at ``path``."""
        self.registry.finished = finished
        self._amend(path, lambda manifest: replace(manifest, finished=finished))
        self._write(entries)

    def notes(self, reasons: Sequence[tuple[SaveReason, str | None]]) -> list[dict[str, Any]]:
        """Reasons in the form in which a manifest has them."""
        job = self._context.job
        return [{"reason": str(reason), "owner": owner, "job": job} for reason, owner in reasons]

    # -- what goes ---------------------------------------------------------------------------------------

    def clear(
        self,
        names: Iterable[str],
        entries: Entries,
        head: CheckpointRecord | None,
        resumed: CheckpointRecord | None,
    ) -> None:
        """Delete of ``names``, and of what earlier saves for a stop left, what nobody wants; see :class:`Clearing`."""
        self.registry.callbacks = entries
        self._clearing.clear(names, head, resumed)

    # -- files -------------------------------------------------------------------------------------------

    def _amend(self, path: str, change: Callable[[Manifest], Manifest]) -> None:
        """Keep with the checkpoint what the registry is told now, so that it can be rebuilt from the manifests."""
        try:
            if self._clearing.still_ours():
                amend(path, change)
        except (OSError, DamagedCheckpointError) as error:
            self._context.say(f"{path}/{MANIFEST_NAME} could not be added to: {error}")

    def _write(self, entries: Entries) -> None:
        self.registry.callbacks = entries
        try:
            self.registry.save(self._run.registry)
        except OSError as error:
            # What is committed is committed: the registry is completed from the manifests by the next reader.
            self._context.say(f"{self._run.registry} could not be written: {error.strerror}.")


def noted_again(manifest: Manifest, notes: Sequence[dict[str, Any]]) -> Manifest:
    """``manifest`` with further reasons for its state; unchanged where it says so already."""
    first = manifest.saved_for[0] if manifest.saved_for else None
    own = {"reason": manifest.reason, "owner": first, "job": manifest.job}
    new = tuple(note for note in notes if note != own and note not in manifest.noted)
    return replace(manifest, noted=(*manifest.noted, *new))
