from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptrun.records import CheckpointRecord
from ckptrun.run.registry import NUM_SAVES_KEPT, DamagedRegistryError, Registry, edit


def record(sequence: int, reason: str = "periodic", **more: Any) -> CheckpointRecord:
    name = f"{sequence:08d}-a"
    return CheckpointRecord(name, f"/c/{name}", sequence, 10 * sequence, 0, reason, **more)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "registry.json")


def test_it_is_read_as_it_was_written(path: str) -> None:
    registry = Registry(run_id="r")
    registry.note_saved(record(1, "hpc", job="7", metrics={"loss": 0.5}), ["mc"], save_s=0.25)
    registry.callbacks = [{"state_key": "mc", "monitor": "loss"}]
    registry.pin = {"reference": "last", "path": "/c/00000001-a", "pinned_at": 1.0}
    registry.note_takeover(2, 1)
    registry.finished = {"sequence": 1, "name": "00000001-a", "by": "max_steps"}
    registry.save(path)
    assert Registry.load(path) == registry


def test_it_has_the_keys_that_readers_are_promised(path: str) -> None:
    registry = Registry()
    registry.note_saved(record(1), ["mc"])
    registry.save(path)
    value = json.loads(Path(path).read_text())
    assert set(value) == {
        "format", "run_id", "sequence", "callbacks", "saves", "holds", "pin", "keeps", "quarantine", "hpc",
        "takeovers", "finished", "going",
    }  # fmt: skip
    assert set(value["saves"][0]) == {
        "name", "sequence", "step", "epoch", "reason", "notes", "metrics", "size_bytes", "saved_at", "save_s",
        "saved_for",
    }  # fmt: skip


def test_only_the_newest_hundred_saves_are_kept() -> None:
    registry = Registry()
    for number in range(1, 251):
        registry.note_saved(record(number), [])
    assert [entry["sequence"] for entry in registry.saves] == list(range(151, 251))
    assert len(registry.saves) == NUM_SAVES_KEPT
    assert registry.sequence == 250


def test_the_counter_never_goes_back() -> None:
    registry = Registry(sequence=5)
    assert registry.reserve_sequence() == 6
    assert registry.reserve_sequence(at_least=40) == 41
    registry.note_saved(record(3), [])
    assert registry.reserve_sequence() == 42


def test_a_second_reason_is_noted_and_not_a_second_save() -> None:
    registry = Registry()
    registry.note_saved(record(1), ["a"])
    registry.note_again("00000001-a", "stop", "b")
    registry.note_again("00000001-a", "stop", "b")
    registry.note_again("00000001-a", "periodic", "a")
    (entry,) = registry.saves
    assert (entry["reason"], entry["notes"], entry["saved_for"]) == ("periodic", ["stop"], ["a", "b"])
    assert registry.holds == {"stop": "00000001-a"}


def test_the_newest_of_each_held_reason_is_held_and_hpc_by_job() -> None:
    registry = Registry()
    for number, (reason, job) in enumerate(
        [("hpc", "7"), ("hpc", "8"), ("stop", None), ("hpc", "7"), ("hpc", None)], 1
    ):
        registry.note_saved(record(number, reason, job=job), [])
    assert registry.holds == {"hpc": "00000005-a", "stop": "00000003-a"}
    assert registry.hpc == {"7": ["00000001-a", "00000004-a"], "8": ["00000002-a"], "": ["00000005-a"]}


def test_what_is_deleted_is_forgotten() -> None:
    registry = Registry()
    registry.note_saved(record(1, "hpc", job="7"), [])
    registry.note_saved(record(2), [])
    registry.quarantine["00000001-a"] = {"why": "checksum", "at": 1.0}
    registry.forget(["00000001-a"])
    assert [entry["sequence"] for entry in registry.saves] == [2]
    assert (registry.holds, registry.hpc, registry.quarantine) == ({}, {}, {})


def test_a_handed_out_counter_is_no_commit() -> None:
    registry = Registry()
    registry.reserve_sequence()
    assert not registry.committed_ever
    assert (registry.sequence, registry.committed_sequence) == (1, 0)
    registry.note_saved(record(2), [])
    assert registry.committed_ever
    assert registry.committed_sequence == 2


def test_one_callback_that_saves_on_exceptions_is_enough() -> None:
    assert not Registry(callbacks=[{"state_key": "a"}]).on_exception
    assert Registry(callbacks=[{"state_key": "a"}, {"state_key": "b", "on_exception": True}]).on_exception


def test_a_missing_file_is_not_a_damaged_one(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        Registry.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"saves": {}}',
        '{"saves": [1]}',
        '{"saves": [{}]}',
        '{"format": 9}',
        '{"pin": {}}',
        '{"sequence": "x"}',
    ],
)
def test_what_is_no_registry_is_damaged(path: str, text: str) -> None:
    Path(path).write_text(text)
    with pytest.raises(DamagedRegistryError):
        Registry.load(path)


def test_a_pin_set_beside_a_live_run_survives_its_saves(path: str) -> None:
    live = Registry(run_id="r")
    live.save(path)
    pin = {"reference": "last", "path": "/c/x", "pinned_at": 1.0}

    def set_pin(registry: Registry) -> None:
        registry.pin = pin
        registry.keeps.append("00000001-a")

    edit(path, set_pin)
    live.note_saved(record(1), [])
    live.save(path)
    found = Registry.load(path)
    assert found.pin == pin
    assert found.keeps == ["00000001-a"]
    assert len(found.saves) == 1


def test_an_edit_of_a_damaged_file_starts_from_what_is_offered(path: str) -> None:
    Path(path).write_text("{")
    edit(
        path,
        lambda registry: registry.note_saved(record(2), []),
        otherwise=lambda: Registry(run_id="rebuilt"),
    )
    assert Registry.load(path).run_id == "rebuilt"


def test_a_failed_write_leaves_the_file_as_it_was(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Registry(run_id="r").save(path)
    before = Path(path).read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        Registry(run_id="other").save(path)
    assert Path(path).read_bytes() == before


def test_one_that_was_overtaken_writes_nothing(path: str) -> None:
    Registry(run_id="r").save(path)
    overtaken = Registry.load(path)
    edit(path, lambda registry: registry.note_takeover(2, 5))
    theirs = Path(path).read_bytes()
    overtaken.note_saved(record(6), [])
    with pytest.raises(OSError, match="another process has taken the run over"):
        overtaken.save(path)
    assert Path(path).read_bytes() == theirs
    taker = Registry.load(path)
    assert taker.reserve_sequence() == 6, "the number that a killed save had is not given out again"
    taker.save(path)
