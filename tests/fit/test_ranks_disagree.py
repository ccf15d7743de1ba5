"""User code that decides on one rank what all of them have to do together, and steps that suddenly are slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_work import Event, Played, SharedServer, Work, play, shared_server

from ckptrun import Callback
from ckptrun.records import StopReason

BATCH_END = "on_train_batch_end"
SOON_S = 30.0  # far from the half hour after which a collective gives up


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server() as shared:
        yield shared


def in_time(server: SharedServer, tmp_path: Path, work: Work) -> Played:
    began = time.monotonic()
    played = play(server, tmp_path, "demo", work)
    assert time.monotonic() - began < SOON_S
    return played


@pytest.mark.parametrize(
    ("what", "finished_by"), [("should stop", "early_stopping"), ("stop training", "stop_training")]
)
def test_all_ranks_at_once_end_at_that_very_step(
    server: SharedServer, tmp_path: Path, what: str, finished_by: str
) -> None:
    played = in_time(server, tmp_path, Work(events=(Event(BATCH_END, 4, what),), every_step=False))
    assert (played.code, played.outcome.finished_by, played.outcome.step) == (0, finished_by, 4)
    assert [(c.reason, c.step) for c in played.checkpoints()][:1] == [("final", 4)]


@pytest.mark.parametrize(
    ("what", "finished_by"), [("should stop", "early_stopping"), ("stop training", "stop_training")]
)
def test_one_rank_takes_the_others_with_it(
    server: SharedServer, tmp_path: Path, what: str, finished_by: str
) -> None:
    work = Work(events=(Event(BATCH_END, 5, what, 1),), patience_s=0.2, every_step=False)
    played = in_time(server, tmp_path, work)
    assert (played.code, played.outcome.finished_by) == (0, finished_by), played.logs()
    newest = played.checkpoints()[0]
    assert newest.step in (5, 6)  # at the next asking, which comes with the end of the epoch at the latest
    assert (newest.step, newest.exact) == (played.outcome.step, True)


def test_a_wish_at_the_end_of_a_validation_is_agreed_on_there(server: SharedServer, tmp_path: Path) -> None:
    work = Work(events=(Event("on_validation_end", 2, "should stop", 1),), every_step=False)
    played = in_time(server, tmp_path, work)  # the first is the sanity check's
    assert (played.code, played.outcome.finished_by, played.outcome.step) == (0, "early_stopping", 6)


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (Work(events=(Event("on_before_backward", 4, "stop training", 1),)), "StopTraining was raised"),
        (Work(model={"skips_on": (1,)}), "training_step returned None"),
    ],
)
def test_what_cannot_be_agreed_on_is_one_clear_error(
    server: SharedServer, tmp_path: Path, work: Work, what: str
) -> None:
    from dataclasses import replace

    played = in_time(server, tmp_path, replace(work, patience_s=0.5))
    assert (played.code, played.outcome.stop_reason) == (1, StopReason.EXCEPTION)
    assert not played.outcome.user_error
    with pytest.raises(Exception, match=rf"{what} on rank 1 after step \d, and not on every rank"):
        raise played.outcome.error


def test_a_batch_that_all_ranks_skip(server: SharedServer, tmp_path: Path) -> None:
    played = in_time(server, tmp_path, Work(model={"skips_on": (0, 1)}, options={"max_epochs": 1}))
    assert (played.code, played.outcome.step) == (0, 6), played.logs()


class TurnsSlow(Callback):
    """Steps are quick until 64 are done, and slow from then on."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= 64:
            time.sleep(0.4)


def turns_slow() -> list[Callback]:
    return [TurnsSlow()]


def test_a_stop_comes_soon_though_steps_have_become_slow(server: SharedServer, tmp_path: Path) -> None:
    work = Work(
        events=(Event(BATCH_END, 65, "sigterm", 1),),
        data={"trained": 8 * 400},
        callbacks=turns_slow,
        every_step=False,
    )
    played = in_time(server, tmp_path, work)
    assert (played.code, played.outcome.stop_reason) == (143, StopReason.SIGTERM), played.logs()
    # The next asking was planned for up to 128 quick steps later. One step late, and one more where one of them
    # finds that it is late a moment before the other.
    assert 65 <= played.outcome.step <= 68
