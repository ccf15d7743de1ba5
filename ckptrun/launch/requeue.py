"""Does the SLURM job start again once the work in it has stopped, who sees to that, and with which exit code?

    saved, ledger and status written  ->  may it?  ->  scontrol requeue  ->  wait to be ended      (143)
                                                   \\->  refused, no scontrol, `exit-code`, `none`  (75: start me again)
                                          no: too often, or nothing was done since the last time    (1)

Decision: the leading supervisor alone acts, once, after all ranks have saved. Where SLURM has requeued the job already
(preempted without grace) nothing is left to do. A job that saved and left by itself inside the grace period of a
preemption counts as completed and never comes back, so that one is requeued here too. Turned down: requeueing when the
signal comes, with ranks still saving: the next start may find the node before the save is committed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptrun.environment.slurm_queue import Meaning, scontrol
from ckptrun.records import AttemptRecord, JobFacts, StopReason
from ckptrun.run.attempts import RequeueRecord, append_requeue, read_attempts, read_requeues
from ckptrun.run.folder import RunFolder
from ckptrun.stop import StopListener

Mode = Literal["scontrol", "exit-code", "none"]
START_AGAIN = 75
NOT_AGAIN = 1
ENDED = 143
_STARTS_WITHOUT_PROGRESS = 3  # of a job that others keep preempting
_ENDED_WITHIN_S = 300.0


@dataclass(frozen=True)
class Policy:
    """What the config says; ``mode`` None is ``scontrol`` in a batch job."""

    mode: Mode | None = None
    max_requeues: int | None = None


def comes_again(reason: StopReason, meaning: Meaning | None) -> bool:
    """Whether the run was stopped for its time, so that it goes on in another start of the job."""
    if reason is StopReason.SIGTERM:
        # Unknown: nobody answers. Where the job is cancelled its script ends too, and nothing acts on the exit code.
        return meaning in ("preempted", "requeued", "time-limit", "unknown")
    return reason is StopReason.WALLTIME


def refusal(
    attempts: Sequence[AttemptRecord],
    requeues: Sequence[RequeueRecord],
    job: JobFacts,
    policy: Policy,
    *,
    preempted: bool,
    began: bool = True,
) -> str | None:
    """Why the job is not to start again; None where it is.

    Args:
        attempts: of the run, the one that has just ended last.
        requeues: those that the run's ledger tells of.
        preempted: others took the job's place, so that it may have had no time to do anything.
        began: this start of the job has come to an attempt.
    """
    keys = (job.key, *job.previous)
    done = sum(each.job in keys and each.by != "slurm" for each in requeues)
    if policy.max_requeues is not None and done >= policy.max_requeues:
        return f"it was requeued {done} times, and slurm.max_requeues is {policy.max_requeues}"
    own = [attempt for attempt in attempts if attempt.job in keys]
    idle = 0 if began else 1
    for attempt in reversed(own):
        if progressed(attempt):
            break
        idle += 1
    if idle >= (_STARTS_WITHOUT_PROGRESS if preempted else 1):
        starts = "this start" if idle == 1 else f"its last {idle} starts"
        return f"nothing was done and saved in {starts}; the next one would do no better"
    return None


def progressed(attempt: AttemptRecord) -> bool:
    """Whether an attempt made a step that is saved."""
    return (attempt.end_step or 0) > attempt.start_step and (
        attempt.end_sequence or 0
    ) > attempt.start_sequence


@dataclass
class Requeue:
    """The end of a fit in a SLURM batch job.

    Args:
        say: takes a line for the user.
    """

    job: JobFacts
    folder: RunFolder
    policy: Policy
    listener: StopListener
    say: Callable[[str], None]

    def after(self, meaning: Meaning | None, *, ending: bool, wait: bool = True, began: bool = True) -> int:
        """See to it that the job starts again, and return this command's exit code.

        Args:
            meaning: what SIGTERM was for, None where the stop had another cause.
            ending: SLURM is ending the job's processes already, and tells it no more.
            wait: for the end that SLURM prepares; False where this process is about to end anyway.
            began: an attempt has begun; False where the job's tasks had not met yet.
        """
        why = self._why(meaning)
        attempts = read_attempts(self.folder.attempts)
        if meaning == "requeued":
            self._note(attempts, by="slurm", why=why)
            self.say(f"job {self.job.key} is requeued by SLURM")
            return ENDED
        no = refusal(
            attempts,
            read_requeues(self.folder.attempts),
            self.job,
            self.policy,
            preempted=why == "preempted",
            began=began,
        )
        if no is not None:
            self.say(f"job {self.job.key} is not requeued: {no}")
            return NOT_AGAIN
        if not self._by_scontrol:
            self._note(attempts, by=self.policy.mode or "", why=why)
            self.say(
                f"job {self.job.key} is not requeued here (slurm.requeue: {self.policy.mode}): exit {START_AGAIN}"
            )
            return START_AGAIN
        problem = self._scontrol(attempts, why, wait=wait and not ending)
        if problem is not None:
            self._note(attempts, by="exit-code", why=why, problem=problem)
            self.say(
                f"job {self.job.key} could not be requeued ({problem}): exit {START_AGAIN}, which its script acts on"
            )
            return START_AGAIN
        return ENDED

    def after_lost_node(self, code: int) -> int:
        """The same where a node is gone, which SLURM may notice after this command has ended: it would count as failed.

        Args:
            code: what the command ends with where the job is not requeued.
        """
        attempts = read_attempts(self.folder.attempts)
        no = refusal(attempts, read_requeues(self.folder.attempts), self.job, self.policy, preempted=True)
        if no is None and not self._by_scontrol:
            return code
        problem = no or self._scontrol(attempts, "node-lost", wait=True)
        if problem is None:
            return ENDED
        self.say(f"job {self.job.key} is not requeued: {problem}")
        return code

    @property
    def _by_scontrol(self) -> bool:
        return self.policy.mode in (None, "scontrol")

    def _why(self, meaning: Meaning | None) -> str:
        if meaning in ("preempted", "requeued"):
            return "preempted"
        request = self.listener.request
        if meaning == "time-limit" or request is None or request.signum is None:
            return "walltime"
        return signal.Signals(request.signum).name

    def _scontrol(self, attempts: Sequence[AttemptRecord], why: str, *, wait: bool) -> str | None:
        """Requeue, and wait for the end that follows; why that could not be done, None where it was."""
        before = self.listener.num_terms
        problem = _requeue(self.job.key)
        if problem is not None:
            return problem
        self._note(attempts, by="scontrol", why=why)
        self.say(f"job {self.job.key} is requeued ({why}); SLURM ends it now")
        if wait:
            self.listener.await_term(_ENDED_WITHIN_S, since=before)
        return None

    def _note(
        self, attempts: Sequence[AttemptRecord], *, by: str, why: str, problem: str | None = None
    ) -> None:
        if not os.path.isdir(self.folder.path):
            return  # nothing has begun, so there is nothing to tell about
        try:
            append_requeue(
                self.folder.attempts,
                attempts[-1].attempt if attempts else 0,
                job=self.job.key,
                by=by,
                why=why,
                problem=problem,
            )
        except OSError as error:
            self.say(f"the requeue could not be noted in {self.folder.attempts}: {error.strerror or error}")


def _requeue(key: str) -> str | None:
    """Requeue the job or array task; why that could not be done, None where it was."""
    done = scontrol(["requeue", key])
    if done is None:
        return "there is no scontrol here, or it does not answer"
    if done.returncode == 0:
        return None
    return " ".join((done.stderr or done.stdout).split()) or f"scontrol ended with {done.returncode}"
