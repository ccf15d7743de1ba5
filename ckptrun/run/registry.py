"""What have the run's checkpoint callbacks and its user decided, for a process that never trained anything?

Decision: one JSON file, replaced whole and durably, with the newest hundred saves only, so that reading it
costs the same in a run with 10,000 checkpoints; older saves stand in their manifests. Turned down: a database
file, which network file systems break, and a list of all saves, which costs ten listings of the folder to
parse.

Two processes write it: the run that saves, and the user's `pin` and `keep` beside it. What a user decides
(pin, keeps) and what a supervisor finds (quarantine) is therefore only changed by :func:`edit`, and a run
that saves takes those three parts over from the file when somebody changed it since.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptrun.records import CheckpointRecord, SaveReason
from ckptrun.storage.file_lock import lock_within, locked
from ckptrun.storage.files import write_json_atomic

FORMAT = 1
NUM_SAVES_KEPT = 100
# The newest save of each of these reasons is held: no callback counts them, so none would keep them.
HELD_REASONS = frozenset(
    str(reason) for reason in (SaveReason.STOP, SaveReason.EXCEPTION, SaveReason.HPC, SaveReason.FINAL)
)
_LOCK_WAIT_S = 10.0
NO_JOB = ""  # the key in `hpc` of a save outside SLURM, which belongs to the run

T = TypeVar("T")
_Stamp = tuple[int, int, int]


class DamagedRegistryError(ValueError):
    """The registry file is not one; it can be rebuilt from the manifests."""


@dataclass
class Registry:
    """``registry.json``, with its keys as fields."""

    run_id: str = ""
    sequence: int = 0  # the highest save counter handed out
    callbacks: list[dict[str, Any]] = field(default_factory=list)  # in the order they were registered
    saves: list[dict[str, Any]] = field(default_factory=list)  # newest last, a hundred at most
    holds: dict[str, str] = field(default_factory=dict)  # reason -> name of the newest save for it
    pin: dict[str, Any] | None = None  # {"reference", "path", "pinned_at"}
    keeps: list[str] = field(default_factory=list)
    quarantine: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> {"why", "at"}
    hpc: dict[str, list[str]] = field(default_factory=dict)  # job key -> names, newest last
    takeovers: list[dict[str, int]] = field(default_factory=list)  # {"lease_epoch", "sequence"}
    finished: dict[str, Any] | None = None
    going: list[str] = field(default_factory=list)  # forgotten, and not seen to be deleted yet
    _stamp: _Stamp | None = field(default=None, repr=False, compare=False)

    # ---- reading and writing

    @classmethod
    def load(cls, path: str) -> Registry:
        """The registry at ``path``.

        Raises:
            FileNotFoundError: there is none.
            DamagedRegistryError: it is not JSON, or has not this shape.
            OSError: it cannot be read, which is not "there is none".
        """
        with open(path, "rb", buffering=0) as file:
            stamp = _stamp(os.fstat(file.fileno()))
            data = file.read()
        try:
            value = json.loads(data)
        except ValueError as error:
            raise DamagedRegistryError(f"{path} is not JSON: {error}") from None
        registry = cls.from_dict(value)
        registry._stamp = stamp
        return registry

    @classmethod
    def from_dict(cls, value: Any) -> Registry:
        """The registry of a dict; missing keys get their defaults, unknown ones are passed over.

        Raises:
            DamagedRegistryError: a value has the wrong shape, or the format is newer than this version reads.
        """
        if not isinstance(value, dict):
            raise DamagedRegistryError(f"the registry is a JSON {type(value).__name__}, not an object")
        found = value.get("format", FORMAT)
        if not isinstance(found, int) or found > FORMAT:
            raise DamagedRegistryError(
                f"the registry has format {found!r}, this ckptrun reads up to {FORMAT}"
            )
        registry = cls()
        for key, kind in _SHAPE.items():
            entry = value.get(key)
            if entry is None:
                continue
            if not isinstance(entry, kind):
                raise DamagedRegistryError(f"the registry's {key!r} is a {type(entry).__name__}")
            setattr(registry, key, entry)
        for key in ("callbacks", "saves", "takeovers"):
            if not all(isinstance(entry, dict) for entry in getattr(registry, key)):
                raise DamagedRegistryError(f"the registry's {key!r} holds something that is not an object")
        for entry in registry.saves:
            if not isinstance(entry.get("name"), str) or not isinstance(entry.get("sequence"), int):
                raise DamagedRegistryError("the registry lists a save without name or sequence")
        if registry.pin is not None and not isinstance(registry.pin.get("path"), str):
            raise DamagedRegistryError("the registry's pin has no path")
        return registry

    def to_dict(self) -> dict[str, Any]:
        """As JSON's types."""
        return {"format": FORMAT, **{key: getattr(self, key) for key in _SHAPE}}

    def save(self, path: str) -> None:
        """Replace the file at ``path`` durably.

        What :func:`edit` changed in the file since this object was loaded or saved is taken over first.

        Raises:
            OSError: it could not be written, or somebody has taken the run over since; the file is as it was.
        """
        with self.exclusively(path):
            self.write(path)

    @contextlib.contextmanager
    def exclusively(self, path: str) -> Iterator[None]:
        """Nobody else writes the file meanwhile, and what :func:`edit` changed in it has been taken over.

        Raises:
            OSError: it cannot be locked or read, or somebody has taken the run over since.
        """
        with _locked(path):
            self._adopt_edits(path)
            yield

    def _adopt_edits(self, path: str) -> None:
        try:
            if self._stamp is None or _stamp(os.stat(path)) == self._stamp:
                return
            theirs = Registry.load(path)
        except (FileNotFoundError, DamagedRegistryError):
            return  # what is in memory is better than that
        if _newest_epoch(theirs) > _newest_epoch(self):
            # What an overtaken holder knows is old, and what it saves from now on is ignored by all readers.
            raise OSError(errno.ESTALE, "another process has taken the run over", path)
        self.pin, self.keeps, self.quarantine = theirs.pin, theirs.keeps, theirs.quarantine

    def write(self, path: str) -> None:
        """Replace the file at ``path`` durably; only inside :meth:`exclusively`."""
        write_json_atomic(path, self.to_dict(), durable=True, indent=None, point="registry")
        self._stamp = _stamp(os.stat(path))

    # ---- what the run notes

    def reserve_sequence(self, at_least: int = 0) -> int:
        """Hand out the next save counter; ``at_least`` is the highest one seen on disk."""
        self.sequence = max(self.sequence, at_least) + 1
        return self.sequence

    def note_saved(
        self, record: CheckpointRecord, for_callbacks: Collection[str], *, save_s: float = 0.0
    ) -> None:
        """Note a committed checkpoint and the state keys of the callbacks that asked for it."""
        self.sequence = max(self.sequence, record.sequence)
        self.saves = [entry for entry in self.saves if entry["name"] != record.name]
        self.saves.append(_entry(record, for_callbacks, save_s))
        del self.saves[:-NUM_SAVES_KEPT]
        self._hold(record.name, record.reason, record.job)

    def note_forgotten(
        self, record: CheckpointRecord, for_callbacks: Collection[str], *, save_s: float = 0.0
    ) -> None:
        """Note a checkpoint that :meth:`forget` dropped and whose deletion never came; nothing holds it."""
        self.saves.append(_entry(record, for_callbacks, save_s))
        self.saves.sort(key=lambda entry: entry["sequence"])
        del self.saves[:-NUM_SAVES_KEPT]

    def note_again(
        self, name: str, reason: str, for_callback: str | None = None, *, job: str | None = None
    ) -> None:
        """Note a further reason for the state that ``name`` already holds, which is not written again."""
        entry = self.find_save(name)
        if entry is not None:
            if reason != entry["reason"] and reason not in entry["notes"]:
                entry["notes"].append(str(reason))
            if for_callback is not None and for_callback not in entry["saved_for"]:
                entry["saved_for"].append(for_callback)
        self._hold(name, reason, job)

    def _hold(self, name: str, reason: str, job: str | None) -> None:
        if reason in HELD_REASONS:
            self.holds[str(reason)] = name
        if reason == SaveReason.HPC:
            names = self.hpc.setdefault(job or NO_JOB, [])
            if name not in names:
                names.append(name)

    def forget(self, names: Collection[str]) -> None:
        """Drop every mention of checkpoints that are about to be deleted (call it before, and save); but that they go
        is kept until :meth:`note_gone`, for a kill in between leaves them on the disk."""
        self.going = [*self.going, *(name for name in names if name not in self.going)]
        self.saves = [entry for entry in self.saves if entry["name"] not in names]
        self.holds = {reason: name for reason, name in self.holds.items() if name not in names}
        kept = {job: [name for name in held if name not in names] for job, held in self.hpc.items()}
        self.hpc = {job: held for job, held in kept.items() if held}
        self.quarantine = {name: note for name, note in self.quarantine.items() if name not in names}

    def note_gone(self, name: str) -> None:
        """Note that ``name`` is no longer there; written with the next change."""
        self.going = [each for each in self.going if each != name]

    def known(self) -> tuple[Any, ...]:
        """What :meth:`forget` changes, to be put back where what follows it cannot be done."""
        return self.saves, self.holds, self.hpc, self.going

    def put_back(self, known: tuple[Any, ...]) -> None:
        """Know again what was :meth:`known`."""
        self.saves, self.holds, self.hpc, self.going = known

    def note_takeover(self, lease_epoch: int, sequence: int) -> None:
        """Note that the holder of ``lease_epoch`` took over when the save counter stood at ``sequence``."""
        self.takeovers = [entry for entry in self.takeovers if entry.get("lease_epoch") != lease_epoch]
        self.takeovers.append({"lease_epoch": lease_epoch, "sequence": sequence})
        self.sequence = max(self.sequence, sequence)  # a number that a killed save had is not given out again

    # ---- what readers ask

    @property
    def committed_ever(self) -> bool:
        """Whether it knows of a commit. The counter alone is none: a first save may have failed."""
        return bool(self.saves or self.holds or self.hpc)

    @property
    def committed_sequence(self) -> int:
        """The save counter of the newest commit it knows of, 0 where there is none."""
        return max((entry["sequence"] for entry in self.saves), default=0)

    @property
    def on_exception(self) -> bool:
        """Whether a callback that saves on an exception is registered."""
        return any(entry.get("on_exception") for entry in self.callbacks)

    @property
    def checkpoint_callbacks(self) -> list[dict[str, Any]]:
        """The entries of the callbacks that save checkpoints, in the order they were registered."""
        return [entry for entry in self.callbacks if entry.get("saves_checkpoints", True)]

    def find_save(self, name: str) -> dict[str, Any] | None:
        """The entry of a save among the newest hundred."""
        return next((entry for entry in reversed(self.saves) if entry["name"] == name), None)


