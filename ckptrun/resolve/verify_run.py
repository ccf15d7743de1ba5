"""Is everything in a run's folder whole, and what would be used where something is not?

Decision: checkpoints are read in full, the small files are parsed, and the registry is compared with the disk; nothing
is repaired, as the next start does that, but for one thing: a checkpoint in quarantine that is found good is taken out,
because that is how a user says that the disk was mended. Turned down: putting what is damaged into quarantine, which a
command that looks should not decide for a run that trains.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.commit import is_leftover
from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.checkpoint.rebuild import catch_up, ignored_by_takeover
from ckptrun.checkpoint.verify import Verified, verify_checkpoint
from ckptrun.errors import CkptrunError, DamagedCheckpointError, NoCheckpointError
from ckptrun.records import CheckpointRecord, FreshStart
from ckptrun.resolve.gather import gather, resolve_gathered
from ckptrun.resolve.quarantine import lift, nearest_good
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import live_holder
from ckptrun.run.registry import DamagedRegistryError, Registry
from ckptrun.storage.retry import retried

FileState = Literal["good", "damaged", "unreadable", "missing"]
_MOST_LISTINGS = 5  # of a run that has deleted all that was listed before it could be read
_STALE_S = 0.5  # a lease of another host: whether a folder is being written is worth no more


@dataclass(frozen=True)
class FileReport:
    """One of the run's small files."""

    path: str
    state: FileState
    what: str = ""


@dataclass
class Report:
    """What was looked at. ``instead``: where something is damaged, a reference and the path that it leads to now."""

    kind: Literal["checkpoint", "run"]
    target: str
    checkpoints: list[Verified] = field(default_factory=list)
    files: list[FileReport] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lifted: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # known to the registry, and not on the disk
    quarantined: dict[str, str] = field(default_factory=dict)  # name -> why, as it stands after this
    instead: dict[str, str | None] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether nothing is damaged, all could be read, and not everything that was saved is gone."""
        return (
            not self.all_gone
            and all(each.state in ("good", "not committed") for each in self.checkpoints)
            and all(each.state in ("good", "missing") for each in self.files)
        )

    @property
    def all_gone(self) -> bool:
        """Whether the run has saved, and none of it is there."""
        return bool(self.gone) and all(each.state == "not committed" for each in self.checkpoints)

    def as_dict(self) -> dict[str, Any]:
        """The document of ``verify --json``."""
        return {
            "kind": self.kind,
            "target": self.target,
            "good": self.good,
            "checkpoints": [
                {
                    "name": each.name,
                    "path": each.path,
                    "sequence": each.sequence,
                    "step": each.step,
                    "state": each.state,
                    "num_files": each.num_files,
                    "size_bytes": each.size_bytes,
                    "damage": [
                        {"file": d.file, "why": d.why, "expected": d.expected, "found": d.found}
                        for d in each.damage
                    ],
                    "notes": list(each.notes),
                    "quarantined": self.quarantined.get(each.name),
                }
                for each in self.checkpoints
            ],
            "files": [{"path": each.path, "state": each.state, "what": each.what} for each in self.files],
            "gone": self.gone,
            "leftovers": self.leftovers,
            "lifted": self.lifted,
            "notes": self.notes,
            "instead": self.instead,
        }


Progress = Callable[[str, int, int], None]  # name, bytes read, bytes in all


def verify_one(path: str, progress: Progress = lambda *_: None) -> Report:
    """Verify the checkpoint in the folder ``path``.

    Raises:
        NoCheckpointError: no checkpoint was ever committed there.
    """
    path = os.path.abspath(path)
    report = Report("checkpoint", path)
    report.checkpoints = _verify_all([path], progress)
    (found,) = report.checkpoints
    if found.state == "not committed":
        raise NoCheckpointError(
            f"{path} is no checkpoint: {'; '.join(found.notes)}",
            hint="A checkpoint is a folder with a manifest.json. `ckptrun inspect` looks into other files.",
        )
    folder = _run_of(path)
    if folder is not None:
        _quarantine(report, folder)
    if found.state != "good":
        if folder is not None and os.path.exists(folder.run_json):
            _instead(report, folder)
        else:
            near = nearest_good(path)
            report.instead["nearest"] = None if near is None else near.path
    return report


def verify_run(folder: RunFolder, progress: Progress = lambda *_: None) -> Report:
    """Verify everything in a run's folder.

    Raises:
        NoCheckpointError: the folder of checkpoints cannot be listed.
    """
    report = Report("run", folder.path)
    catalogue = Catalogue(folder.checkpoints_dir)
    for _ in range(_MOST_LISTINGS):
        catalogue.refresh()
        paths = [os.path.join(catalogue.path, name) for name in catalogue.names()]
        found = _verify_all(paths, progress)
        # What is gone meanwhile was deleted by a live run.
        report.checkpoints = [each for each in found if os.path.lexists(each.path)]
        if report.checkpoints or not paths:
            break
    report.leftovers = _leftovers(folder, report.checkpoints)
    registry = _registry(report, folder, catalogue)
    report.files += [
        _parsed(folder.run_json, lambda value: value["id"]),
        _parsed(folder.lease, lambda value: (int(value["epoch"]), value["holder"])),
        _parsed(folder.status, lambda value: value["status"]),
        _ledger(folder.attempts),
        _readable(folder.config_yaml),
    ]
    if registry is not None:
        _overtaken(report, registry)
    _quarantine(report, folder)
    if any(each.state != "good" for each in report.checkpoints if each.state != "not committed"):
        _instead(report, folder)
    return report


def _verify_all(paths: Sequence[str], progress: Progress) -> list[Verified]:
    sizes = [_size(path) for path in paths]
    total, done, verified = sum(sizes), 0, []
    for path, size in zip(paths, sizes, strict=True):
        read = 0

        def count(num_bytes: int, name: str = os.path.basename(path), before: int = done) -> None:
            nonlocal read
            read += num_bytes
            progress(name, before + read, total)

        verified.append(verify_checkpoint(path, count))
        done += size
    return verified


def _size(path: str) -> int:
    try:
        return sum(file.size_bytes for file in read_manifest(path).files)
    except (OSError, DamagedCheckpointError):
        return 0


def _run_of(path: str) -> RunFolder | None:
    """The run that a checkpoint's folder lies in, None where it lies elsewhere."""
    parent = os.path.dirname(path)
    return RunFolder(os.path.dirname(parent)) if os.path.basename(parent) == "checkpoints" else None


