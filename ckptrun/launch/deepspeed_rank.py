"""What does a process do that DeepSpeed's launcher has started? It calls the supervisor, and becomes a rank.

    rank -->  hello: its numbers, its process, the token of the control file
         <--  job: what to do, where its log is
         -->  store: where the ranks meet, from rank 0 alone
         <--  meet: the same, to all
         ...  then as :mod:`ckptrun.launch.rank_process` has it
         <--  leave: all ranks are done; until then it stays, for DeepSpeed's launcher ends the others when one ends

Run as a script: the launcher knows nothing of ckptrun. Whatever is wrong before the supervisor is reached goes to
stderr, which the launcher passes on.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules are no top-level ones

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any

# Names of the same facts under DeepSpeed's own launcher, Open MPI, MPICH and its kin, and srun.
_NAMES = {
    "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"),
    "local_rank": (
        "LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "SLURM_LOCALID",
    ),
    "world_size": (
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
    ),
    "local_size": (
        "LOCAL_SIZE",
        "LOCAL_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "host_rank": ("CROSS_RANK", "GROUP_RANK", "SLURM_NODEID"),
}
_NEEDED = ("rank", "local_rank", "world_size")
_CALL_S = 30.0


def main() -> int:
    """``CONTROL``: the file that tells where the supervisor listens."""
    control = _read_control()
    numbers = numbers_of(os.environ)
    from ckptrun.environment.process import this_process
    from ckptrun.launch.parent_death import hold_signals, release_signals
    from ckptrun.launch.wire import Channel
    from ckptrun.stop import StopListener

    hold_signals()  # until there is somebody to tell: the first word is hello
    channel = Channel(_call(control["addresses"]))
    channel.send("hello", token=control["token"], process=this_process(), **numbers)
    listener = StopListener(report=lambda signum: channel.send("signal", signum=signum))
    listener.install()
    release_signals()
    return _be_rank(channel, numbers)


def _read_control() -> dict[str, Any]:
    with open(sys.argv[1], encoding="utf-8") as file:
        control: dict[str, Any] = json.load(file)
    return control


def _be_rank(channel: Any, numbers: dict[str, int]) -> int:
    from ckptrun.launch import rank_process

    stop, messages = rank_process.RemoteStop(), channel.messages()
    job = _await(messages, "job", stop)
    log = os.open(job["log_path"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if numbers["rank"] != 0:  # whose output the launcher passes on to the supervisor
        os.dup2(log, 1)
        os.dup2(log, 2)
    _complete_environment(numbers["local_size"])
    os.environ.update(_environment(numbers, job))
    import torch.distributed  # in all ranks at once, not in the others once rank 0 has it and tells where to meet

    store = None
    if numbers["rank"] == 0:
        # At a free port, so that nobody else's can be in the way.
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            "0.0.0.0", 0, numbers["world_size"], is_master=True, wait_for_workers=False
        )
        channel.send("store", port=store.port)
    met = _await(messages, "meet", stop)
    os.environ.update(
        MASTER_ADDR=os.environ.get("MASTER_ADDR") or met["address"],
        MASTER_PORT=str(met["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",  # all ranks are clients of the store that is there
    )
    rank_process.work_and_tell(bytes.fromhex(job["payload"]), channel, log, stop, messages)
    stop.leave.wait()
    return 0


def _complete_environment(local_size: int) -> None:
    """What must stand there before torch is imported, and does not where another host has started this process."""
    from ckptrun.environment.machine import num_cores, num_gpus
    from ckptrun.launch.plan import ALSO_IMPORTED, environment_of_ranks

    found = environment_of_ranks(
        local_size, num_cores=num_cores(), strategy="deepspeed", num_gpus=num_gpus(os.environ)
    )
    del found[ALSO_IMPORTED]
    for name, value in found.items():
        os.environ.setdefault(name, value)


def _environment(numbers: dict[str, int], job: dict[str, Any]) -> dict[str, str]:
    return {
        "RANK": str(numbers["rank"]),
        "LOCAL_RANK": str(numbers["local_rank"]),
        "WORLD_SIZE": str(numbers["world_size"]),
        "LOCAL_WORLD_SIZE": str(numbers["local_size"]),
        "GROUP_RANK": str(numbers["host_rank"]),
        **job["env"],
    }


def _await(messages: Iterator[dict[str, Any]], op: str, stop: Any) -> dict[str, Any]:
    """The next message ``op``; requests that come before it count."""
    from ckptrun.launch.rank_process import take

    for message in messages:
        if message["op"] == op:
            return message
        take(message, stop)
    # Nobody is there any more, so what has started this process is of no use either.
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise AssertionError


def _call(addresses: list[list[Any]]) -> socket.socket:
    errors = []
    for host, port in addresses:
        try:
            sock = socket.create_connection((host, port), timeout=_CALL_S)
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            errors.append(f"{host}:{port}: {error.strerror or error}")
    raise SystemExit(
        f"ckptrun: a rank on {socket.gethostname()} does not reach its supervisor: {'; '.join(errors)}"
    )


def numbers_of(env: Mapping[str, str]) -> dict[str, int]:
    """What whoever has started this process says of its place.

    Raises:
        SystemExit: it says nothing that is known here.
    """
    found: dict[str, int] = {}
    for fact, names in _NAMES.items():
        said = next((env[name] for name in names if env.get(name, "").isdigit()), None)
        if said is not None:
            found[fact] = int(said)
        elif fact in _NEEDED:
            raise SystemExit(
                f"ckptrun: a process on {socket.gethostname()} was not told its {fact.replace('_', ' ')}: none of "
                f"{', '.join(names)} is a number here. Its launcher is none that ckptrun knows."
            )
    found.setdefault("host_rank", 0)
    if "local_size" not in found:
        found["local_size"] = _tasks_here(env, found["host_rank"])
    return found


def _tasks_here(env: Mapping[str, str], node: int) -> int:
    """How many SLURM has started on this node, which it only says in a list of all."""
    from ckptrun.environment.node_list import expand_counts

    try:
        return expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))[node]
    except (ValueError, IndexError):
        return 1


if __name__ == "__main__":
    sys.path[:] = _read_control()["sys_path"]
    from ckptrun.launch.deepspeed_rank import main as _main
    from ckptrun.launch.spawned import leave

    leave(_main())
