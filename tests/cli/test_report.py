"""How errors look."""

from __future__ import annotations

import json

import pytest

from ckptrun.__main__ import main
from ckptrun.cli import app
from ckptrun.cli.report import report_error
from ckptrun.errors import (
    ConfigError,
    IncompatibleError,
    NoCheckpointError,
    RunInUseError,
    SaveError,
    UsageError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("m", hint="h"), 2),
        (ConfigError("m", place="f.yaml:3", hint="h"), 2),
        (NoCheckpointError("m", hint="h"), 3),
        (RunInUseError("m", hint="h"), 4),
        (IncompatibleError("m", hint="h"), 5),
        (SaveError("m", hint="h"), 1),
    ],
)
def test_an_error_of_ours_is_a_message_and_a_hint(
    error: UsageError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error, debug=False, as_json=False) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ckptrun: error: {error.message}\n  hint: h\n"


def test_json_gets_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(NoCheckpointError("gone", hint="look"), debug=False, as_json=True) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"exit_code": 3, "message": "gone", "hint": "look"}}
    assert "gone" in err


def _raise(error: Exception) -> None:
    raise error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "run", lambda *_: _raise(ZeroDivisionError("by\nzero")))


@pytest.mark.usefixtures("failing")
def test_an_unexpected_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("ckptrun: error: internal error: ZeroDivisionError: by zero (")
    assert "--debug" in err
    assert len(err.splitlines()) == 2
    assert "Traceback" not in err


@pytest.mark.usefixtures("failing")
def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_error_of_the_system_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(PermissionError(13, "Permission denied", "/a/b"), debug=False, as_json=False) == 1
    assert "/a/b: Permission denied" in capsys.readouterr().err


def test_ctrl_c_is_130_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", interrupted)
    assert main(["runs"]) == 130
    assert capsys.readouterr().err == ""
