"""Which candidates were looked at, and what speaks against each?

Decision: whoever looks something up writes into one trail, in the order of looking, so that the explanation a
user reads is the search itself and not a second account of it. Turned down: explaining afterwards, which
drifts from what was really done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.rebuild import ignored_by_takeover
from ckptrun.records import Candidate, CheckpointRecord, RejectedRecord
from ckptrun.resolve.facts import Examined
from ckptrun.run.registry import Registry

Verdict: TypeAlias = Literal["taken", "rejected", "not reached"]

QUARANTINED = "quarantined: "
ABANDONED = "on an abandoned line: the run went on from an earlier checkpoint"


@dataclass(frozen=True)
class Line:
    """The current line: the newest committed checkpoint (its head) and its ancestors."""

    head: str
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, record: Examined) -> Line | None:
        """The line that ``record`` heads, None where it was never committed or its line cannot be read."""
        if isinstance(record, RejectedRecord) and not record.line:
            return None
        return cls(record.name, record.line)

    def holds(self, name: str, sequence: int | None) -> bool:
        """Whether a checkpoint is on it; without spans everything before the head is."""
        if name == self.head or not self.spans or sequence is None:
            return True
        return any(first <= sequence <= last for first, last in self.spans)


def current_line(records: Iterable[Examined]) -> Line | None:
    """The line of the newest committed checkpoint among ``records``, which come newest first."""
    return next((line for line in map(Line.of, records) if line is not None), None)


def screen(record: Examined, registry: Registry, run_id: str) -> Examined:
    """``record``, turned down where the registry holds something against it.

    A quarantined checkpoint still says which line is the current one; what another run or an overtaken holder
    of the lease wrote does not.
    """
    if isinstance(record, CheckpointRecord):
        ignored = ignored_by_takeover(registry.takeovers, record.lease_epoch, record.sequence)
        if ignored is not None:
            why = f"written after the run was taken over from its writer at save {ignored}"
            return reject(record, why, committed=False, line=())
        if run_id and record.run_id != run_id:
            return reject(record, f"written by another run ({record.run_id or 'without an id'})", line=())
    note = registry.quarantine.get(record.name)
    if note is not None and not (isinstance(record, RejectedRecord) and not record.committed):
        return reject(record, f"{QUARANTINED}{note.get('why', 'damaged')}")
    return record


def reject(
    record: Examined, why: str, *, committed: bool = True, line: tuple[tuple[int, int], ...] | None = None
) -> RejectedRecord:
    """``record``, turned down for ``why``."""
    if isinstance(record, RejectedRecord):
        return replace(record, why=why)
    return RejectedRecord(
        record.name,
        record.path,
        record.sequence,
        why,
        record.step,
        record.reason,
        committed=committed,
        line=record.line if line is None else line,
    )


class Trail:
    """The candidates that were looked at, in that order, each with its verdict."""

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []
        self.seen: dict[str, str] = {}  # name -> path
        self.committed = False  # something that was turned down had been committed by this run

    def turn_down(self, record: Examined, why: str | None = None) -> None:
        """Note that ``record`` cannot be the answer; ``why`` defaults to its own reason."""
        if isinstance(record, RejectedRecord):
            self.committed |= record.committed
            self._note(record, record.reason_saved, "rejected", why or record.why)
        else:
            self.committed = True
            self._note(record, record.reason, "rejected", why or "")

    def turn_down_gone(self, save: Mapping[str, Any], path: str) -> None:
        """Note a checkpoint that the registry knows (its entry is ``save``) and the disk has not."""
        self.committed = True
        self.seen[save["name"]] = path
        why = "known to the registry, gone from the disk"
        self.candidates.append(
            Candidate(path, save.get("step"), save["sequence"], save.get("reason"), "rejected", why)
        )

    def take(self, record: CheckpointRecord, why: str) -> None:
        """Note the answer."""
        self._note(record, record.reason, "taken", why)

    def _note(self, record: Examined, reason: str | None, verdict: Verdict, why: str) -> None:
        self.seen[record.name] = record.path
        self.candidates.append(Candidate(record.path, record.step, record.sequence, reason, verdict, why))

    def rejections(self, limit: int = 3) -> str:
        """The first few reasons, for a message."""
        lines = [f"{c.path.rsplit('/', 1)[-1]}: {c.why}" for c in self.candidates if c.verdict == "rejected"]
        more = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
        return "; ".join(lines[:limit]) + more


def not_reached(
    names: Sequence[str],
    trail: Trail,
    registry: Registry,
    path_of: Callable[[str], str],
    limit: int | None,
    why: Callable[[str], str],
) -> tuple[list[Candidate], int]:
    """The first ``limit`` candidates that were not looked at (all where None), and how many there are.

    Nothing is read for them: what is told comes from the registry's newest saves and from the names.
    """
    # A checkpoint outside the run may have the same name.
    seen = {name for name, path in trail.seen.items() if path_of(name) == path}
    # A handful of questions is cheaper asked of the list, whose first names they are about, than 10,000
    # hashes.
    known = names if len(seen) <= 4 else set(names)
    num = len(names) - sum(name in known for name in seen)
    saves = {save["name"]: save for save in registry.saves}
    listed: list[Candidate] = []
    for name in names:
        if limit is not None and len(listed) >= limit:
            break
        if name not in seen:
            step, sequence, reason = _told(name, saves)
            listed.append(Candidate(path_of(name), step, sequence, reason, "not reached", why(name)))
    return listed, num


def _told(name: str, saves: dict[str, dict[str, Any]]) -> tuple[int | None, int | None, str | None]:
    """Step, save counter and reason of a checkpoint without looking into it."""
    save = saves.get(name)
    if save is not None:
        return save.get("step"), save["sequence"], save.get("reason")
    parsed = naming.parse(name)
    return (parsed.step, parsed.sequence, None) if parsed else (None, None, None)
