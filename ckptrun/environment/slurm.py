"""What does SLURM say about the process that asks?

Decision: one table names every variable that is read, and nothing else in ckptrun knows SLURM's names.
Whether this is a batch job is told from what SLURM itself sets, not from the job's name, which the user chooses. This
is what a real one (22.05) sets:

    where                                    ENVIRONMENT  SLURMD_NODENAME  SRUN_DEBUG  SLURM_PTY_PORT
    a submitted script                       BATCH        yes              no          no
    srun in it                               BATCH        yes              yes         no
    srun --export=NONE in it                 no           yes              no          no
    the shell of salloc                      no           no               no          no
    srun in that shell, or on a login node   no           yes              yes         no
    srun --pty, and srun in that shell       no           yes              yes         yes

A step has the environment of the srun that started it, and srun puts SRUN_DEBUG into its own: a step that has it, and
no ENVIRONMENT, was started from where no script is. One that lacks both was started with ``--export=NONE`` and has
nothing but SLURM's own variables, which are the same in a script and in ``salloc``; it is taken for a script's, for the
other mistake would let ``--ckpt none`` start over at each requeue. Turned down: asking the controller (``BatchFlag``),
which a container may lack, and which a thousand tasks would ask at once.

How many tasks there are is told by the step alone: in the batch step and in an interactive shell ``SLURM_NTASKS`` only
says how many there could be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptrun.environment.node_list import expand, expand_counts
from ckptrun.errors import UsageError
from ckptrun.records import JobFacts, TaskFacts

VARIABLES: Final[Mapping[str, str]] = {
    "job": "SLURM_JOB_ID",
    "array_job": "SLURM_ARRAY_JOB_ID",
    "array_task": "SLURM_ARRAY_TASK_ID",
    "restart_count": "SLURM_RESTART_COUNT",  # missing until the first requeue
    "kind": "ENVIRONMENT",  # BATCH in a submitted script and in the steps it starts
    "srun_verbosity": "SRUN_DEBUG",  # not SLURM_…, so lost where a step is not given srun's environment
    "pty": "SLURM_PTY_PORT",
    "step": "SLURM_STEP_ID",
    "node": "SLURMD_NODENAME",
    "task_pid": "SLURM_TASK_PID",
    "rank": "SLURM_PROCID",
    "local_rank": "SLURM_LOCALID",
    "node_number": "SLURM_NODEID",
    "step_tasks": "SLURM_STEP_NUM_TASKS",
    "step_tasks_per_node": "SLURM_STEP_TASKS_PER_NODE",
    "step_nodes": "SLURM_STEP_NODELIST",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "end_time": "SLURM_JOB_END_TIME",  # not in 22.05; newer ones set it, and it is that of the job's start
    "het_size": "SLURM_HET_SIZE",
    "pack_size": "SLURM_PACK_SIZE",  # what that was called before 20.02
    "node_gpus": "SLURM_GPUS_ON_NODE",
    "nodes": "SLURM_JOB_NUM_NODES",
    "tasks": "SLURM_NTASKS",
    "previous_jobs": "CKPTRUN_PREVIOUS_JOBS",  # ckptrun's own: the jobs this one was resubmitted from
}
INTERACTIVE_STEP = "4294967290"  # 0xfffffffa, the step in which salloc opens a shell on the node


def job_facts(env: Mapping[str, str]) -> JobFacts | None:
    """What the environment says about the job; None outside of SLURM (``--no-slurm``: an empty ``env``).

    ``previous`` comes from ``CKPTRUN_PREVIOUS_JOBS``: keys of jobs, newest first, with commas between them.
    """
    job = _fact(env, "job")
    if job is None:
        return None
    task = array_task(env)
    restarts = _fact(env, "restart_count") or ""
    previous = (_fact(env, "previous_jobs") or "").replace(",", " ").split()
    return JobFacts(
        key=job if task is None else f"{_fact(env, 'array_job') or job}_{task}",
        batch=_is_batch(env),
        restart_count=int(restarts) if restarts.isdecimal() else 0,
        previous=tuple(previous),
        id=job,
    )


def array_task(env: Mapping[str, str]) -> str | None:
    """The number of the array task, None where this is no job array; part of the run's name by default."""
    return _fact(env, "array_task") if _fact(env, "job") is not None else None


