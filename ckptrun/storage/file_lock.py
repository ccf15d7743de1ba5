"""How does one process at a time do something to a file?

A lock of the kernel's on a file beside it, held for a moment. It belongs to the open file and not to the process: a
child that was forked meanwhile has the file open too, and closing it here would not end the lock while that child
lives. It is therefore always taken off.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.01
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def lock_within(fd: int, timeout_s: float) -> bool:
    """Lock for this process alone. False where the file system has no locks.

    Raises:
        BlockingIOError: another process held it for all of ``timeout_s``: it is halted, or its disk is.
        OSError: it could not be locked.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_S)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise


@contextlib.contextmanager
def locked(path: str, lock: Callable[[int], T]) -> Iterator[T]:
    """Open the lock file at ``path``, which is made where there is none, have ``lock`` lock it, and unlock it.

    Args:
        lock: given the file descriptor; what it returns is given to the caller, so it can say that it could not.

    Raises:
        OSError: it could not be opened.
        Exception: what ``lock`` raises.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield lock(fd)
    finally:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
