"""Which config files are read, in which order of search."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptrun.config.find import FoundConfig, find_config
from ckptrun.errors import ConfigError


def _project(folder: Path, config: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f"[tool.ckptrun]\nconfig = {config}\n")


def test_the_order_of_search(in_tmp_path: Path) -> None:
    cwd = str(in_tmp_path)
    env = {"CKPTRUN_CONFIG": os.pathsep.join(["x.yaml", "/abs/y.yaml"])}
    _project(in_tmp_path, '"configs/p.yaml"')
    (in_tmp_path / "ckptrun.yaml").write_text("trainer: {}\n")
    assert find_config(["a.yaml", "b.yaml"], cwd, env) == FoundConfig(("a.yaml", "b.yaml"), "flag")
    assert find_config([], cwd, env) == FoundConfig(("x.yaml", "/abs/y.yaml"), "CKPTRUN_CONFIG")
    assert find_config([], cwd, {"CKPTRUN_CONFIG": ""}) == FoundConfig(("ckptrun.yaml",), "ckptrun.yaml")
    (in_tmp_path / "ckptrun.yaml").unlink()
    assert find_config([], cwd, {}) == FoundConfig(("configs/p.yaml",), "pyproject.toml")


def test_only_what_was_asked_for_counts_as_given(in_tmp_path: Path) -> None:
    _project(in_tmp_path, '"p.yaml"')
    cwd = str(in_tmp_path)
    assert find_config(["a.yaml"], cwd, {}).was_given
    assert find_config([], cwd, {"CKPTRUN_CONFIG": "a.yaml"}).was_given
    assert not find_config([], cwd, {}).was_given


def test_the_path_in_pyproject_is_relative_to_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _project(tmp_path / "top", '["configs/p.yaml", "../q.yaml"]')
    below = tmp_path / "top" / "deep" / "er"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    found = find_config([], str(below), {})
    assert found.paths == (str(tmp_path / "top/configs/p.yaml"), str(tmp_path / "q.yaml"))


def test_a_nearer_pyproject_without_a_config_is_passed_over(tmp_path: Path) -> None:
    _project(tmp_path, '"p.yaml"')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_config([], str(tmp_path / "sub"), {}).paths == (str(tmp_path / "p.yaml"),)


def test_none_names_init(in_tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_config([], str(in_tmp_path), {})
    assert "CKPTRUN_CONFIG" in caught.value.message
    assert "ckptrun init" in str(caught.value.hint)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.ckptrun\n", "this is not TOML"),
        ("[tool.ckptrun]\nconfig = 3\n", "[tool.ckptrun] config is 3, expected a path or a list of paths"),
        ("[tool.ckptrun]\nconfig = []\n", "expected a path or a list of paths"),
        ("[tool.ckptrun]\nconfig = ''\n", "expected a path or a list of paths"),
    ],
)
def test_a_bad_pyproject(in_tmp_path: Path, text: str, message: str) -> None:
    (in_tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_config([], str(in_tmp_path), {})
    assert caught.value.message.startswith(f"{in_tmp_path}/pyproject.toml: ")
    assert message in caught.value.message
