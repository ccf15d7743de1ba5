"""The line about how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptrun.cli.ending import closing_line, tell
from ckptrun.launch.blame import LostRankError
from ckptrun.records import Fn, Outcome, StopReason
from ckptrun.run.folder import RunFolder
from ckptrun.session.spec import SessionResult


@pytest.mark.parametrize(
    ("fn", "reason", "cancelled", "line"),
    [
        ("fit", StopReason.SIGTERM, False, "run 'demo' stopped by a signal at step 3; no checkpoint was saved"),
        ("fit", StopReason.SIGTERM, True, "run 'demo' stopped, as its job was cancelled, at step 3; no checkpoint was"),
        ("fit", StopReason.DONE, False, "run 'demo' finished at step 3; no checkpoint was saved"),
        ("test", StopReason.DONE, False, "test of run 'demo': done"),
        ("test", StopReason.KEYBOARD, False, "test of run 'demo': stopped by Ctrl-C"),
    ],
)  # fmt: skip
def test_the_closing_line(tmp_path: Path, fn: Fn, reason: StopReason, cancelled: bool, line: str) -> None:
    folder = RunFolder.at(str(tmp_path), "demo")
    said = closing_line(fn, folder, Outcome(reason, step=3), cancelled=cancelled)
    assert said.startswith(line)


@pytest.mark.parametrize("none_begun", [True, False])
def test_where_no_rank_has_begun_the_error_is_all(
    none_begun: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = LostRankError("the launcher ended, and 0 of 2 ranks had begun", hint="What it said is in a.log.")
    error.none_begun = none_begun
    result = SessionResult(70, outcome=Outcome(StopReason.RANK_LOST, error=error))
    folder = RunFolder.at(str(tmp_path), "demo")
    tell("fit", folder, result, ["ckptrun", "fit"], num_hosts=1, debug=False)
    told = capsys.readouterr().err
    assert "the launcher ended, and 0 of 2 ranks had begun" in told
    assert "What it said is in a.log." in told
    assert ("lease was lost" in told) is ("to go on" in told) is (not none_begun)
