"""How does a checkpoint come into a run's folder, and leave it, so that a kill at any moment does no harm?

    checkpoints/                                       a reader sees after a kill here
    1  .tmp-00000043-step-00001300.<pid>-<random>/     nothing new: names with .tmp- are nobody's checkpoint
         state.ckpt          written, hashed, fsynced    ... nothing new
         .manifest.json.tmp  written, fsynced            ... nothing new
         (fsync of the folder: its entries are durable)  ... nothing new
    2  00000043-step-00001300/                         a folder without a manifest: not committed, turned down
         (fsync of checkpoints/: the name is durable)  by every reader, and the save before it is the newest
    3    manifest.json       renamed into place        the checkpoint, whole: every byte it names is durable
         (fsync of the folder: the commit is durable)    (power loss here leaves state 2 or 3)

    What a kill leaves in state 1 or 2 the next holder of the lease sweeps away; .manifest.json.tmp says which run wrote
    a folder in state 2.

    Deleting goes the other way, in one step that readers see:
    1  00000007-step-00000200/                         the checkpoint, whole
    2  .trash-00000007-step-00000200.<pid>-<random>/   nothing; its files are removed one by one

Decision: the manifest is written last and apart from the rename, because that order also holds on an object
store, which has no rename. Each name below .tmp- and .trash- is used by one process once, so that a writer
which lost the lease and does not know it never writes between another one's files. Turned down: a pointer
file ``latest``, which can name what is not whole; writing under the final name, which every reader would have
to look into.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from errno import EDQUOT, ENOSPC, ENOTSUP
from typing import BinaryIO, Final, Protocol, cast

from ckptrun import faults
from ckptrun.checkpoint import naming
from ckptrun.checkpoint.checksum import HashingWriter
from ckptrun.checkpoint.manifest import MANIFEST_NAME, Manifest
from ckptrun.checkpoint.past_cache import PastCacheWriter
from ckptrun.errors import CkptrunError, SaveError
from ckptrun.records import FileRecord
from ckptrun.storage.files import fsync_dir

Writer = Callable[[BinaryIO], None]


class Others(Protocol):
    """Who else writes files of the same checkpoint, into the same temporary folder."""

    def begin(self, temporary: str) -> None:
        """The folder is there."""

    def wait(self) -> Sequence[FileRecord]:
        """What they have written, durable; raises what kept one of them from it."""

    def settle(self) -> None:
        """This try has failed: come back once none of them writes any more, as far as that can be waited for."""


_UNPUBLISHED: Final = f".{MANIFEST_NAME}.tmp"
_ROOM: Final = (
    "Free space on that disk, keep fewer checkpoints (save_top_k of ModelCheckpoint), "
    "or put run.root on another."
)


# Of files that are being written. A loader worker that is forked meanwhile would hold them open, and with them the
# space of a checkpoint that has long been deleted.
_being_written: Final[set[int]] = set()


def _leave_to_the_parent() -> None:
    while _being_written:
        os.close(_being_written.pop())


os.register_at_fork(after_in_child=_leave_to_the_parent)


def commit(
    checkpoints_dir: str,
    name: str,
    files: Mapping[str, Writer],
    manifest: Manifest,
    *,
    needed_bytes: int | None = None,
    last_word: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    past_cache: bool = False,
    others: Others | None = None,
) -> Manifest:
    """Write a checkpoint and commit it; the module's docstring draws the steps.

    Args:
        checkpoints_dir: the folder of the run's checkpoints, which exists. It is never created here: a root
            that is not mounted must not be mistaken for an empty one.
        name: the folder name, as :func:`ckptrun.checkpoint.naming.folder_name` makes it, not used before.
        files: for each file, its path inside the checkpoint and what writes it. The stream it is given can
            only be written to, from front to back.
        manifest: without ``files``, which are filled in here. ``saved_at`` is filled in where it is 0, and
            the seconds this took are added to ``save_s``.
        needed_bytes: what the files take at least. Where that certainly does not fit nothing is begun, for a disk
            that is filled to the brim fails everybody else who writes to it.
        last_word: called once the files are written, with the manifest that is about to be.
        past_cache: leave the kernel's page cache and the processors to those who work meanwhile.
        others: where other processes write a part of the files.

    Returns:
        The manifest as it was written.

    Raises:
        SaveError: it could not be written (disk full, quota, I/O error, a writer failed). What this call
            wrote is gone again and the earlier checkpoints are as they were.
    """
    started = time.monotonic()
    final = os.path.join(checkpoints_dir, name)
    temporary = _own_name(checkpoints_dir, naming.TEMPORARY_PREFIX, name)
    standing: str | None = None  # the folder that goes again if this fails
    try:
        faults.reach("commit:start", checkpoints_dir)
        if needed_bytes is not None and _lacks_room(checkpoints_dir, needed_bytes):
            raise OSError(ENOSPC, os.strerror(ENOSPC), checkpoints_dir)
        os.mkdir(temporary)
        standing = temporary
        faults.reach("commit:temp-made", temporary)
        if others is not None:
            others.begin(temporary)
        records = tuple(
            write_file(temporary, path, writer, past_cache=past_cache) for path, writer in files.items()
        )
        if others is not None:
            records += tuple(others.wait())
        whole = replace(
            manifest,
            files=records,
            saved_at=manifest.saved_at or time.time(),
            save_s=round(manifest.save_s + time.monotonic() - started, 3),
        )
        whole = last_word(whole)
        _write_unpublished(temporary, whole)
        _fsync_folders(temporary, (record.path for record in records))
        faults.reach("commit:temp-synced", temporary)

        _rename(temporary, final)
        standing = final
        faults.reach("commit:renamed", final)
        fsync_dir(checkpoints_dir)
        faults.reach("commit:rename-synced", final)

        _publish(final)
    except BaseException as error:
        if standing is not None:
            if others is not None and isinstance(error, Exception):
                others.settle()  # what they still write would stay
            _discard(checkpoints_dir, standing, name)
        if isinstance(error, CkptrunError) or not isinstance(error, Exception):
            raise
        raise _save_error(checkpoints_dir, name, error, needed_bytes) from error
    return whole


def write_file(folder: str, path: str, writer: Writer, *, past_cache: bool = False) -> FileRecord:
    """Write one file of a checkpoint, hash it on the way, and make its bytes durable (not yet its name).

    Args:
        folder: the temporary folder of the checkpoint.
        path: the file's path inside it; folders on the way are made, but never ``folder`` itself: a save that is given
            up must not come back.
        past_cache: as for :func:`commit`.

    Raises:
        OSError: it could not be written.
        Exception: what ``writer`` raises, unless it is the consequence of an OSError, which is raised
            instead.
    """
    target = os.path.join(folder, path)
    inner = folder
    for part in path.split(os.sep)[:-1]:
        inner = os.path.join(inner, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(inner)
    with open(target, "xb", buffering=0) as raw, _unshared(raw.fileno()):
        around = PastCacheWriter(raw, target) if past_cache else None
        stream = HashingWriter(raw if around is None else around, target)
        try:
            with stream:
                writer(cast(BinaryIO, stream))
        except Exception as error:
            if stream.error is not None and stream.error is not error:
                raise stream.error from error
            raise
        if stream.error is not None:
            raise stream.error
        if around is not None:
            around.finish()
        faults.reach("commit:file-written", target)
        os.fsync(raw.fileno())
    faults.reach("commit:file-synced", target)
    return FileRecord(path=path, size_bytes=stream.size_bytes, checksum=stream.checksum())


@contextlib.contextmanager
def _unshared(fd: int) -> Iterator[None]:
    _being_written.add(fd)
    try:
        yield
    finally:
        _being_written.discard(fd)


def preflight(folder: str, needed_bytes: int, *, what: str = "The next checkpoint") -> str | None:
    """A warning where ``folder``'s disk has less free space than ``needed_bytes``, else None.

    Args:
        what: is going to be written there.
    """
    try:
        found_bytes = free_bytes(folder)
    except OSError as error:
        return f"The free space for checkpoints in {folder} cannot be told: {error.strerror}."
    if found_bytes >= needed_bytes:
        return None
    return (
        f"{what} needs about {_in_words(needed_bytes)}, and only {_in_words(found_bytes)} "
        f"are free in {folder}. {_ROOM}"
    )


def delete(checkpoints_dir: str, name: str) -> bool:
    """Delete a checkpoint: first out of every reader's sight in one step, then its files.

    Where a file cannot be removed (a file that is open on NFS, say) the rest waits for :func:`sweep`.

    Returns:
        Whether it was there.

    Raises:
        ValueError, OSError: as :func:`take_away`.
    """
    trash = take_away(checkpoints_dir, name)
    if trash is not None:
        remove(trash)
    return trash is not None


def take_away(checkpoints_dir: str, name: str) -> str | None:
    """The first half of :func:`delete`: no reader sees the checkpoint any more.

    Returns:
        The folder to :func:`remove`; None where there was no such checkpoint.

    Raises:
        ValueError: ``name`` is not a checkpoint's name, or is a link, which ckptrun never makes.
        OSError: it could not be renamed; the checkpoint is as it was.
    """
    folder = os.path.join(checkpoints_dir, name)
    if naming.parse(name) is None or os.path.islink(folder):
        raise ValueError(f"{folder} is nothing that ckptrun wrote; only checkpoint folders are deleted")
    faults.reach("delete:start", folder)
    trash = _own_name(checkpoints_dir, naming.TRASH_PREFIX, name)
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return None
    faults.reach("delete:renamed", trash)
    # Before a byte goes: after power loss the checkpoint must not be back under its name with half its files.
    fsync_dir(checkpoints_dir)
    return trash


def remove(trash: str) -> None:
    """The second half of :func:`delete`: the files go, as far as they can."""
    try:
        os.unlink(os.path.join(trash, MANIFEST_NAME))
    except OSError:
        pass
    faults.reach("delete:half", trash)
    _remove_tree(trash)


def sweep(checkpoints_dir: str, *, run_id: str | None = None) -> list[str]:
    """Remove what killed saves and deletions left behind; only for the holder of the run's lease.

    Touches only temporary and trash folders whose names ckptrun made, folders that were renamed and never got their
    manifest, and what an addition to the newest manifests left. What cannot be removed is left for the next time.

    Args:
        run_id: this run's; a folder without a manifest goes only where it says that this run wrote it. None: none goes.

    Returns:
        The names that are gone. Empty where the folder does not exist.

    Raises:
        OSError: the folder could not be listed.
    """
    try:
        entries = os.listdir(checkpoints_dir)
    except FileNotFoundError:
        return []
    gone = []
    for entry in sorted(entries):
        folder = os.path.join(checkpoints_dir, entry)
        if not (is_leftover(entry) or (run_id and _is_unpublished(folder, entry, run_id))):
            continue
        if not os.path.islink(folder) and os.path.isdir(folder):
            faults.reach("sweep:folder", folder)
            _remove_tree(folder)
            if not os.path.lexists(folder):
                gone.append(entry)
    # Only a process's newest checkpoint is added to, and that is among these where it was killed at it.
    for name in naming.newest_first(entries)[:2]:
        _remove_additions(os.path.join(checkpoints_dir, name))
    return gone


def _remove_additions(folder: str) -> None:
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            if entry.startswith(f"{_UNPUBLISHED}-"):
                os.unlink(os.path.join(folder, entry))


def _is_unpublished(folder: str, entry: str, run_id: str) -> bool:
    """Whether a folder under a checkpoint's name is a save of this run that was killed before its commit."""
    if naming.parse(entry) is None or os.path.lexists(os.path.join(folder, MANIFEST_NAME)):
        return False
    try:
        with open(os.path.join(folder, _UNPUBLISHED), "rb") as file:
            return Manifest.from_json(file.read()).run_id == run_id
    except (OSError, CkptrunError):
        return False


