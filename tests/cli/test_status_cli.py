"""``status`` and ``runs`` on runs in each state."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptrun.cli.status import KEYS, describe, job_document, job_text, position, state, summary
from ckptrun.environment.slurm_queue import QueueJob
from ckptrun.records import AttemptRecord, Status
from ckptrun.run.attempts import append_requeue, append_start
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import RankRecord, StatusRecord, write_status
from ckptrun.run.submitted import SubmittedJob, note_submitted

RECORD = StatusRecord(
    run="demo",
    status=Status.RUNNING,
    fn="fit",
    stage="train",
    step=120,
    epoch=1,
    max_steps=1000,
    metrics={"train_loss": 1.25, "acc": None},
    checkpoint="/r/demo/checkpoints/00000002-step-00000100",
    attempt=2,
    ranks=(RankRecord(0, 4711, "node1"),),
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.at(str(tmp_path / "runs"), "demo")
    folder.create()
    Path(folder.run_json).write_text(json.dumps({"id": "r"}))
    return folder


def test_the_document_is_the_one_that_programs_rely_on(run: RunFolder, run_cli: Callable[..., Any]) -> None:
    write_status(run.status, RECORD)  # signed by this process, which lives
    done = run_cli("status", "demo", "--json")
    assert done.code == 0, done
    assert tuple(done.document) == KEYS == (
        "run", "status", "stop_reason", "fn", "stage", "step", "epoch", "max_steps", "metrics", "checkpoint",
        "attempt", "ranks", "heartbeat_age_s", "exit_code", "job", "deepspeed",
    )  # fmt: skip
    assert done.document == {
        "run": "demo", "status": "RUNNING", "stop_reason": None, "fn": "fit", "stage": "train", "step": 120,
        "epoch": 1, "max_steps": 1000, "metrics": {"train_loss": 1.25, "acc": None},
        "checkpoint": RECORD.checkpoint, "attempt": 2, "ranks": [{"rank": 0, "pid": 4711, "host": "node1"}],
        "heartbeat_age_s": done.document["heartbeat_age_s"], "exit_code": None,
        "job": None, "deepspeed": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "args", [("demo",), ("--run", "demo"), ("--root", "runs", "demo"), ("demo", "--root", "runs")]
)
def test_a_run_is_named_in_any_way_and_order(
    run: RunFolder, run_cli: Callable[..., Any], args: tuple[str, ...]
) -> None:
    write_status(run.status, replace(RECORD, status=Status.FINISHED, stop_reason="done", exit_code=0))
    done = run_cli("status", *args)
    assert done.code == 0, done
    assert "FINISHED (done)" in done.stdout
    assert "120/1000" in done.stdout


def test_a_run_with_nobody_behind_it_is_lost(run: RunFolder, run_cli: Callable[..., Any]) -> None:
    child = os.fork()
    if child == 0:
        write_status(run.status, RECORD)
        os._exit(0)
    os.waitpid(child, 0)
    done = run_cli("status", "demo")
    assert done.code == 0, done
    assert "LOST since 20" in done.stdout
    assert run_cli("status", "demo", "--json").document["status"] == "LOST"


def test_a_run_that_never_wrote_a_status(run: RunFolder, run_cli: Callable[..., Any]) -> None:
    done = run_cli("status", "demo", "--json")
    assert (done.code, done.document["status"], done.document["run"]) == (0, None, "demo")


def test_an_unknown_run(run: RunFolder, run_cli: Callable[..., Any]) -> None:
    done = run_cli("status", "dmo")
    assert done.code == 2, done
    assert "Did you mean demo?" in done.stderr
    assert done.stdout == ""


def test_watch_ends_with_the_run(run: RunFolder, start_cli: Callable[..., Any]) -> None:
    write_status(run.status, RECORD)
    live = start_cli("status", "demo", "--watch")
    live.wait_for_output("demo: RUNNING train, step 120/1000")
    write_status(
        run.status, replace(RECORD, status=Status.INTERRUPTED, stop_reason="keyboard", exit_code=130)
    )
    done = live.wait()
    assert done.code == 0, done
    assert "INTERRUPTED (keyboard)" in done.stdout
    assert "\x1b" not in done.stdout


def test_ctrl_c_ends_watch_quietly(run: RunFolder, start_cli: Callable[..., Any]) -> None:
    write_status(run.status, RECORD)
    live = start_cli("status", "demo", "--watch")
    live.wait_for_output("RUNNING")
    live.signal(signal.SIGINT)
    done = live.wait()
    assert (done.code, done.stderr) == (130, ""), done


# -- before the run has begun, and between two of its jobs ------------------------------------------


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``queue(job, "JobState=…")``: what ``scontrol show job`` says about a job from now on."""
    folder = tmp_path / "queue"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\nexec cat "{folder}/$4" 2>&-\n')
    (folder / "squeue").write_text(f'#!/bin/sh\nexec cat "{folder}/all"\n')
    for name in ("scontrol", "squeue"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def says(job: str, text: str) -> None:
        (folder / f".{job}").write_text(f"JobId={job.partition('_')[0]} {text}\n")
        (folder / f".{job}").rename(folder / job)

    return says


def submitted(tmp_path: Path, job: str, run: str = "pend") -> None:
    note_submitted(str(tmp_path / "runs"), SubmittedJob(run, job, log="/there/x.out"))


def test_a_run_whose_job_waits_for_its_first_start(
    tmp_path: Path, queue: Callable[..., None], run_cli: Callable[..., Any]
) -> None:
    submitted(tmp_path, "26")
    queue("26", "JobState=PENDING Reason=BeginTime")
    done = run_cli("status", "pend")
    assert (done.code, done.stdout) == (0, "pend: job 26 waits for its first start, BeginTime\n"), done
    document = run_cli("status", "pend", "--json").document
    assert (document["status"], document["job"]["id"], document["job"]["state"]) == (None, "26", "PENDING")
    assert tuple(document) == KEYS
    assert run_cli("runs", "--json").document["runs"] == []
    assert run_cli("status", "other").code == 2


@pytest.mark.parametrize(
    ("state", "fate"), [("CANCELLED", "it is cancelled"), (None, "the queue does not know it")]
)
def test_a_run_whose_job_has_ended_before_it_began(
    tmp_path: Path, queue: Callable[..., None], run_cli: Callable[..., Any], state: str | None, fate: str
) -> None:
    submitted(tmp_path, "26")
    if state is not None:
        queue("26", f"JobState={state}")
    done = run_cli("status", "pend", "--watch")
    assert done.code == 2, done
    assert f"job 26 was handed in for it, and {fate}" in done.stderr
    assert "/there/x.out" in done.stderr


def test_watch_waits_for_the_first_start(
    tmp_path: Path, queue: Callable[..., None], start_cli: Callable[..., Any]
) -> None:
    submitted(tmp_path, "26")
    queue("26", "JobState=PENDING")
    live = start_cli("status", "pend", "--watch")
    live.wait_for_output("pend: job 26 waits for its first start\n")
    folder = RunFolder.at(str(tmp_path / "runs"), "pend")
    folder.create()
    Path(folder.run_json).write_text(json.dumps({"id": "r"}))
    write_status(folder.status, replace(RECORD, run="pend"))
    live.wait_for_output("pend: RUNNING train")
    write_status(folder.status, replace(RECORD, run="pend", status=Status.FINISHED, stop_reason="done"))
    done = live.wait()
    assert done.code == 0, done
    assert "FINISHED (done)" in done.stdout


def attempt_of(job: str, run: RunFolder) -> None:
    append_start(run.attempts, AttemptRecord(attempt=1, fn="fit", started_at=0.0, job=job), versions={})


def test_a_job_that_waits_to_go_on_with_a_run(
    run: RunFolder, tmp_path: Path, queue: Callable[..., None], run_cli: Callable[..., Any]
) -> None:
    write_status(run.status, replace(RECORD, status=Status.FINISHED, stop_reason="done"))
    attempt_of("26", run)
    submitted(tmp_path, "30", "demo")
    queue("30", "JobState=PENDING")
    assert "30 waits to start" in run_cli("status", "demo").stdout
    queue("30", "JobState=CANCELLED")
    assert "cancelled" not in run_cli("status", "demo").stdout


def test_the_task_of_an_array_has_the_name_that_squeue_shows(
    run: RunFolder, tmp_path: Path, queue: Callable[..., None], run_cli: Callable[..., Any]
) -> None:
    write_status(run.status, replace(RECORD, status=Status.INTERRUPTED))
    attempt_of("57_2", run)
    queue("57_2", "ArrayJobId=57 ArrayTaskId=2 JobState=CANCELLED")
    assert "57_2 is cancelled" in run_cli("status", "demo").stdout
    assert run_cli("status", "demo", "--json").document["job"]["id"] == "57_2"
    submitted(tmp_path, "60", "pend-a*")
    queue("60_3", "JobState=PENDING")
    assert run_cli("status", "pend-a3").stdout == "pend-a3: job 60_3 waits for its first start\n"
    assert run_cli("status", "pend-ax").code == 2


def test_the_job_that_a_script_has_handed_in_anew(
    run: RunFolder, tmp_path: Path, queue: Callable[..., None], run_cli: Callable[..., Any]
) -> None:
    write_status(run.status, replace(RECORD, status=Status.INTERRUPTED, stop_reason="walltime"))
    attempt_of("28", run)
    append_requeue(run.attempts, 1, job="28", by="exit-code", why="walltime", problem="refused")
    queue("28", "JobState=FAILED")
    queue("35", "JobState=PENDING Reason=Resources")
    queue_now = tmp_path / "queue" / "all"
    queue_now.write_text("34|/spool/slurm_script 7,28\n35|/spool/slurm_script 28,5\n36|(null)\n")
    assert "35 waits to start, Resources" in run_cli("status", "demo").stdout
    queue_now.write_text("36|/spool/slurm_script\n")
    assert "28 is failed" in run_cli("status", "demo").stdout


def test_runs_lists_all_under_a_root(run: RunFolder, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    write_status(run.status, replace(RECORD, status=Status.FINISHED, stop_reason="done", step=1000))
    other = RunFolder.at(str(tmp_path / "runs"), "another")
    other.create()
    Path(other.run_json).write_text(json.dumps({"id": "s"}))
    (tmp_path / "runs" / "not-a-run").mkdir()
    done = run_cli("runs")
    assert done.code == 0, done
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "another", "demo"]
    assert "1000/1000" in lines[2]
    document = run_cli("runs", "--json").document
    assert document["root"] == str(tmp_path / "runs")
    assert [entry["run"] for entry in document["runs"]] == ["another", "demo"]
    assert [entry["status"] for entry in document["runs"]] == [None, "FINISHED"]


def test_runs_of_a_root_that_is_not_there(run_cli: Callable[..., Any]) -> None:
    done = run_cli("runs", "--root", "nowhere")
    assert (done.code, done.stdout) == (0, "there are no runs under nowhere\n"), done
    assert run_cli("runs", "--root", "nowhere", "--json").document["runs"] == []


def test_lines_for_people() -> None:
    assert state(RECORD) == "RUNNING"
    assert position(replace(RECORD, max_steps=None)) == "120"
    assert summary(RECORD) == "demo: RUNNING train, step 120/1000, epoch 1, train_loss=1.25 acc=nan"
    text = "\n".join(describe(RECORD))
    assert "0: pid 4711 on node1" in text
    assert "2 (fit)" in text


@pytest.mark.parametrize(
    ("job", "text", "document"),
    [
        (
            QueueJob("12", "RUNNING", end=4600.0, nodes="n[1-2]"),
            "12 runs on n1, n2, 1 h left",
            {"state": "RUNNING", "nodes": ["n1", "n2"], "left_s": 3600.0, "starts_at": None},
        ),
        (
            QueueJob("12", "PENDING", "BeginTime", 2, start=None, nodes="n1"),
            "12 waits to start again (2 so far), BeginTime",
            {"state": "PENDING", "reason": "BeginTime", "restarts": 2, "nodes": [], "left_s": None},
        ),
        (QueueJob("12", "PENDING", "Priority"), "12 waits to start, Priority", {"restarts": 0}),
        (QueueJob("12", "COMPLETING", end=900.0), "12 is completing", {"left_s": None, "reason": None}),
    ],
)
def test_the_job_in_the_queue(job: QueueJob, text: str, document: dict[str, Any]) -> None:
    assert job_text(job, 1000.0) == text
    assert {**job_document(job, 1000.0), **document} == job_document(job, 1000.0)
    (line,) = (line for line in describe(RECORD, (), job) if line.startswith("job "))
    assert text.partition(",")[0] in line
