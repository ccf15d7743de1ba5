"""Which command lines get a fork server before their config is read, and who takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ckptrun.launch import early
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.plan import environment_of_ranks


class Server:
    """Stands in for a fork server."""

    def __init__(self, env: Mapping[str, str], method: str, fn: str) -> None:
        self.made_for = (dict(env), method, fn)
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    servers: list[Server] = []

    def start(env: Mapping[str, str], *, method: str = "fork", fn: str = "fit") -> Any:
        servers.append(Server(env, method, fn))
        return servers[-1]

    monkeypatch.setattr(ForkServer, "start", start)
    monkeypatch.setattr(early, "num_cores", lambda: 8)
    yield servers
    early.discard()


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("fit --nproc 2", True),
        ("fit --nproc=4 --ckpt last", True),
        ("fit --nproc 1 --nproc 2", True),
        ("fit", False),
        ("fit --nproc", False),
        ("fit --nproc 1", False),
        ("fit --nproc auto", False),
        ("fit --nproc 2 --dry-run", False),
        ("fit --nproc 2 --print-config", False),
        ("fit --nproc 2 --help", False),
        ("fit -- --nproc 2", False),
        ("fit --nnodes 2", True),
        ("fit --nnodes=2 --nproc 1", True),
        ("fit --nnodes 1 --nproc 1", False),
        ("fit --nnodes 1", False),
    ],
)
def test_starts(words: str, starts: bool, started: list[Server]) -> None:
    early.start_early("fit", words.split())
    assert bool(started) is starts


def test_the_right_one_is_taken(started: list[Server]) -> None:
    early.start_early("fit", ["fit", "--nproc", "2"])
    env = environment_of_ranks(2, num_cores=8)
    taken: Any = early.take(env, method="fork", fn="fit")
    assert taken is started[0]
    assert early.take(env, method="fork", fn="fit") is not taken  # for the next attempt


@pytest.mark.parametrize(
    ("threads", "method", "fn"), [("3", "fork", "fit"), ("4", "spawn", "fit"), ("4", "fork", "test")]
)
def test_the_wrong_one_is_ended(threads: str, method: str, fn: Any, started: list[Server]) -> None:
    early.start_early("fit", ["fit", "--nproc", "2"])
    taken: Any = early.take({"OMP_NUM_THREADS": threads}, method=method, fn=fn)
    assert taken is started[1]
    assert started[0].closed
    assert taken.made_for == ({"OMP_NUM_THREADS": threads}, method, fn)


def test_what_nobody_takes_is_ended(started: list[Server]) -> None:
    early.start_early("fit", ["fit", "--nproc", "2"])
    early.discard()
    assert started[0].closed
