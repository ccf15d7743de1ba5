"""What scontrol prints, and what SIGTERM means in each case. The texts were printed by a real SLURM 22.05."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptrun.environment.slurm_queue import (
    QueueJob,
    meaning_of_sigterm,
    parse_job,
    parse_kill_wait_s,
    parse_lead_s,
    read_job,
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
        nodes="n[1-2]",
    )
    waits = parse_job(
        "JobId=12 ArrayJobId=11 ArrayTaskId=2 JobState=PENDING Reason=BeginTime Requeue=0 Restarts=3\n"
    )
    assert waits == QueueJob("12", "PENDING", "BeginTime", 3)


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobName=x"])
def test_no_job(text: str) -> None:
    assert parse_job(text) is None


def test_what_users_write_themselves_is_not_taken_for_what_the_controller_says() -> None:
    theirs = "go on, see JobState=PENDING Restarts=3 EndTime=5 Reason=TimeLimit Restarts=no"
    named = RUNNING.replace("JobName=train it", f"JobName={theirs}")
    commented = RUNNING.rstrip("\n") + f" WorkDir=/x Comment={theirs}\n"
    assert parse_job(named) == parse_job(commented) == parse_job(RUNNING)
    assert parse_job(RUNNING.replace("Restarts=0", "Restarts=no")) == parse_job(RUNNING)


def test_kill_wait() -> None:
    assert parse_kill_wait_s("JobRequeue = 1\nKillWait                = 30 sec\nLicenses = x\n") == 30.0
    assert parse_kill_wait_s("") is None


GOING = QueueJob("6", "RUNNING", start=100.0, end=1000.0)
ENDING = replace(GOING, state="COMPLETING")
GRACE = replace(GOING, preempted_at=500.0, end=560.0)


@pytest.mark.parametrize(
    ("job", "now", "meaning"),
    [
        pytest.param(None, 500, "unknown", id="no scontrol, or no answer"),
        pytest.param(GOING, 500, "signal", id="scancel --signal=TERM, or kill"),
        pytest.param(replace(GOING, state="SUSPENDED"), 500, "signal", id="suspended"),
        pytest.param(replace(GOING, state="STOPPED"), 500, "signal", id="stopped"),
        pytest.param(replace(GOING, state="SIGNALING"), 500, "signal", id="signaling"),
        pytest.param(replace(GOING, state="RESIZING"), 500, "signal", id="resizing"),
        pytest.param(GRACE, 500, "preempted", id="preempted, in its grace"),
        pytest.param(replace(ENDING, preempted_at=500.0, end=500.0), 500, "preempted", id="preempted by CANCEL"),
        pytest.param(replace(ENDING, restarts=1), 500, "requeued", id="preempted by REQUEUE, or scontrol requeue"),
        pytest.param(replace(ENDING, state="PENDING"), 500, "requeued", id="waits for its next start"),
        pytest.param(replace(ENDING, end=500.0), 500, "cancelled", id="scancel"),
        pytest.param(replace(ENDING, end=500.0, reason="TimeLimit"), 500, "time-limit", id="limit cut short"),
        pytest.param(replace(ENDING, state="CANCELLED", end=500.0), 500, "cancelled", id="scancel, looked at late"),
        pytest.param(replace(ENDING, end=1010.0, reason="TimeLimit"), 1010, "time-limit", id="time limit"),
        pytest.param(replace(ENDING, end=1010.0), 1010, "cancelled", id="scancel, when the limit is over already"),
        pytest.param(replace(GOING, state="TIMEOUT"), 1010, "time-limit", id="time limit, looked at late"),
        pytest.param(GOING, 999, "time-limit", id="SIGTERM at the limit, before the state says so"),
    ],
)  # fmt: skip
def test_what_sigterm_means(job: QueueJob | None, now: float, meaning: str) -> None:
    assert meaning_of_sigterm(job, restart_count=0, now=now) == meaning


def test_a_job_in_its_second_start_is_not_taken_for_one_that_was_requeued() -> None:
    job = replace(ENDING, restarts=1, end=500.0)
    assert meaning_of_sigterm(job, restart_count=1, now=500.0) == "cancelled"


@pytest.mark.parametrize(
    ("job", "meaning"),
    [
        (GRACE, "preempted"),
        (replace(GRACE, state="COMPLETING"), "preempted"),  # the grace is over
        (replace(GRACE, state="COMPLETING", end=530.0), "cancelled"),
        (replace(GRACE, state="COMPLETING", end=530.0, restarts=1), "requeued"),
    ],
)
def test_a_job_that_is_cancelled_while_it_is_preempted(job: QueueJob, meaning: str) -> None:
    assert meaning_of_sigterm(job, restart_count=0, now=530.0, grace_end=560.0) == meaning


@pytest.mark.parametrize(
    ("said", "patient", "tries"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller", True, 2),
        ("slurm_load_jobs error: Unable to contact slurm controller", False, 1),
        ("slurm_load_jobs error: Invalid job id specified", True, 1),
    ],
)
def test_a_controller_that_is_busy_is_asked_once_more(
    said: str, patient: bool, tries: int, tmp_path: Path
) -> None:
    path, asked = tmp_path / "scontrol", tmp_path / "asked"
    path.write_text(
        f'#!/bin/sh\n[ -s "{asked}" ] && {{ echo >> "{asked}"; echo "{RUNNING.strip()}"; exit; }}\n'
        f'echo >> "{asked}"\necho "{said}" >&2\nexit 1\n'
    )
    path.chmod(0o755)
    job = read_job("6", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, patient=patient)
    assert (job is not None) is (tries == 2)
    assert len(asked.read_text()) == tries


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


def test_a_name_in_another_encoding_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "scontrol"
    line = RUNNING.replace("train it", "entra\u00eenement").encode("latin-1")
    path.write_bytes(b"#!/bin/sh\ncat <<'END'\n" + line + b"END\n")
    path.chmod(0o755)
    assert read_job("6", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == parse_job(RUNNING)
