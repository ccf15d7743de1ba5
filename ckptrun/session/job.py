"""What does a session mean for the SLURM job that it runs in?"""

from __future__ import annotations

import signal
from dataclasses import replace

from ckptrun.environment.slurm_queue import Meaning
from ckptrun.launch.requeue import NOT_AGAIN, JobEnd, Requeue, comes_again
from ckptrun.records import JobFacts, Outcome, StopReason
from ckptrun.session.spec import SessionResult, SessionSpec
from ckptrun.stop import exit_code

_FIRST_TASK_ENDS_S = 5.0


def see_to_the_job(spec: SessionSpec, result: SessionResult) -> SessionResult:
    """Have the SLURM job start again, where it was stopped for its time: after ledger and status are written."""
    outcome, job = result.outcome, batch_job(spec)
    if job is None or outcome is None or not outcome.built:
        return result
    request = spec.listener.request
    if outcome.stop_reason is StopReason.WALLTIME:
        end = _requeue(spec, job)
    elif getattr(outcome.error, "host_lost", False) and (
        request is None or comes_again(request.reason, meaning_of_sigterm(spec))
    ):
        end = _requeuer(spec, job).after_lost_node(result.exit_code)
    else:
        return result
    return replace(result, exit_code=end.code, requeued=end.requeued)


def _requeue(spec: SessionSpec, job: JobFacts, *, wait: bool = True, began: bool = True) -> JobEnd:
    return _requeuer(spec, job).after(meaning_of_sigterm(spec), wait=wait, began=began)


def _requeuer(spec: SessionSpec, job: JobFacts) -> Requeue:
    assert spec.walltime is not None
    known = replace(job, restart_count=spec.walltime.restart_count(job.restart_count))
    return Requeue(known, spec.folder, spec.requeue, spec.listener, spec.echo, spec.walltime.grace_end)


def batch_job(spec: SessionSpec) -> JobFacts | None:
    """The SLURM job that goes on in another start of it, where this is a fit in one."""
    is_fit = spec.fn == "fit" and not spec.fast_dev_run
    return spec.job if is_fit and spec.job is not None and spec.job.batch else None


def meaning_of_sigterm(spec: SessionSpec) -> Meaning | None:
    """What SLURM said that SIGTERM was for; None where no SIGTERM stopped the run, or it was not asked."""
    request = spec.listener.request
    if spec.walltime is None or request is None or batch_job(spec) is None:
        return None
    is_sigterm = request.reason is StopReason.SIGTERM and request.signum == signal.SIGTERM
    return spec.walltime.meaning() if is_sigterm else None


def judge(spec: SessionSpec, outcome: Outcome, code: int) -> tuple[Outcome, int]:
    """How an attempt ended, once it is known what SIGTERM was for: a preemption is the end of its time."""
    meaning = meaning_of_sigterm(spec)
    if meaning is None or outcome.stop_reason is not StopReason.SIGTERM:
        return outcome, code
    if comes_again(outcome.stop_reason, meaning):
        outcome = replace(outcome, stop_reason=StopReason.WALLTIME)
        code = exit_code(outcome, request=spec.listener.request)
    return outcome, code


def after_forced_end(spec: SessionSpec, outcome: Outcome, code: int) -> int:
    """The exit code where the grace period ended it: the job is given back all the same, without waiting."""
    job = batch_job(spec)
    if job is None or spec.walltime is None or outcome.stop_reason is not StopReason.WALLTIME:
        return code
    return _requeue(spec, job, wait=False).code


def stopped_before_all_had_met(spec: SessionSpec, code: int) -> SessionResult:
    """SLURM's task 0 sees to the job all the same, and the others do not cut it off by their end.

    Nor do they hide its exit code: srun ends with the highest one.
    """
    task, job, request = spec.plan.task, batch_job(spec), spec.listener.request
    if task is None or job is None or request is None:
        return SessionResult(code)
    if task.number:
        spec.listener.await_term(_FIRST_TASK_ENDS_S)
        return SessionResult(NOT_AGAIN)
    if comes_again(request.reason, meaning_of_sigterm(spec)):
        end = _requeue(spec, job, began=False)
        return SessionResult(end.code, requeued=end.requeued)
    return SessionResult(code)


def hpc_for(spec: SessionSpec) -> tuple[str, ...]:
    """The reasons to stop for which what is saved is an hpc checkpoint."""
    if not spec.hpc_save:
        return ()
    in_job = batch_job(spec) is not None
    return (StopReason.WALLTIME, StopReason.SIGTERM) if in_job else (StopReason.WALLTIME,)
