"""When a stop must be asked for, what is too tight, and the clock that asks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrun.launch.walltime import Walltime, _Known, ask_again_s, margin_s, no_save_fits, too_tight
from ckptrun.records import JobFacts, StopReason
from ckptrun.stop import StopListener


@pytest.mark.parametrize(
    ("save_s", "step_s", "whole_s", "margin"),
    [
        (0, 0, 3600, 10),
        (60, 5, 3600, 140),
        (60, 5, 120, 60),  # no more than half of what there is
        (0, 0, 4, 2),
    ],
)
def test_margin(save_s: float, step_s: float, whole_s: float, margin: float) -> None:
    assert margin_s(save_s, step_s, whole_s) == margin


@pytest.mark.parametrize(
    ("save_s", "left_s", "none_fits"),
    [(20, 29, True), (20, 30, False), (20, None, False), (0, 1, False), (20, -5, True)],
)
def test_with_less_than_one_and_a_half_saves_time_none_is_begun(
    save_s: float, left_s: float | None, none_fits: bool
) -> None:
    assert no_save_fits(save_s, left_s) is none_fits


@pytest.mark.parametrize(
    ("left_s", "again_s"), [(None, 60), (86400, 60), (600, 30), (60, 5), (0, 5), (-10, 5)]
)
def test_the_controller_is_asked_more_often_near_the_end(left_s: float | None, again_s: float) -> None:
    assert ask_again_s(left_s) == again_s


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"save_s": 0.0, "left_s": 1.0, "lead_s": 1.0}, []),
        ({}, []),
        ({"lead_s": 20.0}, ["--signal comes 20 s before the limit: make it --signal=USR1@90"]),
        ({"lead_s": None, "save_s": 50.0}, []),
        ({"lead_s": 0.0}, []),
        (
            {"lead_s": 0.0, "save_s": 50.0},
            [
                "no --signal stands in the job's script: one given to sbatch itself has to be --signal=USR1@135"
            ],
        ),
        ({"kill_wait_s": 20.0}, ["SLURM kills 20 s after SIGTERM (KillWait)"]),
        ({"left_s": 50.0}, ["the job ends in 50 s: ask for more with --time"]),
        ({"left_s": None}, []),
    ],
)
def test_what_is_too_tight_is_said_with_the_numbers(options: dict[str, Any], found: list[str]) -> None:
    given = {"left_s": 3600.0, "kill_wait_s": 60.0, "save_s": 20.0, "lead_s": 120.0}
    said = too_tight(**{**given, **options})
    assert len(said) == len(found)
    for text, part in zip(said, found, strict=True):
        assert text.startswith(f"a save of this run has taken {options.get('save_s', 20):.0f} s, and ")
        assert part in text


@pytest.fixture
def listener() -> Iterator[StopListener]:
    listener = StopListener(on_grace_over=lambda _: None)
    listener.install(signals=())
    yield listener
    listener.restore()


def test_a_time_limit_asks_for_a_stop_and_then_bounds_it(
    listener: StopListener, wait_until: Callable[..., Any]
) -> None:
    walltime = Walltime(listener, job=None, say=lambda _: None, limit_s=1.0)
    began = time.monotonic()
    walltime.start()
    wait_until(lambda: listener.request is not None)
    assert listener.request is not None
    assert listener.request.reason is StopReason.WALLTIME
    assert 0.4 < listener.request.at_monotonic - began < 1.0  # half of it is the margin
    assert walltime.meaning() is None
    assert 30.0 < listener.allowed_s < 30.6  # what is left, and the grace period
    walltime.close()


def test_a_stop_that_comes_when_no_save_fits_any_more_says_so(listener: StopListener) -> None:
    walltime = Walltime(listener, job=None, say=lambda _: None, limit_s=60.0)
    walltime.start()
    walltime.saved(1000.0)
    listener.request_stop(StopReason.WALLTIME)
    assert listener.request is not None
    assert listener.request.no_save
    assert 89.0 < listener.allowed_s <= 90.0
    walltime.close()


def test_a_stop_for_the_walltime_that_does_not_end_is_forced(wait_until: Callable[..., Any]) -> None:
    forced: list[StopReason] = []
    listener = StopListener(on_grace_over=lambda request: forced.append(request.reason))
    listener.install(signals=())
    listener.time_left_s = lambda: -60.0  # there is always a second
    began = time.monotonic()
    listener.request_stop(StopReason.WALLTIME)
    wait_until(lambda: forced)
    listener.restore()
    assert forced == [StopReason.WALLTIME]
    assert time.monotonic() - began >= 1.0


def test_a_validation_between_two_steps_is_not_taken_for_a_slow_one() -> None:
    known = _Known()
    assert known.step_s == 0.0
    known.steps_s.extend([0.1, 0.1, 600.0, 0.1])
    assert known.step_s == 0.1


def test_a_stop_for_another_reason_saves(listener: StopListener) -> None:
    walltime = Walltime(listener, job=None, say=lambda _: None, limit_s=60.0)
    walltime.start()
    walltime.saved(1000.0)
    listener.request_stop(StopReason.KEYBOARD)
    assert listener.request is not None
    assert not listener.request.no_save
    walltime.close()


JOB = JobFacts("7", True, id="7")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_the_question_goes_wrong_nobody_waits_for_an_answer(
    listener: StopListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("something unforeseen")

    walltime = Walltime(listener, job=JOB, say=lambda _: None)
    monkeypatch.setattr("ckptrun.launch.walltime.read_job", fails)
    walltime._begin_to_ask()
    began = time.monotonic()
    assert walltime.meaning() == "unknown"
    assert time.monotonic() - began < 5.0


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a program of that name in place that says that KillWait is 40 s, and this of the job."""

    def put(says: str, *, after_s: float = 0.0) -> None:
        path = tmp_path / "scontrol"
        path.write_text(
            f'#!/bin/sh\ncase "$*" in *"show config") echo "KillWait = 40 sec";; '
            f'*"show job"*) sleep {after_s}; echo "JobId=7 Restarts=0 {says}";; esac\n'
        )
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return put


