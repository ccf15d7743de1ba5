"""What does a checkpoint say about itself?

Decision: one small JSON file per checkpoint, written last, so that its presence is the commit and everything
that choosing needs is known without opening a tensor file. Turned down: an index of all checkpoints in the
registry, which costs more to read the longer a run lasts and is wrong after a crash between two files.

Reading is lenient towards keys it does not know (they are kept in ``extra``) and towards optional keys that
are missing, and strict towards the few that a decision rests on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ckptrun.errors import DamagedCheckpointError
from ckptrun.records import CheckpointRecord, FileRecord
from ckptrun.storage.files import write_atomic

MANIFEST_NAME = "manifest.json"
FORMAT = 1

Line = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``. Times are in seconds (``saved_at`` since 1970), sizes in bytes."""

    run_id: str
    sequence: int  # the run's save counter
    step: int
    epoch: int
    reason: str
    files: tuple[FileRecord, ...] = ()
    format: int = FORMAT
    attempt: int = 1
    parent: str | None = None  # folder name of the checkpoint before it on the line
    line: Line = ()  # save counters of this checkpoint and its ancestors, as inclusive ranges
    lease_epoch: int = 0
    fn: str = "fit"
    exact: bool = True
    weights_only: bool = False
    strategy: str = "single"
    world_size: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    saved_at: float = 0.0
    save_s: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    saved_for: tuple[str, ...] = ()  # state keys of the callbacks that asked for it
    job: str | None = None  # SLURM job or array task that wrote it
    callbacks: tuple[dict[str, Any], ...] = ()  # the registry's callback entries at that time
    loops: dict[str, Any] = field(default_factory=dict)  # epoch, batch and stage point, for a reader
    noted: tuple[dict[str, Any], ...] = ()  # {"reason", "owner", "job"}: further reasons for the same state
    finished: dict[str, Any] | None = None  # the registry's note of the end, where training ended here
    extra: dict[str, Any] = field(default_factory=dict)  # keys that this version does not know

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types, in the order of the fields."""
        value: dict[str, Any] = {"format": self.format}
        for name in _FIELDS:
            value[name] = getattr(self, name)
        value["line"] = [list(span) for span in self.line]
        value["files"] = [
            {"path": file.path, "size_bytes": file.size_bytes, "checksum": file.checksum}
            for file in self.files
        ]
        value["saved_for"] = list(self.saved_for)
        value["callbacks"] = list(self.callbacks)
        value["noted"] = list(self.noted)
        return {**self.extra, **value}

    def to_json(self) -> bytes:
        """The bytes of ``manifest.json``."""
        return json.dumps(self.to_dict(), indent=1).encode() + b"\n"

    def to_record(self, path: str) -> CheckpointRecord:
        """What choosing needs of it; ``path`` is the checkpoint's folder, absolute."""
        noted_owners = (note.get("owner") for note in self.noted)
        return CheckpointRecord(
            name=os.path.basename(path),
            path=path,
            sequence=self.sequence,
            step=self.step,
            epoch=self.epoch,
            reason=self.reason,
            exact=self.exact,
            weights_only=self.weights_only,
            metrics=self.metrics,
            parent=self.parent,
            line=self.line,
            run_id=self.run_id,
            attempt=self.attempt,
            lease_epoch=self.lease_epoch,
            saved_at=self.saved_at,
            size_bytes=sum(file.size_bytes for file in self.files),
            saved_for=tuple(dict.fromkeys((*self.saved_for, *filter(None, noted_owners)))),
            noted=tuple(str(note.get("reason")) for note in self.noted),
            job=self.job,
        )

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Manifest:
        """The manifest of a dict; missing optional keys get their defaults.

        Raises:
            DamagedCheckpointError: a required key is missing, a value has the wrong type, or the format is
                newer than this version reads.
        """
        found = _typed(value, "format", int, FORMAT)
        if found > FORMAT:
            raise DamagedCheckpointError(
                f"its manifest has format {found}, this ckptrun reads formats up to {FORMAT}",
                hint="Read it with the newer ckptrun that wrote it.",
            )
        sequence = _typed(value, "sequence", int)
        return cls(
            format=found,
            run_id=_typed(value, "run_id", str, ""),
            attempt=_typed(value, "attempt", int, 1),
            sequence=sequence,
            parent=None if value.get("parent") is None else _typed(value, "parent", str),
            # A manifest that tells no line is taken to descend from everything before it.
            line=_line(value.get("line")) or ((1, sequence),),
            lease_epoch=_typed(value, "lease_epoch", int, 0),
            step=_typed(value, "step", int),
            epoch=_typed(value, "epoch", int, 0),
            fn=_typed(value, "fn", str, "fit"),
            exact=_typed(value, "exact", bool, True),
            reason=_typed(value, "reason", str, "periodic"),
            weights_only=_typed(value, "weights_only", bool, False),
            strategy=_typed(value, "strategy", str, "single"),
            world_size=_typed(value, "world_size", int, 1),
            metrics=_metrics(_typed(value, "metrics", dict, {})),
            saved_at=float(_typed(value, "saved_at", (int, float), 0.0)),
            save_s=float(_typed(value, "save_s", (int, float), 0.0)),
            versions=_typed(value, "versions", dict, {}),
            files=tuple(_file(entry) for entry in _typed(value, "files", list)),
            saved_for=tuple(map(str, _typed(value, "saved_for", list, []))),
            job=None if value.get("job") is None else str(value["job"]),
            callbacks=tuple(
                entry for entry in _typed(value, "callbacks", list, []) if isinstance(entry, dict)
            ),
            loops=_typed(value, "loops", dict, {}),
            noted=tuple(entry for entry in _typed(value, "noted", list, []) if isinstance(entry, dict)),
            finished=None if value.get("finished") is None else _typed(value, "finished", dict),
            extra={key: entry for key, entry in value.items() if key not in _KNOWN},
        )

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """The manifest in the bytes of ``manifest.json``; raises as :meth:`from_dict`."""
        try:
            value = json.loads(data)
        except ValueError as error:  # undecodable bytes too
            raise DamagedCheckpointError(f"its manifest is not JSON ({len(data)} bytes): {error}") from None
        if not isinstance(value, dict):
            raise DamagedCheckpointError(f"its manifest is a JSON {type(value).__name__}, not an object")
        return cls.from_dict(value)


