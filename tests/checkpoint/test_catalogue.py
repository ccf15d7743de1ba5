"""Against a real folder: what is committed, what is damaged, and what only looks absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.errors import NoCheckpointError
from ckptrun.records import CheckpointRecord, RejectedRecord
from ckptrun.storage import retry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    return checkpoints


def save(folder: Path, sequence: int, **more: Any) -> str:
    """Commit a small checkpoint; returns its name."""
    name = naming.folder_name(sequence, naming.step_label(100 * sequence))
    fields: dict[str, Any] = {
        "run_id": "r",
        "epoch": 0,
        "reason": "periodic",
        "line": ((1, sequence),),
        **more,
    }
    manifest = Manifest(sequence=sequence, step=100 * sequence, **fields)
    commit(str(folder), name, {"state.ckpt": lambda f: f.write(b"0123456789")}, manifest)
    return name


def test_names_come_newest_first_without_what_is_written_or_deleted(folder: Path) -> None:
    names = [save(folder, number) for number in (9, 10, 2)]
    for other in (".tmp-00000099-step-1", ".trash-00000098-step-1", "notes"):
        (folder / other).mkdir()
    assert Catalogue(str(folder)).names() == [names[1], names[0], names[2]]
    assert Catalogue(str(folder)).highest_sequence() == 10


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    catalogue = Catalogue(str(tmp_path / "no" / "checkpoints"))
    assert catalogue.names() == []
    assert catalogue.highest_sequence() == 0


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTDIR])
def test_a_folder_that_cannot_be_read_is_never_absent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(path: str) -> list[str]:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(retry, "RETRY_WAITS_S", (0.0, 0.0))
    with pytest.raises(NoCheckpointError, match="cannot be listed") as caught:
        Catalogue(str(folder)).names()
    assert caught.value.exit_code == 3


def test_a_good_one_is_a_record(folder: Path) -> None:
    name = save(folder, 3, metrics={"val_loss": 0.5})
    record = Catalogue(str(folder)).examine(name)
    assert isinstance(record, CheckpointRecord)
    assert (record.path, record.step, record.size_bytes) == (str(folder / name), 300, 10)
    assert record.metrics == {"val_loss": 0.5}


def rejected(folder: Path, name: str) -> RejectedRecord:
    record = Catalogue(str(folder)).examine(name)
    assert isinstance(record, RejectedRecord)
    return record


def test_one_without_a_manifest_was_never_committed(folder: Path) -> None:
    name = save(folder, 3)
    (folder / name / "manifest.json").unlink()
    record = rejected(folder, name)
    assert "not committed" in record.why
    assert (record.sequence, record.step, record.committed) == (3, 300, False)


def test_one_that_lacks_a_file_says_which(folder: Path) -> None:
    name = save(folder, 3)
    (folder / name / "state.ckpt").unlink()
    record = rejected(folder, name)
    assert record.why == "lacks its file state.ckpt"
    assert record.committed
    assert record.line == ((1, 3),)


@pytest.mark.parametrize("data", [b"", b"01234", b"0123456789a"])
def test_a_wrong_size_says_found_and_expected(folder: Path, data: bytes) -> None:
    name = save(folder, 3)
    (folder / name / "state.ckpt").write_bytes(data)
    assert rejected(folder, name).why == f"state.ckpt has {len(data)} bytes, its manifest says 10"


def test_a_torn_manifest_is_damage_and_was_committed(folder: Path) -> None:
    name = save(folder, 3)
    manifest = folder / name / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:40])
    record = rejected(folder, name)
    assert record.why.startswith("damaged: its manifest is not JSON")
    assert record.committed


def test_a_renamed_copy_is_not_taken_for_a_newer_save(folder: Path) -> None:
    name = save(folder, 3)
    os.rename(folder / name, folder / "00000009-step-00000900")
    assert "that of save 3" in rejected(folder, "00000009-step-00000900").why


def test_a_plain_file_and_a_broken_link_are_turned_down(folder: Path) -> None:
    (folder / "00000001-a").write_text("")
    (folder / "00000002-a").symlink_to("nowhere")
    assert rejected(folder, "00000001-a").why == "not a folder"
    assert "not committed" in rejected(folder, "00000002-a").why
    assert rejected(folder, "00000003-a").why == "gone"


def test_an_io_error_is_not_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(folder, 3)
    real = os.stat

    def fail(path: Any, **more: Any) -> os.stat_result:
        if str(path).endswith("state.ckpt"):
            raise OSError(errno.EIO, "Input/output error", path)
        return real(path, **more)

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(retry, "RETRY_WAITS_S", (0.0, 0.0))
    record = rejected(folder, name)
    assert record.unreadable
    assert "Input/output error" in record.why


def test_only_what_is_asked_for_is_looked_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 6):
        save(folder, number)
    catalogue = Catalogue(str(folder))
    looked: list[str] = []
    real = catalogue.examine
    monkeypatch.setattr(catalogue, "examine", lambda name: looked.append(name) or real(name))
    newest = next(catalogue.newest_first(ignore={catalogue.names()[0]}))
    assert newest.sequence == 4
    assert looked == [newest.name]


def test_refresh_sees_what_was_saved_since(folder: Path) -> None:
    catalogue = Catalogue(str(folder))
    assert catalogue.names() == []
    name = save(folder, 1)
    assert catalogue.names() == []
    catalogue.refresh()
    assert catalogue.names() == [name]