def _own_name(checkpoints_dir: str, prefix: str, name: str) -> str:
    if naming.parse(name) is None:
        raise ValueError(f"{name!r} is not a checkpoint's name, which looks like 00000042-step-00001200")
    return os.path.join(checkpoints_dir, f"{prefix}{name}.{os.getpid()}-{secrets.token_hex(4)}")


def scratch_folder(checkpoints_dir: str, name: str) -> str:
    """A folder for what belongs to the making of checkpoint ``name``; the next holder of the lease sweeps it away."""
    path = _own_name(checkpoints_dir, naming.TEMPORARY_PREFIX, name)
    os.mkdir(path)
    return path


def discard_scratch(path: str) -> None:
    """Remove what :func:`scratch_folder` made."""
    _remove_tree(path)


def is_leftover(entry: str) -> bool:
    """Whether a name is one of those that a save or a deletion under way gives."""
    for prefix in (naming.TEMPORARY_PREFIX, naming.TRASH_PREFIX):
        if entry.startswith(prefix):
            return naming.parse(entry.removeprefix(prefix)) is not None
    return False


def _fsync_folders(root: str, paths: Iterable[str]) -> None:
    """Make the entries of ``root`` and of each folder on the way to ``paths`` durable, innermost first."""
    inner = set()
    for path in paths:
        while path := os.path.dirname(path):
            inner.add(path)
    for folder in sorted(inner, key=len, reverse=True):
        fsync_dir(os.path.join(root, folder))
    fsync_dir(root)


