"""How do supervisor, fork server and ranks talk to each other? Lines of JSON over a socket pair.

Decision: JSON, one line a message, because a torn or foreign message is then an error that can be read, and the
supervisor needs nothing of torch to understand it. Turned down: ``multiprocessing`` connections, which unpickle
whatever arrives, in a process that must not import the user's code.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end of a connection. Sending is safe from any thread; receiving belongs to one.

    Args:
        longest: how long a message may be, in bytes; None for any length. It may be set later.
    """

    def __init__(self, sock: socket.socket, *, longest: int | None = None) -> None:
        self.longest = longest
        self._socket = sock
        self._lock = threading.Lock()
        self._buffer = b""
        self.closed = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel for this process, and the socket that another process makes its end of."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, op: str, **fields: Any) -> bool:
        """Send one message; False where the other side is gone."""
        data = json.dumps({"op": op, **fields}).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """Messages that have arrived; blocks for the first bytes. Sets ``closed`` at the end of the connection.

        Raises:
            ValueError: what has arrived is no message, or too long.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if self.longest is not None and any(len(line) > self.longest for line in (*lines, self._buffer)):
            raise ValueError(f"a message of more than {self.longest} bytes")
        return [_message(line) for line in lines]

    def messages(self) -> Iterator[Message]:
        """Every message until the other side is gone."""
        while not self.closed:
            yield from self.receive()

    def close(self) -> None:
        self.closed = True
        try:
            self._socket.close()
        except OSError:
            pass


def _message(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message that is {type(message).__name__}")
    return message


def send_with_fds(sock: socket.socket, message: Message, payload: bytes, fds: list[int]) -> None:
    """One message with open files, to the fork server. The payload travels through a file, whatever its size."""
    spool = os.memfd_create("ckptrun-payload")
    try:
        with os.fdopen(os.dup(spool), "wb") as file:
            file.write(payload)
        socket.send_fds(sock, [json.dumps(message).encode()], [spool, *fds])
    finally:
        os.close(spool)


def receive_with_fds(sock: socket.socket) -> tuple[Message, bytes, list[int]] | None:
    """The other side of :func:`send_with_fds`; None where nobody is there any more."""
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 16)
    if not data:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        payload = file.read()
    return json.loads(data), payload, list(fds[1:])
