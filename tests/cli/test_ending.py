"""The line about how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptrun.cli.ending import closing_line
from ckptrun.records import Fn, Outcome, StopReason
from ckptrun.run.folder import RunFolder


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
