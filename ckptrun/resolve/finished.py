"""Is there anything left to train?

Decision: the registry notes at the end which checkpoint is the final one and by which limit the training
ended; the same command again compares its limits with those. Turned down: starting the ranks and letting the
loop find out, which costs a minute on a cluster and writes another attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptrun.records import CheckpointRecord


@dataclass(frozen=True)
class Limits:
    """What ends the training now; None (or -1) where there is no such limit. ``max_time_s`` is in seconds."""

    max_steps: int | None = None
    max_epochs: int | None = None
    max_time_s: float | None = None


def nothing_left(
    finished: Mapping[str, Any] | None,
    taken: CheckpointRecord,
    limits: Limits,
    *,
    early_stopping_changed: bool = False,
) -> str | None:
    """Why there is nothing left to do from the checkpoint ``taken``, None where there is.

    Args:
        finished: the registry's note of the end.
        early_stopping_changed: the config's early stopping is another one than when training ended.
    """
    # A checkpoint at the last step that is not noted as the end was made before its validation was through.
    if finished is None or finished.get("name") != taken.name:
        return None
    by = finished.get("by")
    if by in ("max_steps", "max_epochs", "max_time"):
        name = "max_time_s" if by == "max_time" else str(by)
        if _raised(getattr(limits, name), finished.get(name)):
            return None
        return f"training ended at step {taken.step} by {by} {finished.get(name)}, which has not been raised"
    raised = any(_raised(getattr(limits, name), finished.get(name)) for name in _NAMES)
    if raised or (by == "early_stopping" and early_stopping_changed):
        return None
    ended = {"early_stopping": "by early stopping", "stop_training": "by StopTraining"}.get(str(by), "")
    return f"training ended {ended} at step {taken.step}".replace("  ", " ")


_NAMES = ("max_steps", "max_epochs", "max_time_s")


def _is_set(limit: float | None) -> bool:
    return limit is not None and limit != -1


def _raised(now: float | None, then: float | None) -> bool:
    """Whether a limit lies further out than it did; no limit is the furthest."""
    if not _is_set(then):
        return False
    return not _is_set(now) or now > then  # type: ignore[operator]
