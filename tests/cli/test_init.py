"""``ckptrun init``: the project that it writes is complete, and nothing that exists is overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptrun.cli import init as init_module
from ckptrun.cli.init import init, write_project
from ckptrun.errors import UsageError

FILES = ["ckptrun.yaml", "task.py", "job.sbatch", ".gitignore"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_writes_the_project_and_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init("my project") == 0
    out = capsys.readouterr().out
    assert sorted(os.listdir("my project")) == sorted(FILES)
    assert "cd 'my project'" in out
    assert "ckptrun fit --ckpt last" in out


def test_in_the_working_folder_there_is_nowhere_to_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init() == 0
    assert "cd " not in capsys.readouterr().out
    assert sorted(os.listdir()) == sorted(FILES)


@pytest.mark.parametrize("existing", [["ckptrun.yaml"], ["task.py", "job.sbatch"]])
def test_refuses_to_overwrite_and_writes_nothing(tmp_path: Path, existing: list[str]) -> None:
    for name in existing:
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UsageError) as caught:
        write_project(str(tmp_path))
    assert caught.value.exit_code == 2
    assert ", ".join(existing) in caught.value.message
    assert contents(tmp_path) == before


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "task.py").symlink_to("elsewhere.py")
    with pytest.raises(UsageError, match=r"task\.py exists"):
        write_project(str(tmp_path))
    assert os.listdir(tmp_path) == ["task.py"]


def test_a_gitignore_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".gitignore").write_text("mine\n")
    assert init(str(tmp_path)) == 0
    assert (tmp_path / ".gitignore").read_text() == "mine\n"
    assert "add the line 'runs/'" in capsys.readouterr().out


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        write_project(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="nothing was written"):
        write_project(str(tmp_path / "file" / "below"))


def test_what_was_written_before_an_error_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A name that turns up between the look and the writing.
    (tmp_path / "job.sbatch").write_text("mine")
    monkeypatch.setattr(init_module.os.path, "lexists", lambda path: False)
    with pytest.raises(UsageError, match=r"job\.sbatch.*nothing was written"):
        write_project(str(tmp_path))
    assert contents(tmp_path) == {"job.sbatch": b"mine"}


def test_the_config_names_classes_and_arguments_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import inspect
    import sys

    write_project(str(tmp_path))
    config = yaml.safe_load((tmp_path / "ckptrun.yaml").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "task", raising=False)
    entries = [config["model"], config["data"], *config["callbacks"], *config["loggers"]]
    for entry in entries:
        module, _, name = entry["class_path"].rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert entry.get("init_args", {}).keys() <= parameters.keys()
    monkeypatch.delitem(sys.modules, "task", raising=False)


def test_the_project_runs_as_it_stands(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    project = tmp_path / "project"
    assert run_cli("init", project).code == 0
    fitted = run_cli("fit", "--ckpt", "last", "trainer.max_epochs=2", cwd=project)
    assert fitted.code == 0, fitted
    tested = run_cli("test", cwd=project)
    assert tested.code == 0, tested
    assert "nothing left to do" in str(run_cli("fit", "--ckpt", "last", "trainer.max_epochs=2", cwd=project))
