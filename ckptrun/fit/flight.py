"""What is known of a save that a thread is writing, and what waits for its end?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptrun.records import CheckpointRecord, SaveReason

Reasons: TypeAlias = list[tuple[SaveReason, str | None]]
"""Why a state is saved, and for which callback."""

PositionKey: TypeAlias = tuple[int, int, int, str]
"""Step, epoch, batch and point within the epoch: which boundary a state belongs to."""


@dataclass(frozen=True)
class Ticket:
    """A name for a save that is about to be made; ``exists`` where this very state is saved already."""

    name: str
    path: str
    exists: bool
    sequence: int = 0


@dataclass
class Flight:
    """One save in flight. The training thread makes it, the writer's thread ends it.

    Until the manifest is written the training thread alone changes ``entries``, ``replaces`` and the further reasons,
    after that nobody. ``record`` is set by the writer's thread with the end, and read after that.
    """

    ticket: Ticket
    key: PositionKey | None  # of the state it holds, where training can go on from it
    owner: str | None
    size_bytes: int
    entries: list[dict[str, Any]]  # the callbacks' entries for manifest and registry
    resumed: CheckpointRecord | None  # what the attempt began from, which stays
    replaces: list[str]  # what goes once it is committed, where nobody else wants it
    blocked_s: float = 0.0  # for which training stood still
    undo: list[Callable[[], None]] = field(default_factory=list)  # what was entered for it
    noted: bool = False  # this rank has seen how it ended
    record: CheckpointRecord | None = None  # once it is committed
    # Between the two threads:
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reasons: Reasons = field(default_factory=list)  # further ones
    _manifest_written: bool = False
    _ended: bool = False
    _serves: int = 0  # the requests to save, counted from the run's start, that it answers

    # -- the training thread -----------------------------------------------------------------------------

    def joins(
        self,
        reason: SaveReason,
        owner: str | None,
        entries: list[dict[str, Any]],
        replaces: Collection[str],
    ) -> bool:
        """Whether a further reason still gets into the manifest; what it replaces goes with the rest then."""
        with self._lock:
            if self._manifest_written:
                return False
            self._reasons.append((reason, owner))
            self.replaces += replaces
            self.entries = entries
            return True

    def answers(self, count: int) -> bool:
        """Whether its end will be told to those who asked for a save; not where it has ended already."""
        with self._lock:
            if not self._ended:
                self._serves = count
            return not self._ended

    # -- the writer's thread -----------------------------------------------------------------------------

    def close_manifest(self) -> tuple[list[dict[str, Any]], Reasons]:
        """The callbacks' entries and the further reasons; what comes later comes too late for the manifest."""
        with self._lock:
            self._manifest_written = True
            return self.entries, self._reasons

    def end(self, record: CheckpointRecord | None) -> int:
        """It has ended, well where there is a record. Returns which requests to save it answers, 0 where none."""
        with self._lock:
            self.record = record
            self._manifest_written = self._ended = True
            return self._serves
