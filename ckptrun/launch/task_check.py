"""Do the ranks of a SLURM job have the GPUs and the cores that they need?

Decision: asked once, before anything is started, of what this process can see itself (its GPUs, its cores, the
tasks beside it), and answered with the numbers and the option to change. What could only fail is an error, what
only wastes or waits is a warning. How many ranks and hosts there are, and whether that can be, is the plan's to say.
Turned down: comparing with what the script asked for, which is not what it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptrun.errors import UsageError


@dataclass(frozen=True)
class TaskShare:
    """What one task of a job has.

    ``num_ranks`` are those that this command starts, with ``num_workers`` loader workers each; ``num_cores`` and
    ``num_gpus`` are what this process may use. ``num_local_tasks`` run on this node; each may see all its GPUs or only
    its own. ``num_node_gpus`` is what SLURM says of the node, None where it says nothing.
    """

    num_ranks: int
    num_cores: int
    num_gpus: int = 0
    num_workers: int = 0
    num_local_tasks: int = 1
    num_node_gpus: int | None = None


def check_share(share: TaskShare) -> list[str]:
    """What is worth a warning, each with what to do about it.

    Raises:
        UsageError: there are fewer GPUs than tasks.
    """
    tasks, gpus = share.num_local_tasks, _node_gpus(share)
    if gpus and tasks > gpus:
        raise UsageError(
            f"SLURM has started {tasks} tasks on this node, each of which is a rank, and gave them "
            f"{_count(gpus, 'GPU')}.",
            hint=f"Use --ntasks-per-node={gpus}, or --gpus-per-node={tasks} where a node has as many.",
        )
    return [*_idle_gpus(share), *_scarce_cores(share)]


def _idle_gpus(share: TaskShare) -> Iterator[str]:
    tasks, gpus = share.num_local_tasks, _node_gpus(share)
    busy = tasks if tasks > 1 else share.num_ranks
    if gpus > busy:
        remedy = f"--ntasks-per-node={gpus}" if tasks > 1 else f"--nproc {gpus}"
        yield (
            f"{_count(busy, 'rank')} on this node, which has {gpus} GPUs: {gpus - busy} will have no work; "
            f"use {remedy}, or ask for fewer"
        )


def _scarce_cores(share: TaskShare) -> Iterator[str]:
    needed = share.num_ranks * (1 + share.num_workers)
    if share.num_cores >= needed:
        return
    workers = f" with {_count(share.num_workers, 'loader worker')} each" if share.num_workers else ""
    ranks = _count(share.num_ranks, "rank")
    cores = _count(share.num_cores, "core") if share.num_cores else "less than a core"
    yield (
        f"{ranks}{workers} on {cores}, all that SLURM gave this task: put '#SBATCH --cpus-per-task={needed}' and "
        f"'export SRUN_CPUS_PER_TASK={needed}' into the script (srun does not take over the first by itself)"
    )


def _node_gpus(share: TaskShare) -> int:
    """The node's GPUs, 0 where that is not known: what one of several tasks sees may be its own alone."""
    if share.num_local_tasks == 1 or not share.num_gpus:
        return share.num_gpus
    if share.num_node_gpus is not None:
        return max(share.num_gpus, share.num_node_gpus)
    return share.num_gpus if share.num_gpus > 1 else 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
