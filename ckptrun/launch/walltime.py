"""How long may this command still run, and when must it stop by itself to be saved in time?

One process of a job watches: the leading supervisor. It asks the controller now and then when the job ends (a limit can
be changed, and so can ``--signal``'s own lead be too short), knows how long saves and steps have taken, and asks for a
stop while there is time for another save. ``launch.time_limit`` is an end like any other. When SIGTERM comes it asks
the controller once what it is for.

Decision: what is known is kept here, and what follows from it are pure functions. Turned down: a fixed lead, which is
too short for a large model and wasteful for a small one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptrun.environment.slurm_queue import (
    DEFAULT_LEAD_S,
    Meaning,
    QueueJob,
    meaning_of_sigterm,
    read_job,
    read_kill_wait_s,
    read_lead_s,
)
from ckptrun.records import JobFacts, Progress, StopReason
from ckptrun.stop import StopListener, StopRequest

DEFAULT_KILL_WAIT_S = 30.0  # SLURM's
BEFORE_KILL_S = 5.0
LEAST_MARGIN_S = 10.0
SAVES_LEFT = 1.5  # fewer than so many saves' time, and none is begun
_MOST_PART = 0.5  # of the whole time that a margin may take
_ASK_MOST_S, _ASK_LEAST_S = 60.0, 5.0
_ASK_EVERY = 0.05  # of the time that is left
_LOOK_EVERY_S = 0.25
_ANSWER_S = 15.0
_ANSWER_FROM_MUTE_S = 5.0  # of a controller that has not answered yet, so that KillWait may be short
_ANSWER_PART = 0.5  # of the grace period that is left; the rest is for ledger and status
_STEPS_KNOWN = 5
_SAVES_KNOWN = 10  # the newest ones, for a run that has become quicker


def margin_s(save_s: float, step_s: float, whole_s: float) -> float:
    """How long before the end a stop is asked for.

    Args:
        save_s: the longest save.
        step_s: an optimizer step.
        whole_s: all the time that there is.
    """
    return min(LEAST_MARGIN_S + 2 * save_s + 2 * step_s, whole_s * _MOST_PART)


def no_save_fits(save_s: float, left_s: float | None) -> bool:
    """Whether there is too little time left to begin another save: the one in flight is finished, and that is all."""
    return left_s is not None and save_s > 0 and left_s < SAVES_LEFT * save_s


def ask_again_s(left_s: float | None) -> float:
    """When to ask the controller for the end of the job again."""
    return _ASK_MOST_S if left_s is None else min(_ASK_MOST_S, max(_ASK_LEAST_S, left_s * _ASK_EVERY))


def too_tight(*, left_s: float | None, kill_wait_s: float, save_s: float, lead_s: float | None) -> list[str]:
    """What is too short for a save, with the numbers and the option to change; at start.

    Args:
        save_s: the longest save that is known of this run; 0 where none is.
        lead_s: how long before the end ``--signal`` comes; 0 where the script asks for none, None where that is
            not known.
    """
    if not save_s:
        return []
    found, needed = [], SAVES_LEFT * save_s
    took = f"a save of this run has taken {save_s:.0f} s"
    if lead_s and lead_s < needed:
        found.append(
            f"{took}, and --signal comes {lead_s:.0f} s before the limit: make it --signal=USR1@{needed + 60:.0f} or "
            "more"
        )
    if lead_s == 0 and needed > DEFAULT_LEAD_S:
        found.append(
            f"{took}, and no --signal stands in the job's script: one given to sbatch itself has to be "
            f"--signal=USR1@{needed + 60:.0f} or more"
        )
    if kill_wait_s - BEFORE_KILL_S < save_s:
        found.append(
            f"{took}, and SLURM kills {kill_wait_s:.0f} s after SIGTERM (KillWait): a preemption without grace may "
            "lose what was done since the last save; save more often (ModelCheckpoint's every_n_train_steps, "
            "train_time_interval)"
        )
    if left_s is not None and left_s * _MOST_PART < needed:
        found.append(f"{took}, and the job ends in {left_s:.0f} s: ask for more with --time")
    return found


@dataclass
class _Known:
    kill_wait_s: float = DEFAULT_KILL_WAIT_S
    answered: bool = False  # the controller has, once
    job_end: float | None = None  # seconds since 1970
    grace_end: float | None = None  # the same, of a preemption
    job_start: float | None = None
    restarts: int | None = None  # of this start of the job
    save_s: float = 0.0
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KNOWN))

    @property
    def step_s(self) -> float:
        """The median, so that a validation between two steps is not taken for a slow one."""
        return sorted(self.steps_s)[len(self.steps_s) // 2] if self.steps_s else 0.0


class Walltime:
    """Watches the time in threads of its own, from :meth:`start` to :meth:`close`.

    Args:
        job: the batch job that this command runs in; None where it is in none.
        say: takes a warning for the user.
        limit_s: ``launch.time_limit``.
        job_end: when the job ends, as its environment says; counts where there is no controller to be asked.
        grace_given: the grace period was set by the user, so KillWait does not change it.
    """

    def __init__(
        self,
        listener: StopListener,
        *,
        job: JobFacts | None,
        say: Callable[[str], None],
        limit_s: float | None = None,
        job_end: float | None = None,
        grace_given: bool = False,
    ) -> None:
        self._listener = listener
        self._job = job
        self._say = say
        self._began = time.time()
        self._limit_end = None if limit_s is None else self._began + limit_s
        self._grace_given = grace_given
        # Until the controller has been asked: what is said at the start of a job holds no longer once its limit is
        # changed, and one that is over was.
        self._told_end = job_end if job_end is not None and job_end > self._began else None
        self._known = _Known(job_start=self._began)
        self._progress: Progress | None = None
        self._over = threading.Event()
        self._warned = False
        self._entered = 0
        self._asks = threading.Lock()  # taken for good by who asks what SIGTERM is for: once
        self._asked = threading.Event()
        self._answer_by: float | None = None
        self._meaning: Meaning = "unknown"
        self._threads: list[threading.Thread] = []

    # -- what it is told -----------------------------------------------------------------------------------

    def __enter__(self) -> Walltime:
        self._entered += 1
        if self._entered == 1:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered == 0:
            self.close()

    def start(self) -> None:
        """Begin to watch."""
        self._listener.time_left_s = self._allowed_s
        self._listener.no_time_to_save = lambda: no_save_fits(self._known.save_s, self.left_s())
        self._listener.on_request = self._requested
        if self._listener.request is not None:
            self._requested(self._listener.request)  # it came before there was somebody to ask
        tasks = [self._watch] if self._job is None else [self._watch, self._read_now_and_then]
        self._threads = [
            threading.Thread(target=each, name="ckptrun-walltime", daemon=True) for each in tasks
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        for thread in self._threads:
            thread.join(_ANSWER_S)
        self._listener.time_left_s = lambda: None
        self._listener.no_time_to_save = lambda: False
        self._listener.on_request = lambda _: None

    def follow(self, progress: Progress, saves_s: Sequence[float]) -> None:
        """Take the attempt that begins now; ``saves_s`` is how long earlier saves of the run have taken."""
        self._progress = progress
        self._known.save_s = max([self._known.save_s, *saves_s[-_SAVES_KNOWN:]])

    def saved(self, save_s: float) -> None:
        """A save has taken so long."""
        self._known.save_s = max(self._known.save_s, save_s)

    # -- what it knows ---------------------------------------------------------------------------------------

    def left_s(self) -> float | None:
        """Seconds until the end; None where there is no end."""
        ends = [end for end in (self._known.job_end, self._limit_end) if end is not None]
        return min(ends) - time.time() if ends else None

    def _allowed_s(self) -> float | None:
        """How long a stop for the walltime may take: SLURM gives a job KillWait more after its end."""
        left_s = self.left_s()
        return None if left_s is None else left_s + self._listener.grace_s

    @property
    def grace_end(self) -> float | None:
        """Until when a job that is preempted is left to run, in seconds since 1970; None where that is not known."""
        return self._known.grace_end

    def restart_count(self, told: int) -> int:
        """Which start of the job this is, as the controller says; ``told``, by the environment, where it does not."""
        return told if self._known.restarts is None else self._known.restarts

    def meaning(self) -> Meaning | None:
        """What the controller said that SIGTERM was for; None outside of a batch job.

        An answer is waited for, though not until SIGKILL: how the work has ended is written down after it.
        """
        if self._job is None:
            return None
        if self._answer_by is None:
            most_s = _ANSWER_S if self._known.answered else _ANSWER_FROM_MUTE_S
            left_s = self._listener.grace_left_s()
            most_s = most_s if left_s is None else min(most_s, left_s * _ANSWER_PART)
            self._answer_by = time.monotonic() + most_s
        self._asked.wait(max(0.0, self._answer_by - time.monotonic()))
        return self._meaning

    # -- the thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        last_step, last_at = None, 0.0
        while not self._over.is_set():
            now, progress = time.monotonic(), self._progress
            if progress is not None and progress.step != last_step:
                if last_step is not None and progress.step > last_step:
                    self._known.steps_s.append((now - last_at) / (progress.step - last_step))
                last_step, last_at = progress.step, now
            self._stop_in_time()
            if self._listener.num_terms and not self._listener.has_finished:
                self._begin_to_ask()  # also where it was not the first wish to stop
            self._over.wait(_LOOK_EVERY_S)

    def _read_now_and_then(self) -> None:
        """In a thread of its own: a controller that does not answer must not hold up the clock."""
        assert self._job is not None
        self._read_kill_wait()
        job = read_job(self._job.id)
        self._hear(job)
        if job is None:
            self._known.job_end = self._told_end
        next_read = time.monotonic() + ask_again_s(self.left_s())
        while not self._over.is_set() and self._listener.request is None:
            if time.monotonic() >= next_read:
                self._hear(read_job(self._job.id))
                next_read = time.monotonic() + ask_again_s(self.left_s())
            self._warn()
            self._over.wait(_LOOK_EVERY_S)

    def _warn(self) -> None:
        """Once, as soon as it is known how long a save takes."""
        known = self._known
        if self._warned or self._job is None or not known.save_s:
            return
        self._warned = True
        for text in too_tight(
            left_s=self.left_s(),
            kill_wait_s=known.kill_wait_s,
            save_s=known.save_s,
            lead_s=read_lead_s(self._job.id),
        ):
            self._say(f"warning: {text}")

    def _read_kill_wait(self) -> None:
        kill_wait_s = read_kill_wait_s()
        if kill_wait_s is not None:
            self._known.kill_wait_s, self._known.answered = kill_wait_s, True
        self._set_grace()

    def _set_grace(self) -> None:
        """SLURM kills so long after it has told the processes to end, and in a preemption not before the grace ends."""
        if self._grace_given:
            return
        known = self._known
        left_s = 0.0 if known.grace_end is None else max(0.0, known.grace_end - time.time())
        self._listener.grace_s = max(1.0, left_s + known.kill_wait_s - BEFORE_KILL_S)

    def _hear(self, job: QueueJob | None) -> None:
        if job is not None and job.state == "RUNNING" and job.end is not None:
            self._known.job_end, self._known.job_start = job.end, job.start
            self._known.restarts = job.restarts

    def _stop_in_time(self) -> None:
        left_s, known = self.left_s(), self._known
        if left_s is None or self._listener.request is not None:
            return
        began = known.job_start if known.job_start is not None else self._began
        whole_s = time.time() + left_s - min(began, self._began)
        if self._limit_end is not None:
            whole_s = min(whole_s, self._limit_end - self._began)
        if left_s <= margin_s(known.save_s, known.step_s, whole_s):
            self._listener.request_stop(StopReason.WALLTIME)

    def _requested(self, request: StopRequest) -> None:
        """In the thread that brought it: what SIGTERM means is asked while ranks come to their boundary."""
        is_sigterm = request.signum == signal.SIGTERM and request.reason is StopReason.SIGTERM
        if is_sigterm and self._job is not None:
            self._begin_to_ask()
        else:
            self._asked.set()

    def _begin_to_ask(self) -> None:
        if self._job is not None and self._asks.acquire(blocking=False):
            threading.Thread(target=self._ask, name="ckptrun-walltime-ask", daemon=True).start()

    def _ask(self) -> None:
        assert self._job is not None
        try:
            job = read_job(self._job.id, patient=True)
            self._meaning = meaning_of_sigterm(
                job, restart_count=self.restart_count(self._job.restart_count), now=time.time()
            )
            if job is not None and self._meaning == "preempted" and not job.ending:
                self._known.grace_end = job.end
                self._set_grace()
        finally:
            self._asked.set()  # whatever went wrong, nobody waits for it in vain
