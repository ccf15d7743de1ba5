"""Which checkpoints are really on disk, and can each be used?

Decision: one listing gives all names, and only those that a question needs are looked into, newest first, so
that `last` costs one listing, one manifest and a stat for each file in it, however long the run. Turned down:
reading every manifest first (seconds in a run with 10,000), and trusting the registry's list, which is wrong
after a crash or when a user moved a folder.

A folder that is not there is empty; a folder that cannot be read is an error, never "absent".
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from functools import partial
from typing import TypeAlias

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.manifest import Manifest, read_manifest
from ckptrun.errors import DamagedCheckpointError, NoCheckpointError
from ckptrun.records import CheckpointRecord, RejectedRecord
from ckptrun.storage.retry import retried

Examined: TypeAlias = CheckpointRecord | RejectedRecord


class Catalogue:
    """The checkpoints in one folder, listed once; :meth:`refresh` lists again.

    Args:
        checkpoints_dir: the run's ``checkpoints`` folder; need not exist.
    """

    def __init__(self, checkpoints_dir: str) -> None:
        self.path = os.path.abspath(checkpoints_dir)
        self._names: list[str] | None = None

    def names(self) -> list[str]:
        """The names of all checkpoint folders, committed or not, highest save counter first.

        Raises:
            NoCheckpointError: the folder is there, or may be, and cannot be listed.
        """
        if self._names is None:
            try:
                entries = retried(lambda: os.listdir(self.path))
            except FileNotFoundError:
                entries = []
            except OSError as error:
                raise NoCheckpointError(
                    f"{self.path} cannot be listed: {error.strerror or error}",
                    hint="Whether there are checkpoints is not known, so nothing is started. "
                    "Mend the access to the folder, then try again.",
                ) from error
            self._names = naming.newest_first(entries)
        return self._names

    def refresh(self) -> None:
        """Forget the listing; the next question lists again."""
        self._names = None

    def highest_sequence(self) -> int:
        """The highest save counter in use, committed or not; 0 where there is none."""
        names = self.names()
        parsed = naming.parse(names[0]) if names else None
        return parsed.sequence if parsed else 0

    def examine(self, name: str) -> Examined:
        """Whether the checkpoint ``name`` can be used: committed, no file missing, each of the right size."""
        return examine(os.path.join(self.path, name))

    def newest_first(self, ignore: Collection[str] = ()) -> Iterator[Examined]:
        """Every checkpoint but those in ``ignore``, each examined when its turn comes."""
        for name in self.names():
            if name not in ignore:
                yield self.examine(name)

    def manifests(self) -> Iterator[tuple[str, Manifest]]:
        """Name and manifest of every committed checkpoint, newest first; what cannot be read is left out."""
        for name in self.names():
            try:
                yield name, read_manifest(os.path.join(self.path, name))
            except (OSError, DamagedCheckpointError):
                continue


def examine(folder: str) -> Examined:
    """The record of the checkpoint in ``folder`` (an absolute path, anywhere), or why it cannot be used.

    Checksums are not read here: that costs as much as loading, and whoever loads reads the bytes anyway.
    """
    name = os.path.basename(folder)
    parsed = naming.parse(name)
    sequence = parsed.sequence if parsed else None

    def rejected(why: str, *, committed: bool = False, unreadable: bool = False) -> RejectedRecord:
        step = parsed.step if parsed else None
        return RejectedRecord(name, folder, sequence, why, step, committed=committed, unreadable=unreadable)

    try:
        manifest = retried(lambda: read_manifest(folder))
    except FileNotFoundError:
        if not os.path.lexists(folder):
            return rejected("gone")
        return rejected("not committed: it has no manifest.json")
    except NotADirectoryError:
        return rejected("not a folder")
    except OSError as error:
        return rejected(f"cannot be read: {error.strerror or error}", committed=True, unreadable=True)
    except DamagedCheckpointError as error:
        return rejected(f"damaged: {error.message}", committed=True)
    if sequence is not None and sequence != manifest.sequence:
        return rejected(f"its manifest is that of save {manifest.sequence}: the folder was copied or renamed")
    fault, unreadable = fault_in_files(folder, manifest)
    if fault is not None:
        return RejectedRecord(
            name,
            folder,
            manifest.sequence,
            fault,
            manifest.step,
            manifest.reason,
            committed=True,
            unreadable=unreadable,
            line=manifest.line,
        )
    return manifest.to_record(folder)


def fault_in_files(folder: str, manifest: Manifest) -> tuple[str | None, bool]:
    """What is wrong with the files, None where nothing is; and whether that is an I/O error. Bytes are not read."""
    for file in manifest.files:
        try:
            size_bytes = retried(partial(os.stat, os.path.join(folder, file.path))).st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"lacks its file {file.path}", False
        except OSError as error:
            return f"{file.path} cannot be read: {error.strerror or error}", True
        if size_bytes != file.size_bytes:
            return f"{file.path} has {size_bytes} bytes, its manifest says {file.size_bytes}", False
    return None, False
