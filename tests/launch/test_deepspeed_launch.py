"""The supervisor's side of DeepSpeed's launcher: who is let in, and what is made of the ways in which all can end.

Ranks are sockets here, and nothing is started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrun.environment.process import ProcessName, this_process
from ckptrun.launch import deepspeed
from ckptrun.launch.deepspeed import DeepSpeedLaunch
from ckptrun.launch.torchrun import Hooks, Launch
from ckptrun.launch.wire import Channel
from ckptrun.processes import process_stat
from ckptrun.records import Progress, StopReason
from ckptrun.stop import StopListener


class Server:
    """In the fork server's place: it starts nothing, and says what it is told to."""

    def __init__(self) -> None:
        self.closed = False
        self.words: list[dict[str, Any]] = []
        self._ours, self._theirs = socket.socketpair()

    def fileno(self) -> int:
        return self._ours.fileno()

    def fork(self, *_: Any, **__: Any) -> int:
        return 1

    def say(self, **word: Any) -> None:
        self.words.append(word)
        self._theirs.send(b".")

    def receive(self) -> list[dict[str, Any]]:
        self._ours.recv(4096)
        words, self.words = self.words, []
        return words

    def sweep(self) -> None:
        pass

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Door(DeepSpeedLaunch):
    """A launch whose loop is turned by the test; as many ranks as ``nproc`` are awaited."""

    def __init__(self, folder: Path, *, everywhere: bool = False) -> None:
        self.server, self.listener = Server(), StopListener()
        self.heard: list[tuple[int, int]] = []
        self.listener.count = lambda signum, origin: self._counted(signum, origin)  # type: ignore[method-assign]
        self.origins: list[tuple[int, str]] = []
        nothing: Any = lambda *_: None  # noqa: E731
        super().__init__(
            Launch(2, nothing, lambda rank: str(folder / f"rank-{rank}.log"), 1, "run"),
            self.server,  # type: ignore[arg-type]
            listener=self.listener,
            progress=Progress(),
            hooks=Hooks(*[nothing] * 9),
            command=("deepspeed",),
            control=str(folder / "control.json"),
            everywhere=everywhere,
        )
        self._start_agent()
        self.token = json.loads((folder / "control.json").read_text())["token"]
        self.port = json.loads((folder / "control.json").read_text())["addresses"][0][1]

    def _counted(self, signum: int, origin: str) -> None:
        self.origins.append((signum, origin))
        StopListener.count(self.listener, signum, origin)

    def turn_until(self, condition: Callable[[], object], timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline
            self._turn()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))

    def hello(self, rank: int, process: ProcessName | None = None, **more: Any) -> bytes:
        word = {
            "op": "hello", "token": self.token, "process": process or this_process(), "rank": rank, "local_rank": rank,
            "world_size": 2, "local_size": 2, "host_rank": 0, **more,
        }  # fmt: skip
        return json.dumps(word).encode() + b"\n"

    @property
    def ranks(self) -> list[int]:
        return sorted(self._ranks)

    @property
    def callers(self) -> int:
        return len(self._calling)

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.kill = lambda: None  # type: ignore[method-assign]  # it is this very process
        self._end_all()
        self.server.close()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    opened = Door(tmp_path)
    yield opened
    opened.close()


def word(op: str, **fields: Any) -> bytes:
    return json.dumps({"op": op, **fields}).encode() + b"\n"


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a list": b"[1]\n",
    "no UTF-8": b"\xff\xfe\n",
    "nested": b"[" * 4000 + b"\n",
    "no token": word("hello", rank=0),
    "another token": word("hello", rank=0, token="x" * 32),
    "a token that is none": word("hello", rank=0, token=[1]),
    "a token of surrogates": word("hello", rank=0, token="\ud800"),
    "another word first": word("signal", signum=15),
    "a line without an end": b"x" * 100_000,
    "a long line": b'{"op": "' + b"x" * 100_000 + b'"}\n',
    "nothing": b"",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_hung_up_on_and_changes_nothing(door: Door, said: bytes) -> None:
    with door.connect() as rank, door.connect() as stranger:
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        rank.sendall(door.hello(0))
        door.turn_until(lambda: door.ranks == [0] and door.callers == 0)
        assert door._trouble is None
        assert not door._over()
        stranger.settimeout(5.0)
        try:
            assert stranger.recv(10) == b""
        except ConnectionResetError:
            pass
        assert Channel(rank).receive()[0]["op"] == "job"


