"""Who compiles DeepSpeed's operations, and who waits? Ranks are threads here that meet in a store."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import ckptrun.strategies.deepspeed as module
from ckptrun.strategies.deepspeed import DeepSpeedStrategy

pytestmark = pytest.mark.deepspeed


class Together:
    """``gather_all`` of so many threads."""

    def __init__(self, count: int) -> None:
        self._values: list[Any] = [None] * count
        self._all = threading.Barrier(count)

    def __call__(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._all.wait(10.0)
        return list(self._values)


@pytest.mark.parametrize(
    ("hosts", "numbers", "compile_there"),
    [
        pytest.param("aabb", [(0, 0), (0, 1), (1, 0), (1, 1)], [0, 2], id="as torchrun numbers them"),
        pytest.param("aa", [(0, 0), (1, 1)], [0], id="each a task of one node"),
        pytest.param("abab", [(0, 0), (1, 0), (2, 1), (3, 1)], [0, 1], id="tasks that go round the nodes"),
        pytest.param("abb", [(0, 0), (1, 1), (1, 0)], [0, 1], id="as DeepSpeed numbers unequal hosts"),
    ],
)
def test_the_first_rank_of_each_host_compiles_and_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, hosts: str, numbers: list[tuple[int, int]], compile_there: list[int]
) -> None:
    """``numbers``: the launcher's number of each rank's group, and its local rank."""
    store, together, own = dist.HashStore(), Together(len(hosts)), threading.local()
    compiled: list[int] = []
    done: list[tuple[int, list[int]]] = []

    def compile_op(*_: Any) -> bool:
        time.sleep(0.2)
        compiled.append(own.rank)
        return True

    monkeypatch.setattr(module, "host_name", lambda: hosts[own.rank])
    monkeypatch.setattr(module, "not_compiled", lambda _: ["ShareMemCommBuilder"])
    monkeypatch.setattr(module, "compile_op", compile_op)
    monkeypatch.setattr(DeepSpeedStrategy, "gather_all", lambda self, value: together(self.rank, value))
    over = threading.Event()

    def be_rank(rank: int) -> None:
        own.rank = rank
        strategy = DeepSpeedStrategy(rank=rank, local_rank=numbers[rank][1], world_size=len(hosts))
        strategy._store = store
        strategy.prepare(lambda _: None, over.is_set)
        done.append((rank, list(compiled)))

    threads = [threading.Thread(target=be_rank, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10.0
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    waiting = [thread for thread in threads if thread.is_alive()]
    over.set()
    for thread in threads:
        thread.join()
    assert not waiting
    assert sorted(compiled) == compile_there
    for rank, before in done:
        first = hosts.index(hosts[rank])
        assert first in before, f"rank {rank} went on before rank {first} of its host had compiled"
