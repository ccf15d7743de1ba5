"""What does SLURM's controller say about a job, and what does that mean for a process that is told to end?

Decision: ``scontrol show job`` alone is asked, and only when something has happened or now and then by one process: a
thousand ranks that ask at once are a load that the controller shows to everybody. Turned down: ``squeue --json``, which
needs a plugin that is missing in many installations.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_TIMEOUT_S = 10.0
_DEAF = 'trap "" TERM INT HUP USR1 USR2; exec scontrol "$@"'
_NOT_FOUND = 127
_TRIES = 3
_PAUSE_S = 1.0
# A job in one of these states has its processes; in one of the next it waits to start once more.
_ALIVE = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_WORD = re.compile(r"(?:^|\s)([A-Za-z:/]+)=(\S*)")

Meaning = Literal["preempted", "requeued", "time-limit", "cancelled", "signal", "unknown"]
DEFAULT_LEAD_S = 60.0  # of a --signal without a number


@dataclass(frozen=True)
class QueueJob:
    """A job as the controller sees it. Times are seconds since 1970, None where there is none."""

    id: str
    state: str
    reason: str = ""
    restarts: int = 0
    start: float | None = None
    end: float | None = None
    preempted_at: float | None = None
    nodes: str = ""

    @property
    def ending(self) -> bool:
        """Whether its processes are ended, or were."""
        return self.state not in _ALIVE


def parse_job(text: str) -> QueueJob | None:
    """What ``scontrol --oneliner show job`` has printed, with times as seconds; None where it names no job."""
    line = text.strip().partition("\n")[0]
    found = re.match(r"JobId=(\S+)", line)
    if found is None:
        return None
    # What users write themselves, and may look like any of it, stands before and behind: JobName=, Command=, Comment=.
    before, _, behind = line.partition(" UserId=")
    words = dict(_WORD.findall((behind or before).partition(" Command=")[0]))
    reason, restarts = words.get("Reason", ""), words.get("Restarts", "")
    return QueueJob(
        id=found[1],
        state=words.get("JobState", ""),
        reason="" if reason == "None" else reason,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        start=_time(words.get("StartTime")),
        end=_time(words.get("EndTime")),
        preempted_at=_time(words.get("PreemptTime")),
        nodes=words.get("NodeList", "").replace("(null)", ""),
    )


def _time(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() and int(text) else None


def meaning_of_sigterm(
    job: QueueJob | None,
    *,
    restart_count: int,
    now: float,
    grace_end: float | None = None,
    slack_s: float = 2.0,
) -> Meaning:
    """Why SIGTERM came: for preemption, a requeue, the time limit and ``scancel`` SLURM sends the same one.

    While a job's processes are ended, SLURM calls it COMPLETING, whatever it was ended for; at its limit it gives the
    reason TimeLimit, and none after ``scancel``. The time alone does not tell: a limit may have been changed a moment
    ago, and its end is looked for twice a minute only.

    Args:
        job: as the controller sees it now; None where it does not say.
        restart_count: of this start of the job.
        grace_end: until when it was left to run after it was preempted, where that is known.
    """
    if job is None:
        return "unknown"
    if job.restarts > restart_count or job.state in _WAITING:
        return "requeued"
    if job.preempted_at is not None or job.state == "PREEMPTED":
        early = grace_end is not None and job.end is not None and job.end < grace_end - slack_s
        return "cancelled" if job.ending and early else "preempted"
    if job.ending:
        return "time-limit" if job.state == "TIMEOUT" or job.reason == "TimeLimit" else "cancelled"
    return "time-limit" if job.end is not None and now >= job.end - slack_s else "signal"


def read_job(job_id: str, env: Mapping[str, str] | None = None, *, patient: bool = False) -> QueueJob | None:
    """The job as the controller sees it now; None where it does not say, or there is no ``scontrol``.

    Args:
        patient: ask once more where the controller is busy.
    """
    began = time.monotonic()
    for _ in range(_TRIES):
        done = scontrol(["--oneliner", "show", "job", job_id], env)
        if done is None or done.returncode == 0:
            break
        if done.returncode < 0:
            continue  # a signal ended it before it could turn deaf
        if not patient or "Invalid job id" in done.stderr or time.monotonic() - began > _TIMEOUT_S:
            break
        time.sleep(_PAUSE_S)
    return None if done is None or done.returncode != 0 else parse_job(done.stdout)


def read_kill_wait_s(env: Mapping[str, str] | None = None) -> float | None:
    """SLURM's ``KillWait``: seconds from SIGTERM to SIGKILL; None where nobody says."""
    done = scontrol(["show", "config"], env)
    return None if done is None or done.returncode != 0 else parse_kill_wait_s(done.stdout)


def parse_kill_wait_s(text: str) -> float | None:
    """``KillWait`` in what ``scontrol show config`` has printed."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", text, re.MULTILINE)
    return None if found is None else float(found[1])


def read_lead_s(job_id: str, env: Mapping[str, str] | None = None) -> float | None:
    """How long before the limit the job's script asks for a signal: 0 where for none, None where nobody says."""
    done = scontrol(["write", "batch_script", job_id, "-"], env)
    return None if done is None or done.returncode != 0 else parse_lead_s(done.stdout) or 0.0


def parse_lead_s(script: str) -> float | None:
    """The lead of ``#SBATCH --signal=[B:]USR1@120``; 60 where it names none, as SLURM has it.

    Like sbatch it reads no further than the first command.
    """
    lead_s = None
    for line in itertools.takewhile(lambda line: line[:1] in ("#", ""), script.splitlines()):
        found = re.search(r"^#SBATCH\s(?:.*\s)?--signal[=\s]\s*[\"']?(?:[A-Z]+:)?\w+(?:@(\d+))?", line)
        lead_s = lead_s if found is None else float(found[1] or DEFAULT_LEAD_S)
    return lead_s


def scontrol(
    words: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run ``scontrol``; None where there is none, or it does not answer.

    SLURM sends SIGTERM to all processes of a step, and often twice: this one is not to die of it.
    """
    try:
        done = subprocess.run(
            ["sh", "-c", _DEAF, "scontrol", *words],
            env={**(os.environ if env is None else env), "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # names that users chose, in whatever encoding
            timeout=_TIMEOUT_S,
            start_new_session=True,  # a signal to this process's group is not for it
            check=False,
        )
        return None if done.returncode == _NOT_FOUND else done
    except (OSError, subprocess.TimeoutExpired):
        return None
