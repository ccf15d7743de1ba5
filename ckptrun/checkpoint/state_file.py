"""How is a state written to, and read from, ``state.ckpt`` and its siblings?

Decision: ``torch.save`` into the stream that commit hashes, without the zip format's own CRC32. The result is
an ordinary torch file, for ``torch.load`` with ``weights_only=True`` and with ``mmap=True``; its CRC fields
do not hold the CRC (``ZIP_CRC`` says so in the manifest), so ``unzip -t`` and Python's ``zipfile`` call it
damaged, and the manifest's checksum is what counts. Turned down: the CRC, which makes a save up to twice as
long; a zip writer of our own, which would have to follow torch's format. Where tensors are large, each begins at a
sector of the file, so that it goes to the disk from where it lies in memory (:mod:`ckptrun.checkpoint.past_cache`).

Reading compares the checksum of all bytes before any of them is used, and loads through the same open file, so
that what was checked is what is loaded even where the folder is deleted meanwhile. A large file is hashed by a
thread while torch reads it: with weights only, a damaged file can make that reading fail and nothing else, and
what came of it is dropped. Turned down: memory-mapping, where the first update pays for each page and a damaged
page is only met there.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, Final

import torch
from torch.utils.serialization import config

from ckptrun import faults
from ckptrun.checkpoint.checksum import RawReader, checksum_of
from ckptrun.checkpoint.past_cache import LARGE_BYTES, SECTOR_BYTES
from ckptrun.checkpoint.storages import storage_sizes
from ckptrun.errors import DamagedCheckpointError, IncompatibleError, NoCheckpointError
from ckptrun.records import Damage
from ckptrun.storage.retry import Patience, forget_cached

ZIP_CRC: Final = False  # goes into the manifest as ``zip_crc``

_HASHED_BESIDE_BYTES: Final = 32 << 20  # from here on a thread that hashes is worth its start
_options = threading.Lock()  # older torch keeps its options for the process, newer for the thread


def write_state(f: BinaryIO, state: Any) -> None:
    """Write ``state``, which has to be in the safe set (see :mod:`ckptrun.checkpoint.safe_state`), as a torch
    file.

    Args:
        f: needs ``write`` and ``flush`` only.

    Raises:
        OSError: the stream failed; where torch turns it into a RuntimeError, a stream of commit keeps the
            OSError.
    """
    sizes = storage_sizes(state)
    large = sum(sizes) >= LARGE_BYTES * max(1, len(sizes))  # on average: a sector for each is nothing then
    with _options, _without_crc(), _at_sectors() if large else contextlib.nullcontext():
        torch.save(state, f)


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(ZIP_CRC)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def _at_sectors() -> Iterator[None]:
    """Each storage begins at a sector of the file, where torch can do that."""
    options: Any = config.save
    before = getattr(options, "storage_alignment", None)
    if before is None:  # older torch
        yield
        return
    options.storage_alignment = SECTOR_BYTES
    try:
        yield
    finally:
        options.storage_alignment = before


def read_state(path: str, *, checksum: str | None = None, size_bytes: int | None = None) -> Any:
    """Read a torch file into CPU memory with ``weights_only=True``, its bytes verified first.

    Args:
        path: the file.
        checksum: what the manifest says, ``xxh3_64:<hex>``; None: not compared.
        size_bytes: what the manifest says; None: not compared.

    Raises:
        DamagedCheckpointError: in two reads the file is missing, has the wrong size or the wrong checksum, or is
            no torch file; its ``damage`` says which.
        NoCheckpointError: it may be whole and could not be read (an I/O error that stays after some retries,
            or missing rights).
        IncompatibleError: it holds objects that ``weights_only=True`` refuses, or has a checksum of a kind
            that this version does not know.
    """
    return _read_patiently(path, lambda raw: _read(raw, path, checksum, size_bytes))


def map_state(path: str, *, checksum: str | None = None, size_bytes: int | None = None) -> Any:
    """As :func:`read_state`, with tensors whose bytes stay in the file until they are used.

    All bytes are read once for the checksum, a block at a time. Not for what is trained on; for what is copied.

    Raises:
        DamagedCheckpointError, NoCheckpointError, IncompatibleError: as :func:`read_state`.
    """

    def read(raw: _File) -> Any:
        wrong = _wrong_size(raw, path, size_bytes)
        if wrong is None and checksum is not None:
            wrong = _wrong_checksum(raw, path, checksum)
        if wrong is not None:
            raise wrong
        raw.seek(0)
        return _load(raw, path, mapped=True)

    return _read_patiently(path, read)


def _read_patiently(path: str, read: Callable[[_File], Any]) -> Any:
    """What ``read`` makes of the file; again after an I/O error that may pass, and once more from the disk where it
    finds damage: a cache or the network may have erred."""
    patience, mistrusted = Patience(), False
    while True:
        try:
            with _File(path) as raw:
                try:
                    return read(raw)
                except DamagedCheckpointError:
                    if mistrusted:
                        raise
                    forget_cached(raw.fileno())
        except FileNotFoundError:
            if mistrusted:
                raise _damaged(path, f"{path} is missing") from None
        except OSError as error:
            if patience.again(error):
                continue
            raise _unreadable(path, error) from error
        mistrusted = True


def _unreadable(path: str, error: OSError) -> NoCheckpointError:
    return NoCheckpointError(
        f"{path} could not be read: {error.strerror or error}",
        hint="It may be whole. Look at that disk or mount and the file's rights, then try again.",
    )


_INSTEAD: Final = "Resume from another checkpoint of the run; `ckptrun resolve --ckpt last` lists them."


def _damaged(
    path: str, why: str, *, expected: str | None = None, found: str | None = None
) -> DamagedCheckpointError:
    folder, name = os.path.split(os.path.abspath(path))
    return DamagedCheckpointError(why, hint=_INSTEAD, damage=Damage(folder, name, why, expected, found))


class _File(io.FileIO):
    """A file for reading that remembers the disk's error; torch's reader turns it into one of its own."""

    error: OSError | None = None

    def readinto(self, buffer: Any, /) -> int | None:
        try:
            faults.reach("state:read")
            return super().readinto(buffer)
        except OSError as error:
            self.error = error
            raise


class _Beside:
    """Reads the same open file from its start, and leaves the position of others alone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._offset = 0

    def readinto(self, buffer: bytearray, /) -> int:
        faults.reach("state:read")
        count = os.preadv(self._fd, [buffer], self._offset)
        self._offset += count
        return count


