"""Hosts that do not meet, and what is said of it. That they do is tried through the command line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from rank_work import SharedServer, shared_server

from ckptrun.errors import UsageError
from ckptrun.launch import meeting
from ckptrun.launch.hosts import host_names
from ckptrun.launch.meeting import Card, HostError, Place, meet, new_card


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server() as server:
        yield server


def card_for(place: Place) -> Card:
    return new_card(place, nproc=1, fn="fit", run="/runs/demo", ckpt="last", version="1", config="")


def free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def place_at(port: int, *, timeout_s: float = 30.0, num_hosts: int = 2) -> Iterator[Place]:
    with closing(Place(f"127.0.0.1:{port}", num_hosts, timeout_s)) as place:
        yield place


def test_not_all_come(server: SharedServer) -> None:
    with place_at(free_port(), timeout_s=1.0) as place, pytest.raises(HostError) as caught:
        meet(server, place, card_for(place), over=lambda: False, say=lambda _: None)
    assert caught.value.exit_code == 70
    assert "2 hosts were to meet at 127.0.0.1:" in caught.value.message
    assert "not all came within 1 s" in caught.value.message


def test_tasks_of_one_host_are_not_called_hosts(
    server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_SAID_AFTER_S", 0.0)
    said: list[str] = []
    port = free_port()
    with closing(Place(f"127.0.0.1:{port}", 4, 1.0, "tasks")) as place, pytest.raises(HostError) as caught:
        meet(server, place, card_for(place), over=lambda: False, say=said.append)
    assert said == [f"waiting up to 1 s for 4 tasks to meet at 127.0.0.1:{port}"]
    assert "4 tasks were to meet at 127.0.0.1:" in caught.value.message
    assert "--nnodes" not in str(caught.value.hint)


def test_something_else_is_at_the_port(server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_S", 1)
    with socket.create_server(("", 0)) as stranger, place_at(stranger.getsockname()[1]) as place:
        over = threading.Event()

        def talk() -> None:
            stranger.settimeout(0.05)
            while not over.is_set():
                try:
                    sock, _ = stranger.accept()
                except TimeoutError:
                    continue
                sock.sendall(b"SSH-2.0-something\r\n" * 4)
                callers.append(sock)

        callers: list[socket.socket] = []
        talking = threading.Thread(target=talk)
        talking.start()
        try:
            with pytest.raises(UsageError, match="of this host is in use by something that is no rendezvous"):
                meet(server, place, card_for(place), over=lambda: False, say=lambda _: None)
        finally:
            over.set()
            talking.join()
            for sock in callers:
                sock.close()


def test_something_that_never_answers(server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER_S", 1)
    with (
        socket.create_server(("", 0)) as stranger,
        place_at(stranger.getsockname()[1]) as place,
        pytest.raises(UsageError, match="is in use by something that is no rendezvous"),
    ):
        meet(server, place, card_for(place), over=lambda: False, say=lambda _: None)


def test_a_stop_while_waiting(server: SharedServer) -> None:
    with place_at(free_port()) as place:
        assert meet(server, place, card_for(place), over=lambda: True, say=lambda _: None) is None


def test_names_of_hosts() -> None:
    with place_at(free_port()) as place:
        cards = [card_for(place) for _ in range(3)]
    (same,) = {card.host for card in cards}
    assert list(host_names(cards).values()) == [f"{same} (127.0.0.1){more}" for more in ("", " #2", " #3")]
    assert list(host_names(cards[:1]).values()) == [same]