_FIELDS = tuple(entry.name for entry in fields(Manifest) if entry.name not in ("format", "extra"))
_KNOWN = frozenset(("format", *_FIELDS))


def extend_line(parent: Line, sequence: int) -> Line:
    """The line of save ``sequence`` whose parent has the line ``parent`` (empty for a fresh start).

    A counter that was handed out and never committed leaves a gap; ranges keep a line of 10,000 saves short.
    """
    if parent and parent[-1][1] == sequence - 1:
        return (*parent[:-1], (parent[-1][0], sequence))
    return (*parent, (sequence, sequence))


_REQUIRED = object()


def _typed(
    value: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED
) -> Any:
    found = value.get(key, default)
    if found is _REQUIRED:
        raise DamagedCheckpointError(f"its manifest has no {key!r}")
    # True is an int to Python, and never a step.
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise DamagedCheckpointError(f"its manifest has {key!r}: {found!r}, of the wrong type")
    return found


def _line(value: Any) -> Line:
    if not value:
        return ()
    try:
        return tuple((int(first), int(last)) for first, last in value)
    except (TypeError, ValueError):
        raise DamagedCheckpointError(f"its manifest has 'line': {value!r}, not a list of ranges") from None


def _metrics(value: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(score) for key, score in value.items() if isinstance(score, (int, float))}


def _file(value: Any) -> FileRecord:
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"its manifest lists the file {value!r}, which is not an object")
    path = _typed(value, "path", str)
    # What is read and deleted later must lie in the checkpoint's own folder.
    if not path or os.path.isabs(path) or ".." in path.split("/"):
        raise DamagedCheckpointError(f"its manifest lists the file {path!r}, outside its folder")
    return FileRecord(path, _typed(value, "size_bytes", int), _typed(value, "checksum", str, ""))


def read_manifest(folder: str) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        FileNotFoundError: there is none, so it was never committed.
        OSError: it is there or may be, and cannot be read.
        DamagedCheckpointError: it is not a manifest.
    """
    with open(os.path.join(folder, MANIFEST_NAME), "rb", buffering=0) as file:
        return Manifest.from_json(file.read())


def amend(folder: str, change: Callable[[Manifest], Manifest]) -> None:
    """Replace the manifest of a committed checkpoint by what ``change`` makes of it: what became known after the save.

    Whole and durable, so that a reader and a crash find the old or the new one.

    Raises:
        OSError: it cannot be read or written; it is as it was.
        DamagedCheckpointError: it is not a manifest.
    """
    manifest = read_manifest(folder)
    changed = change(manifest)
    if changed != manifest:
        write_atomic(os.path.join(folder, MANIFEST_NAME), changed.to_json(), durable=True)
