"""Who takes part, with which rank, and who came or left? torch's elastic agent says; ckptrun's processes do the work.

This runs in a process of its own, forked from the fork server. It meets the other hosts (rendezvous), assigns ranks,
serves the store that the ranks' process group needs, and watches for hosts that come or go. Starting and stopping
ranks it leaves to the supervisor, over a channel: the agent's own handling replaces signal handlers, kills siblings
after a fixed time and restarts with the arguments of the first start.

Facts: torch.distributed.elastic.agent.server.api (SimpleElasticAgent: four abstract methods; with ``localhost:0`` the
agent's own store listens on a free port, and ``TORCHELASTIC_USE_AGENT_STORE`` makes the ranks use it).
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from ckptrun.launch.parent_death import release_signals
from ckptrun.launch.wire import Channel
from ckptrun.stop import STOP_SIGNALS

_MONITOR_S = 0.1


class Agent(SimpleElasticAgent):
    """Asks the supervisor to start and stop ranks, and hears from it how they are."""

    def __init__(self, spec: WorkerSpec, channel: Channel) -> None:
        super().__init__(spec, exit_barrier_timeout=30)
        self._channel = channel
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

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._state = WorkerState.HEALTHY
        self._ask(
            "start",
            master_addr=worker_group.master_addr,
            master_port=worker_group.master_port,
            group_rank=worker_group.group_rank,
            group_world_size=worker_group.group_world_size,
            ranks=[[w.local_rank, w.global_rank, w.world_size] for w in worker_group.workers],
        )
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._ask("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._condition:
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
    parameters = RendezvousParameters(
        backend=options["backend"],
        endpoint=options["endpoint"],
        run_id=options["run_id"],
        min_nodes=options["nnodes"],
        max_nodes=options["nnodes"],
        local_addr=options.get("local_addr"),
        **options.get("rdzv_options", {}),
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=options["nproc"],
        fn=_never_called,
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    try:
        Agent(spec, channel).run()
    except Exception as error:
        channel.send("failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _never_called() -> None:
    raise AssertionError("ranks are started by the supervisor")