def _rename(temporary: str, final: str) -> None:
    # rename(2) would silently replace an empty folder, and nothing of ours is empty.
    if os.path.lexists(final):
        raise SaveError(
            f"{final} exists already and is never overwritten",
            hint="Another process has saved under this number. If it writes to this run, stop it; "
            "then the next save takes the next number.",
        )
    os.rename(temporary, final)


def _write_unpublished(folder: str, manifest: Manifest) -> None:
    """Write the manifest under the name that does not count yet."""
    with open(os.path.join(folder, _UNPUBLISHED), "xb") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    faults.reach("commit:manifest-written", folder)


def _publish(folder: str) -> None:
    """Give the manifest its name: from here on the checkpoint is committed."""
    os.rename(os.path.join(folder, _UNPUBLISHED), os.path.join(folder, MANIFEST_NAME))
    faults.reach("commit:manifest-renamed", folder)
    fsync_dir(folder)
    faults.reach("commit:done", folder)


def _discard(checkpoints_dir: str, standing: str, name: str) -> None:
    """Remove what a failed save wrote. An error here must not hide the one that led here."""
    try:
        trash = _own_name(checkpoints_dir, naming.TRASH_PREFIX, name)
        os.rename(standing, trash)
    except OSError:
        trash = standing
    _remove_tree(trash)