# -- what the run's other files say ----------------------------------------------------------------------------


def _leftovers(folder: RunFolder, checkpoints: Sequence[Verified]) -> list[str]:
    try:
        entries = sorted(filter(is_leftover, os.listdir(folder.checkpoints_dir)))
    except OSError:
        entries = []
    left = [*entries, *(each.name for each in checkpoints if each.state == "not committed")]
    if not left:
        return []
    whose = "a live run may be writing it" if _lives(folder) else "a save or a deletion that was killed"
    return [f"{name}: {whose}" for name in left]


def _lives(folder: RunFolder) -> bool:
    try:
        return live_holder(folder.lease, stale_after_s=_STALE_S) is not None
    except OSError:
        return False


def _registry(report: Report, folder: RunFolder, catalogue: Catalogue) -> Registry | None:
    try:
        registry = retried(lambda: Registry.load(folder.registry))
    except FileNotFoundError:
        report.files.append(FileReport(folder.registry, "missing"))
        if catalogue.names():
            report.notes.append(
                "registry.json is missing: the next start rebuilds it from the manifests (pins, keeps and quarantine "
                "notes are not in them)"
            )
        return None
    except DamagedRegistryError as error:
        what = f"{error}; the next start rebuilds it from the manifests, without pins, keeps and quarantine notes"
        report.files.append(FileReport(folder.registry, "damaged", what))
        return None
    except OSError as error:
        report.files.append(FileReport(folder.registry, "unreadable", error.strerror or str(error)))
        return None
    report.files.append(FileReport(folder.registry, "good"))
    registry = _what_is_gone(report, folder, registry, catalogue)
    if registry.pin is not None and not os.path.exists(registry.pin["path"]):
        report.notes.append(f"the pin leads nowhere: {registry.pin['path']}")
    behind = catch_up(registry, catalogue)
    if behind and not _lives(folder):  # a live one notes a save when it has landed
        report.notes.append(f"the registry is behind the disk: {', '.join(behind)} not noted yet")
    return registry


