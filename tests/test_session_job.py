"""What a session that ends in a SLURM job asks for, and with which exit code it ends. The acting is in tests/launch."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ckptrun.session.job as session_job
from ckptrun.environment.slurm_queue import Meaning
from ckptrun.launch.blame import LostRankError
from ckptrun.launch.requeue import JobEnd, Requeue
from ckptrun.records import JobFacts, Outcome, StopReason
from ckptrun.run.folder import RunFolder
from ckptrun.session.spec import SessionResult, SessionSpec
from ckptrun.stop import StopListener


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was to be seen to; the job was requeued each time."""
    asked: list[str] = []

    def after(self: Requeue, *_: object, **__: object) -> JobEnd:
        asked.append("stopped")
        return JobEnd(143, requeued=True)

    def after_lost_node(self: Requeue, code: int) -> JobEnd:
        asked.append("lost node")
        return JobEnd(143, requeued=True)

    monkeypatch.setattr(Requeue, "after", after)
    monkeypatch.setattr(Requeue, "after_lost_node", after_lost_node)
    monkeypatch.setattr(session_job, "_FIRST_TASK_ENDS_S", 0.1)
    return asked


def a_spec(
    tmp_path: Path, stop: StopReason | None, meaning: Meaning | None = None, *, task: int = 0
) -> SessionSpec:
    """A fit in a job, as far as it matters here."""
    listener = StopListener()
    if stop is not None:
        listener.request_stop(stop, signum=signal.SIGTERM if stop is StopReason.SIGTERM else None)
    spec: Any = SimpleNamespace(
        fn="fit",
        fast_dev_run=False,
        job=JobFacts("7", True, id="7"),
        plan=SimpleNamespace(task=SimpleNamespace(number=task)),
        listener=listener,
        folder=RunFolder(str(tmp_path / "run")),
        requeue=None,
        echo=lambda _: None,
        walltime=SimpleNamespace(grace_end=None, meaning=lambda: meaning, restart_count=int),
    )
    return cast("SessionSpec", spec)


@pytest.mark.parametrize(
    ("task", "stop", "meaning", "code", "end"),
    [
        pytest.param(0, StopReason.WALLTIME, None, 75, SessionResult(143, requeued=True), id="the first sees to it"),
        pytest.param(0, StopReason.SIGTERM, "cancelled", 143, SessionResult(143), id="cancelled is not requeued"),
        pytest.param(0, StopReason.SIGTERM, "signal", 143, SessionResult(143), id="told to end"),
        pytest.param(1, StopReason.WALLTIME, None, 75, SessionResult(1), id="srun ends with the highest code"),
        pytest.param(1, StopReason.SIGTERM, None, 143, SessionResult(1), id="nor does 143 hide the first one's 75"),
    ],
)  # fmt: skip
def test_stopped_before_all_had_met(
    task: int,
    stop: StopReason,
    meaning: Meaning | None,
    code: int,
    end: SessionResult,
    asked: list[str],
    tmp_path: Path,
) -> None:
    spec = a_spec(tmp_path, stop, meaning, task=task)
    assert session_job.stopped_before_all_had_met(spec, code) == end
    assert asked == (["stopped"] if end.requeued else [])


@pytest.mark.parametrize(
    ("stop", "meaning", "requeued"),
    [
        (None, None, True),
        (StopReason.WALLTIME, None, True),
        (StopReason.SIGTERM, "preempted", True),
        (StopReason.SIGTERM, "cancelled", False),
        (StopReason.SIGTERM, "signal", False),
        (StopReason.KEYBOARD, None, False),
        (StopReason.REQUESTED, None, False),
    ],
)
def test_a_host_that_is_lost_brings_back_no_job_that_was_to_end(
    stop: StopReason | None, meaning: Meaning | None, requeued: bool, asked: list[str], tmp_path: Path
) -> None:
    error = LostRankError("n2 is gone")
    error.host_lost = True
    result = SessionResult(70, outcome=Outcome(StopReason.RANK_LOST, error=error))
    end = session_job.see_to_the_job(a_spec(tmp_path, stop, meaning), result)
    assert (end.exit_code, end.requeued) == ((143, True) if requeued else (70, False))
    assert asked == (["lost node"] if requeued else [])
