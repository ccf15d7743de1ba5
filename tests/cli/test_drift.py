"""Code and versions that moved since the checkpoint are said, and refused under --exact."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptrun.cli import drift
from ckptrun.config.load import load_config
from ckptrun.environment.git import GitState
from ckptrun.records import CheckpointRecord, Resolution

COMMIT = "a" * 40


@pytest.mark.parametrize(
    ("git_then", "git_now", "versions_then", "told", "unknown"),
    [
        ({"commit": COMMIT, "clean": True}, GitState(COMMIT, True), {"torch": "2"}, [], None),
        (
            {"commit": COMMIT, "clean": True},
            GitState(COMMIT, False),
            {"torch": "2"},
            ["the code has changes that are not committed; the run began without"],
            None,
        ),
        (
            {"commit": COMMIT, "clean": False},
            GitState(COMMIT, False),
            {"torch": "2"},
            [],
            "were not committed",
        ),
        (
            {"commit": COMMIT, "clean": True},
            GitState("b" * 40, True),
            {"torch": "2"},
            ["the code is at commit bbbbbbbbbb; the run began at aaaaaaaaaa"],
            None,
        ),
        ({"commit": COMMIT, "clean": True}, None, {"torch": "2"}, [], "no git repository with a commit at /"),
        (None, GitState(COMMIT, True), {"torch": "2"}, [], "the run began where there was no git repository"),
        (None, None, {"torch": "1"}, ["torch is 2; the checkpoint was written with 1"], "no git"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_what_moved(
    monkeypatch: pytest.MonkeyPatch,
    git_then: Any,
    git_now: Any,
    versions_then: dict[str, str],
    told: list[str],
    unknown: str | None,
    exact: bool,
) -> None:
    monkeypatch.setattr(drift, "read_manifest", lambda _: SimpleNamespace(versions=versions_then))
    monkeypatch.setattr(drift, "read_identity", lambda _: SimpleNamespace(git=git_then))
    monkeypatch.setattr(drift, "changes", lambda *_: [])
    monkeypatch.setattr("ckptrun.environment.git.git_state", lambda _: git_now)
    monkeypatch.setattr("ckptrun.environment.versions.versions", lambda: {"torch": "2"})
    check = drift.config_check(load_config(files=[]), override=False, exact=exact, look_at_code=True)
    record = CheckpointRecord("00000001-step-00000003", "/somewhere", 1, 3, 0, "stop")
    error, warnings = check(SimpleNamespace(name="demo"), Resolution("last", 2, record))  # type: ignore[arg-type]
    if exact and told:
        assert error is not None
        assert error.exit_code == 5
        assert all(text in error.message for text in told)
    else:
        assert error is None
        assert list(warnings)[: len(told)] == told
        more = list(warnings)[len(told) :]
        assert len(more) == (exact and unknown is not None), "only who asks for --exact relies on it"
        assert all(text.startswith("--exact: whether the code") and str(unknown) in text for text in more)
