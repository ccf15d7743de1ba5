"""Who takes part, with which rank, and who came or left? torch's elastic agent says; ckptrun's processes do the work.

This runs in a process of its own, forked from the fork server. It meets the other hosts (rendezvous), assigns ranks
and serves the store that the ranks' process group needs. Starting and stopping ranks it leaves to the supervisor, over
a channel: the agent's own handling replaces signal handlers, kills siblings after a fixed time and restarts with the
arguments of the first start. Who takes part is settled once an attempt; that a host is lost the supervisors notice
sooner than the rendezvous would.

With several hosts each agent lays its supervisor's card into the store and reads those of the others, so that every
supervisor knows who leads and where to call it. The ranks of the leader's host come first, whatever the rendezvous
would have given them: rank 0, which writes, is where the leader is, also in an attempt that others have joined since.

Facts: torch.distributed.elastic.agent.server.api (SimpleElasticAgent: four abstract methods; with ``localhost:0`` the
agent's own store listens on a free port, and ``TORCHELASTIC_USE_AGENT_STORE`` makes the ranks use it).
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import socket
import threading
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from ckptrun.launch.parent_death import release_signals
from ckptrun.launch.wire import Channel
from ckptrun.stop import STOP_SIGNALS

_MONITOR_S = 0.1
_CARDS_S = 30.0  # how long the card of a host that has met the others may take


class Agent(SimpleElasticAgent):
    """Asks the supervisor to start and stop ranks, and hears from it how they are.

    Args:
        card: what this host's supervisor tells the others; None where there are none.
    """

    def __init__(self, spec: WorkerSpec, channel: Channel, card: dict[str, Any] | None = None) -> None:
        super().__init__(spec, exit_barrier_timeout=30)
        self._channel = channel
        self._card = card
        self._cards: list[dict[str, Any]] = []
        self._group_rank = 0
        self._condition = threading.Condition()
        self._state = WorkerState.INIT
        self._acknowledged = False
        threading.Thread(target=self._listen, name="ckptrun-agent", daemon=True).start()

    def _listen(self) -> None:
        for message in self._channel.messages():
            with self._condition:
                if message["op"] == "state":
                    self._state = WorkerState[message["state"]]
                elif message["op"] == "acknowledged":
                    self._acknowledged = True
                self._condition.notify_all()
        with self._condition:
            # The supervisor is gone, and with it the work.
            self._state, self._acknowledged = WorkerState.FAILED, True
            self._condition.notify_all()

    def _ask(self, op: str, **fields: Any) -> None:
        with self._condition:
            self._acknowledged = False
        self._channel.send(op, **fields)
        with self._condition:
            self._condition.wait_for(lambda: self._acknowledged)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        if self._card is not None:
            cards = _exchange(store, self._card, group_rank, group_world_size)
            order = sorted(
                range(group_world_size),
                key=lambda each: (not cards[each]["leads"], cards[each].get("order", 0), each),
            )
            self._cards = [cards[each] for each in order]
            group_rank = order.index(group_rank)
        self._group_rank = group_rank
        workers: list[Worker] = super()._assign_worker_ranks(store, group_rank, group_world_size, spec)
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._state = WorkerState.HEALTHY
        self._ask(
            "start",
            master_addr=worker_group.master_addr,
            master_port=worker_group.master_port,
            group_rank=self._group_rank,
            cards=self._cards,
            group_world_size=worker_group.group_world_size,
            ranks=[[w.local_rank, w.global_rank, w.world_size] for w in worker_group.workers],
        )
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._ask("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._condition:
            self._condition.wait_for(lambda: self._state is not WorkerState.HEALTHY)
            state = self._state
        if state is WorkerState.SUCCEEDED:
            return RunResult(state, return_values={w.global_rank: None for w in worker_group.workers})
        return RunResult(state)

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        """The supervisor ends ranks itself."""


def agent_main(payload: bytes, fds: list[int]) -> int:
    """The agent's process; returns its exit code."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    for signum in (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # the supervisor's to judge
    release_signals()
    options = json.loads(payload)
    channel = Channel(socket.socket(fileno=fds[0]))
    several = options["nnodes"] > 1
    if several:
        # What torch writes there about a connection that fails, the supervisor says in one line.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        handler = _join(options)
        if several:
            channel.send("reached")
        spec = WorkerSpec(
            role="default",
            local_world_size=options["nproc"],
            fn=_never_called,
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=_MONITOR_S,
        )
        Agent(spec, channel, options.get("card")).run()
    except Exception as error:
        channel.send("failed", kind=type(error).__name__, error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _join(options: dict[str, Any]) -> RendezvousHandler:
    """The way into the rendezvous. ``serves`` says whether this host serves its store: True where it can, else the
    other supervisor on this host that was quicker; None leaves it to torch."""
    serves = options.get("serves")
    for is_host in (True, False) if serves else (serves,):
        parameters = RendezvousParameters(
            backend=options["backend"],
            endpoint=options["endpoint"],
            run_id=options["run_id"],
            min_nodes=options["nnodes"],
            max_nodes=options["nnodes"],
            local_addr=options.get("local_addr"),
            **({} if is_host is None else {"is_host": is_host}),
            **options.get("rdzv_options", {}),
        )
        try:
            return rendezvous_registry.get_rendezvous_handler(parameters)
        except RendezvousConnectionError:
            if not is_host:
                raise
    raise AssertionError("the last try returns or raises")


def _exchange(store: Any, card: dict[str, Any], group_rank: int, num_hosts: int) -> list[dict[str, Any]]:
    """Every host's card, by the rank that the rendezvous gave it."""
    store.set_timeout(datetime.timedelta(seconds=_CARDS_S))
    names = [f"ckptrun/card/{each}" for each in range(num_hosts)]
    store.set(names[group_rank], json.dumps(card))
    store.wait(names)
    return [json.loads(store.get(name)) for name in names]


def _never_called() -> None:
    raise AssertionError("ranks are started by the supervisor")
