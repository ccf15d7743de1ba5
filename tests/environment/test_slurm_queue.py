"""What scontrol prints, and what SIGTERM means in each case. The texts were printed by a real SLURM 22.05."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptrun.environment.slurm_queue import (
    QueueJob,
    duration_s,
    meaning_of_sigterm,
    parse_job,
    parse_kill_wait_s,
    parse_lead_s,
)

RUNNING = (
    "JobId=6 JobName=train it UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901754 Nice=0 "
    "Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 RunTime=00:01:12 TimeLimit=00:01:00 TimeMin=N/A SubmitTime=1796070591 "
    "EligibleTime=1796070591 AccrueTime=1796070591 StartTime=1796070592 EndTime=1796070664 Deadline=N/A "
    "PreemptEligibleTime=1796070706 PreemptTime=None NodeList=n[1-2] BatchHost=n1 NumNodes=2 Command=/x/JobId=9.sh\n"
)


def test_a_job_as_scontrol_prints_it() -> None:
    assert parse_job(RUNNING) == QueueJob(
        id="6",
        state="RUNNING",
        start=1796070592.0,
        end=1796070664.0,
        eligible=1796070591.0,
        limit_s=60.0,
        nodes="n[1-2]",
    )
    waits = parse_job(
        "JobId=12 ArrayJobId=11 ArrayTaskId=2 JobState=PENDING Reason=BeginTime Requeue=0 Restarts=3\n"
    )
    assert waits == QueueJob("12", "PENDING", "BeginTime", 3, may_requeue=False)


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobName=x"])
def test_no_job(text: str) -> None:
    assert parse_job(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:01:00", 60), ("1-02:03:04", 93784), ("02:30", 150), ("UNLIMITED", None), ("", None), ("N/A", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


def test_kill_wait() -> None:
    assert parse_kill_wait_s("JobRequeue = 1\nKillWait                = 30 sec\nLicenses = x\n") == 30.0
    assert parse_kill_wait_s("") is None


GOING = QueueJob("6", "RUNNING", start=100.0, end=1000.0, limit_s=900.0)
ENDING = replace(GOING, state="COMPLETING")


@pytest.mark.parametrize(
    ("job", "now", "known_end", "meaning"),
    [
        pytest.param(None, 500, 1000, "unknown", id="no scontrol, or no answer"),
        pytest.param(GOING, 500, 1000, "signal", id="scancel --signal=TERM, or kill"),
        pytest.param(
            replace(GOING, preempted_at=500.0, end=560.0),
            500,
            1000,
            "preempted",
            id="preempted, in its grace",
        ),
        pytest.param(
            replace(ENDING, preempted_at=500.0, end=500.0), 500, 1000, "preempted", id="preempted by CANCEL"
        ),
        pytest.param(
            replace(ENDING, restarts=1), 500, 1000, "requeued", id="preempted by REQUEUE, or scontrol requeue"
        ),
        pytest.param(replace(ENDING, state="PENDING"), 500, 1000, "requeued", id="waits for its next start"),
        pytest.param(replace(ENDING, end=500.0), 500, 1000, "cancelled", id="scancel"),
        pytest.param(
            replace(ENDING, end=500.0, limit_s=400.0), 500, 1000, "time-limit", id="limit cut short"
        ),
        pytest.param(
            replace(ENDING, state="CANCELLED", end=500.0), 500, None, "cancelled", id="scancel, end unknown"
        ),
        pytest.param(replace(ENDING, end=1010.0), 1010, 1000, "time-limit", id="time limit, looked at late"),
        pytest.param(replace(ENDING, end=1010.0), 1010, None, "time-limit", id="time limit, end unknown"),
        pytest.param(replace(GOING, state="TIMEOUT"), 1010, None, "time-limit", id="time limit"),
        pytest.param(GOING, 999, 1000, "time-limit", id="SIGTERM at the limit, before the state says so"),
        pytest.param(
            replace(ENDING, end=500.0, limit_s=None), 500, None, "cancelled", id="scancel, no limit"
        ),
    ],
)
def test_what_sigterm_means(job: QueueJob | None, now: float, known_end: float | None, meaning: str) -> None:
    assert meaning_of_sigterm(job, restart_count=0, now=now, known_end=known_end) == meaning


def test_a_job_in_its_second_start_is_not_taken_for_one_that_was_requeued() -> None:
    job = replace(ENDING, restarts=1, end=500.0)
    assert meaning_of_sigterm(job, restart_count=1, now=500.0, known_end=1000.0) == "cancelled"


@pytest.mark.parametrize(
    ("script", "lead_s"),
    [
        ("#!/bin/bash\n#SBATCH --time=1:00\n#SBATCH --signal=USR1@300\nsrun x\n", 300.0),
        ("#SBATCH --signal=B:USR1@120\n", 120.0),
        ("#SBATCH --signal B:10@90\n", 90.0),
        ("#SBATCH --signal=USR1\n", 60.0),
        ("#SBATCH --signal='USR1@30'\n", 30.0),
        ("#SBATCH --requeue --signal=USR1@45 --time=5\n", 45.0),
        ("#SBATCH --signal=USR1@45 --comment='a b'\n#SBATCH --signal=USR1@50\n", 50.0),
        ("#SBATCH --comment=x--signal=USR1@9\n", None),
        ("#!/bin/bash\n\n# a word\n#SBATCH --signal=USR1@30\n", 30.0),
        ("#!/bin/bash\nmodule load x\n#SBATCH --signal=USR1@30\n", None),
        ("#!/bin/bash\nsrun x --signal=USR1@30\n", None),
    ],
)
def test_the_lead_that_a_script_asks_for(script: str, lead_s: float | None) -> None:
    assert parse_lead_s(script) == lead_s
