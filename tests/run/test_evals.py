"""Evaluations have folders of their own, and what a live one reads is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptrun.environment.process import this_process
from ckptrun.errors import UsageError
from ckptrun.run.evals import begin_eval, in_use
from ckptrun.run.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.at(str(tmp_path), "demo")


def change(path: str, **fields: Any) -> None:
    file = Path(path) / "eval.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_folders_are_numbered_whatever_the_fn(run: RunFolder) -> None:
    paths = [begin_eval(run, fn, None).path for fn in ("test", "predict", "test")]
    assert [os.path.basename(path) for path in paths] == ["0001-test", "0002-predict", "0003-test"]
    os.mkdir(os.path.join(run.evals_dir, "0041-test"))
    (Path(run.evals_dir) / "notes").mkdir()
    assert os.path.basename(begin_eval(run, "validate", None).path) == "0042-validate"


def test_what_is_noted(run: RunFolder) -> None:
    evaluation = begin_eval(run, "test", "/c/1")
    record = json.loads((Path(evaluation.path) / "eval.json").read_text())
    assert (record["fn"], record["checkpoint"], record["ended_at"]) == ("test", "/c/1", None)
    evaluation.end(metrics=[{"loss": 1.0}], status="done")
    record = json.loads((Path(evaluation.path) / "eval.json").read_text())
    assert (record["metrics"], record["status"]) == ([{"loss": 1.0}], "done")
    assert record["ended_at"] >= record["started_at"]


def test_in_use(run: RunFolder) -> None:
    assert in_use(run) == set()
    live, ended = begin_eval(run, "test", "/c/1"), begin_eval(run, "test", "/c/2")
    begin_eval(run, "test", None)
    ended.end(metrics=None, status="done")
    assert in_use(run) == {"/c/1"}
    live.end(metrics=None, status="done")
    assert in_use(run) == set()


def test_a_dead_process_reads_nothing_and_one_on_another_host_may(run: RunFolder) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    me = this_process()._asdict()
    change(begin_eval(run, "test", "/c/dead").path, process={**me, "pid": dead.pid})
    change(begin_eval(run, "test", "/c/far").path, process={**me, "host": "elsewhere"})
    assert in_use(run) == {"/c/far"}


def test_what_is_no_record_is_passed_over(run: RunFolder) -> None:
    first, second = begin_eval(run, "test", "/c/1"), begin_eval(run, "test", "/c/2")
    (Path(first.path) / "eval.json").write_text("{")
    change(second.path, process={"pid": 1})
    os.mkdir(os.path.join(run.evals_dir, "0009-test"))
    assert in_use(run) == set()


def test_a_folder_that_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="cannot write to /proc/"):
        begin_eval(RunFolder.at("/proc/none", "demo"), "test", None)
