"""Whether a job starts again, who sees to it, and the exit code. The acting itself is in tests/slurm."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckptrun.environment.slurm_queue import Meaning
from ckptrun.launch.requeue import ENDED, NOT_AGAIN, START_AGAIN, Policy, Requeue, comes_again, refusal
from ckptrun.records import AttemptRecord, JobFacts, StopReason
from ckptrun.run.attempts import RequeueRecord, append_end, append_requeue, append_start, read_requeues
from ckptrun.run.folder import RunFolder
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


def scontrol(folder: Path, code: int) -> None:
    """A program of that name that writes its arguments down and ends with ``code``."""
    path = folder / "scontrol"
    path.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/asked"\necho refused >&2\nexit {code}\n')
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("mode", "meaning", "scontrol_ends", "code", "noted"),
    [
        pytest.param(None, None, 0, ENDED, ("scontrol", "walltime", None), id="requeued"),
        pytest.param(None, "preempted", 0, ENDED, ("scontrol", "preempted", None), id="preempted"),
        pytest.param(None, "requeued", 0, ENDED, ("slurm", "preempted", None), id="SLURM did it"),
        pytest.param(None, "unknown", 1, START_AGAIN, ("exit-code", "SIGTERM", "refused"), id="refused"),
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    scontrol(tmp_path, scontrol_ends)
    folder = RunFolder(str(tmp_path / "run"))
    folder.create()
    append_start(folder.attempts, AttemptRecord(1, "fit", 0.0, job="7_1"), versions={})
    append_end(
        folder.attempts, 1, status="INTERRUPTED", stop_reason="walltime", exit_code=75, step=4, sequence=1,
        steps_gained=4, steps_replayed=0, save_s=0, restore_s=0,
    )  # fmt: skip
    said: list[str] = []
    listener = StopListener()
    if meaning is not None:
        listener.request_stop(StopReason.SIGTERM, signum=signal.SIGTERM)
    requeue = Requeue(JOB, folder, Policy(mode), listener, said.append)  # type: ignore[arg-type]
    assert requeue.after(meaning, ending=True) == code
    (record,) = read_requeues(folder.attempts)
    assert (record.by, record.why, record.job, record.attempt) == (noted[0], noted[1], "7_1", 1)
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == (
        "requeue 7_1\n" if noted[0] == "scontrol" or noted[2] else ""
    )
    assert len(said) == 1
    assert "job 7_1" in said[0]


def test_where_there_is_no_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = RunFolder(str(tmp_path / "run"))
    folder.create()
    said: list[str] = []
    assert (
        Requeue(JOB, folder, Policy(), StopListener(), said.append).after(None, ending=False) == START_AGAIN
    )
    assert "there is no scontrol here" in said[0]
    assert [each.by for each in read_requeues(folder.attempts)] == ["exit-code"]


def test_the_limit_ends_it(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "run"))
    folder.create()
    append_requeue(folder.attempts, 1, job="5", by="scontrol", why="walltime")
    said: list[str] = []
    requeue = Requeue(JOB, folder, Policy("exit-code", 1), StopListener(), said.append)
    assert requeue.after(None, ending=False) == NOT_AGAIN
    assert len(read_requeues(folder.attempts)) == 1