@pytest.mark.parametrize(
    ("grace_s", "answered", "most_s"),
    [(4.0, True, 2.0), (25.0, True, 12.5), (100.0, True, 15.0), (25.0, False, 5.0), (0.0, False, 0.0)],
)
def test_how_long_an_answer_is_waited_for_leaves_time_to_write_down_the_end(
    grace_s: float,
    answered: bool,
    most_s: float,
    listener: StopListener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walltime = Walltime(listener, job=JOB, say=lambda _: None)
    waited: list[float] = []
    monkeypatch.setattr(walltime._asked, "wait", waited.append)
    walltime._known.answered = answered
    listener.grace_s = grace_s
    listener.count(signal.SIGTERM, "")
    listener.finished()
    assert walltime.meaning() == "unknown"
    assert waited[0] == pytest.approx(most_s, abs=0.3)
    walltime._answer_by = time.monotonic()
    walltime.meaning()
    assert waited[1] == 0.0, "once it was waited for, that is all"


def test_an_end_that_holds_no_longer_stops_nothing(
    listener: StopListener, scontrol: Callable[..., None], wait_until: Callable[..., Any]
) -> None:
    scontrol(f"JobState=RUNNING EndTime={time.time() + 3600:.0f}", after_s=0.6)
    for told in (-100.0, 1.0):
        walltime = Walltime(listener, job=JOB, say=lambda _: None, job_end=time.time() + told)
        walltime.start()
        wait_until(lambda walltime=walltime: walltime.left_s() is not None)
        assert 3500 < (walltime.left_s() or 0) <= 3600
        walltime.close()
    assert listener.request is None


def test_where_nobody_can_be_asked_the_environment_s_end_counts(
    listener: StopListener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., Any],
) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    over = Walltime(listener, job=JOB, say=lambda _: None, job_end=time.time() - 100)
    over.start()
    time.sleep(0.5)
    over.close()
    assert listener.request is None, "the job runs all the same, so its limit was changed"
    walltime = Walltime(listener, job=JOB, say=lambda _: None, job_end=time.time() + 2)
    walltime.start()
    wait_until(lambda: listener.request is not None)
    walltime.close()
    assert listener.request is not None
    assert listener.request.reason is StopReason.WALLTIME


@pytest.mark.parametrize("told", [0, 3])
def test_which_start_it_is_is_the_controller_s_to_say(
    told: int, listener: StopListener, scontrol: Callable[..., None], wait_until: Callable[..., Any]
) -> None:
    # The environment may have lost it, or have it from the job that handed this one in.
    scontrol(f"JobState=RUNNING Restarts=2 EndTime={time.time() + 3600:.0f}")
    walltime = Walltime(listener, job=JobFacts("7", True, told, id="7"), say=lambda _: None)
    assert walltime.restart_count(told) == told
    walltime.start()
    wait_until(lambda: walltime.restart_count(told) == 2)
    scontrol("JobState=COMPLETING Restarts=2")
    listener.count(signal.SIGTERM, "")
    assert walltime.meaning() == "cancelled"
    walltime.close()


def test_a_sigterm_after_the_work_is_asked_nothing_about(
    listener: StopListener, scontrol: Callable[..., None]
) -> None:
    scontrol(f"JobState=RUNNING EndTime={time.time() + 3600:.0f}")
    walltime = Walltime(listener, job=JOB, say=lambda _: None)
    walltime.start()
    listener.request_stop(StopReason.WALLTIME)
    listener.finished()
    listener.count(signal.SIGTERM, "")
    time.sleep(0.6)
    assert not walltime._asks.locked()
    walltime.close()


@pytest.mark.parametrize("before", [None, StopReason.WALLTIME])
@pytest.mark.parametrize(
    ("state", "given", "grace_s"),
    [("RUNNING", False, 595 + 35), ("COMPLETING", False, 35), ("RUNNING", True, 12)],
)
def test_a_preemption_leaves_a_save_its_grace_time(
    state: str,
    given: bool,
    grace_s: float,
    before: StopReason | None,
    listener: StopListener,
    scontrol: Callable[..., None],
    wait_until: Callable[..., Any],
) -> None:
    now = int(time.time())
    scontrol(f"JobState={state} PreemptTime={now} EndTime={now + 595}")
    if given:
        listener.grace_s = 12.0
    walltime = Walltime(listener, job=JOB, say=lambda _: None, grace_given=given)
    walltime.start()
    if before is not None:
        listener.request_stop(before)
    listener.count(signal.SIGTERM, "")
    wait_until(lambda: walltime._meaning == "preempted")
    wait_until(lambda: abs(listener.grace_s - grace_s) < 5)
    assert walltime.grace_end == (now + 595 if state == "RUNNING" else None)
    assert listener._grace_deadline() is not None
    walltime.close()
