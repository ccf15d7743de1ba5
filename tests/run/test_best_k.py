"""Which are the best k by a score, and what goes for another one? Ties are what people disagree about."""

from __future__ import annotations

import pytest
import torch

from ckptrun.run import best_k

SCORES = {"a": 3.0, "b": 1.0, "c": 3.0, "d": 2.0}  # in the order of their saves


@pytest.mark.parametrize(
    ("mode", "order", "best"), [("min", ["b", "d", "c", "a"], "b"), ("max", ["c", "a", "d", "b"], "a")]
)
def test_of_equals_the_newer_is_kept_and_the_older_is_the_best(
    mode: str, order: list[str], best: str
) -> None:
    assert best_k.ranked(SCORES, mode) == order
    assert best_k.best(SCORES, mode) == best
    assert best_k.cut(SCORES, mode="max", limit=1) == {"c": 3.0}


def test_what_only_equals_the_last_does_not_come_in() -> None:
    assert not best_k.comes_in(SCORES, 3.0, mode="min", limit=4)
    assert best_k.comes_in(SCORES, 2.9, mode="min", limit=4)
    assert best_k.comes_in(SCORES, 9.0, mode="min", limit=5)
    assert best_k.comes_in(SCORES, 9.0, mode="min", limit=-1)
    assert not best_k.comes_in({}, 9.0, mode="min", limit=0)


def test_the_older_of_equals_goes_for_a_new_one() -> None:
    assert best_k.entered(SCORES, "e", 0.5, mode="min", limit=4) == {"b": 1.0, "c": 3.0, "d": 2.0, "e": 0.5}
    assert list(best_k.entered(SCORES, "a", 3.0, mode="min", limit=-1)) == ["b", "c", "d", "a"]


def test_scores_may_be_tensors() -> None:
    scores = {name: torch.tensor(value) for name, value in SCORES.items()}
    assert best_k.best(scores, "min") == "b"
    assert best_k.comes_in(scores, torch.tensor(2.5), mode="min", limit=4)


def test_nothing_has_no_best() -> None:
    assert best_k.best({}, "min") is None
