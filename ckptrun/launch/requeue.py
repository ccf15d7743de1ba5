"""Does the SLURM job start again once the work in it has stopped, who sees to that, and with which exit code?

    saved, ledger and status written  ->  cancelled?  ->  may it?  ->  scontrol requeue  ->  wait to be ended      (143)
                                      |               |           \\->  refused, nobody answers, `exit-code`, `none`
                                      |               |                                         (75: start me again)
                                      |               \\-> no: too often, or nothing was done since the last time (1)
                                      \\-> yes                                                                  (143)

Decision: the leading supervisor alone acts, once, after all ranks have saved. The controller takes a requeue of a job
that was cancelled as well, so it is asked right before what becomes of the job; where it does not say, the exit code
leaves it to the script, which is gone where the job was cancelled. Where SLURM has requeued the job already (preempted
without grace) nothing is left to do. A job that saved and left by itself inside the grace period of a preemption counts
as completed and never comes back, so that one is requeued here too. What is written before is amended with the exit
code that it comes to. Turned down: requeueing when the signal comes, with ranks still saving: the next start may find
the node before the save is committed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptrun.environment.slurm_queue import Meaning, QueueJob, meaning_of_sigterm, read_job, scontrol
from ckptrun.records import AttemptRecord, JobFacts, StopReason
from ckptrun.run.attempts import RequeueRecord, append_exit, append_requeue, read_attempts, read_requeues
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import amend_exit_code
from ckptrun.stop import StopListener

Mode = Literal["scontrol", "exit-code", "none"]
START_AGAIN = 75
NOT_AGAIN = 1
ENDED = 143
_STARTS_WITHOUT_PROGRESS = 3  # of a job that others keep preempting
_LOST_IN_A_ROW = 3  # nodes; more, and it is something else that ends ckptrun there, such as a lack of memory
_NODE_LOST = "node-lost"
_ENDED_WITHIN_S = (
    60.0  # it is requeued, whatever comes; one that SLURM has lost sight of must not hold the node
)


@dataclass(frozen=True)
class JobEnd:
    """What this command ends with, and whether the job starts again by itself."""

    code: int
    requeued: bool = False


@dataclass(frozen=True)
class Policy:
    """What the config says; ``mode`` None is ``scontrol`` in a batch job."""

    mode: Mode | None = None
    max_requeues: int | None = None


def comes_again(reason: StopReason, meaning: Meaning | None) -> bool:
    """Whether the run was stopped for its time, so that it goes on in another start of the job."""
    if reason is StopReason.SIGTERM:
        # Unknown: nobody answers. It is asked once more before anything is done.
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


def _lost_too_often(requeues: Sequence[RequeueRecord], job: JobFacts) -> str | None:
    """Why the job is not to start again after the loss of another node; None where it is."""
    whys = [each.why for each in requeues if each.job in (job.key, *job.previous)]
    if len(whys) < _LOST_IN_A_ROW or any(why != _NODE_LOST for why in whys[-_LOST_IN_A_ROW:]):
        return None
    return (
        f"each of its last {_LOST_IN_A_ROW + 1} starts has lost a node, as it seems; a ckptrun that is killed there, "
        "for want of memory, say, looks the same"
    )


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
        grace_end: until when the job was left to run after it was preempted, where that is known.
    """

    job: JobFacts
    folder: RunFolder
    policy: Policy
    listener: StopListener
    say: Callable[[str], None]
    grace_end: float | None = None

    def after(self, meaning: Meaning | None, *, wait: bool = True, began: bool = True) -> JobEnd:
        """See to it that the job starts again, where it is to.

        Args:
            meaning: what SIGTERM was for, None where the stop had another cause.
            wait: for the end that SLURM prepares; False where this process is about to end anyway.
            began: an attempt has begun; False where the job's tasks had not met yet.
        """
        attempts = read_attempts(self.folder.attempts)
        amended = attempts if began else []
        job, now = (None, meaning) if meaning == "requeued" else self._ask()
        if now == "cancelled":
            return self._cancelled(amended)
        if meaning == "unknown" and now == "signal":
            self.say(
                f"job {self.job.key} is not requeued: SIGTERM came from elsewhere, and SLURM lets it run"
            )
            return self._end(amended, ENDED, now)
        why = self._why(now if now == "requeued" or meaning == "unknown" else meaning)
        if why == "requeued" and (
            meaning == "preempted" or (job is not None and job.preempted_at is not None)
        ):
            why = "preempted"  # else SLURM says that alone: without grace time, or by hand
        if now == "requeued":
            return self._by_slurm(attempts, amended, why)
        requeues = read_requeues(self.folder.attempts)
        no = refusal(attempts, requeues, self.job, self.policy, preempted=why == "preempted", began=began)
        if no is not None:
            self.say(f"job {self.job.key} is not requeued: {no}")
            return self._end(amended, NOT_AGAIN, no)
        if not self._by_scontrol:
            self._note(attempts, by=self.policy.mode or "", why=why)
            self.say(
                f"job {self.job.key} is not requeued here (slurm.requeue: {self.policy.mode}): exit {START_AGAIN}"
            )
            return self._end(amended, START_AGAIN, why)
        problem = self._scontrol(attempts, amended, why, job, wait=wait)
        if problem is not None:
            self._note(attempts, by="exit-code", why=why, problem=problem)
            self.say(
                f"job {self.job.key} could not be requeued ({problem}): exit {START_AGAIN}, which its script acts on"
            )
            return self._end(amended, START_AGAIN, why)
        return JobEnd(ENDED, requeued=True)

    def after_lost_node(self, code: int) -> JobEnd:
        """The same where a node is gone, which SLURM may notice after this command has ended: it would count as failed.

        Args:
            code: what the command ends with where the job is not requeued.
        """
        attempts = read_attempts(self.folder.attempts)
        job, now = self._ask()
        if now == "cancelled":
            return self._cancelled(attempts)
        if now == "requeued":
            return self._by_slurm(attempts, attempts, _NODE_LOST)
        requeues = read_requeues(self.folder.attempts)
        no = _lost_too_often(requeues, self.job) or refusal(
            attempts, requeues, self.job, self.policy, preempted=True
        )
        if no is None and not self._by_scontrol:
            return JobEnd(code)
        problem = no or self._scontrol(attempts, attempts, _NODE_LOST, job, wait=True)
        if problem is None:
            return JobEnd(ENDED, requeued=True)
        self.say(f"job {self.job.key} is not requeued: {problem}")
        return JobEnd(code)

    @property
    def _by_scontrol(self) -> bool:
        return self.policy.mode in (None, "scontrol")

    def _ask(self) -> tuple[QueueJob | None, Meaning]:
        """What becomes of the job as things are now: it may have been cancelled while ranks saved."""
        job = read_job(self.job.id, patient=True)
        return job, meaning_of_sigterm(
            job, restart_count=self.job.restart_count, now=time.time(), grace_end=self.grace_end
        )

    def _why(self, meaning: Meaning | None) -> str:
        if meaning in ("preempted", "requeued"):
            return meaning
        request = self.listener.request
        if meaning == "time-limit" or request is None or request.signum is None:
            return "walltime"
        return signal.Signals(request.signum).name

    def _cancelled(self, amended: Sequence[AttemptRecord]) -> JobEnd:
        self.say(f"job {self.job.key} was cancelled, and is not requeued")
        return self._end(amended, ENDED, "cancelled")

    def _by_slurm(
        self, attempts: Sequence[AttemptRecord], amended: Sequence[AttemptRecord], why: str
    ) -> JobEnd:
        self._note(attempts, by="slurm", why=why)
        self.say(f"job {self.job.key} is requeued by SLURM")
        return self._end(amended, ENDED, why, requeued=True)

    def _scontrol(
        self,
        attempts: Sequence[AttemptRecord],
        amended: Sequence[AttemptRecord],
        why: str,
        job: QueueJob | None,
        *,
        wait: bool,
    ) -> str | None:
        """Requeue, and wait for the end that follows; why that could not be done, None where it was.

        Args:
            job: as the controller saw it a moment ago.
        """
        before = self.listener.num_terms
        if job is None:
            return "there is no scontrol here, or it does not answer"
        problem = _requeue(self.job.key)
        if problem is not None and self._ask()[1] != "requeued":  # else only the answer was lost
            return problem
        self._note(attempts, by="scontrol", why=why)
        self.say(f"job {self.job.key} is requeued ({why}); SLURM ends it now")
        self._end(amended, ENDED, why)
        if wait and not job.ending:  # else it tells this process no more
            self.listener.await_term(_ENDED_WITHIN_S, since=before)
        return None

    def _end(
        self, amended: Sequence[AttemptRecord], code: int, why: str, *, requeued: bool = False
    ) -> JobEnd:
        """Ledger and status, which were written before it was known, say the exit code that it comes to."""
        last = amended[-1] if amended else None
        if last is not None and last.job == self.job.key and last.exit_code not in (None, code):
            try:
                append_exit(self.folder.attempts, last.attempt, exit_code=code, why=why)
                amend_exit_code(self.folder, last.attempt, code)
            except OSError as error:
                self.say(f"the exit code could not be noted in {self.folder.path}: {error.strerror or error}")
        return JobEnd(code, requeued)

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
        return "scontrol does not answer"
    if done.returncode == 0:
        return None
    return " ".join((done.stderr or done.stdout).split()) or f"scontrol ended with {done.returncode}"
