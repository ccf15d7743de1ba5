"""The process that ranks are forked from: how children begin, end, and are swept up. No torch is needed for it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrun.launch import fork_client
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.parent_death import release_signals
from ckptrun.processes import process_stat

# -- what children do (called in them) -------------------------------------------------------------------------


def tell(payload: bytes, fds: list[int]) -> int:
    with socket.socket(fileno=fds[0]) as sock:
        sock.sendall(b"%s %d %d %s" % (payload, os.getpid(), os.getpgrp(), os.environ["GREETING"].encode()))
    return 7


def print_at_exit(payload: bytes, fds: list[int]) -> int:
    import atexit

    atexit.register(os.write, fds[0], b"at exit")
    return 0


class _Pipe(logging.Handler):
    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        os.write(self._fd, record.getMessage().encode())


def leave_work_to_the_exit(payload: bytes, fds: list[int]) -> int:
    import logging.handlers
    import multiprocessing.util
    import weakref

    log = logging.getLogger("exit")
    log.propagate = False
    log.addHandler(logging.handlers.MemoryHandler(100, target=_Pipe(fds[0])))
    log.warning("flushed ")
    _kept.append(_Pipe(fds[0]))
    weakref.finalize(_kept[0], os.write, fds[0], b"finalized ")
    multiprocessing.util.Finalize(None, os.write, args=(fds[0], b"ended "), exitpriority=0)
    return 0


_kept: list[object] = []


def count_signals(payload: bytes, fds: list[int]) -> int:
    heard: list[int] = []
    os.write(fds[0], b"begun")
    while not Path(payload.decode()).exists():
        time.sleep(0.005)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: heard.append(number))
    release_signals()
    os.write(fds[0], b" ".join(b"%d" % number for number in sorted(heard)))
    return 0


def sleep(payload: bytes, fds: list[int]) -> int:
    import subprocess

    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.write(fds[0], b"sleeping")
    time.sleep(1000)
    return 0


def leave_one_in_the_group(payload: bytes, fds: list[int]) -> int:
    import subprocess

    os.write(fds[0], b"%d" % subprocess.Popen(["sleep", "1000"]).pid)
    return 0


# -- the server ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["fork", "spawn"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """One that imports nothing: what it imports makes no difference here, and takes seconds."""
    boot = (
        f"import sys; sys.path[:] = {sys.path!r}; import ckptrun.launch.fork_server as server; "
        "server.import_all = server._cuda_was_touched = lambda *_: False; "
        # As what it imports does: what libraries do at exit is registered, and there is something of its own to do.
        "import logging, multiprocessing.util, os, weakref; weakref.finalize(server, os._exit, 99); "
        "server.main()"
    )
    monkeypatch.setattr(
        fork_client, "argv_for", lambda _, *args: [sys.executable, "-c", boot, *map(str, args)]
    )
    made = ForkServer.start({}, method=request.param)
    monkeypatch.undo()
    yield made
    made.close()


class Child:
    """One that was asked for, and what it writes."""

    def __init__(
        self, server: ForkServer, name: str, payload: bytes = b"", *, group_lasts: bool = False
    ) -> None:
        self._server = server
        self._ours, theirs = socket.socketpair()
        self.number = server.fork(
            f"{__name__}:{name}",
            payload,
            env={"GREETING": "hello"},
            fds=[theirs.fileno()],
            group_lasts=group_lasts,
        )
        theirs.close()
        self.pid = int(hear(server, "forked")["pid"])

    def read(self) -> bytes:
        return self._ours.recv(4096)

    def read_all(self) -> bytes:
        found = b""
        while data := self.read():
            found += data
        return found

    def close(self) -> None:
        self._ours.close()


def hear(server: ForkServer, op: str) -> dict[str, Any]:
    while True:
        for message in server.receive():
            if message["op"] == op:
                return message
        assert not server.closed


def gone(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is None or stat.ended


def test_a_child_is_told_everything_and_its_end_is_heard(server: ForkServer) -> None:
    child = Child(server, "tell", b"payload")
    word, pid, group, greeting = child.read().split()
    assert (word, int(pid), int(group), greeting) == (b"payload", child.pid, child.pid, b"hello")
    ended = hear(server, "ended")
    assert (ended["pid"], ended["code"]) == (child.pid, 7)
    child.close()


def test_a_child_that_is_killed(server: ForkServer) -> None:
    child = Child(server, "sleep")
    assert child.read() == b"sleeping"
    os.kill(child.pid, signal.SIGKILL)
    assert hear(server, "ended")["code"] == -signal.SIGKILL
    child.close()


def test_a_target_that_cannot_be_called(server: ForkServer) -> None:
    child = Child(server, "nothing_of_that_name")
    assert hear(server, "ended")["code"] == 1
    child.close()


def test_what_a_child_has_registered_runs_at_its_exit(server: ForkServer) -> None:
    child = Child(server, "print_at_exit")
    assert child.read() == b"at exit"
    child.close()


def test_what_libraries_do_at_exit_is_done(server: ForkServer) -> None:
    child = Child(server, "leave_work_to_the_exit")
    assert sorted(child.read_all().split()) == [b"ended", b"finalized", b"flushed"]
    child.close()


def test_signals_wait_until_the_child_can_take_them(server: ForkServer, tmp_path: Path) -> None:
    go = tmp_path / "go"
    child = Child(server, "count_signals", str(go).encode())
    assert child.read() == b"begun"
    sent = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in sent:
        os.kill(child.pid, number)
    go.touch()
    assert child.read().split() == [b"%d" % number for number in sorted(sent)]
    child.close()


def test_a_sweep_ends_children_and_what_they_left_and_the_server_serves_on(
    server: ForkServer, wait_until: Callable[..., Any]
) -> None:
    child = Child(server, "sleep")
    assert child.read() == b"sleeping"
    hear_ready(server)
    below = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    server.sweep()
    assert not server.closed
    assert all(map(gone, [child.pid, *below]))
    child.close()
    again = Child(server, "tell", b"again")
    assert again.read().startswith(b"again")
    again.close()


@pytest.mark.parametrize("lasts", [False, True])
def test_what_a_child_leaves_in_its_group_ends_with_it_unless_it_is_to_last(
    server: ForkServer, wait_until: Callable[..., Any], lasts: bool
) -> None:
    child = Child(server, "leave_one_in_the_group", group_lasts=lasts)
    left = int(child.read())
    hear(server, "ended")
    if lasts:
        assert not gone(left)
        hear_ready(server)
        server.sweep()
    wait_until(lambda: gone(left), what="what it left is gone")
    child.close()


def hear_ready(server: ForkServer) -> None:
    while not server.ready:
        server.receive()


@pytest.mark.parametrize("how", ["close", "killed"])
def test_nothing_outlives_the_server(server: ForkServer, how: str, wait_until: Callable[..., Any]) -> None:
    child = Child(server, "sleep")
    assert child.read() == b"sleeping"
    hear_ready(server)
    below = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    assert len(below) == 2
    if how == "close":
        server.close()
        assert all(map(gone, [child.pid, *below]))
    else:
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: gone(child.pid), what="the child ended with the server")
        while not server.closed:
            server.receive()
        for pid in below:  # the supervisor's to end, which adopts them
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: gone(pid))
    child.close()


def test_stop_signals_do_not_reach_the_server(server: ForkServer) -> None:
    hear_ready(server)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(server.pid, number)
    child = Child(server, "tell", b"still there")
    assert child.read().startswith(b"still there")
    child.close()


def test_signals_that_come_while_it_begins_do_not_end_it(server: ForkServer) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(server.pid, number)  # SLURM signals all processes of a step, whatever they are just doing
    hear_ready(server)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()  # ours are as they were


def test_a_server_that_is_gone_shows_as_closed(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.fork("os:abort", b"", env={}, fds=[])
    while not server.closed:
        server.receive()
    server.sweep()
