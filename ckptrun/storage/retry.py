"""Which errors of a disk are worth another try, and how is it made?

What a network file system or a failing cable gives now and, asked again, may not give. Decision: a few tries with
growing waits, for reading only, and an error that stays is raised as it is: it says nothing about what is in the file.
Turned down: trying again at everything, which makes a missing file take seconds.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

# Absence and missing rights are not among them.
TRANSIENT: Final = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ECONNRESET, errno.EREMOTEIO}
)
RETRY_WAITS_S: tuple[float, ...] = (0.1, 0.5, 2.0)

T = TypeVar("T")


class Patience:
    """How often an operation may still be tried again; one for each file that is read."""

    def __init__(self) -> None:
        self._waits_s: Iterator[float] = iter(RETRY_WAITS_S)

    def again(self, error: OSError) -> bool:
        """Wait where another try is worth it; False where ``error`` stands."""
        wait_s = next(self._waits_s, None) if error.errno in TRANSIENT else None
        if wait_s is None:
            return False
        time.sleep(wait_s)
        return True


def retried(read: Callable[[], T]) -> T:
    """What ``read`` returns, tried again after an error that may pass.

    Raises:
        OSError: it stayed, or is of another kind.
    """
    patience = Patience()
    while True:
        try:
            return read()
        except OSError as error:
            if not patience.again(error):
                raise


def forget_cached(fd: int) -> None:
    """Have the next reader get a file's bytes from the disk and not from this machine's memory. A hint."""
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except (OSError, AttributeError):
        pass
