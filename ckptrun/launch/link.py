"""How do two supervisors on different hosts hear each other, and know that the other is still there?

Lines of JSON over TCP (:mod:`.wire`), each side telling once a second that it lives. A connection that is closed, or
silent for ten seconds, is the loss of the other host. A thread reads: what must not wait for the main loop (a signal,
the end at once) is handed on there, all else is kept for the loop.

Decision: plain data only, and nothing is read before the other side has shown the token that the rendezvous handed to
it. Turned down: the rendezvous' own store (who waits for a key cannot be told that its writer died) and pickles.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ckptrun.launch.wire import Channel, Message

BEAT_S = 1.0
SILENT_S = 10.0
_HELLO_S = 5.0
_LONGEST_HELLO = 4096


class Link:
    """One connection to another supervisor; ``fileno`` becomes readable when there is something to take.

    Args:
        urgent: takes each message first, in the link's thread; True where that was all.
        on_lost: called in that thread when the other side is gone, with the reason.

    Attributes:
        lost: why the other side is gone; None while it is there.
        own_address: this host's end.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        urgent: Callable[[Message], bool] = lambda _: False,
        on_lost: Callable[[str], object] = lambda _: None,
        silent_s: float = SILENT_S,
    ) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.own_address = str(sock.getsockname()[0])
        self.lost: str | None = None
        self._socket = sock
        self._channel = Channel(sock)
        self._urgent = urgent
        self._on_lost = on_lost
        self._silent_s = silent_s
        self._inbox: deque[Message] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="ckptrun-link", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._wake

    def send(self, op: str, **fields: Any) -> bool:
        """Send one message, from any thread; False where the other side is gone."""
        return self.lost is None and self._channel.send(op, **fields)

    def take(self) -> list[Message]:
        """What has come; does not wait."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        taken = []
        while self._inbox:
            taken.append(self._inbox.popleft())
        return taken

    def let_go(self, timeout_s: float) -> None:
        """Send nothing more, and wait for the other side to take what was sent and to leave."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Close at once."""
        self._closing = True
        self._shut()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._channel.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _shut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        heard = sent = time.monotonic()
        while not self._closing and self.lost is None:
            arrived = poll.poll(BEAT_S * 500)
            now = time.monotonic()
            if arrived:
                heard = now
                self._receive()
            elif now - heard > self._silent_s:
                self._lose(f"nothing was heard of it for {self._silent_s:g} s")
            if now - sent >= BEAT_S and self._takes_more():
                sent = now
                self._channel.send("beat")

    def _receive(self) -> None:
        try:
            for message in self._channel.receive():
                if message["op"] != "beat" and not self._urgent(message):
                    self._inbox.append(message)
                    os.eventfd_write(self._wake, 1)
        except (ValueError, KeyError, TypeError):
            self._lose("it sent what is no message")
            return
        if self._channel.closed:
            self._lose("its connection was closed")

    def _takes_more(self) -> bool:
        # A peer that does not read must not keep this thread from noticing.
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    def _lose(self, why: str) -> None:
        if self._closing:
            return
        self.lost = why
        self._shut()  # whoever is about to send does not wait any longer
        os.eventfd_write(self._wake, 1)
        self._on_lost(why)


def say_hello(sock: socket.socket, token: str, host_id: str) -> bool:
    """What who connects says first; False where it is not let in. Nothing else may have been sent."""
    sock.settimeout(_HELLO_S)
    try:
        sock.sendall(_line({"op": "hello", "token": token, "id": host_id}))
        return _read_line(sock) == _WELCOME
    except OSError:
        return False


def hear_hello(sock: socket.socket, token: str) -> str | None:
    """Let in who has connected and return its id; None where it did not show the token in time."""
    sock.settimeout(_HELLO_S)
    try:
        message = json.loads(_read_line(sock))
        if message["op"] == "hello" and hmac.compare_digest(str(message["token"]), token):
            sock.sendall(_WELCOME)
            return str(message["id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


_WELCOME = _line({"op": "welcome"})


def _read_line(sock: socket.socket) -> bytes:
    """One short line and nothing after it."""
    data = b""
    deadline = time.monotonic() + _HELLO_S
    while not data.endswith(b"\n") and len(data) < _LONGEST_HELLO and time.monotonic() < deadline:
        byte = sock.recv(1)
        if not byte:
            break
        data += byte
    return data