def test_who_says_nothing_is_hung_up_on(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    with door.connect() as stranger:
        door.turn_until(lambda: door.callers == 1)
        monkeypatch.setattr(deepspeed, "_HELLO_S", 0.0)
        door.turn_until(lambda: door.callers == 0)
        assert stranger.recv(10) == b""


def test_a_hello_may_come_in_pieces_and_a_signal_right_behind_it(door: Door) -> None:
    with door.connect() as rank:
        said = door.hello(1) + word("signal", signum=int(signal.SIGTERM))
        rank.sendall(said[:40])
        door.turn_until(lambda: door.callers == 1)
        door._turn()
        rank.sendall(said[40:])
        door.turn_until(lambda: door.ranks == [1])
        assert door.origins == [(signal.SIGTERM, "rank 1")]
        assert not door._ranks[1].channel.closed
        job, stop = wait_for_words(door, rank, 2)
        assert (job["op"], stop["op"], stop["signum"]) == ("job", "stop", signal.SIGTERM)


def wait_for_words(door: Door, rank: socket.socket, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    channel = Channel(rank)
    rank.settimeout(5.0)
    while len(found) < count:
        door._turn()
        found += channel.receive()
    return found


def test_a_process_of_another_container_is_never_signalled(door: Door) -> None:
    """Host names may be the same; a number means another process there."""
    with subprocess.Popen(["sleep", "60"]) as other:
        here = this_process()
        foreign = here._replace(pid=other.pid, boot_id="another")
        ended = here._replace(pid=other.pid, start=1)
        with door.connect() as one, door.connect() as two:
            one.sendall(door.hello(0, foreign))
            two.sendall(door.hello(1, ended))
            door.turn_until(lambda: door.ranks == [0, 1])
            for rank in door._ranks.values():
                rank.ask_for_stacks()
                rank.kill()
            assert other.poll() is None
            told = [message["op"] for message in wait_for_words(door, one, 3)]
            assert told == ["job", "stacks", "die"]
        other.kill()


def state_of(pid: int) -> str:
    stat = process_stat(pid)
    return "" if stat is None else stat.state


PARENT = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


@pytest.mark.parametrize(("command", "halted"), [("deepspeed.launcher.launch", True), ("orted", False)])
def test_the_inner_launcher_is_halted_once_it_has_signalled_a_rank(
    door: Door, wait_until: Callable[..., Any], command: str, halted: bool
) -> None:
    """It would kill the rank after half a minute, however long a save takes."""
    launcher = subprocess.Popen([sys.executable, "-c", PARENT, command], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    number = int(launcher.stdout.readline())
    stat = process_stat(number)
    assert stat is not None
    with door.connect() as rank:
        said = door.hello(0, this_process()._replace(pid=number, start=stat.start_time))
        rank.sendall(said + word("signal", signum=int(signal.SIGTERM)))
        door.turn_until(lambda: door.origins)
        if halted:
            wait_until(lambda: state_of(launcher.pid) == "T", what="it is halted")
        assert (state_of(launcher.pid) == "T") is halted
    os.kill(number, signal.SIGKILL)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()


# -- the launcher's own end ----------------------------------------------------------------------------------------


def started(door: Door, ranks: int, code: int) -> list[socket.socket]:
    """So many of two ranks have come, and the launcher has ended."""
    there = [door.connect() for _ in range(ranks)]
    for number, rank in enumerate(there):
        rank.sendall(door.hello(number))
    door.turn_until(lambda: len(door.ranks) == ranks)
    group = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    door.server.say(op="forked", id=1, pid=group.pid)
    door.server.say(op="ended", pid=group.pid, code=code)
    door.turn_until(lambda: not door.server.words and door._agent_pid is None)
    door.left = group  # type: ignore[attr-defined]
    return there


def end(door: Door, ranks: list[socket.socket], *, timeout_s: float = 0.3) -> int | None:
    """How what was in the launcher's group has ended; None where it still runs."""
    for rank in ranks:
        rank.close()
    group = door.left  # type: ignore[attr-defined]
    try:
        code: int | None = group.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    group.kill()
    group.wait()
    group.stdin.close()
    return code


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_to_the_launcher_is_one_to_the_command(door: Door, signum: signal.Signals) -> None:
    ranks = started(door, 2, -signum)
    assert door.origins == [(signum, "DeepSpeed's launcher")]
    assert not door._over()
    assert wait_for_words(door, ranks[0], 2)[1]["op"] == "stop"
    assert end(door, ranks) is None


@pytest.mark.parametrize("come", [0, 1])
def test_a_stop_signal_before_all_ranks_have_come_ends_it_at_once(door: Door, come: int) -> None:
    ranks = started(door, come, -signal.SIGTERM)
    assert door._over()
    assert door._outcome().stop_reason is StopReason.SIGTERM
    assert end(door, ranks) is None


@pytest.mark.parametrize("code", [0, 1, -signal.SIGKILL])
def test_any_other_end_of_the_launcher_is_the_end_of_its_ranks(door: Door, code: int) -> None:
    ranks = started(door, 1, code)
    assert door._over()
    outcome = door._outcome()
    assert outcome.stop_reason is StopReason.RANK_LOST
    assert f"ended with exit code {code}, and 1 of 2 ranks had begun" in str(outcome.error)
    assert door.origins == []
    assert end(door, ranks, timeout_s=10.0) == -signal.SIGKILL


def test_two_processes_of_one_number_are_an_error(door: Door) -> None:
    with door.connect() as one, door.connect() as two:
        one.sendall(door.hello(0))
        two.sendall(door.hello(0))
        door.turn_until(door._over)
        assert "has started two processes as rank 0" in str(door._outcome().error)


def test_another_number_of_ranks_than_the_commands_is_an_error(door: Door) -> None:
    """The checkpoint was chosen, and may have been converted, for as many as were counted."""
    with door.connect() as one:
        one.sendall(door.hello(0, world_size=1))
        door.turn_until(door._over)
        assert "gives a world size of 1, and its command one of 2" in str(door._outcome().error)


def test_the_control_file_is_for_its_owner_alone(door: Door, tmp_path: Path) -> None:
    assert os.stat(tmp_path / "control.json").st_mode & 0o077 == 0
