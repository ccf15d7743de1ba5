"""What a run says that it does, and whether anybody is behind it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptrun.errors import UsageError
from ckptrun.records import Status
from ckptrun.run import status as module
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import RankRecord, StatusRecord, list_runs, read_status, write_status

RUNNING = StatusRecord(
    run="demo", status=Status.RUNNING, stage="train", step=12, epoch=1, max_steps=100, metrics={"loss": 0.5},
    checkpoint="/runs/demo/checkpoints/00000001-step-00000010", attempt=2, ranks=(RankRecord(0, 1, "n"),),
    started_at=5.0,
)  # fmt: skip
KEYS = [
    "run", "status", "stop_reason", "fn", "stage", "step", "epoch", "max_steps", "metrics", "checkpoint",
    "attempt", "ranks", "heartbeat_age_s", "exit_code",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make(tmp_path, "demo")


def make(root: Path, name: str) -> RunFolder:
    folder = RunFolder.at(str(root / "runs"), name)
    folder.create()
    Path(folder.run_json).write_text("{}")
    return folder


def put(folder: RunFolder, record: StatusRecord) -> None:
    """As another process would have written it."""
    Path(folder.status).write_text(json.dumps(record.to_dict()))


def test_written_and_read_back(folder: RunFolder) -> None:
    assert read_status(folder) is None
    write_status(folder.status, RUNNING)
    read = read_status(folder)
    assert read is not None
    assert read.pid == os.getpid()
    fields = {name: getattr(RUNNING, name) for name in (*KEYS, "started_at") if name != "heartbeat_age_s"}
    assert {name: getattr(read, name) for name in fields} == fields
    assert read.heartbeat_age_s is not None
    first = read.counter
    write_status(folder.status, RUNNING)
    assert read_status(folder).counter > first


def test_the_keys_that_other_programs_read(folder: RunFolder) -> None:
    write_status(folder.status, RUNNING)
    on_disk = json.loads(Path(folder.status).read_text())
    assert list(on_disk)[: len(KEYS)] == KEYS
    assert list(read_status(folder).to_dict()) == list(on_disk)
    assert on_disk["ranks"] == [{"rank": 0, "pid": 1, "host": "n"}]
    assert on_disk["status"] == "RUNNING"


def test_a_metric_that_is_no_number_is_null() -> None:
    record = dataclasses.replace(RUNNING, metrics={"a": float("nan"), "b": float("inf"), "c": 1.0})
    assert json.dumps(record.to_dict()["metrics"]) == '{"a": null, "b": null, "c": 1.0}'


@pytest.mark.parametrize("status", [Status.INITIALIZING, Status.RUNNING])
def test_dead_here_is_lost_at_once(folder: RunFolder, status: Status) -> None:
    code = (
        "import sys; from ckptrun.run.status import *; from ckptrun.records import Status\n"
        f"write_status(sys.argv[1], StatusRecord('demo', Status.{status}))"
    )
    subprocess.run([sys.executable, "-c", code, folder.status], check=True)
    start = time.monotonic()
    read = read_status(folder, watch_s=60)
    assert time.monotonic() - start < 10
    assert read.status is Status.LOST
    assert read.lost_since == read.written_at == pytest.approx(time.time(), abs=60)
    assert read.heartbeat_age_s >= 0
    assert json.loads(Path(folder.status).read_text())["status"] == status  # LOST is never written


def test_a_number_that_is_used_again_is_lost(folder: RunFolder) -> None:
    write_status(folder.status, RUNNING)
    put(folder, dataclasses.replace(read_status(folder), pid_start=1))
    assert read_status(folder).status is Status.LOST


@pytest.mark.parametrize("status", [Status.FINISHED, Status.INTERRUPTED])
def test_what_has_ended_is_not_lost(folder: RunFolder, status: Status) -> None:
    put(folder, dataclasses.replace(RUNNING, status=status, stop_reason="done", exit_code=0, pid=1 << 22))
    assert read_status(folder).status is status


def test_elsewhere_and_standing_still_is_lost_whatever_the_clocks_say(folder: RunFolder) -> None:
    put(folder, dataclasses.replace(RUNNING, host="other", counter=4, written_at=time.time() + 9999))
    read = read_status(folder, watch_s=0.2)
    assert read.status is Status.LOST
    assert read.heartbeat_age_s == 0


def test_elsewhere_and_moving_is_alive_whatever_the_clocks_say(folder: RunFolder) -> None:
    ended = threading.Event()

    def write() -> None:
        counter = 0
        while not ended.wait(0.02):
            counter += 1
            record = dataclasses.replace(RUNNING, host="other", counter=counter, written_at=3.0)
            temporary = f"{folder.status}.new"
            Path(temporary).write_text(json.dumps(record.to_dict()))
            os.replace(temporary, folder.status)

    put(folder, dataclasses.replace(RUNNING, host="other", counter=0))
    thread = threading.Thread(target=write)
    thread.start()
    start = time.monotonic()
    assert read_status(folder, watch_s=60).status is Status.RUNNING
    assert time.monotonic() - start < 20
    ended.set()
    thread.join()


def test_its_last_word_counts_when_it_ends_between_two_looks(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, dataclasses.replace(RUNNING, pid=1 << 22, pid_start=1, counter=1))
    write_status(folder.status, RUNNING)
    alive = dataclasses.replace(read_status(folder), pid_start=1)
    put(folder, alive)
    last = dataclasses.replace(alive, status=Status.FINISHED, stop_reason="done", counter=alive.counter + 1)
    monkeypatch.setattr(
        module.ProcessName,
        "alive",
        property(lambda self: put(folder, last)),  # None: not alive
    )
    assert read_status(folder).status is Status.FINISHED


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "x", "status": "WALKING"}'])
def test_a_damaged_one_is_said(folder: RunFolder, text: str) -> None:
    Path(folder.status).write_text(text)
    with pytest.raises(UsageError, match="is damaged"):
        read_status(folder)


def test_a_newer_version_s_keys_are_passed_over(folder: RunFolder) -> None:
    value = {**dataclasses.replace(RUNNING, status=Status.FINISHED).to_dict(), "new": 1}
    Path(folder.status).write_text(json.dumps(value))
    assert read_status(folder).step == 12


# -- a listing -----------------------------------------------------------------------------------------------


def test_runs_are_listed_by_name_and_folders_that_are_none_are_not(tmp_path: Path) -> None:
    assert list_runs(str(tmp_path / "runs")) == []
    put(make(tmp_path, "b"), dataclasses.replace(RUNNING, status=Status.FINISHED))
    make(tmp_path, "a")
    (tmp_path / "runs/.hidden").mkdir()
    (tmp_path / "runs/something").mkdir()
    (tmp_path / "runs/file").write_text("")
    runs = list_runs(str(tmp_path / "runs"))
    assert [(run.name, run.status and run.status.status) for run in runs] == [("a", None), ("b", "FINISHED")]
    assert runs[0].path == str(tmp_path / "runs/a")


def test_many_lost_runs_cost_as_much_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    sleep = module.time.sleep

    def counted(seconds: float) -> None:
        waited.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(module.time, "sleep", counted)
    for number in range(8):
        put(make(tmp_path, f"r{number}"), dataclasses.replace(RUNNING, host="other"))
    runs = list_runs(str(tmp_path / "runs"), watch_s=0.2)
    assert 0 < sum(waited) < 0.2 * 2
    assert {run.status.status for run in runs} == {Status.LOST}


def test_a_root_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match="cannot list"):
        list_runs(str(tmp_path / "runs"))

    def broken(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(module.os, "scandir", broken)
    with pytest.raises(UsageError, match="Permission denied"):
        list_runs(str(tmp_path))
