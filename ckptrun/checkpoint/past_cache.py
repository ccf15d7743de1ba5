"""How are a file's bytes written without passing through the kernel's page cache?

A save in the background shares the machine with training. Through the page cache each of its bytes is copied into a
page that has to be found first (and, in a virtual machine, often to be got from the host, which costs several times
the copy), and the pages of the data set that training reads are thrown out for it. Here the kernel hands them to the
disk from where they lie (``O_DIRECT``), a block at a time: large pieces that begin at a sector are not even copied into
a block, which would keep the interpreter from training meanwhile.

Decision: only for saves that training goes on beside. A checkpoint of a stop is read again soon, often on the same
host, and is better off in the cache. Turned down: dropping the pages after the write (``POSIX_FADV_DONTNEED``), for
they have been paid for by then.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import IO, Final

from ckptrun import faults

BLOCK_BYTES = 4 << 20
"""So much is gathered for one call; a multiple of every disk's sector."""

SECTOR_BYTES: Final = 4096
"""What is handed to the disk has to begin, in memory and in the file, and end at a multiple of this.

Not the machine's page, which may have 64 kB: torch's files cannot begin a tensor at each of those (the field of the zip
format that fills up to there holds 65,535 bytes, and torch does not notice where it takes more).
"""

LARGE_BYTES: Final = 1 << 20
"""Pieces from here on are written as they lie, for a call waits for the disk. Tensors of that size are laid out so."""

# A refused piece has cost the file system an allocation and its return, so a few in a row are enough.
_REFUSALS: Final = 3

# Kept for the next file: a page that is touched first has to be cleared, or got from the host, by the kernel.
_kept_blocks: Final[list[memoryview]] = []

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)  # Linux


class PastCacheWriter:
    """Gathers what is written into aligned blocks and hands whole ones to the disk; :meth:`finish` writes the rest.

    A large piece goes to the disk from where it lies, behind what is gathered. As long as writes go past the cache the
    file's position is at a sector, so a block that is filled up to a sector ends at one of the file. Whether a piece
    begins where the disk can read it is for the kernel to say.

    Where the file system takes no such writes, they go through its cache like any other.

    Args:
        raw: a new file, opened without buffering; nothing else may write to it.
        path: the file's, for errors.
    """

    def __init__(self, raw: IO[bytes], path: str) -> None:
        self._fd = raw.fileno()
        self._path = path
        self._begun = False
        kept = _kept_blocks.pop() if _kept_blocks else None
        # What is mapped begins at a sector.
        self._view = kept if kept is not None else memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._filled = 0
        self._direct = False
        self._untried = bool(_O_DIRECT)
        self._refused = 0  # pieces in a row that the disk could not read as they lay

    def write(self, data: memoryview, /) -> int:
        """Take a part of ``data``: what fits into the block, or all whole sectors; returns how many bytes.

        Raises:
            OSError: the disk is full, a quota is used up, or the device failed.
        """
        whole_bytes = len(data) - len(data) % SECTOR_BYTES
        large = whole_bytes >= LARGE_BYTES and self._refused < _REFUSALS
        if large and self._filled % SECTOR_BYTES == 0:
            self._try()
            if self._direct:
                count = self._hand_on_as_it_lies(data[:whole_bytes])
                if count:
                    return count
        count = min(len(data), len(self._view) - self._filled)
        self._view[self._filled : self._filled + count] = data[:count]
        self._filled += count
        if self._filled == len(self._view):
            self._try()
            self._hand_on()
        return count

    def finish(self) -> None:
        """Write what is left, which is no whole block, through the cache. Nothing can be written after it.

        Raises:
            OSError: as :meth:`write`.
        """
        self._through_cache()
        self._hand_on()
        if not _kept_blocks:
            _kept_blocks.append(self._view)
        self._view = memoryview(bytearray())

    def fileno(self) -> int:
        return self._fd

    def _hand_on_as_it_lies(self, data: memoryview) -> int:
        """Write the block and ``data`` behind it; how much of ``data`` the disk took, 0 where it is to be copied."""
        try:
            written = os.writev(self._fd, [self._view[: self._filled], data])
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFAULT):
                raise
            self._refused += 1  # it begins, or is mapped, where this disk cannot read
            return 0
        self._refused = 0
        self._has_begun()
        if written % SECTOR_BYTES:
            self._through_cache()  # a short write has left the sectors
        left = max(0, self._filled - written)
        self._view[:left] = self._view[self._filled - left : self._filled]
        count = max(0, written - self._filled)
        self._filled = left
        return count

    def _hand_on(self) -> None:
        rest = self._view[: self._filled]
        while rest:
            try:
                written = os.write(self._fd, rest)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_cache()  # this disk wants another alignment
                continue
            if not written:
                raise OSError(errno.EIO, "a write took no bytes", self._path)
            self._has_begun()
            rest = rest[written:]
            if rest and self._direct and written % SECTOR_BYTES:
                self._through_cache()  # a short write has left the block's alignment
        self._filled = 0

    def _has_begun(self) -> None:
        if not self._begun:
            self._begun = True
            faults.reach("commit:file-half", self._path)

    def _try(self) -> None:
        if self._untried:
            self._untried, self._direct = False, self._switch(on=True)

    def _through_cache(self) -> None:
        if self._direct:
            self._switch(on=False)
            self._direct = False

    def _switch(self, *, on: bool) -> bool:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        except OSError:
            return False
        return on
