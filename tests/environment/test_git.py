"""The commit of the user's code, from real repositories."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from ckptrun.environment.git import git_state


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    _git(tmp_path, "init", "-q")
    return tmp_path


def _git(folder: Path, *args: str) -> str:
    names = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.run(
        ["git", *names, *args], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_and_clean(repository: Path) -> None:
    (repository / "train.py").write_text("1\n")
    _git(repository, "add", ".")
    _git(repository, "commit", "-q", "-m", "x")
    commit = _git(repository, "rev-parse", "HEAD")
    below = repository / "configs"
    below.mkdir()
    (repository / "untracked").write_text("")
    assert git_state(str(below)) == (commit, True)
    (repository / "train.py").write_text("2\n")
    assert git_state(str(below)) == (commit, False)


def test_nothing_committed_no_repository_no_folder(repository: Path, tmp_path_factory) -> None:
    assert git_state(str(repository)) is None
    assert git_state(str(repository / "missing")) is None


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(str(tmp_path)) is None


def test_a_git_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    start = time.monotonic()
    assert git_state(str(tmp_path), timeout_s=0.2) is None
    assert time.monotonic() - start < 10
