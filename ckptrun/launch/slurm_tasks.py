"""Where do the tasks of a SLURM step meet? At an address and a free port of task 0, which leads and says where it is.

    runs/.meet-1234-0-0.json    job (or array task), start of the job, step -> endpoint; gone once all have met

Decision: task 0 takes a free port and writes it beside the run, on the disk that all nodes must share anyway. Turned
down: a port computed from the job's id, which another job or a process of yesterday may have, and the first name of the
node list, which need not be where task 0 is (``--distribution``, ``SLURM_HOSTFILE``) nor be known to anybody as a host.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptrun.environment.process import host_name
from ckptrun.launch.endpoint import interface_addresses, is_here
from ckptrun.launch.meeting import HostError
from ckptrun.records import JobFacts, TaskFacts
from ckptrun.run.folder import meeting_name, root_is_gone, root_state
from ckptrun.storage.files import write_json_atomic

_POLL_S = 0.1
_SAID_AFTER_S = 5.0
# Below those that the kernel gives to connections by itself, so that it stays free until it is served.
_PORTS = range(20000, 32000)
_TRIES = 100


@dataclass(frozen=True)
class Gathering:
    """Which tasks meet, and beside which runs. ``timeout_s`` is the time within which all must have come."""

    task: TaskFacts
    job: JobFacts
    root: str
    timeout_s: float

    @property
    def path(self) -> str:
        return os.path.join(self.root, f"{meeting_name(self.job, self.task.step)}.json")


@contextlib.contextmanager
def endpoint_of_tasks(
    gathering: Gathering, *, over: Callable[[], bool], say: Callable[[str], None]
) -> Iterator[str | None]:
    """Where the tasks meet, as ``host:port``; None where ``over`` said first that there is no more reason to.

    Raises:
        HostError: task 0 has not said where it is.
        NoCheckpointError: the job was requeued or resubmitted, and its root is gone, or nothing is in it.
    """
    state = root_state(gathering.root, gathering.job)
    if gathering.job.requeued and state in ("absent", "empty"):
        raise root_is_gone(gathering.root, state, gathering.job)
    if gathering.task.number:
        yield _await(gathering, over, say)
        return
    made = not os.path.isdir(gathering.root)
    os.makedirs(gathering.root, exist_ok=True)
    try:
        endpoint = f"{_own_address(gathering.task.node)}:{_free_port()}"
        write_json_atomic(gathering.path, {"endpoint": endpoint}, durable=False)
        yield endpoint
    finally:
        forget(gathering)
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(gathering.root)  # only where nothing else has come there since


def forget(gathering: Gathering) -> None:
    """All have met: the next command of this step is not to find the place of this one."""
    with contextlib.suppress(OSError):
        os.unlink(gathering.path)


def _await(gathering: Gathering, over: Callable[[], bool], say: Callable[[str], None]) -> str | None:
    task, began, said = gathering.task, time.monotonic(), False
    while True:
        found = _read(gathering)
        if found is not None:
            return found
        if over():
            return None
        waited_s = time.monotonic() - began
        if waited_s > gathering.timeout_s:
            raise HostError(
                f"task 0 of step {gathering.job.key}.{task.step} has not said where to meet, for {waited_s:.0f} s",
                hint=f"It writes {gathering.path}: the root has to lie on a disk that all nodes share, under the same "
                "path. What task 0 says stands in the job's log.",
            )
        if waited_s > _SAID_AFTER_S and not said:
            said = True
            say(f"task {task.number} on {task.node} waits for task 0 to say where to meet")
        time.sleep(_POLL_S)


def _read(gathering: Gathering) -> str | None:
    try:
        with os.scandir(gathering.root):
            pass  # a network disk looks anew at a folder that is listed
        with open(gathering.path, encoding="utf-8") as file:
            return str(json.load(file)["endpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _own_address(node: str) -> str:
    """An address of this host that other nodes can reach: that of its name, else the first of its interfaces."""
    for name in dict.fromkeys((node, host_name())):
        with contextlib.suppress(OSError):
            for found in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM):
                address = str(found[4][0])
                if is_here(address) and not address.startswith("127."):
                    return address
    return next((each for each in interface_addresses() if not each.startswith("127.")), "127.0.0.1")


def _free_port() -> int:
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            return port
    raise HostError("no port is free on this host", hint="Give one with --rdzv-endpoint HOST:PORT.")
