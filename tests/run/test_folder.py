"""Where a run's files are, and whether there is a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptrun.errors import UsageError
from ckptrun.run import folder as module
from ckptrun.run.folder import RunFolder


def test_paths_are_absolute(in_tmp_path: Path) -> None:
    folder = RunFolder.at("runs", "demo")
    assert folder.path == str(in_tmp_path / "runs/demo")
    assert (folder.root, folder.name) == (str(in_tmp_path / "runs"), "demo")
    assert folder.lease == str(in_tmp_path / "runs/demo/lease.json")
    assert RunFolder(folder.path).checkpoints_dir == folder.checkpoints_dir


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a", "a\nb", "\x1b[0m"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a run"):
        RunFolder.at("runs", name)


def test_a_remote_root_is_refused_and_not_made_a_folder() -> None:
    with pytest.raises(UsageError, match="s3://bucket/runs"):
        RunFolder.at("s3://bucket/runs", "demo")


def test_a_run_exists_by_what_is_in_it(tmp_path: Path) -> None:
    folder = RunFolder.at(str(tmp_path / "runs"), "demo")
    assert not folder.exists()
    folder.create()
    folder.create()
    assert not folder.exists()
    assert sorted(os.listdir(folder.path)) == ["checkpoints", "control", "evals", "logs"]
    os.mkdir(os.path.join(folder.checkpoints_dir, "00000001-step-00000001"))
    assert folder.exists()
    other = RunFolder.at(str(tmp_path / "runs"), "other")
    other.create()
    Path(other.run_json).write_text("{}")
    assert other.exists()


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    folder = RunFolder.at(str(tmp_path / "runs"), "demo")
    assert not folder.exists()
    with pytest.raises(UsageError, match="cannot be written"):
        folder.create()


def test_an_error_of_the_disk_is_not_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.at(str(tmp_path), "demo")
    folder.create()

    def broken(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(module.os, "stat", broken)
    with pytest.raises(UsageError, match="Input/output error"):
        folder.exists()
