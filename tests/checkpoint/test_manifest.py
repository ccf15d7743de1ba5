from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint.manifest import Manifest, amend, extend_line, read_manifest
from ckptrun.errors import DamagedCheckpointError
from ckptrun.records import FileRecord

FULL = Manifest(
    run_id="r",
    sequence=42,
    step=1200,
    epoch=3,
    reason="periodic",
    files=(FileRecord("state.ckpt", 10, "xxh3_64:00"), FileRecord("rank-0000.ckpt", 5, "xxh3_64:01")),
    attempt=2,
    parent="00000041-step-00001100",
    line=((1, 10), (40, 42)),
    lease_epoch=2,
    metrics={"val_loss": 0.25},
    saved_at=1.5,
    save_s=0.25,
    versions={"torch": "2.6"},
    saved_for=("ModelCheckpoint",),
    job="7_1",
    callbacks=({"state_key": "ModelCheckpoint"},),
    loops={"epoch": 3, "batch": 7},
)
LEAST = {"sequence": 3, "step": 30, "files": []}


def test_it_is_read_as_it_was_written() -> None:
    assert Manifest.from_json(FULL.to_json()) == FULL


def test_it_has_the_keys_that_readers_are_promised() -> None:
    promised = {
        "format", "run_id", "attempt", "sequence", "parent", "lease_epoch", "step", "epoch", "fn", "exact",
        "reason", "strategy", "world_size", "metrics", "saved_at", "save_s", "versions", "files",
    }  # fmt: skip
    value = json.loads(FULL.to_json())
    assert promised <= set(value)
    assert value["files"][0] == {"path": "state.ckpt", "size_bytes": 10, "checksum": "xxh3_64:00"}


def test_the_record_says_what_choosing_needs() -> None:
    record = FULL.to_record("/runs/a/checkpoints/00000042-step-00001200")
    assert (record.name, record.sequence, record.step) == ("00000042-step-00001200", 42, 1200)
    assert (record.size_bytes, record.job, record.line) == (15, "7_1", ((1, 10), (40, 42)))


def test_optional_keys_have_defaults_and_no_line_means_everything_before() -> None:
    manifest = Manifest.from_dict(LEAST)
    assert (manifest.exact, manifest.weights_only, manifest.job) == (True, False, None)
    assert manifest.line == ((1, 3),)


def test_unknown_keys_are_kept() -> None:
    manifest = Manifest.from_dict({**LEAST, "colour": "red"})
    assert manifest.to_dict()["colour"] == "red"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sequence": "3"}, "'sequence'"),
        ({"step": True}, "'step'"),
        ({"step": None}, "'step'"),
        ({"files": None}, "'files'"),
        ({"files": ["state.ckpt"]}, "not an object"),
        ({"files": [{"path": "../other/state.ckpt", "size_bytes": 1}]}, "outside its folder"),
        ({"files": [{"path": "/etc/passwd", "size_bytes": 1}]}, "outside its folder"),
        ({"files": [{"path": "state.ckpt"}]}, "'size_bytes'"),
        ({"line": [1, 2]}, "'line'"),
        ({"format": 2}, "format 2"),
        ({"exact": "yes"}, "'exact'"),
    ],
)
def test_what_a_decision_rests_on_is_checked(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=says):
        Manifest.from_dict({**LEAST, **change})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", FULL.to_json()[:-20]])
def test_what_is_no_json_object_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="manifest"):
        Manifest.from_json(data)


def test_a_missing_manifest_is_not_damage(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError):
        read_manifest(str(tmp_path))


def test_a_line_is_ranges_with_gaps_for_what_is_not_on_it() -> None:
    line = extend_line((), 1)
    line = extend_line(line, 2)
    line = extend_line(line, 5)
    assert extend_line(line, 6) == ((1, 2), (5, 6))


def test_what_becomes_known_later_is_added_whole(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = Manifest("r", 1, 10, 0, "periodic", line=((1, 1),), extra={"zip_crc": False})
    Path(folder, "manifest.json").write_bytes(first.to_json())
    note = {"reason": "hpc", "owner": None, "job": "7"}
    end = {"name": "00000001-a", "sequence": 1, "by": "max_steps"}
    amend(folder, lambda manifest: replace(manifest, noted=(note,), finished=end))
    assert read_manifest(folder) == replace(first, noted=(note,), finished=end)
    before = os.stat(os.path.join(folder, "manifest.json"))
    amend(folder, lambda manifest: manifest)
    assert os.stat(os.path.join(folder, "manifest.json")) == before, "nothing to add, nothing written"
    assert os.listdir(folder) == ["manifest.json"]
