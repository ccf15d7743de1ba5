"""What does SLURM say about the process that asks?

Decision: one table names every variable that is read, and nothing else in ckptrun knows SLURM's names.
Whether this is a batch job is told from what slurmd itself sets, not from the job's name, which the user
chooses: a submitted script gets ``ENVIRONMENT=BATCH``, a shell of ``srun --pty`` (and the shell that
``salloc`` opens on the node) has a pseudo-terminal's port, and the shell of a plain ``salloc`` stays on the
login node, where slurmd sets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptrun.records import JobFacts

VARIABLES: Final[Mapping[str, str]] = {
    "job": "SLURM_JOB_ID",
    "array_job": "SLURM_ARRAY_JOB_ID",
    "array_task": "SLURM_ARRAY_TASK_ID",
    "restart_count": "SLURM_RESTART_COUNT",  # missing until the first requeue
    "kind": "ENVIRONMENT",  # BATCH in a submitted script and in the steps it starts
    "pty": "SLURM_PTY_PORT",
    "step": "SLURM_STEP_ID",
    "node": "SLURMD_NODENAME",
    "task_pid": "SLURM_TASK_PID",
    "rank": "SLURM_PROCID",
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
    )


def array_task(env: Mapping[str, str]) -> str | None:
    """The number of the array task, None where this is no job array; part of the run's name by default."""
    return _fact(env, "array_task") if _fact(env, "job") is not None else None


def _is_batch(env: Mapping[str, str]) -> bool:
    # A script that was submitted from within an interactive shell may inherit that shell's SLURM_PTY_PORT, so
    # what slurmd sets for batch jobs alone is asked first.
    if _fact(env, "kind") == "BATCH":
        return True
    if _fact(env, "pty") is not None or _fact(env, "step") == INTERACTIVE_STEP:
        return False
    # A step started with `srun --export=NONE` has lost ENVIRONMENT; only batch jobs are ever restarted.
    on_node = any(_fact(env, fact) is not None for fact in ("node", "task_pid", "rank"))
    return on_node or _fact(env, "restart_count") is not None


def _fact(env: Mapping[str, str], fact: str) -> str | None:
    return env.get(VARIABLES[fact]) or None