def _read(raw: _File, path: str, checksum: str | None, size_bytes: int | None) -> Any:
    """Compare size and checksum, and load.

    Raises:
        DamagedCheckpointError: the bytes are not those that were written.
    """
    wrong = _wrong_size(raw, path, size_bytes)
    if wrong is not None:
        raise wrong
    found_bytes = os.fstat(raw.fileno()).st_size
    if checksum is None:
        return _load(raw, path)
    if found_bytes < _HASHED_BESIDE_BYTES:
        wrong = _wrong_checksum(raw, path, checksum)
        raw.seek(0)
        if wrong is not None:
            raise wrong
        return _load(raw, path)
    with ThreadPoolExecutor(1, "ckptrun-checksum") as pool:
        hashing = pool.submit(_wrong_checksum, _Beside(raw.fileno()), path, checksum)
        try:
            state = _load(raw, path)
        except Exception:
            wrong = hashing.result()
            if wrong is None:
                raise
            raise wrong from None
        wrong = hashing.result()
    if wrong is not None:
        raise wrong
    return state


def _wrong_size(raw: _File, path: str, size_bytes: int | None) -> DamagedCheckpointError | None:
    found_bytes = os.fstat(raw.fileno()).st_size
    if size_bytes is None or found_bytes == size_bytes:
        return None
    kind = "is truncated" if found_bytes < size_bytes else "is too long"
    return _damaged(
        path,
        f"{path} {kind}: found {found_bytes} bytes, expected {size_bytes}",
        expected=f"{size_bytes} bytes",
        found=f"{found_bytes} bytes",
    )


def _wrong_checksum(raw: RawReader, path: str, checksum: str) -> DamagedCheckpointError | None:
    found, _ = checksum_of(raw, checksum.partition(":")[0])
    if found == checksum:
        return None
    why = f"{path} is damaged: found the checksum {found}, expected {checksum}"
    return _damaged(path, why, expected=checksum, found=found)


def _load(raw: _File, path: str, *, mapped: bool = False) -> Any:
    try:
        if mapped:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return torch.load(raw, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if raw.error is not None:
            raise raw.error from error
        refused = _unsafe_names(raw)
        if refused:
            raise IncompatibleError(
                f"{path} holds objects that torch.load(weights_only=True) refuses: {', '.join(refused)}",
                hint="They would run code of their own when loaded. Save them as plain values or tensors.",
            ) from error
        reason = str(error).strip().split("\n", 1)[0]
        raise _damaged(
            path, f"{path} cannot be read as a torch file: {type(error).__name__}: {reason}"
        ) from error


def _unsafe_names(raw: _File) -> list[str]:
    raw.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(raw))
    except OSError:
        raise
    except Exception:  # no zip, or a pickle that cannot be followed: then it is damage
        return []