def _remove_tree(folder: str) -> None:
    """Remove ``folder`` and what is in it, as far as that is possible. Links are removed and not followed."""
    shutil.rmtree(folder, ignore_errors=True)


def _save_error(folder: str, name: str, error: Exception, needed_bytes: int | None) -> SaveError:
    """What the user is told: what failed, how much was needed and is free, and what to do."""
    if not isinstance(error, OSError):
        return SaveError(
            f"Checkpoint {name} could not be written to {folder}: {type(error).__name__}: {error}",
            hint="The earlier checkpoints are untouched.",
        )
    what = f"Checkpoint {name} could not be written to {folder}: {error.strerror or error}"
    if error.errno not in (ENOSPC, EDQUOT):
        return SaveError(
            f"{what} ({error.filename})" if error.filename else what,
            hint="The earlier checkpoints are untouched. Look at the state of that disk or mount.",
        )
    try:
        free = f"{_in_words(free_bytes(folder))} are free on that disk"
    except OSError:
        free = "what is free on that disk cannot be told"
    if error.errno == EDQUOT:
        free += ", and a quota of the user or the project is used up"
    needed = ""
    if needed_bytes is not None:
        fits = not _lacks_room(folder, needed_bytes)  # now; or what comes to the tensors does not
        needed = f"{'More than' if fits else 'About'} {_in_words(needed_bytes)} were needed; "
    return SaveError(f"{what}. {needed}{free}.", hint=f"The earlier checkpoints are untouched. {_ROOM}")


def _lacks_room(folder: str, needed_bytes: int) -> bool:
    """Whether so many bytes certainly do not fit."""
    try:
        return free_bytes(folder) < needed_bytes
    except OSError:
        return False


def free_bytes(folder: str) -> int:
    """What a user without special rights can still write, in bytes.

    Raises:
        OSError: it cannot be told; some network mounts say that they have no blocks at all.
    """
    found = os.statvfs(folder)
    if found.f_blocks == 0:
        raise OSError(ENOTSUP, os.strerror(ENOTSUP), folder)
    return found.f_bavail * found.f_frsize


def _in_words(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
