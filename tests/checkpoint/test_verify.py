"""Each kind of fault in a checkpoint's folder, and what is none."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun import faults
from ckptrun.checkpoint import verify
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.state_file import write_state
from ckptrun.checkpoint.verify import verify_checkpoint
from ckptrun.storage import retry

STATE = {"state_dict": {"weight": torch.arange(100.0)}, "global_step": 3}


def save(root: Path, sequence: int = 1, *, ranks: int = 1, files: Any = None, **more: Any) -> str:
    name = f"{sequence:08d}-step-{sequence:08d}"
    fields = {"line": ((1, sequence),), "world_size": ranks, **more}
    manifest = Manifest("r", sequence, sequence, 0, "periodic", **fields)
    if files is None:
        names = ["state.ckpt", *(f"rank-{rank:04d}.ckpt" for rank in range(ranks))]
        files = {name: lambda file: write_state(file, STATE) for name in names}
    commit(str(root), name, files, manifest)
    return str(root / name)


def edit_manifest(folder: str, **values: Any) -> None:
    path = Path(folder, "manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_WAITS_S", (0.0, 0.0))


def test_a_whole_one(tmp_path: Path) -> None:
    read: list[int] = []
    found = verify_checkpoint(save(tmp_path, ranks=2), read.append)
    assert (found.state, found.num_files, found.damage, found.notes) == ("good", 3, (), ())
    assert sum(read) == found.size_bytes


def whys(folder: str) -> list[str]:
    found = verify_checkpoint(folder)
    assert found.state == "damaged"
    return [f"{damage.file}: {damage.why}" for damage in found.damage]


def test_faults_of_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, ranks=3)
    os.truncate(f"{folder}/state.ckpt", 100)
    os.unlink(f"{folder}/rank-0000.ckpt")
    with open(f"{folder}/rank-0002.ckpt", "r+b") as file:
        file.seek(300)
        byte = file.read(1)[0]
        file.seek(300)
        file.write(bytes([byte ^ 4]))
    size, gone, wrong = whys(folder)
    assert "state.ckpt has 100 bytes, its manifest says" in size
    assert "rank-0000.ckpt is missing" in gone
    assert "rank-0002.ckpt is damaged: found the checksum xxh3_64:" in wrong


def test_a_file_that_was_written_wrongly(tmp_path: Path) -> None:
    folder = save(
        tmp_path, files={"state.ckpt": lambda file: file.write(b"PK\x03\x04 no zip" * 9)}, weights_only=True
    )
    (why,) = whys(folder)
    assert "cannot be read as a torch file" in why


def test_faults_of_the_manifest(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2, parent="00000001-step-00000001")
    assert verify_checkpoint(second).state == "good"
    edit_manifest(second, world_size=3)
    assert whys(second) == [
        "manifest.json: 3 ranks wrote it and its manifest lists no rank-0001.ckpt, rank-0002.ckpt"
    ]
    edit_manifest(second, world_size=1, parent="00000009-step-00000009")
    assert "is not on its line" in whys(second)[0]
    edit_manifest(second, parent="00000001-step-00000001", line=[[2, 2]])
    assert "is not on its line" in whys(second)[0]
    edit_manifest(first, line=[[1, 1]])
    edit_manifest(second, line=[[1, 1], [2, 2]])
    assert "is not that of its parent" in whys(second)[0]
    edit_manifest(second, line=[[1, 3]])
    assert "ends with save 3" in whys(second)[0]
    edit_manifest(second, sequence=3)
    assert "that of save 3" in whys(second)[0]
    Path(first, "manifest.json").write_text("{")
    assert "not JSON" in whys(first)[0]


def test_what_is_no_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, weights_only=True, exact=False)
    Path(folder, "notes.txt").write_text("mine")
    found = verify_checkpoint(folder)
    assert found.state == "good"
    assert found.notes == (
        "holds what is not in its manifest: notes.txt",
        "does not stand at a boundary (exact: false)",
    )
    os.unlink(f"{folder}/manifest.json")
    assert verify_checkpoint(folder).state == "not committed"
    assert verify_checkpoint(str(tmp_path / "00000009-x")).notes == ("it is gone",)


def test_one_that_a_live_run_deletes_meanwhile_is_no_damage(tmp_path: Path) -> None:
    folder = save(tmp_path)
    found = verify_checkpoint(folder, lambda _: shutil.rmtree(folder, ignore_errors=True))
    assert (found.state, found.notes) == ("not committed", ("it is gone",))


def test_what_was_wrong_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path)
    real, calls = verify.checksum_of, []

    def once(raw: Any, algorithm: str) -> tuple[str, int]:
        calls.append(algorithm)
        found, size = real(raw, algorithm)
        return ("xxh3_64:0" if len(calls) == 1 else found), size

    monkeypatch.setattr(verify, "checksum_of", once)
    assert verify_checkpoint(folder).state == "good"
    assert len(calls) == 3, "two files, one of them twice"


@pytest.mark.usefixtures("no_waits")
def test_an_io_error_is_no_damage(tmp_path: Path) -> None:
    folder = save(tmp_path)
    with faults.armed("state:read:1=raise:EIO"):
        assert verify_checkpoint(folder).state == "good"
    with faults.armed("state:read:1+=raise:ESTALE"):
        found = verify_checkpoint(folder)
    assert (found.state, found.damage) == ("unreadable", ())
    assert "cannot be read" in found.notes[0]


def test_a_checksum_of_a_newer_kind_is_not_called_damage(tmp_path: Path) -> None:
    folder = save(tmp_path)
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    manifest["files"][0]["checksum"] = "blake3:00"
    edit_manifest(folder, files=manifest["files"])
    found = verify_checkpoint(folder)
    assert found.state == "unreadable"
    assert "blake3" in found.notes[0]
    assert replace(found, notes=()).damage == ()
