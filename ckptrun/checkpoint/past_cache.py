"""How are a file's bytes written without passing through the kernel's page cache?

A save in the background shares the machine with training. Through the page cache each of its bytes is copied into a
page that has to be found first (and, in a virtual machine, often to be got from the host, which costs several times
the copy), and the pages of the data set that training reads are thrown out for it. Here the kernel hands them to the
disk from where they lie (``O_DIRECT``), a block at a time.

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
"""So much is written by one call; a multiple of every disk's sector."""

# Kept for the next file: a page that is touched first has to be cleared, or got from the host, by the kernel.
_kept_blocks: Final[list[memoryview]] = []

_O_DIRECT: Final = getattr(os, "O_DIRECT", 0)  # Linux


class PastCacheWriter:
    """Gathers what is written into aligned blocks and hands whole ones to the disk; :meth:`finish` writes the rest.

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
        # What is mapped begins at a page.
        self._view = kept if kept is not None else memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._filled = 0
        self._direct = False
        self._untried = bool(_O_DIRECT)

    def write(self, data: memoryview, /) -> int:
        """Take as much of ``data`` as fits into the block; returns how many bytes.

        Raises:
            OSError: the disk is full, a quota is used up, or the device failed.
        """
        count = min(len(data), len(self._view) - self._filled)
        self._view[self._filled : self._filled + count] = data[:count]
        self._filled += count
        if self._filled == len(self._view):
            if self._untried:
                self._untried, self._direct = False, self._switch(on=True)
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
            if not self._begun:
                self._begun = True
                faults.reach("commit:file-half", self._path)
            rest = rest[written:]
            if rest and self._direct and written % mmap.PAGESIZE:
                self._through_cache()  # a short write has left the block's alignment
        self._filled = 0

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
