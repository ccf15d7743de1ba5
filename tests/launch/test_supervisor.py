"""What the supervisor writes while the ranks work, and how it ends what does not end by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptrun.launch import supervisor as module
from ckptrun.launch.supervisor import Supervision, Supervisor
from ckptrun.records import AttemptRecord, Outcome, Progress, SavedCheckpoint, Stage, StopReason
from ckptrun.run.attempts import append_start, read_attempts
from ckptrun.run.control import ask, wait_answer
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import Holder, Lease, read_lease
from ckptrun.stop import StopListener


class Display:
    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self) -> None: ...

    def stop(self, final_line: str | None = None) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


class Parts:
    """A supervisor and all that it works with."""

    def __init__(self, root: Path, **supervision: Any) -> None:
        self.run = RunFolder.at(str(root), "demo")
        self.run.create()
        holder = Holder.this_process(job=None, command="test")
        self.lease = Lease.acquire(self.run.lease, holder, noted=lambda: (0, 0))
        self.attempt = AttemptRecord(attempt=1, fn="fit", started_at=5.0, **supervision.pop("attempt", {}))
        append_start(self.run.attempts, self.attempt, versions={})
        self.listener, self.progress, self.display = StopListener(), Progress(), Display()
        self.supervisor = Supervisor(
            Supervision(self.run, self.lease, self.attempt, **supervision),
            listener=self.listener,
            progress=self.progress,
            display=self.display,
            metrics=lambda: {"loss": 1.5},
        )

    @property
    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(Path(self.run.status).read_text())
        return document

    @property
    def end(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(Path(self.run.attempts).read_text().splitlines()[-1])
        return document


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    made = Parts(tmp_path)
    yield made
    made.supervisor.finish(Outcome(StopReason.DONE), 0)


def saved(step: int, sequence: int) -> SavedCheckpoint:
    return SavedCheckpoint(
        f"c{sequence}", f"/runs/demo/checkpoints/c{sequence}", sequence, step, 0, "periodic", 2.0, 9, 0.5
    )


def test_the_status_follows_the_rank(parts: Parts, wait_until: Callable[..., Any]) -> None:
    supervisor, progress = parts.supervisor, parts.progress
    supervisor.start()
    assert (parts.status["status"], parts.status["stage"]) == ("INITIALIZING", "set-up")
    progress.stage = Stage.RESTORE
    supervisor.stage_changed()
    wait_until(lambda: parts.status["stage"] == "restore")
    assert parts.status["status"] == "INITIALIZING"
    progress.stage, progress.step, progress.epoch, progress.max_steps = Stage.TRAINING, 7, 1, 100
    supervisor.stage_changed()
    wait_until(lambda: parts.status["status"] == "RUNNING")
    supervisor.saved(saved(7, 3))
    wait_until(lambda: parts.status["checkpoint"] is not None)
    status = parts.status
    assert (status["step"], status["epoch"], status["max_steps"]) == (7, 1, 100)
    assert status["metrics"] == {"loss": 1.5}
    assert status["checkpoint"] == "/runs/demo/checkpoints/c3"
    assert [(rank["rank"], rank["pid"]) for rank in status["ranks"]] == [(0, os.getpid())]
    supervisor.finish(Outcome(StopReason.KEYBOARD, 7), 130)
    assert (parts.status["status"], parts.status["stop_reason"], parts.status["exit_code"]) == (
        "INTERRUPTED", "keyboard", 130,
    )  # fmt: skip


def test_the_lease_is_beaten(parts: Parts, wait_until: Callable[..., Any]) -> None:
    parts.supervisor.start()
    wait_until(lambda: getattr(read_lease(parts.run.lease), "counter", 0) > 2)


def test_the_ledgers_end_line(parts: Parts) -> None:
    supervisor = parts.supervisor
    supervisor.restore_s = lambda: 0.25
    supervisor.start()
    supervisor.saved(saved(7, 3))
    supervisor.saved(saved(9, 4))
    supervisor.finish(Outcome(StopReason.DONE, 9), 0)
    end = parts.end
    assert (end["event"], end["status"], end["stop_reason"], end["exit_code"]) == (
        "end",
        "FINISHED",
        "done",
        0,
    )
    assert (end["step"], end["sequence"], end["save_s"], end["restore_s"]) == (9, 4, 1.0, 0.25)
    supervisor.finish(Outcome(StopReason.EXCEPTION), 1)
    assert len(Path(parts.run.attempts).read_text().splitlines()) == 2, "an end is written once"


@pytest.mark.parametrize(
    ("start", "earlier", "end", "gained", "replayed"),
    [(0, 0, 10, 10, 0), (10, 10, 25, 15, 0), (10, 18, 25, 7, 8), (10, 18, 15, 0, 5), (10, 18, 10, 0, 0)],
)
def test_steps_gained_and_replayed(
    tmp_path: Path, start: int, earlier: int, end: int, gained: int, replayed: int
) -> None:
    parts = Parts(tmp_path, attempt={"start_step": start}, earlier_best_step=earlier)
    parts.supervisor.start()
    parts.supervisor.finish(Outcome(StopReason.DONE, end), 0)
    assert (parts.end["steps_gained"], parts.end["steps_replayed"]) == (gained, replayed)


def test_a_request_to_save_is_passed_on_and_answered(parts: Parts, wait_until: Callable[..., Any]) -> None:
    parts.supervisor.start()
    first, second = ask(parts.run, "save"), ask(parts.run, "save")
    wait_until(lambda: parts.listener.save_requested == 2)
    parts.supervisor.saved(saved(7, 3))
    parts.supervisor.save_served("/runs/demo/checkpoints/c3", None, 2)
    for request in (first, second):
        answer = wait_answer(parts.run, request, lambda: True, 10)
        assert (answer.state, answer.checkpoint) == ("done", "/runs/demo/checkpoints/c3")
    third = ask(parts.run, "save")
    wait_until(lambda: parts.listener.save_requested == 3)
    # Asked for while the first two were served: what they got is older than that.
    parts.supervisor.save_served("/runs/demo/checkpoints/c3", None, 2)
    assert wait_answer(parts.run, third, lambda: False, 0.1).state != "done"
    parts.supervisor.save_served(None, "the disk is full", 3)
    answer = wait_answer(parts.run, third, lambda: True, 10)
    assert (answer.state, answer.message) == ("failed", "the disk is full")
    assert parts.listener.request is None


def test_a_request_to_stop_is_answered_at_the_end(parts: Parts, wait_until: Callable[..., Any]) -> None:
    parts.supervisor.start()
    stop, save = ask(parts.run, "stop"), ask(parts.run, "save")
    wait_until(lambda: parts.listener.request is not None and parts.listener.save_requested)
    assert parts.listener.request is not None
    assert parts.listener.request.reason is StopReason.REQUESTED
    parts.supervisor.saved(saved(7, 3))
    parts.supervisor.finish(Outcome(StopReason.REQUESTED, 7), 143)
    assert wait_answer(parts.run, stop, lambda: True, 10).checkpoint == "/runs/demo/checkpoints/c3"
    assert wait_answer(parts.run, save, lambda: True, 10).state == "ended"


def test_a_lease_that_was_taken_over_stops_the_work(parts: Parts, wait_until: Callable[..., Any]) -> None:
    parts.supervisor.start()
    before = Path(parts.run.status).read_text()
    parts.lease.release()
    Lease.acquire(parts.run.lease, Holder("elsewhere", 1, 1, "x", command="other"), noted=lambda: (0, 0))
    wait_until(lambda: parts.listener.request is not None)
    assert parts.listener.request is not None
    assert parts.listener.request.reason is StopReason.RANK_LOST
    assert parts.supervisor.lease_lost
    assert "taken this run over" in parts.display.said[0]
    parts.supervisor.finish(Outcome(StopReason.RANK_LOST), 70)
    (attempt,) = read_attempts(parts.run.attempts)
    assert attempt.exit_code is None, "the files are the other's now"
    assert json.loads(before)["status"] == parts.status["status"]


def test_what_is_said_is_in_the_attempts_log(parts: Parts) -> None:
    parts.supervisor.start()
    parts.supervisor.say("something")
    assert parts.display.said == ["something"]
    log = Path(parts.run.logs_dir) / "attempt-0001-rank-0000.log"
    assert log.read_text().endswith("something\n")


def test_a_folder_that_is_gone_ends_nothing(parts: Parts, wait_until: Callable[..., Any]) -> None:
    parts.supervisor.start()
    moved = parts.run.path + "-away"
    os.rename(parts.run.path, moved)
    try:
        parts.supervisor.stage_changed()
        parts.supervisor.finish(Outcome(StopReason.DONE), 0)
    finally:
        os.rename(moved, parts.run.path)
    assert any("could not be written" in text for text in parts.display.said)


# -- forced ends, in a process of their own ------------------------------------------------------------------

HANGS = """
    import os, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from ckptrun.callbacks import ModelCheckpoint
    from fit_helpers import Tiny, loader, make_trainer
    class Hangs(Tiny):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                while saves and not list(Path({root!r}).glob("demo/checkpoints/*/manifest.json")):
                    time.sleep(0.01)
                print("hanging", flush=True)
                while True:
                    time.sleep(0.01)
            return super().training_step(batch, batch_idx)
    saves = {saves}
    callbacks = [ModelCheckpoint(every_n_train_steps=3)] if saves else []
    trainer = make_trainer(Path({root!r}), grace_s={grace_s}, callbacks=callbacks)
    trainer.fit(Hangs(), loader())