def task_facts(env: Mapping[str, str], *, at_terminal: bool) -> TaskFacts | None:
    """Which of several tasks of a step this process is; None where it is the only one, or no step's task.

    Args:
        at_terminal: standard input is a terminal, as in a shell that ``srun --pty`` has opened.

    Raises:
        UsageError: the job is a heterogeneous one, or what SLURM says does not fit together.
    """
    if _fact(env, "job") is None:
        return None
    if max(_number(env, "het_size"), _number(env, "pack_size")) > 1:
        raise UsageError(
            f"job {_fact(env, 'job')} is a heterogeneous one, with {_fact(env, 'het_size') or _fact(env, 'pack_size')} "
            "components; ckptrun runs on nodes of one kind",
            hint="Submit one component as a job of its own, or say --no-slurm and give --nnodes and --rdzv-endpoint.",
        )
    num_tasks = _number(env, "step_tasks")
    interactive = _fact(env, "pty") is not None and at_terminal
    if num_tasks <= 1 or interactive or _fact(env, "step") in (None, INTERACTIVE_STEP):
        return None
    try:
        counts = expand_counts(_fact(env, "step_tasks_per_node") or "")
        nodes = tuple(expand(_fact(env, "step_nodes") or ""))
        node, number, local = (int(env[VARIABLES[fact]]) for fact in ("node_number", "rank", "local_rank"))
        num_local = counts[node]
        if sum(counts) != num_tasks or len(nodes) != len(counts) or local >= num_local or number >= num_tasks:
            raise ValueError("the numbers of tasks and nodes do not fit together")
    except (ValueError, KeyError, IndexError) as error:
        said = ", ".join(f"{VARIABLES[fact]}={env.get(VARIABLES[fact])}" for fact in _STEP_FACTS)
        raise UsageError(
            f"what SLURM says about this step cannot be used: {error} ({said})",
            hint="Start ckptrun with srun itself, not from within another task; --no-slurm passes SLURM over.",
        ) from None
    return TaskFacts(
        number=number,
        num_tasks=num_tasks,
        local=local,
        num_local=num_local,
        nodes=nodes,
        node=env.get(VARIABLES["node"]) or nodes[node],
        step=_fact(env, "step") or "",
        cpus=_number(env, "cpus_per_task"),
    )


_STEP_FACTS = ("step_tasks", "step_tasks_per_node", "step_nodes", "node_number", "rank", "local_rank")


def end_time(env: Mapping[str, str]) -> float | None:
    """When the job was to end as it started, in seconds since 1970; None where SLURM does not say."""
    return float(_number(env, "end_time")) or None


def _number(env: Mapping[str, str], fact: str) -> int:
    text = _fact(env, fact) or ""
    return int(text) if text.isdecimal() else 0


def _is_batch(env: Mapping[str, str]) -> bool:
    # A script that was submitted from within an interactive shell may inherit that shell's SLURM_PTY_PORT, so
    # what slurmd sets for batch jobs alone is asked first.
    if _fact(env, "kind") == "BATCH":
        return True
    if _fact(env, "pty") is not None or _fact(env, "step") == INTERACTIVE_STEP:
        return False
    if _fact(env, "restart_count") is not None:
        return True  # only batch jobs are ever restarted
    on_node = any(_fact(env, fact) is not None for fact in ("node", "task_pid", "rank"))
    # Somebody's own ENVIRONMENT says nothing: it may have taken the place of BATCH.
    has_no_script = _fact(env, "kind") is None and _fact(env, "srun_verbosity") is not None
    return on_node and not has_no_script


def _fact(env: Mapping[str, str], fact: str) -> str | None:
    return env.get(VARIABLES[fact]) or None


def gpus_on_node(env: Mapping[str, str]) -> int | None:
    """How many of this node's GPUs the step has; None where SLURM does not say."""
    return _number(env, "node_gpus") or None


def tasks_not_started(env: Mapping[str, str]) -> int:
    """How many tasks a job has of which srun has started none: this process is (below) its script. 0 in a step."""
    if _fact(env, "kind") != "BATCH" or _fact(env, "step") is not None:
        return 0
    return max(_number(env, "tasks"), _number(env, "nodes"))


_OF_EVERY_JOB = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_MPI_TYPE")


def outside_of_the_job(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what SLURM told the job that asks.

    sbatch hands its own environment on, and a new job would believe what was true of another: that it is the third
    start (``SLURM_RESTART_COUNT``), or a task of an array.
    """
    own = ("SLURM_", "SLURMD_", "SRUN_")
    return {
        name: value
        for name, value in env.items()
        if name in _OF_EVERY_JOB
        or not (name.startswith(own) or name in (VARIABLES["kind"], VARIABLES["previous_jobs"]))
    }
