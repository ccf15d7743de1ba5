"""Which are the best k checkpoints by a score, and which of them goes for another one?

Scores stand by name, in the order in which the checkpoints were saved. Of equal ones the newer stays among the k, the
older is called the best, and one that only equals the last of k does not come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar


class Score(Protocol):
    """A number, or a tensor with one."""

    def __float__(self) -> float: ...


S = TypeVar("S", bound=Score)


def ranked(scores: Mapping[str, S], mode: str) -> list[str]:
    """The names, best first; of equal scores the newer first, so that the older goes.

    Args:
        mode: ``min`` or ``max``, which is better.
    """
    newest_first = list(scores)[::-1]
    return sorted(newest_first, key=lambda name: float(scores[name]), reverse=mode == "max")


def comes_in(scores: Mapping[str, S], score: S, *, mode: str, limit: int) -> bool:
    """Whether ``score`` belongs to the best ``limit``; -1 is no limit."""
    if limit == -1 or len(scores) < limit:
        return True
    if limit == 0:
        return False
    last = float(scores[ranked(scores, mode)[limit - 1]])
    return float(score) < last if mode == "min" else float(score) > last


def entered(scores: Mapping[str, S], name: str, score: S, *, mode: str, limit: int) -> dict[str, S]:
    """The scores with ``name`` as the newest, and without those that go for it."""
    others = [known for known in ranked(scores, mode) if known != name]
    kept = set(others[: limit - 1] if limit > 0 else others)
    return {known: value for known, value in scores.items() if known in kept} | {name: score}


def cut(scores: Mapping[str, S], *, mode: str, limit: int) -> dict[str, S]:
    """The best ``limit`` of them; -1 is no limit."""
    kept = set(ranked(scores, mode)[: None if limit == -1 else limit])
    return {name: value for name, value in scores.items() if name in kept}


def best(scores: Mapping[str, S], mode: str) -> str | None:
    """The best; of equal ones the first. None where there is none."""
    order = ranked(scores, mode)
    if not order:
        return None
    return next(name for name in scores if float(scores[name]) == float(scores[order[0]]))