def _entry(record: CheckpointRecord, for_callbacks: Collection[str], save_s: float) -> dict[str, Any]:
    return {
        "name": record.name,
        "sequence": record.sequence,
        "step": record.step,
        "epoch": record.epoch,
        "reason": record.reason,
        "notes": [],
        "metrics": dict(record.metrics),
        "size_bytes": record.size_bytes,
        "saved_at": record.saved_at,
        "save_s": save_s,
        "saved_for": list(for_callbacks),
    }


_SHAPE: dict[str, type] = {
    "run_id": str,
    "sequence": int,
    "callbacks": list,
    "saves": list,
    "holds": dict,
    "pin": dict,
    "keeps": list,
    "quarantine": dict,
    "hpc": dict,
    "takeovers": list,
    "finished": dict,
    "going": list,
}


def edit(path: str, change: Callable[[Registry], T], *, otherwise: Callable[[], Registry] = Registry) -> T:
    """Load the registry, let ``change`` alter it, and save it, with nobody else writing in between.

    Args:
        otherwise: makes the registry where the file is missing or damaged.

    Raises:
        OSError: the file cannot be read or written.
    """
    with _locked(path):
        try:
            registry = Registry.load(path)
        except (FileNotFoundError, DamagedRegistryError):
            registry = otherwise()
        result = change(registry)
        registry.write(path)
        return result


def _locked(path: str) -> contextlib.AbstractContextManager[None]:
    folder, name = os.path.split(path)
    return locked(os.path.join(folder, f".{name}.lock"), _lock)


def _lock(fd: int) -> None:
    # Some network file systems have no locks. The file is still replaced whole; only a pin set in the very moment of
    # a save could be lost.
    try:
        lock_within(fd, _LOCK_WAIT_S)
    except BlockingIOError:
        raise OSError(
            errno.EBUSY,
            f"another process has held its lock for {_LOCK_WAIT_S:g} s; it is halted, or its disk is",
            os.readlink(f"/proc/self/fd/{fd}"),
        ) from None


def _newest_epoch(registry: Registry) -> int:
    return max((takeover.get("lease_epoch", 0) for takeover in registry.takeovers), default=0)


def _stamp(stat: os.stat_result) -> _Stamp:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
