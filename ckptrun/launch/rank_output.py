"""Where does what a rank prints go? Into the rank's log, and the first rank's above the bar too.

A rank writes into two pipes, so that its stdout and stderr stay apart on the screen. Stacks of threads go from the
rank straight into the log (its file is open there too), because the process that reads the pipes may be the one that
is ending everything.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator

_LONGEST_LINE = 1 << 13  # a bar without line ends would never come out


class RankOutput:
    """The supervisor's ends of one rank's pipes, and the rank's log.

    Args:
        log_path: appended to.
        shown: takes each line and whether it came on stderr; None where nobody is shown them.
    """

    def __init__(self, log_path: str, shown: Callable[[str, bool], None] | None) -> None:
        self._shown = shown
        self._log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._theirs: list[int] = []
        self._is_error: dict[int, bool] = {}
        self._tails: dict[int, bytes] = {}
        self.log_path = log_path
        self.quiet = False  # the rank's work is done: its stderr is no longer shown
        for is_error in (False, True):
            read, write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read, False)
            self._is_error[read], self._tails[read] = is_error, b""
            self._theirs.append(write)

    def give(self) -> list[int]:
        """The rank's ends (stdout, stderr, log); :meth:`given` once it has them."""
        return [*self._theirs, self._log]

    def given(self) -> None:
        """The rank has its ends: close them here."""
        for fd in self._theirs:
            os.close(fd)
        self._theirs = []

    def fds(self) -> Iterator[int]:
        """What to wait for."""
        yield from self._is_error

    def hear(self, fd: int) -> bool:
        """Take what ``fd`` has; False where there is nothing now."""
        if fd not in self._is_error:
            return False
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        self.log(data)
        *lines, tail = (self._tails[fd] + data).split(b"\n")
        if tail and (not data or len(tail) > _LONGEST_LINE):
            lines, tail = [*lines, tail], b""
        self._tails[fd] = tail
        if self._shown is not None and not (self.quiet and self._is_error[fd]):
            for line in lines:
                self._shown(line.decode(errors="replace"), self._is_error[fd])
        if not data:
            os.close(fd)
            del self._is_error[fd]
        return bool(data)

    def drain(self) -> None:
        """Take all that is there now."""
        for fd in list(self._is_error):
            while fd in self._is_error and _readable(fd) and self.hear(fd):
                pass

    def log(self, data: bytes) -> None:
        """Into the log only."""
        try:
            os.write(self._log, data)
        except OSError:
            pass  # its disk is full; training goes on

    def close(self) -> None:
        """Take what is there and close; a child of the rank that still has the other ends is not waited for."""
        self.given()
        self.drain()
        for fd, tail in self._tails.items():
            if fd in self._is_error:
                if tail and self._shown is not None and not self.quiet:
                    self._shown(tail.decode(errors="replace"), self._is_error[fd])
                os.close(fd)
        self._is_error.clear()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


class OutputElsewhere(RankOutput):
    """The output of a rank that writes its log itself, or whose supervisor on another host does."""

    def __init__(self, log_path: str) -> None:
        self.log_path = log_path
        self.quiet = False

    def fds(self) -> Iterator[int]:
        return iter(())

    def drain(self) -> None:
        """It is drained there."""

    def log(self, data: bytes) -> None:
        """It is logged there."""

    def close(self) -> None:
        """It is closed there."""


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))
