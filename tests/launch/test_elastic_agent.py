"""Which ranks do the hosts get that have met, and what do they know of each other? A store and threads for hosts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec

from ckptrun.launch.elastic_agent import Agent, _never_called
from ckptrun.launch.wire import Channel


class Handler:
    """What a WorkerSpec wants to see of a rendezvous."""

    def get_run_id(self) -> str:
        return "ckptrun"

    def get_backend(self) -> str:
        return "c10d"


@pytest.mark.parametrize(
    ("leads", "orders", "expected"),
    [
        # by the rank that the rendezvous gave: the group rank, and the ranks of the host's two or three processes
        ([False, False], [0, 0], [(0, [0, 1]), (1, [2, 3, 4])]),
        ([True, False], [0, 0], [(0, [0, 1]), (1, [2, 3, 4])]),
        ([False, True], [0, 0], [(1, [3, 4]), (0, [0, 1, 2])]),
        ([False, False, True], [0, 0, 0], [(1, [3, 4]), (2, [5, 6, 7]), (0, [0, 1, 2])]),
        # SLURM's tasks have numbers of their own
        ([False, False, True], [2, 1, 0], [(2, [6, 7]), (1, [3, 4, 5]), (0, [0, 1, 2])]),
    ],
)
def test_who_has_led_comes_first(
    leads: list[bool], orders: list[int], expected: list[tuple[int, list[int]]]
) -> None:
    store = dist.HashStore()
    found: dict[int, tuple[int, list[int], list[str]]] = {}
    pairs = [Channel.pair() for _ in leads]

    def join(rendezvous_rank: int) -> None:
        handler: Any = Handler()
        spec = WorkerSpec(
            role="default",
            local_world_size=2 if rendezvous_rank == 0 else 3,
            rdzv_handler=handler,
            entrypoint=_never_called,
        )
        card = {"id": str(rendezvous_rank), "leads": leads[rendezvous_rank], "order": orders[rendezvous_rank]}
        agent = Agent(spec, pairs[rendezvous_rank][0], card)
        workers = agent._assign_worker_ranks(store, rendezvous_rank, len(leads), spec)
        ids = [each["id"] for each in agent._cards]
        found[rendezvous_rank] = agent._group_rank, [worker.global_rank for worker in workers], ids

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(leads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for channel, theirs in pairs:
        theirs.close()
        channel.close()
    assert [found[rank][:2] for rank in range(len(leads))] == expected
    order = sorted(range(len(leads)), key=lambda rank: expected[rank][0])
    assert all(ids == [str(rank) for rank in order] for _, _, ids in found.values())
