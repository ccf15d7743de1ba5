"""Two supervisors on one line: what comes through, what goes first, and when the other counts as gone."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ckptrun.launch.link import Link, hear_hello, say_hello


def sockets() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


@contextmanager
def linked(**options: Any) -> Iterator[tuple[Link, Link]]:
    """A link with ``options``, and the other side's."""
    ours, theirs = sockets()
    one, other = Link(ours, **options), Link(theirs)
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def next_messages(link: Link) -> list[dict[str, Any]]:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    assert poll.poll(10_000), "nothing came"
    return link.take()


def test_messages_come_in_order_and_wake_who_waits() -> None:
    with linked() as (one, other):
        assert other.take() == []
        assert one.send("exit", code=3, line="äöü\nzwei")
        assert next_messages(other) == [{"op": "exit", "code": 3, "line": "äöü\nzwei"}]
        for number in range(100):
            one.send("n", number=number)
        seen: list[int] = []
        while len(seen) < 100:
            seen += [message["number"] for message in next_messages(other)]
        assert seen == list(range(100))
        assert one.own_address == "127.0.0.1"


def test_what_is_urgent_does_not_wait_for_the_loop() -> None:
    came = threading.Event()

    def urgent(message: dict[str, Any]) -> bool:
        if message["op"] == "signal":
            came.set()
        return message["op"] == "signal"

    with linked(urgent=urgent) as (one, other):
        other.send("signal", signum=15)
        other.send("rank", rank=1)
        assert came.wait(10)
        assert next_messages(one) == [{"op": "rank", "rank": 1}]


def test_a_closed_connection_is_the_loss_of_the_other(wait_until: Callable[..., Any]) -> None:
    why: list[str] = []
    with linked(on_lost=why.append) as (one, other):
        other.send("last")
        other.close()
        messages = next_messages(one)
        while one.lost is None:
            messages += next_messages(one)
        assert messages == [{"op": "last"}]
        assert one.lost == "its connection was closed"
        wait_until(lambda: why == [one.lost], 10, what="it is told")
        assert not one.send("anything")


def test_silence_is_the_loss_of_the_other(wait_until: Callable[..., Any]) -> None:
    ours, theirs = sockets()
    link = Link(ours, silent_s=0.6)
    try:
        wait_until(lambda: link.lost is not None, 10, what="silence is noticed")
        assert link.lost == "nothing was heard of it for 0.6 s"
    finally:
        link.close()
        theirs.close()


def test_who_lives_is_heard_without_having_anything_to_say(wait_until: Callable[..., Any]) -> None:
    ours, theirs = sockets()
    link = Link(ours)
    try:
        theirs.settimeout(10)
        assert json.loads(theirs.recv(100)) == {"op": "beat"}
        assert link.take() == []
    finally:
        link.close()
        theirs.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\n", b"[1]\n", b'{"no": "op"}\n', b"\xff\xfe\n"])
def test_what_is_no_message_ends_it(sent: bytes, wait_until: Callable[..., Any]) -> None:
    ours, theirs = sockets()
    link = Link(ours)
    try:
        theirs.sendall(sent)
        wait_until(lambda: link.lost is not None, 10, what="it is noticed")
        assert link.lost == "it sent what is no message"
    finally:
        link.close()
        theirs.close()


def test_letting_go_lets_the_last_word_through() -> None:
    with linked() as (one, other):
        other.send("unread")
        one.send("exit", code=0, line="")
        leaving = threading.Thread(target=one.let_go, args=(10.0,))
        leaving.start()
        assert next_messages(other)[0]["op"] == "exit"
        other.close()
        leaving.join(10)
        assert not leaving.is_alive()


def hello(said: Callable[[socket.socket], object], token: str = "secret") -> tuple[str | None, object]:
    """What the one who listens makes of what is said."""
    ours, theirs = sockets()
    answers: list[object] = []

    def speak() -> None:
        answers.append(said(ours))

    speaking = threading.Thread(target=speak)
    speaking.start()
    try:
        heard = hear_hello(theirs, token)
        theirs.close()
        speaking.join(10)
        return heard, answers[0]
    finally:
        ours.close()


def test_who_has_the_token_is_let_in() -> None:
    assert hello(lambda sock: say_hello(sock, "secret", "b")) == ("b", True)
    assert hello(lambda sock: say_hello(sock, "guessed", "b")) == (None, False)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\n",
        b"null\n",
        b"[]\n",
        b'{"op": "hello"}\n',
        b"x" * 5000,
        b'{"op": "exit", "token": "secret"}\n',
    ],
)
def test_who_says_something_else_is_not(sent: bytes) -> None:
    def said(sock: socket.socket) -> None:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)

    assert hello(said) == (None, None)
