"""The leader's side: who is let in, what all must have in common, and what is told at the end."""

from __future__ import annotations

import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from ckptrun import stop
from ckptrun.errors import UsageError
from ckptrun.launch import hosts as hosts_module
from ckptrun.launch.hosts import Hosts, rank_environment
from ckptrun.launch.link import Link, say_hello
from ckptrun.launch.meeting import Card, HostError, Meeting, Place
from ckptrun.launch.wire import Channel
from ckptrun.records import StopReason
from ckptrun.stop import StopListener

CONFIG = "launch:\n  nproc: 1\nmodel:\n  width: 8\n"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Met:
    """A leader with a follower ``b`` that has met it and not called yet."""

    def __init__(self, stack: ExitStack, **other: Any) -> None:
        self.listener = StopListener()
        self.place = stack.enter_context(closing(Place("127.0.0.1:29500", 2, 30.0)))
        leader = Card(
            "a", "a", "127.0.0.1", self.place.port, "secret", 1, 2, "fit", "/runs/demo", "last", "1", CONFIG
        )
        self.b = replace(leader, id="b", host="b", token="its own", **other)
        agent, theirs = Channel.pair()
        stack.callback(agent.close)
        stack.callback(theirs.close)
        self.meeting = Meeting([leader, self.b], 0, {}, agent, 1, 1)
        self.hosts = stack.enter_context(Hosts(self.place, self.listener))
        self._stack = stack

    def call(self, token: str, name: str) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.place.port))
        self._stack.callback(sock.close)
        self.let_in = say_hello(sock, token, name)
        return sock

    def gathered(self) -> Link:
        """Gather, while the follower calls; its end of the line."""
        ends: list[socket.socket] = []
        calling = threading.Thread(target=lambda: ends.append(self.call("secret", "b")))
        calling.start()
        try:
            self.hosts.gather(self.meeting)
        finally:
            calling.join()
            self.link = Link(ends[0])
            self._stack.callback(self.link.close)
        return self.link


def heard(link: Link) -> list[dict[str, Any]]:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    assert poll.poll(10_000), "nothing came"
    return link.take()


def test_one_that_calls_is_led_and_dismissed(stack: ExitStack, wait_until: Callable[..., Any]) -> None:
    met = Met(stack)
    link = met.gathered()
    assert [each.name for each in met.hosts.followers] == ["b"]
    assert met.hosts.interface == "lo"
    link.send("signal", signum=int(signal.SIGTERM))
    wait_until(lambda: met.listener.request is not None, 10, what="the signal counts")
    assert met.listener.request is not None
    assert met.listener.request.reason is StopReason.SIGTERM
    leaving = threading.Thread(target=met.hosts.dismiss, args=(143, "the leader ended"))
    leaving.start()
    assert heard(link) == [{"op": "exit", "code": 143, "line": "the leader ended"}]
    link.close()
    leaving.join(10)
    assert not leaving.is_alive()
    assert met.hosts.followers == []


def test_presses_are_counted_host_by_host(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setattr(stop, "SAME_PRESS_S", 0.0)
    met = Met(stack)
    met.listener.on_force = lambda _: None
    link = met.gathered()
    met.listener.count(signal.SIGINT, "rank 0")
    link.send("signal", signum=int(signal.SIGINT))
    wait_until(lambda: met.listener._presses.get("host b"), 10, what="the signal counts")
    assert not met.listener.forced
    link.send("signal", signum=int(signal.SIGINT))
    wait_until(lambda: met.listener.forced, 10, what="the second press at b")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"nnodes": 3}, "--nnodes is 2 on a and 3 on b"),
        ({"fn": "test"}, "command is fit on a and test on b"),
        ({"run": "/runs/other"}, "run's folder is /runs/demo on a and /runs/other on b"),
        ({"ckpt": "none"}, "--ckpt is last on a and none on b"),
        ({"version": "2"}, "version of ckptrun is 1 on a and 2 on b"),
        ({"config": CONFIG.replace("8", "9")}, "the config of a has 'width: 8', not 'width: 9'"),
    ],
)
def test_what_hosts_must_have_in_common(stack: ExitStack, other: dict[str, Any], message: str) -> None:
    met = Met(stack, **other)
    with pytest.raises(UsageError, match=message):
        met.gathered()
    # It is on the line, so that it learns why.
    leaving = threading.Thread(target=met.hosts.dismiss, args=(2, "the leader ended"))
    leaving.start()
    assert heard(met.link) == [{"op": "exit", "code": 2, "line": "the leader ended"}]
    met.link.close()
    leaving.join(10)


def test_one_that_does_not_call(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "_CALL_S", 0.0)
    met = Met(stack)
    with pytest.raises(HostError, match="b met the others, and did not call this host"):
        met.hosts.gather(met.meeting)


def test_who_does_not_know_the_token_is_not_let_in(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "_CALL_S", 2.0)
    met = Met(stack)
    calling = threading.Thread(target=met.call, args=("guessed", "b"))
    calling.start()
    with pytest.raises(HostError):
        met.hosts.gather(met.meeting)
    calling.join()
    assert not met.let_in
    assert met.hosts.followers == []


def test_the_end_at_once_is_told(stack: ExitStack) -> None:
    met = Met(stack)
    link = met.gathered()
    met.listener.request_stop(StopReason.KEYBOARD)
    assert met.listener.request is not None
    ending = threading.Thread(target=met.listener.on_ending, args=(met.listener.request, True))
    ending.start()
    assert heard(link) == [{"op": "now", "code": 130, "stacks": True}]
    link.close()
    ending.join(10)


def test_the_interface_that_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert rank_environment("eth1") == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert rank_environment(None) == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert rank_environment("eth1") == {}
