"""A run has one id for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from ckptrun.errors import UsageError
from ckptrun.run.folder import RunFolder
from ckptrun.run.identity import ensure_identity, read_identity


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.at(str(tmp_path), "demo")
    made.create()
    return made


def test_made_once(folder: RunFolder) -> None:
    assert read_identity(folder) is None
    first = ensure_identity(folder, ["ckptrun", "fit"])
    assert ensure_identity(folder, ["ckptrun", "fit", "--ckpt", "last"]) == first == read_identity(folder)
    assert len(first.id) == 32
    assert (first.name, first.command, first.cwd) == ("demo", ("ckptrun", "fit"), os.getcwd())
    assert first.versions["python"] == first.python
    assert datetime.fromisoformat(first.created).tzinfo is not None
    on_disk = json.loads(Path(folder.run_json).read_text())
    assert list(on_disk) == ["id", "name", "created", "command", "cwd", "python", "versions", "git"]


def test_two_that_start_at_once_agree(folder: RunFolder) -> None:
    code = (
        "import sys; from ckptrun.run.folder import RunFolder; "
        "from ckptrun.run.identity import ensure_identity; "
        "sys.stdin.read(1); print(ensure_identity(RunFolder(sys.argv[1]), ['x']).id)"
    )
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code, folder.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert len({one.communicate("x")[0] for one in starters}) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null"])
def test_a_damaged_one_is_said_and_not_replaced(folder: RunFolder, text: str) -> None:
    Path(folder.run_json).write_text(text)
    with pytest.raises(UsageError, match="is damaged"):
        ensure_identity(folder, ["x"])
    assert Path(folder.run_json).read_text() == text
