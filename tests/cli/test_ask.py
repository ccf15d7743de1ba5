"""``save`` and ``stop``, from the side of the one who asks; this process plays the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptrun.records import Status
from ckptrun.run import control
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import StatusRecord, write_status

RECORD = StatusRecord(run="demo", status=Status.RUNNING, stage="train", step=5)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.at(str(tmp_path / "runs"), "demo")
    folder.create()
    Path(folder.run_json).write_text(json.dumps({"id": "r"}))
    write_status(folder.status, RECORD)
    return folder


@pytest.mark.parametrize(("command", "did"), [("save", "saved"), ("stop", "stopped")])
def test_it_waits_for_the_answer(
    command: str, did: str, run: RunFolder, start_cli: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    live = start_cli(command, "demo")
    (request,) = wait_until(lambda: control.take(run))
    assert request.kind == command
    assert live.process.poll() is None
    control.answer(run, request.id, {"state": "done", "checkpoint": "/c/00000007", "message": None})
    done = live.wait()
    assert (done.code, done.stdout) == (0, f"run 'demo' has {did}: /c/00000007\n"), done


def test_json(run: RunFolder, start_cli: Callable[..., Any], wait_until: Callable[..., Any]) -> None:
    live = start_cli("save", "--json", "--run", "demo")
    (request,) = wait_until(lambda: control.take(run))
    control.answer(run, request.id, {"state": "failed", "checkpoint": None, "message": "the disk is full"})
    done = live.wait()
    assert done.code == 1, done
    assert done.document == {
        "run": "demo", "asked": "save", "state": "failed", "checkpoint": None, "message": "the disk is full",
    }  # fmt: skip


def test_a_run_that_ends_meanwhile(
    run: RunFolder, start_cli: Callable[..., Any], wait_until: Callable[..., Any]
) -> None:
    live = start_cli("stop", "demo")
    wait_until(lambda: control.take(run))
    write_status(run.status, replace(RECORD, status=Status.FINISHED, stop_reason="done", exit_code=0))
    done = live.wait()
    assert (done.code, done.stdout) == (0, "run 'demo' has ended: FINISHED (done)\n"), done


def test_no_answer_in_time(run: RunFolder, run_cli: Callable[..., Any]) -> None:
    done = run_cli("save", "demo", "--timeout-s", "0.2")
    assert done.code == 1, done
    assert "has not answered within 0.2 s" in done.stderr
    assert control.take(run) == []


@pytest.mark.parametrize("command", ["save", "stop"])
def test_a_run_that_is_not_live_is_wrong_usage(
    command: str, run: RunFolder, run_cli: Callable[..., Any]
) -> None:
    write_status(run.status, replace(RECORD, status=Status.INTERRUPTED, stop_reason="sigterm"))
    done = run_cli(command, "demo")
    assert done.code == 2, done
    assert "run 'demo' is not live: it is INTERRUPTED (sigterm)" in done.stderr
    assert control.take(run) == []
