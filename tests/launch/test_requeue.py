"""Whether a job starts again, who sees to it, and the exit code. The acting itself is in tests/slurm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

import pytest

from ckptrun.environment.slurm_queue import Meaning
from ckptrun.launch.requeue import (
    ENDED,
    NOT_AGAIN,
    START_AGAIN,
    JobEnd,
    Policy,
    Requeue,
    comes_again,
    refusal,
)
from ckptrun.records import AttemptRecord, JobFacts, Status, StopReason
from ckptrun.run.attempts import (
    RequeueRecord,
    append_end,
    append_requeue,
    append_start,
    read_attempts,
    read_requeues,
)
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import StatusRecord, read_status, write_status
from ckptrun.stop import StopListener

JOB = JobFacts("7_1", True, 1, ("5",), "9")


@pytest.mark.parametrize(
    ("reason", "meaning", "again"),
    [
        (StopReason.WALLTIME, None, True),
        (StopReason.SIGTERM, "preempted", True),
        (StopReason.SIGTERM, "requeued", True),
        (StopReason.SIGTERM, "time-limit", True),
        (StopReason.SIGTERM, "unknown", True),
        (StopReason.SIGTERM, "cancelled", False),
        (StopReason.SIGTERM, "signal", False),
        (StopReason.SIGTERM, None, False),
        (StopReason.KEYBOARD, None, False),
        (StopReason.EXCEPTION, None, False),
    ],
)
def test_what_comes_again(reason: StopReason, meaning: Meaning | None, again: bool) -> None:
    assert comes_again(reason, meaning) is again


def attempt(job: str, *, moved: bool = True) -> AttemptRecord:
    end = 8 if moved else 5
    return AttemptRecord(1, "fit", 0.0, job=job, start_step=5, start_sequence=2, end_step=end, end_sequence=3)


MOVED, IDLE = attempt("7_1"), attempt("7_1", moved=False)


@pytest.mark.parametrize(
    ("attempts", "requeued_by", "most", "preempted", "said"),
    [
        pytest.param([MOVED], [], None, False, None, id="it went on"),
        pytest.param([MOVED, IDLE], [], None, False, "in this start", id="nothing was done"),
        pytest.param([MOVED, IDLE, IDLE], [], None, True, None, id="preempted before anything was done"),
        pytest.param([MOVED, IDLE, IDLE, IDLE], [], None, True, "its last 3 starts", id="again and again"),
        pytest.param([IDLE, attempt("8"), MOVED], [], None, False, None, id="another job's"),
        pytest.param([MOVED], ["7_1"] * 2, 2, False, "requeued 2 times, and slurm.max_requeues is 2", id="too often"),
        pytest.param([MOVED], ["7_1", "5"], 2, False, "requeued 2 times", id="jobs it was resubmitted from count"),
        pytest.param([MOVED], ["7_2", "7_1"], 2, False, None, id="other tasks of the array do not count"),
        pytest.param([MOVED], ["slurm"] * 9, 1, True, None, id="what SLURM did by itself does not count"),
        pytest.param([MOVED], [], 0, True, "slurm.max_requeues is 0", id="never"),
    ],
)  # fmt: skip
def test_what_is_not_requeued(
    attempts: list[AttemptRecord],
    requeued_by: list[str],
    most: int | None,
    preempted: bool,
    said: str | None,
) -> None:
    requeues = [
        RequeueRecord(1, "7_1" if key == "slurm" else key, "slurm" if key == "slurm" else "scontrol", "")
        for key in requeued_by
    ]
    why = refusal(attempts, requeues, JOB, Policy(None, most), preempted=preempted)
    assert (why is None) if said is None else (said in (why or ""))


def test_a_start_that_came_to_nothing_counts_too() -> None:
    assert refusal([MOVED], [], JOB, Policy(), preempted=True, began=False) is None
    assert "in this start" in (refusal([MOVED], [], JOB, Policy(), preempted=False, began=False) or "")
    assert "its last 3 starts" in (
        refusal([IDLE, IDLE], [], JOB, Policy(), preempted=True, began=False) or ""
    )


def scontrol(folder: Path, code: int, says: str | None = "JobState=RUNNING", *, then: str = "") -> None:
    """A program of that name that writes down what else than the job it is asked for, and ends with ``code``.

    Args:
        says: what it says of the job; None where it cannot say.
        then: what it says instead, once it was asked for something else.
    """
    path, asked = folder / "scontrol", folder / "asked"
    shown = (
        "exit 1" if says is None else f'echo "JobId=9 Restarts=1 {says} EndTime=$(($(date +%s) + 999))"; exit'
    )
    later = f'[ "{then}" ] && [ -e "{asked}" ] && {{ echo "JobId=9 {then}"; exit; }}'
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *"show job 9") {later}\n{shown};; esac\n'
        f'echo "$@" >> "{asked}"\necho refused >&2\nexit {code}\n'
    )
    path.chmod(0o755)


def asked_for(folder: Path) -> str:
    path = folder / "asked"
    return path.read_text() if path.exists() else ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a run whose only attempt was stopped for its time, where ``scontrol`` is found in its parent."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("ckptrun.environment.slurm_queue._PAUSE_S", 0.01)
    folder = RunFolder(str(tmp_path / "run"))
    folder.create()
    append_start(folder.attempts, AttemptRecord(1, "fit", 0.0, job="7_1"), versions={})
    append_end(
        folder.attempts, 1, status="INTERRUPTED", stop_reason="walltime", exit_code=75, step=4, sequence=1,
        steps_gained=4, steps_replayed=0, save_s=0, restore_s=0,
    )  # fmt: skip
    write_status(
        folder.status,
        StatusRecord("run", Status.INTERRUPTED, stop_reason="walltime", attempt=1, exit_code=75),
    )
    return folder


def said_codes(folder: RunFolder) -> set[int | None]:
    """The exit code as ledger and status say it."""
    record = read_status(folder)
    assert record is not None
    return {read_attempts(folder.attempts)[-1].exit_code, record.exit_code}


@pytest.mark.parametrize(
    ("mode", "meaning", "scontrol_ends", "code", "noted"),
    [
        pytest.param(None, None, 0, ENDED, ("scontrol", "walltime", None), id="requeued"),
        pytest.param(None, "preempted", 0, ENDED, ("scontrol", "preempted", None), id="preempted"),
        pytest.param(None, "requeued", 0, ENDED, ("slurm", "requeued", None), id="SLURM did it"),
        pytest.param(None, "unknown", 1, START_AGAIN, ("exit-code", "walltime", "refused"), id="refused"),
        pytest.param("exit-code", "time-limit", 0, START_AGAIN, ("exit-code", "walltime", None), id="exit-code"),
        pytest.param("none", None, 0, START_AGAIN, ("none", "walltime", None), id="none"),
    ],
)  # fmt: skip
def test_who_sees_to_it(
    mode: str | None,
    meaning: Meaning | None,
    scontrol_ends: int,
    code: int,
    noted: tuple[str, str, str | None],
    tmp_path: Path,
    folder: RunFolder,
) -> None:
    scontrol(tmp_path, scontrol_ends, "JobState=COMPLETING Reason=TimeLimit")
    said: list[str] = []
    listener = StopListener()
    if meaning is not None:
        listener.request_stop(StopReason.SIGTERM, signum=signal.SIGTERM)
    requeue = Requeue(JOB, folder, Policy(mode), listener, said.append)  # type: ignore[arg-type]
    assert requeue.after(meaning, wait=False) == JobEnd(code, code == ENDED)
    (record,) = read_requeues(folder.attempts)
    assert (record.by, record.why, record.job, record.attempt) == (noted[0], noted[1], "7_1", 1)
    assert asked_for(tmp_path) == ("requeue 7_1\n" if noted[0] == "scontrol" or noted[2] else "")
    assert len(said) == 1
    assert "job 7_1" in said[0]
    assert said_codes(folder) == {code}


CANCELLED = "JobState=COMPLETING Reason=None"


@pytest.mark.parametrize("meaning", [None, "unknown", "preempted", "time-limit"])
@pytest.mark.parametrize("mode", [None, "exit-code"])
def test_a_job_that_was_cancelled_meanwhile_stays_so(
    meaning: Meaning | None, mode: Literal["exit-code"] | None, tmp_path: Path, folder: RunFolder
) -> None:
    scontrol(tmp_path, 0, CANCELLED)
    said: list[str] = []
    assert Requeue(JOB, folder, Policy(mode), StopListener(), said.append).after(meaning) == JobEnd(ENDED)
    assert asked_for(tmp_path) == ""
    assert read_requeues(folder.attempts) == []
    assert said == ["job 7_1 was cancelled, and is not requeued"]
    assert said_codes(folder) == {ENDED}


def test_a_mere_signal_whose_meaning_is_known_late_brings_nothing_back(
    tmp_path: Path, folder: RunFolder
) -> None:
    scontrol(tmp_path, 0)
    requeue = Requeue(JOB, folder, Policy(), StopListener(), lambda _: None)
    assert requeue.after("unknown") == JobEnd(ENDED)
    assert asked_for(tmp_path) == ""
    assert said_codes(folder) == {ENDED}


def test_a_job_that_nobody_tells_of_is_left_to_its_script(tmp_path: Path, folder: RunFolder) -> None:
    scontrol(tmp_path, 0, None)
    said: list[str] = []
    requeue = Requeue(JOB, folder, Policy(), StopListener(), said.append)
    assert requeue.after("unknown") == requeue.after(None) == JobEnd(START_AGAIN)
    assert asked_for(tmp_path) == ""
    assert "does not answer" in said[0]
    assert said_codes(folder) == {START_AGAIN}


@pytest.mark.parametrize("says", ["JobState=PENDING", "JobState=COMPLETING Restarts=2"])
@pytest.mark.parametrize("lost_node", [False, True])
def test_one_that_slurm_requeued_meanwhile_is_not_requeued_twice(
    says: str, lost_node: bool, tmp_path: Path, folder: RunFolder
) -> None:
    scontrol(tmp_path, 0, says)
    requeue = Requeue(JOB, folder, Policy(), StopListener(), lambda _: None)
    end = requeue.after_lost_node(70) if lost_node else requeue.after(None)
    assert end == JobEnd(ENDED, requeued=True)
    assert asked_for(tmp_path) == ""
    (record,) = read_requeues(folder.attempts)
    assert (record.by, record.why) == ("slurm", "node-lost" if lost_node else "requeued")


@pytest.mark.parametrize(
    ("meaning", "says", "why"),
    [
        ("preempted", "JobState=COMPLETING Restarts=2", "preempted"),  # its grace time was not enough
        (None, "JobState=COMPLETING Restarts=2 PreemptTime=1796088872", "preempted"),
        (None, "JobState=COMPLETING Restarts=2 PreemptTime=None", "requeued"),
        ("unknown", "JobState=COMPLETING Restarts=2", "requeued"),
        ("requeued", "JobState=COMPLETING Restarts=2", "requeued"),  # so does `scontrol requeue` by hand look
    ],
)
def test_only_what_is_known_to_be_a_preemption_is_called_one(
    meaning: Meaning | None, says: str, why: str, tmp_path: Path, folder: RunFolder
) -> None:
    scontrol(tmp_path, 0, says)
    requeue = Requeue(JOB, folder, Policy(), StopListener(), lambda _: None)
    assert requeue.after(meaning) == JobEnd(ENDED, requeued=True)
    (record,) = read_requeues(folder.attempts)
    assert (record.by, record.why) == ("slurm", why)


def test_a_requeue_whose_answer_is_lost_counts(tmp_path: Path, folder: RunFolder) -> None:
    scontrol(tmp_path, 1, then="JobState=COMPLETING Restarts=2")
    requeue = Requeue(JOB, folder, Policy(), StopListener(), lambda _: None)
    assert requeue.after(None, wait=False) == JobEnd(ENDED, requeued=True)
    assert [each.by for each in read_requeues(folder.attempts)] == ["scontrol"]


def test_the_end_is_waited_for_only_where_it_is_still_told(tmp_path: Path, folder: RunFolder) -> None:
    scontrol(tmp_path, 0, "JobState=COMPLETING Reason=TimeLimit")
    began = time.monotonic()
    requeue = Requeue(JOB, folder, Policy(), StopListener(), lambda _: None)
    assert requeue.after(None) == JobEnd(ENDED, requeued=True)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("says", "lost", "most", "end", "requeued"),
    [
        ("JobState=COMPLETING Reason=TimeLimit", ["node-lost"] * 2, None, JobEnd(ENDED, requeued=True), True),
        ("JobState=COMPLETING Reason=TimeLimit", ["node-lost"] * 3, None, JobEnd(70), False),
        (
            "JobState=COMPLETING Reason=TimeLimit",
            ["node-lost", "walltime", "node-lost", "node-lost"],
            None,
            JobEnd(ENDED, requeued=True),
            True,
        ),
        ("JobState=COMPLETING Reason=TimeLimit", [], 0, JobEnd(70), False),
        (CANCELLED, [], None, JobEnd(ENDED), False),
        (None, [], None, JobEnd(70), False),
    ],
)
def test_a_lost_node(
    says: str | None,
    lost: list[str],
    most: int | None,
    end: JobEnd,
    requeued: bool,
    tmp_path: Path,
    folder: RunFolder,
) -> None:
    scontrol(tmp_path, 0, says)
    for why in lost:
        append_requeue(folder.attempts, 1, job="7_1", by="scontrol", why=why)
    said: list[str] = []
    requeue = Requeue(JOB, folder, Policy(None, most), StopListener(), said.append)
    assert requeue.after_lost_node(70) == end
    assert asked_for(tmp_path) == ("requeue 7_1\n" if requeued else "")
    assert len(said) == 1


def test_nobody_elses_status_is_amended(tmp_path: Path, folder: RunFolder) -> None:
    scontrol(tmp_path, 0)
    write_status(folder.status, StatusRecord("run", Status.RUNNING, attempt=2))
    requeue = Requeue(JOB, folder, Policy(max_requeues=0), StopListener(), lambda _: None)
    assert requeue.after(None) == JobEnd(NOT_AGAIN)
    record = read_status(folder)
    assert record is not None
    assert (record.attempt, record.exit_code) == (2, None)
    assert read_attempts(folder.attempts)[-1].exit_code == NOT_AGAIN


def test_an_earlier_start_s_end_is_not_amended(tmp_path: Path, folder: RunFolder) -> None:
    scontrol(tmp_path, 0, "JobState=COMPLETING Reason=TimeLimit")
    requeue = Requeue(JOB, folder, Policy(), StopListener(), lambda _: None)
    assert requeue.after("preempted", began=False) == JobEnd(ENDED, requeued=True)
    assert said_codes(folder) == {START_AGAIN}


def test_where_there_is_no_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = RunFolder(str(tmp_path / "run"))
    folder.create()
    said: list[str] = []
    assert Requeue(JOB, folder, Policy(), StopListener(), said.append).after(None) == JobEnd(START_AGAIN)
    assert "there is no scontrol here" in said[0]
    assert [each.by for each in read_requeues(folder.attempts)] == ["exit-code"]


def test_the_limit_ends_it(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "run"))
    folder.create()
    append_requeue(folder.attempts, 1, job="5", by="scontrol", why="walltime")
    said: list[str] = []
    requeue = Requeue(JOB, folder, Policy("exit-code", 1), StopListener(), said.append)
    assert requeue.after(None) == JobEnd(NOT_AGAIN)
    assert len(read_requeues(folder.attempts)) == 1
