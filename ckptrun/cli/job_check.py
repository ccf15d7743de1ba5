"""Does this command stand where SLURM reaches it, and with what it needs?

Decision: told before anything starts, from what the process sees; only what could never work is an error. Turned
down: refusing a command that no signal reaches, for a short job may need none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping

from ckptrun.cli.settle import Settled
from ckptrun.environment.shell_above import Shell, shell_above
from ckptrun.environment.slurm import gpus_on_node, tasks_not_started
from ckptrun.launch.plan import LaunchPlan
from ckptrun.launch.task_check import TaskShare, check_share


def job_warnings(settled: Settled, plan: LaunchPlan, env: Mapping[str, str]) -> Iterator[str]:
    """What a command in a SLURM batch job, or one of several tasks that train together, is told before it starts.

    Raises:
        UsageError: it cannot work with what SLURM gave it.
    """
    if settled.job is None or not (settled.job.batch or plan.task is not None):
        return
    of_the_share = check_share(_share(settled, plan, env))
    if plan.task is not None and plan.task.number:
        return  # task 0 says it
    if settled.fn == "fit":
        shell = shell_above(env, _signal_number(settled))
        if shell is not None:
            yield _in_the_way(shell)
        tasks = tasks_not_started(env)
        if tasks > plan.num_ranks:
            yield (
                f"the job has {tasks} tasks, none of which runs: srun starts them, and this command is one for itself. "
                "Write 'srun ckptrun …', or ask for one task"
            )
    yield from of_the_share


def _share(settled: Settled, plan: LaunchPlan, env: Mapping[str, str]) -> TaskShare:
    from ckptrun.environment.machine import num_cores, num_gpus

    cores, task = num_cores(), plan.task
    local_tasks = task.num_local if task is not None and task.is_rank else 1
    if task is not None and local_tasks > 1:
        # Where no plugin binds tasks to cores, each sees those of the others too.
        cores = min(cores, task.cpus) if task.cpus else cores // local_tasks
    return TaskShare(
        num_ranks=plan.num_ranks,
        num_cores=cores,
        num_gpus=num_gpus(os.environ),
        num_workers=settled.config.num_loader_workers,
        num_local_tasks=local_tasks,
        num_node_gpus=gpus_on_node(env),
    )


def _in_the_way(shell: Shell) -> str:
    if shell.in_script:
        return (
            f"the script's shell ({shell.name}) stands between SLURM and this command: a plain --signal reaches only "
            "what srun starts, one with B: only the shell, which dies of it, and the job ends with the shell. Write "
            "'srun ckptrun …', or, with B: and as the last line, 'exec ckptrun …'"
        )
    return (
        f"a shell ({shell.name}) that srun started stands between SLURM and this command, and dies of the signal "
        "that comes before the time limit; let srun start ckptrun itself, or say 'exec ckptrun …' in that shell"
    )


def _signal_number(settled: Settled) -> int:
    names = settled.config.slurm.signals or ("SIGUSR1",)
    return int(signal.Signals[names[0]])
