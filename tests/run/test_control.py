"""Asking a live run to save or stop, through its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptrun.run import control
from ckptrun.run.control import Answer, Request
from ckptrun.run.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.at(str(tmp_path), "demo")
    made.create()
    return made


def test_asked_taken_once_answered_and_heard(folder: RunFolder) -> None:
    first = control.ask(folder, "save")
    second = control.ask(folder, "stop")
    assert control.take(folder) == [Request(first, "save"), Request(second, "stop")]
    assert control.take(folder) == []
    control.answer(folder, first, {"state": "done", "checkpoint": "/c/1", "message": None})
    control.answer(folder, second, {"state": "failed", "message": "disk full"})
    assert control.wait_answer(folder, first, lambda: True, 10) == Answer("done", "/c/1")
    assert control.wait_answer(folder, second, lambda: True, 10) == Answer("failed", None, "disk full")
    assert os.listdir(folder.control_dir) == []


def test_between_two_processes(folder: RunFolder) -> None:
    code = (
        "import sys; from ckptrun.run.folder import RunFolder; from ckptrun.run import control\n"
        "folder = RunFolder(sys.argv[1])\n"
        "while not (asked := control.take(folder)): pass\n"
        "control.answer(folder, asked[0].id, {'state': 'done', 'checkpoint': asked[0].kind})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder.path]) as run:
        request = control.ask(folder, "stop")
        assert control.wait_answer(folder, request, lambda: run.poll() is None, 60) == Answer("done", "stop")


def test_a_run_that_ends_without_an_answer(folder: RunFolder) -> None:
    request = control.ask(folder, "stop")
    assert control.wait_answer(folder, request, lambda: False, 60) == Answer("ended")
    assert control.take(folder) == []


def test_a_run_that_answers_and_ends_at_once(folder: RunFolder) -> None:
    request = control.ask(folder, "stop")

    def alive() -> bool:
        control.answer(folder, request, {"state": "done", "checkpoint": "/c/1"})
        return False

    assert control.wait_answer(folder, request, alive, 60) == Answer("done", "/c/1")


def test_no_answer_in_time_withdraws_the_request(folder: RunFolder) -> None:
    request = control.ask(folder, "save")
    assert control.wait_answer(folder, request, lambda: True, 0.05, poll_s=0.01) == Answer("timeout")
    assert control.take(folder) == []


def test_other_files_are_left_alone(folder: RunFolder) -> None:
    for name in ("notes.txt", ".x.save.json.tmp-1", "mine.save.json", "1.restart.json"):
        (Path(folder.control_dir) / name).write_text("")
    assert control.take(folder) == []
    assert len(os.listdir(folder.control_dir)) == 4


def test_no_folder_no_requests(tmp_path: Path) -> None:
    assert control.take(RunFolder.at(str(tmp_path), "none")) == []
