"""How are the bytes of a checkpoint's files checked?

Every file has a checksum in the manifest, written ``xxh3_64:<16 hex digits>`` with its algorithm in front, so
that another can follow without a new format. It is computed while the bytes go to the disk, and compared
before they are interpreted.

Decision: XXH3, which is many times faster than a disk, against accidental damage. Turned down: SHA-256, which costs
more than the write itself and guards against somebody who could change the manifest as well; CRC32 of the zip format,
which does not cover the zip's own structure and halves the speed of a save.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
from typing import TYPE_CHECKING, Any, Final, Protocol

import xxhash

from ckptrun import faults
from ckptrun.checkpoint.past_cache import BLOCK_BYTES, PastCacheWriter
from ckptrun.errors import IncompatibleError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ALGORITHM: Final = "xxh3_64"
# Hashed and written piece by piece, so that a piece is still in the processor's cache for its second use.
CHUNK_BYTES: Final = 1 << 20
# Smaller pieces are gathered first: a zip of 10,000 tensors is written in 40,000 small pieces.
GATHER_BYTES: Final = 1 << 16

# So many bytes are left to the kernel's own pace before it is told to begin writing them.
BEGIN_BYTES: Final = 8 << 20


class RawReader(Protocol):
    """A binary file opened without buffering."""

    def readinto(self, buffer: bytearray, /) -> int | None: ...


class RawWriter(Protocol):
    """A binary file opened without buffering, or what stands before one."""

    def write(self, data: memoryview, /) -> int | None: ...

    def fileno(self) -> int: ...


class HashingWriter(io.RawIOBase):
    """A binary stream that hashes and counts what goes through it to ``raw``, a file opened without
    buffering.

    The first ``OSError`` is kept in ``error`` and raised; what is written after it is dropped. Writers in C++
    (torch's zip writer) replace the error by one of their own or go on writing while they unwind, and the
    caller needs the first cause. It cannot seek: a hash is of the bytes in their order.
    """

    def __init__(self, raw: RawWriter, path: str) -> None:
        super().__init__()
        self._gathers = isinstance(raw, PastCacheWriter)  # then it says itself when bytes are on the disk
        # Past the cache a piece is not copied after it was hashed, and each waits for the disk.
        self._piece_bytes = BLOCK_BYTES if self._gathers else CHUNK_BYTES
        self._raw = raw
        self._path = path
        self._hash = xxhash.xxh3_64()
        self._gathered = bytearray()
        self.size_bytes = 0  # on their way to the disk; what is still gathered is not in it
        self._begun_bytes = 0  # for which the kernel was told to begin
        self.error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Take all of ``data``; returns its length in bytes.

        Raises:
            OSError: the disk is full, a quota is used up, or the device failed.
        """
        view = memoryview(data).cast("B")
        if self.error is not None:
            return len(view)
        if len(view) < GATHER_BYTES:
            self._gathered += view
            if len(self._gathered) >= GATHER_BYTES:
                self.flush()
        else:
            self.flush()
            for start in range(0, len(view), self._piece_bytes):
                self._write_through(view[start : start + self._piece_bytes])
        return len(view)

    def flush(self) -> None:
        """Hand on what is gathered.

        Raises:
            OSError: as :meth:`write`.
        """
        if self._gathered and self.error is None:
            gathered, self._gathered = self._gathered, bytearray()
            self._write_through(memoryview(gathered))

    def _write_through(self, chunk: memoryview) -> None:
        first = self.size_bytes == 0
        self._hash.update(chunk)
        try:
            while chunk:
                written = self._raw.write(chunk)
                if not written:
                    raise OSError(errno.EIO, "a write took no bytes", self._path)
                self.size_bytes += written
                chunk = chunk[written:]
            if first and not self._gathers:
                faults.reach("commit:file-half", self._path)
            if self.size_bytes - self._begun_bytes >= BEGIN_BYTES:
                start_writeback(self._raw.fileno(), self._begun_bytes, self.size_bytes - self._begun_bytes)
                self._begun_bytes = self.size_bytes
        except OSError as error:
            self.error = error
            raise

    def tell(self) -> int:
        """The position in the stream, in bytes."""
        return self.size_bytes + len(self._gathered)

    def writable(self) -> bool:
        return True

    def checksum(self) -> str:
        """The checksum, as the manifest has it, of what was handed on (after :meth:`flush`: of all)."""
        return f"{ALGORITHM}:{self._hash.hexdigest()}"


def checksum_of(raw: RawReader, algorithm: str = ALGORITHM) -> tuple[str, int]:
    """The checksum and the size in bytes of the rest of ``raw``, a file opened without buffering.

    Raises:
        IncompatibleError: this version does not know the algorithm.
        OSError: the file could not be read.
    """
    if algorithm != ALGORITHM:
        raise IncompatibleError(
            f"found a checksum of the kind {algorithm!r}, expected {ALGORITHM!r}",
            hint="The checkpoint was written by a newer ckptrun; use that version or a later one.",
        )
    digest = xxhash.xxh3_64()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    size_bytes = 0
    while True:
        count = raw.readinto(buffer)
        if not count:
            return f"{ALGORITHM}:{digest.hexdigest()}", size_bytes
        digest.update(view[:count])
        size_bytes += count


@functools.cache
def _sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def start_writeback(fd: int, offset: int, size_bytes: int) -> None:
    """Have the kernel begin to write this part of a file now, and not wait for it.

    The disk then works while the next part is hashed and copied, and fsync has little left to do. A hint:
    what it returns does not matter, fsync reports every error.
    """
    function = _sync_file_range()
    if function is not None:
        function(fd, offset, size_bytes, 2)  # SYNC_FILE_RANGE_WRITE