"""


def hanging(root: Path, grace_s: float, *, saves: bool = False) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent.parent / "fit")
    code = textwrap.dedent(HANGS).format(tests=tests, root=str(root), grace_s=grace_s, saves=saves)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "hanging\n"
    return process


def test_a_second_ctrl_c_ends_at_once_without_saving(tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    process = hanging(tmp_path, 60)
    process.send_signal(signal.SIGINT)
    # Presses closer than half a second are one, so it is pressed until it counts.
    wait_until(lambda: _pressed(process, signal.SIGINT))
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "forced by a second Ctrl-C" in stderr
    run = RunFolder.at(str(tmp_path), "demo")
    (attempt,) = read_attempts(run.attempts)
    assert (attempt.stop_reason, attempt.exit_code, attempt.end_step) == ("keyboard", 130, 3)
    assert json.loads(Path(run.status).read_text())["status"] == "INTERRUPTED"
    assert os.listdir(run.checkpoints_dir) == []


def _pressed(process: subprocess.Popen[str], signum: int) -> bool:
    try:
        process.wait(0.55)
    except subprocess.TimeoutExpired:
        process.send_signal(signum)
        return False
    return True


def test_the_grace_period_ends_what_hangs_and_says_where_it_hung(tmp_path: Path) -> None:
    process = hanging(tmp_path, 0.3, saves=True)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert "within the grace period of 0.3 s" in stderr
    run = RunFolder.at(str(tmp_path), "demo")
    log = (Path(run.logs_dir) / "attempt-0001-rank-0000.log").read_text()
    assert "training_step" in log
    (attempt,) = read_attempts(run.attempts)
    assert (attempt.stop_reason, attempt.exit_code) == ("sigterm", 143)
    # It was written in the background of the step that hung, so that nobody had told of it.
    (saved,) = os.listdir(run.checkpoints_dir)
    assert os.path.basename(json.loads(Path(run.status).read_text())["checkpoint"]) == saved
