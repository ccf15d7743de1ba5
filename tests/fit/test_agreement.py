"""When ranks ask each other, and what each of them knows then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from ckptrun.fit.agreement import ASK_EVERY_S, LATE_S, Agreement, Wish
from ckptrun.fit.context import NoStop
from ckptrun.records import StopReason
from ckptrun.stop import StopRequest


class Peers:
    """Stands in for the strategy: the other ranks' words are given."""

    rank = 1

    def __init__(self) -> None:
        self.others = [0, 0, 0, 0, 5_000, -(1 << 20)]
        self.points: list[str] = []
        self.are_here = True

    def agree(self, words: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(words, self.others, strict=True)]

    def all_here(self, point: str, patience_s: float) -> bool:
        self.points.append(point)
        return self.are_here


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def make(stop: NoStop, peers: Peers) -> Agreement:
    strategy: Any = peers
    return Agreement(stop, strategy)


def test_intervals_grow_to_about_half_a_second(clock: list[float]) -> None:
    agreement, since, intervals = make(NoStop(), Peers()), 1, []
    clock[0] += 3.0  # set-up
    for _ in range(12):
        since = agreement.ask(since=since)
        intervals.append(since)
        clock[0] += since * 0.001
    # One step says nothing of the next ones: batches read ahead make the first ones quick.
    assert intervals[:4] == [1, 2, 4, 8]
    assert intervals[-1] == pytest.approx(ASK_EVERY_S / 0.001, abs=2)


def test_long_steps_are_asked_after_each(clock: list[float]) -> None:
    agreement, since = make(NoStop(), Peers()), 1
    for _ in range(3):
        clock[0] += since * 0.8
        since = agreement.ask(since=since)
        assert since == 1


def test_the_rank_with_the_smallest_proposal_decides(clock: list[float]) -> None:
    peers = Peers()
    agreement = make(NoStop(), peers)
    clock[0] += 0.1
    peers.others[-1] = -3
    assert agreement.ask(since=100) == 3


def test_a_request_of_another_rank_is_known_after_asking(clock: list[float]) -> None:
    stop, peers = NoStop(), Peers()
    agreement = make(stop, peers)
    agreement.ask(since=1)
    assert not agreement.request
    peers.others[:3] = [(tuple(StopReason).index(StopReason.SIGTERM) + 1) * 1000 + 15, 2, 1]
    agreement.ask(since=1)
    assert agreement.request == StopRequest(StopReason.SIGTERM, 15, clock[0])
    assert (agreement.save_requested, agreement.time_over) == (2, True)
    assert agreement.clock_s == 5.0


def test_that_no_save_fits_is_agreed_on_with_the_request(clock: list[float]) -> None:
    peers = Peers()
    request = StopRequest(StopReason.WALLTIME, 10, 1.0, no_save=True)
    agreement = make(NoStop(request), peers)
    agreement.ask(since=1)
    assert agreement.request == StopRequest(StopReason.WALLTIME, 10, clock[0], no_save=True)
    other = make(NoStop(StopRequest(StopReason.WALLTIME, None, 1.0)), peers)
    other.ask(since=1)
    assert other.request == StopRequest(StopReason.WALLTIME, None, clock[0])


def test_the_first_request_stays(clock: list[float]) -> None:
    stop = NoStop(StopRequest(StopReason.KEYBOARD, 2, 1.0))
    agreement = make(stop, Peers())
    agreement.ask()
    stop.request = StopRequest(StopReason.SIGTERM, 15, 2.0)
    agreement.ask()
    assert agreement.request is not None
    assert agreement.request.reason is StopReason.KEYBOARD


def test_ranks_that_are_late_meet_before_it_is_due(clock: list[float]) -> None:
    peers = Peers()
    agreement = make(NoStop(), peers)
    agreement.ask(since=1)
    clock[0] += LATE_S - 0.01
    assert not agreement.late(2)
    assert peers.points == []  # nobody is asked while it is not late
    clock[0] += 0.02
    assert agreement.late(3)
    peers.are_here = False
    assert not agreement.late(4)
    assert peers.points == ["late/1/3", "late/1/4"]
    agreement.ask(since=1)
    assert not agreement.late(5)


def test_a_wish_of_all_counts_at_once_and_one_that_is_alone_with_the_next_asking(clock: list[float]) -> None:
    peers = Peers()
    agreement = make(NoStop(), peers)
    assert agreement.all_wish(Wish.SHOULD_STOP, "here")
    assert agreement.all_wish(Wish.SHOULD_STOP, "there")
    assert len(peers.points) == 1
    peers.are_here = False
    assert not agreement.all_wish(Wish.STOP_TRAINING, "there")
    assert not agreement.all_wish(Wish.STOP_TRAINING, "later")  # it does not wait a second time
    assert len(peers.points) == 2
    agreement.ask()
    assert agreement.wish is Wish.STOP_TRAINING


def test_a_wish_of_another_rank(clock: list[float]) -> None:
    peers = Peers()
    agreement = make(NoStop(), peers)
    peers.others[3] = int(Wish.SHOULD_STOP)
    agreement.ask()
    assert agreement.wish is Wish.SHOULD_STOP
    assert agreement.all_wish(Wish.SHOULD_STOP, "here")
    assert peers.points == []