def _what_is_gone(report: Report, folder: RunFolder, registry: Registry, catalogue: Catalogue) -> Registry:
    """Say what the registry knows and the disk lacks; returns the registry as it is after that.

    A live run forgets a checkpoint before it deletes it. So what an older registry knew, a later listing lacks and a
    registry read after that still knows has been taken away by somebody else.
    """
    catalogue.refresh()
    on_disk = set(catalogue.names())
    try:
        now = Registry.load(folder.registry)
    except (OSError, DamagedRegistryError):
        now = registry
    known = {save["name"] for save in registry.saves}
    report.gone = sorted((known - on_disk) & {save["name"] for save in now.saves})
    if report.gone:
        report.notes.append(
            f"known to the registry, gone from the disk: {', '.join(report.gone)} (not by ckptrun, which notes what it "
            "deletes)"
        )
    named = _named(now)
    for what, names in _named(registry).items():
        lost = sorted((set(names) - on_disk - known) & set(named[what]))
        if lost:
            report.notes.append(f"{what} in the registry, gone from the disk: {', '.join(lost)}")
    return now


def _named(registry: Registry) -> dict[str, list[str]]:
    best = [name for entry in registry.callbacks for name in (entry.get("best_k") or {})]
    return {"kept": registry.keeps, "among the best": best, "in quarantine": list(registry.quarantine)}


def _overtaken(report: Report, registry: Registry) -> None:
    for each in report.checkpoints:
        parsed = naming.parse(each.name)
        if parsed is None or each.state == "not committed":
            continue
        past = ignored_by_takeover(registry.takeovers, each.lease_epoch, parsed.sequence)
        if past is not None:
            report.notes.append(
                f"{each.name} is ignored: written after the run was taken over at save {past}"
            )
        elif registry.run_id and each.run_id and each.run_id != registry.run_id:
            report.notes.append(f"{each.name} is ignored: written by another run ({each.run_id})")


def _parsed(path: str, look: Callable[[Any], object]) -> FileReport:
    def read() -> Any:
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    try:
        look(retried(read))
    except (FileNotFoundError, NotADirectoryError):
        return FileReport(path, "missing")
    except OSError as error:
        return FileReport(path, "unreadable", error.strerror or str(error))
    except (ValueError, KeyError, TypeError) as error:
        return FileReport(path, "damaged", f"{type(error).__name__}: {error}")
    return FileReport(path, "good")


def _ledger(path: str) -> FileReport:
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return FileReport(path, "missing")
    except OSError as error:
        return FileReport(path, "unreadable", error.strerror or str(error))
    torn = 0
    for line in filter(None, lines):
        try:
            json.loads(line)
        except ValueError:
            torn += 1
    return FileReport(path, "good", f"{torn} torn lines of writers that died are passed over" if torn else "")


def _readable(path: str) -> FileReport:
    try:
        with open(path, "rb") as file:
            file.read()
    except FileNotFoundError:
        return FileReport(path, "missing")
    except OSError as error:
        return FileReport(path, "unreadable", error.strerror or str(error))
    return FileReport(path, "good")


# -- quarantine, and what is left --------------------------------------------------------------------------------


def _quarantine(report: Report, folder: RunFolder) -> None:
    """Take out of quarantine what was found good; note what stays in it."""
    try:
        notes = Registry.load(folder.registry).quarantine
    except (OSError, DamagedRegistryError):
        return
    for each in report.checkpoints:
        if each.name not in notes:
            continue
        if each.state == "good":
            try:
                lift(folder, each.name)
                report.lifted.append(each.name)
                continue
            except OSError as error:
                report.notes.append(
                    f"{each.name} is good and could not be taken out of quarantine: {error.strerror or error}"
                )
        report.quarantined[each.name] = str(notes[each.name].get("why", "damaged"))


def _instead(report: Report, folder: RunFolder) -> None:
    """What `last` and `best` lead to without what is not good."""
    bad = {
        each.name: {"why": each.damage[0].why if each.damage else "cannot be read"}
        for each in report.checkpoints
        if each.state in ("damaged", "unreadable")
    }
    for reference in ("last", "best"):
        try:
            gathered = gather(folder, fn="validate", reference=reference, allow_fallback=True)
            gathered.registry.quarantine.update(bad)
            resolution = resolve_gathered(gathered)
        except CkptrunError:
            continue
        if isinstance(resolution.answer, FreshStart) or (
            reference == "best" and resolution.error is not None
        ):
            continue
        answer = resolution.answer
        report.instead[reference] = answer.path if isinstance(answer, CheckpointRecord) else None
