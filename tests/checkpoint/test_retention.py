"""What may be deleted, as a table: everything that somebody wants stays, and the reason says who."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptrun.checkpoint.retention import decide, names_to_delete
from ckptrun.records import CheckpointRecord
from ckptrun.run.registry import Registry


def record(sequence: int, reason: str = "periodic", **more: Any) -> CheckpointRecord:
    name = f"{sequence:08d}-a"
    fields: dict[str, Any] = {"line": ((1, sequence),), "run_id": "r", "saved_for": ("mc",), **more}
    return CheckpointRecord(name, f"/c/{name}", sequence, 10 * sequence, 0, reason, **fields)


OLD, NAME = record(1), "00000001-a"
HEAD = record(9)
CALLBACK = {
    "state_key": "mc",
    "class": "ModelCheckpoint",
    "save_top_k": 1,
    "best_k": {},
    "best": None,
    "last": None,
}

SECOND = {**CALLBACK, "state_key": "b"}


def registry_with(change: Callable[[Registry], Any] | None = None, old: CheckpointRecord = OLD) -> Registry:
    registry = Registry(run_id="r", callbacks=[dict(CALLBACK)])
    registry.note_saved(old, old.saved_for)
    registry.note_saved(HEAD, HEAD.saved_for)
    if change is not None:
        change(registry)
    return registry


def test_what_no_callback_wants_goes() -> None:
    decisions = decide([OLD], HEAD, registry_with(), run_id="r")
    assert names_to_delete(decisions) == [NAME]


@pytest.mark.parametrize(
    ("change", "old", "why"),
    [
        (None, HEAD, "the newest"),
        (None, record(1, run_id="other"), "another run wrote it"),
        (lambda r: r.callbacks[0].update(best=NAME), OLD, "the best of ModelCheckpoint"),
        (lambda r: r.callbacks[0].update(best_k={NAME: 0.5}), OLD, "among the best 1"),
        (lambda r: r.callbacks[0].update(last=NAME), OLD, "the last of ModelCheckpoint"),
        (lambda r: r.callbacks.append({**SECOND, "best_k": {NAME: 1.0}}), OLD, "among the best"),
        (lambda r: r.callbacks[0].update(save_top_k=-1), OLD, "keeps every checkpoint"),
        (
            lambda r: (r.callbacks.append({**SECOND, "save_top_k": -1}), r.note_again(NAME, "periodic", "b")),
            OLD,
            "keeps every checkpoint",
        ),
        (lambda r: setattr(r, "pin", {"path": OLD.path}), OLD, "pinned"),
        (lambda r: r.keeps.append(NAME), OLD, "kept by the user"),
        (lambda r: r.quarantine.update({NAME: {"why": "x"}}), OLD, "in quarantine"),
        (lambda r: r.note_again(NAME, "manual"), OLD, "the user asked"),
        (None, record(1, "manual", saved_for=()), "the user asked"),
        (None, record(1, "stop", saved_for=()), "the newest save by stop"),
        (None, record(1, "hpc", saved_for=(), job="7"), "the newest save by hpc"),
        (None, record(1, saved_for=("gone",)), "not set now"),
        (None, record(1, saved_for=()), "not known for whom"),
    ],
)  # fmt: skip
def test_what_somebody_wants_stays(change: Any, old: CheckpointRecord, why: str) -> None:
    (decision,) = decide([old], HEAD, registry_with(change, old), run_id="r")
    assert not decision.delete
    assert why in decision.why


def test_an_abandoned_line_stays() -> None:
    head = record(9, line=((1, 3), (9, 9)))
    decisions = decide([record(2), record(5)], head, registry_with(), run_id="r")
    assert [decision.delete for decision in decisions] == [True, False]
    assert "abandoned" in decisions[1].why


@pytest.mark.parametrize("by", [NAME, OLD.path])
def test_what_was_resumed_from_or_is_being_read_stays(by: str) -> None:
    (resumed,) = decide([OLD], HEAD, registry_with(), run_id="r", resumed_from=[by])
    (reading,) = decide([OLD], HEAD, registry_with(), run_id="r", in_use=[by])
    assert not resumed.delete
    assert not reading.delete


def test_an_older_hpc_goes_once_a_newer_one_is_committed() -> None:
    old, new = record(1, "hpc", saved_for=(), job="7"), record(5, "hpc", saved_for=(), job="7")
    registry = registry_with(old=old)
    registry.note_saved(new, ())
    decisions = decide([old, new], HEAD, registry, run_id="r")
    assert names_to_delete(decisions) == [old.name]


def test_notes_that_are_no_longer_kept_protect() -> None:
    registry = registry_with(lambda r: r.callbacks.append({**CALLBACK, "state_key": "all", "save_top_k": -1}))
    registry.saves = registry.saves[1:]
    (decision,) = decide([OLD], HEAD, registry, run_id="r")
    assert not decision.delete
