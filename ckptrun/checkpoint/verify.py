"""Is every byte of a checkpoint as it was written, and is it whole?

Decision: all that a rank would meet is looked for without torch: presence, size and checksum of every file, the
structure of the torch files (their zip's directory and their pickle, calling nothing), the rank files, the line. What
is wrong is read a second time, past the cache, before it is called damage; an error of the disk is tried again and
never is damage.
Turned down: loading the files, which needs torch and memory for all of them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ckptrun import faults
from ckptrun.checkpoint import naming
from ckptrun.checkpoint.checksum import checksum_of
from ckptrun.checkpoint.manifest import MANIFEST_NAME, Manifest, extend_line, read_manifest
from ckptrun.errors import DamagedCheckpointError, IncompatibleError, NoCheckpointError
from ckptrun.inspect.torch_file import read_torch_file
from ckptrun.records import Damage, FileRecord
from ckptrun.storage.retry import Patience, forget_cached, retried

State = Literal["good", "damaged", "unreadable", "not committed"]
STATE_FILE = "state.ckpt"
_WITH_RANK_FILES = ("single", "ddp", "deepspeed")


@dataclass(frozen=True)
class Verified:
    """What was found in one checkpoint's folder.

    ``unreadable``: the disk gives errors, so nothing is known about what is there. ``size_bytes`` is what was read.
    """

    name: str
    path: str
    state: State
    sequence: int | None = None
    step: int | None = None
    num_files: int = 0
    size_bytes: int = 0
    damage: tuple[Damage, ...] = ()
    notes: tuple[str, ...] = ()
    run_id: str = ""
    lease_epoch: int = 0


class _Unreadable(Exception):  # noqa: N818 - an answer on its way
    """The disk gives an error that stays."""


def verify_checkpoint(folder: str, progress: Callable[[int], None] = lambda _: None) -> Verified:
    """Read all of the checkpoint in ``folder``; writes nothing.

    Args:
        progress: called with the number of bytes that were read since the last call.
    """
    folder = os.path.abspath(folder)
    name = os.path.basename(folder)
    parsed = naming.parse(name)
    sequence, step = (parsed.sequence, parsed.step) if parsed is not None else (None, None)
    try:
        manifest = _manifest(folder)
    except FileNotFoundError:
        why = "it has no manifest.json" if os.path.lexists(folder) else "it is gone"
        return Verified(name, folder, "not committed", sequence, step, notes=(why,))
    except OSError as error:
        return Verified(name, folder, "unreadable", sequence, step, notes=(error.strerror or str(error),))
    except DamagedCheckpointError as error:
        damage = Damage(folder, MANIFEST_NAME, error.message)
        return Verified(name, folder, "damaged", sequence, step, damage=(damage,))
    found: list[Damage] = []
    unreadable: list[str] = []
    for file in manifest.files:
        try:
            damage_of_file = _file(folder, file, progress)
        except _Unreadable as error:
            unreadable.append(str(error))
            continue
        if damage_of_file is not None:
            found.append(damage_of_file)
    if found and not os.path.lexists(os.path.join(folder, MANIFEST_NAME)):
        # A live run has deleted it while it was read.
        return Verified(name, folder, "not committed", sequence, step, notes=("it is gone",))
    found += [Damage(folder, MANIFEST_NAME, why) for why in _not_whole(folder, sequence, manifest)]
    return Verified(
        name,
        folder,
        "damaged" if found else "unreadable" if unreadable else "good",
        manifest.sequence,
        manifest.step,
        len(manifest.files),
        sum(file.size_bytes for file in manifest.files),
        tuple(found),
        (*unreadable, *_notes(folder, manifest)),
        manifest.run_id,
        manifest.lease_epoch,
    )


def _manifest(folder: str) -> Manifest:
    try:
        return retried(lambda: read_manifest(folder))
    except (DamagedCheckpointError, FileNotFoundError):
        return retried(lambda: read_manifest(folder))


# -- one file ------------------------------------------------------------------------------------------------


def _file(folder: str, file: FileRecord, progress: Callable[[int], None]) -> Damage | None:
    """What is wrong with a file in two reads; None where one of them was good.

    Raises:
        _Unreadable: the disk gives an error that stays.
    """
    first = _read(folder, file, progress)
    return None if first is None else _read(folder, file, progress)


def _read(folder: str, file: FileRecord, progress: Callable[[int], None]) -> Damage | None:
    path = os.path.join(folder, file.path)

    def damaged(why: str, expected: str | None = None, found: str | None = None) -> Damage:
        return Damage(folder, file.path, f"{file.path} {why}", expected, found)

    patience = Patience()
    while True:
        try:
            with _Counting(path, progress) as raw:
                size_bytes = os.fstat(raw.fileno()).st_size
                if size_bytes != file.size_bytes:
                    return damaged(
                        f"has {size_bytes} bytes, its manifest says {file.size_bytes}",
                        f"{file.size_bytes} bytes",
                        f"{size_bytes} bytes",
                    )
                checksum = checksum_of(raw, file.checksum.partition(":")[0])[0] if file.checksum else ""
                if checksum != file.checksum:
                    forget_cached(raw.fileno())
                    return damaged(
                        f"is damaged: found the checksum {checksum}, expected {file.checksum}",
                        file.checksum,
                        checksum,
                    )
            break
        except FileNotFoundError:
            return damaged("is missing", f"{file.size_bytes} bytes")
        except IncompatibleError as error:
            raise _Unreadable(f"{file.path}: {error.message}") from None
        except OSError as error:
            if not patience.again(error):
                raise _Unreadable(f"{file.path} cannot be read: {error.strerror or error}") from None
    if not file.path.endswith(".ckpt"):
        return None
    try:
        read_torch_file(path)
    except NoCheckpointError as error:
        if isinstance(error.__context__, OSError) and not isinstance(error, DamagedCheckpointError):
            raise _Unreadable(f"{file.path}: {error.message}") from None
        return damaged(f"cannot be read as a torch file: {error.message}")
    return None


class _Counting(io.FileIO):
    """A file for reading that tells how far it is."""

    def __init__(self, path: str, progress: Callable[[int], None]) -> None:
        super().__init__(path)
        self._progress = progress

    def readinto(self, buffer: Any, /) -> int | None:
        faults.reach("state:read")
        count = super().readinto(buffer)
        self._progress(count or 0)
        return count


# -- the whole -----------------------------------------------------------------------------------------------


def _not_whole(folder: str, sequence: int | None, manifest: Manifest) -> list[str]:
    """What the manifest does not say that it should, or says wrongly."""
    faults_found = []
    if sequence is not None and sequence != manifest.sequence:
        faults_found.append(f"its manifest is that of save {manifest.sequence}: it was copied or renamed")
    names = {file.path for file in manifest.files}
    if STATE_FILE not in names:
        faults_found.append(f"its manifest lists no {STATE_FILE}")
    if not manifest.weights_only and manifest.strategy in _WITH_RANK_FILES:
        wanted = [f"rank-{rank:04d}.ckpt" for rank in range(manifest.world_size)]
        missing = [name for name in wanted if name not in names]
        if missing:
            faults_found.append(
                f"{manifest.world_size} ranks wrote it and its manifest lists no {', '.join(missing)}"
            )
    faults_found += _wrong_line(folder, manifest)
    return faults_found


def _wrong_line(folder: str, manifest: Manifest) -> list[str]:
    line, own = manifest.line, manifest.sequence
    if line[-1][1] != own:
        return [f"its line ends with save {line[-1][1]} and not with its own, {own}"]
    if manifest.parent is None:
        return []
    parent = naming.parse(manifest.parent)
    if parent is None or not any(first <= parent.sequence <= last for first, last in line):
        return [f"its parent {manifest.parent} is not on its line"]
    try:
        before = read_manifest(os.path.join(os.path.dirname(folder), manifest.parent))
    except (OSError, DamagedCheckpointError):
        return []  # deleted since, as old ones are; or it says so itself
    if before.run_id == manifest.run_id and extend_line(before.line, own) != line:
        return [f"its line is not that of its parent {manifest.parent} and itself"]
    return []


def _notes(folder: str, manifest: Manifest) -> list[str]:
    """What is no damage and worth a word."""
    known = {MANIFEST_NAME, *(file.path.split("/")[0] for file in manifest.files)}
    try:
        others = sorted(set(os.listdir(folder)) - known)
    except OSError:
        return []
    notes = [f"holds what is not in its manifest: {', '.join(others)}"] if others else []
    if any(not file.checksum for file in manifest.files):
        notes.append("its manifest has no checksum for some files")
    if not manifest.exact:
        notes.append("does not stand at a boundary (exact: false)")
    return notes
