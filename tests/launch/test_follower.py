"""A follower and what its leader says; the ranks that it starts are tried through the command line."""

from __future__ import annotations

import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrun.launch import follower
from ckptrun.launch.follower import Following, follow
from ckptrun.launch.link import Link, hear_hello
from ckptrun.launch.meeting import Card, HostError, Meeting
from ckptrun.launch.wire import Channel
from ckptrun.stop import StopListener

FACTS = {"attempt": 1, "run_id": "r", "lease_epoch": 1, "logs_dir": None}
FRESH = {"ref": None, "rule": 7, "answer": {"fresh": None}, "removes_pin": False}


class Server:
    """Stands in for a fork server that is asked for nothing."""

    closed = False

    def __init__(self) -> None:
        self.sweeps = 0

    def fileno(self) -> int:
        return 0

    def sweep(self) -> None:
        self.sweeps += 1


class Place:
    def close(self) -> None:
        """It has no door."""


def card(name: str, port: int = 0) -> Card:
    return Card(name, name, "127.0.0.1", port, f"token of {name}", 1, 2, "fit", "/runs/demo", "last", "1", "")


class Led:
    """A follower in a thread, and the leader's end of its line."""

    def __init__(self, listener: StopListener) -> None:
        self.said: list[str] = []
        self.code: int | None = None
        self.server = Server()
        self.agent, self._theirs = Channel.pair()
        door = socket.create_server(("127.0.0.1", 0))
        leader, me = card("leader", door.getsockname()[1]), card("me")
        server: Any = self.server
        place: Any = Place()
        following = Following(
            place, me, lambda _: pytest.fail("no rank runs here"), listener, lambda: server, self.said.append
        )
        meeting = Meeting([leader, me], 1, {}, self.agent, 1, 1)
        self._thread = threading.Thread(target=self._follow, args=(following, meeting))
        self._thread.start()
        sock, _ = door.accept()
        assert hear_hello(sock, leader.token) == "me"
        door.close()
        self.link = Link(sock)

    def _follow(self, following: Following, meeting: Meeting) -> None:
        self.code = follow(following, meeting)

    def hears(self) -> list[dict[str, Any]]:
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        assert poll.poll(10_000), "nothing came"
        return self.link.take()

    def ends(self) -> int | None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.code

    def close(self) -> None:
        self.link.close()
        self._thread.join(20)
        self.agent.close()
        self._theirs.close()


@pytest.fixture
def led() -> Iterator[Callable[..., Led]]:
    made: list[Led] = []

    def make(listener: StopListener | None = None) -> Led:
        made.append(Led(listener or StopListener()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_it_ends_as_the_leader_says(led: Callable[..., Led]) -> None:
    one = led()
    one.link.send("exit", code=75, line="the leader ended: walltime at step 3")
    assert one.ends() == 75
    assert one.said == ["following leader, which leads", "the leader ended: walltime at step 3"]


def test_it_ends_soon_after_its_leader(led: Callable[..., Led]) -> None:
    one = led()
    one.link.close()
    assert one.ends() == 70
    assert one.said[-1] == "the leader leader is gone: its connection was closed; nothing more is done here"


def test_signals_are_the_leaders_to_count(led: Callable[..., Led]) -> None:
    listener = StopListener()
    listener.count(signal.SIGTERM, "rank 0")  # while the hosts were meeting
    one = led(listener)
    heard = one.hears()
    assert heard == [{"op": "signal", "signum": signal.SIGTERM}]
    listener.count(signal.SIGINT, "rank 0")
    listener.count(signal.SIGINT, "rank 0")
    heard = []
    while len(heard) < 2:
        heard += one.hears()
    assert [message["signum"] for message in heard] == [signal.SIGINT, signal.SIGINT]
    assert not listener.forced
    one.link.send("exit", code=130, line="")
    assert one.ends() == 130
    assert listener.report is None


def test_it_takes_no_part_where_the_disk_is_another(
    led: Callable[..., Led], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_SEEN_S", 0.0)
    one = led()
    path = str(tmp_path / "demo")
    one.link.send("attempt", facts=FACTS, run_path=path, resolution=FRESH, fingerprint=None)
    heard: list[dict[str, Any]] = []
    while len(heard) < 2:
        heard += one.hears()
    refused, swept = heard
    assert (refused["op"], refused["exit_code"]) == ("refused", 2)
    assert refused["message"] == f"the run's folder {path} is not there"
    assert "on a disk that all hosts share" in refused["hint"]
    assert swept == {"op": "swept", "trouble": None}
    assert one.server.sweeps == 1
    one.link.send("exit", code=2, line="the leader ended")
    assert one.ends() == 2


def test_an_attempt_that_is_told_before_the_own_agent_says_that_all_have_met(
    led: Callable[..., Led], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take = Link.take

    def noted(link: Link) -> list[dict[str, Any]]:
        messages = take(link)
        taken.extend(message["op"] for message in messages)
        return messages

    def slowly(*_: Any, over: Callable[[], bool], say: Callable[[str], None]) -> Meeting:
        while "over" not in taken:
            assert not over(), "that is no reason to leave"
        return Meeting([], 1, {"ranks": []}, one.agent, 1, 1)

    monkeypatch.setattr(Link, "take", noted)
    monkeypatch.setattr(follower, "meet", slowly)
    one = led()
    one.link.send("again")
    facts = {**FACTS, "lease_epoch": 0}
    one.link.send("attempt", facts=facts, run_path=None, resolution=FRESH, fingerprint=None)
    one.link.send("over")
    assert one.hears() == [{"op": "swept", "trouble": None}]
    assert one.server.sweeps == 1
    one.link.send("exit", code=0, line="the leader ended")
    assert one.ends() == 0


def test_an_exit_is_heard_while_hosts_meet(led: Callable[..., Led], monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: Any, over: Callable[[], bool], say: Callable[[str], None]) -> None:
        while not over():
            pass

    monkeypatch.setattr(follower, "meet", waits)
    one = led()
    one.link.send("again")
    one.link.send("exit", code=70, line="no other attempt")
    assert one.ends() == 70
    assert one.said[-1] == "no other attempt"


def test_a_leader_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    agent, theirs = Channel.pair()
    place: Any = Place()
    following = Following(
        place, card("me"), lambda _: pytest.fail("no"), StopListener(), lambda: pytest.fail("no"), pytest.fail
    )
    with pytest.raises(HostError, match=f"the leader leader cannot be reached at 127.0.0.1:{port}: Conn"):
        follow(following, Meeting([card("leader", port), card("me")], 1, {}, agent, 1, 1))
    agent.close()
    theirs.close()
