"""What an attempt left behind is ended; what only has the same number is not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ckptrun.processes import process_stat
from ckptrun.run.folder import RunFolder
from ckptrun.run.rank_processes import end_leftovers, note_processes


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.at(str(tmp_path), "run")
    made.create()
    return made


def test_a_leftover_is_killed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptrun.run.rank_processes._PATIENCE_S", 0.1)
    process = subprocess.Popen(["sleep", "1000"])
    try:
        note_processes(folder, [process.pid])
        assert end_leftovers(folder) == [process.pid]
        assert process.wait() == -9
    finally:
        process.kill()
        process.wait()


def test_a_process_of_the_same_number_is_left_alone(folder: RunFolder) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        note_processes(folder, [process.pid])
        path = Path(folder.control_dir) / "ranks.json"
        value = json.loads(path.read_text())
        value["processes"][0][1] += 1  # started at another time
        path.write_text(json.dumps(value))
        assert end_leftovers(folder) == []
        assert process_stat(process.pid) is not None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("content", ["", "{", '{"host": "elsewhere", "boot_id": "x", "processes": []}'])
def test_nothing_is_done_where_nothing_is_known(folder: RunFolder, content: str) -> None:
    (Path(folder.control_dir) / "ranks.json").write_text(content)
    assert end_leftovers(folder) == []


def test_nothing_is_done_without_a_note(folder: RunFolder) -> None:
    assert end_leftovers(folder) == []
