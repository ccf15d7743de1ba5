"""Two ranks through the command line, and what comes to them from outside."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_work
from live_cli import Live
from rank_work import alive, assert_same, checkpoints, picture

from ckptrun.run.folder import RunFolder
from ckptrun.run.status import read_status
from ckptrun.stop import SAME_PRESS_S

CONFIG = """\
run: {name: demo}
trainer: {max_steps: 200, max_epochs: -1, num_threads: 1, log_every_n_steps: 1}
launch: {nproc: 2}
model: {class_path: rank_work.Model}
data: {class_path: rank_work.Data}
callbacks:
  - {class_path: ckptrun.callbacks.ModelCheckpoint, init_args: {monitor: val_loss}}
  - {class_path: ckptrun.callbacks.EarlyStopping, init_args: {monitor: val_loss, patience: 1000}}
"""
SLOWLY = "callbacks.2={class_path: rank_work.Slowly, init_args: {seconds: 0.02}}"
NEVER_ENDING = ("trainer.max_steps=1000000", SLOWLY)


@pytest.fixture
def project(in_tmp_path: Path) -> Path:
    shutil.copy(rank_work.__file__, in_tmp_path / "rank_work.py")
    (in_tmp_path / "ckptrun.yaml").write_text(CONFIG)
    return in_tmp_path


def folder(project: Path, run: str = "demo") -> RunFolder:
    return RunFolder(str(project / "runs" / run))


def happens(hook: str, nth: int, what: str, rank: int | None = None) -> str:
    where = "null" if rank is None else rank
    return (
        "callbacks.2={class_path: rank_work.HappensHere, init_args: "
        f"{{hook: {hook}, nth: {nth}, what: {what}, rank: {where}}}}}"
    )


def step_from_now(live: Live) -> None:
    """Until training has moved on by a few steps."""
    live.wait_for(lambda: live.status("demo").get("status") == "RUNNING", what="training")
    before = live.status("demo")["step"]
    live.wait_for_step(before + 3, "demo")


def test_stopped_from_outside_in_every_way_and_resumed(project: Path, start_cli: Callable[..., Live]) -> None:
    def to_rank_1(live: Live) -> None:
        (pid,) = [each["pid"] for each in live.status("demo")["ranks"] if each["rank"] == 1]
        os.kill(pid, signal.SIGTERM)

    ways: list[tuple[Callable[[Live], None], int]] = [
        (lambda live: live.signal(signal.SIGINT), 130),
        (lambda live: live.signal(signal.SIGTERM, group=True), 143),
        (to_rank_1, 143),
    ]
    for way, code in ways:
        live = start_cli("fit", "--ckpt", "last", SLOWLY)
        step_from_now(live)
        way(live)
        done = live.wait()
        assert done.code == code, done
        assert "Traceback" not in done.stderr
        newest = checkpoints(folder(project))[0]
        assert newest.exact
        assert newest.step == live.status("demo")["step"]
        assert live.survivors() == []
    assert start_cli("fit", "--ckpt", "last").wait().code == 0
    assert start_cli("fit", "--run", "plain").wait().code == 0
    stopped, plain = picture(folder(project)), picture(folder(project, "plain"))
    assert_same(plain, stopped)


def test_twice_is_at_once(project: Path, start_cli: Callable[..., Live]) -> None:
    import time

    live = start_cli("fit", happens("on_train_batch_end", 3, "hang", 1))
    live.wait_for_step(3, "demo")  # before that, the first press ends it as it should
    live.signal(signal.SIGINT)
    time.sleep(SAME_PRESS_S + 0.1)  # closer together they are one press
    live.signal(signal.SIGINT)
    assert live.wait().code == 130
    assert live.survivors() == []


def test_the_grace_period_ends_with_stacks_in_every_log(
    project: Path, start_cli: Callable[..., Live]
) -> None:
    live = start_cli("fit", "--grace-s", "1", happens("on_train_batch_end", 3, "hang", 1))
    live.wait_for(lambda: live.status("demo").get("step", 0) >= 2, what="step 2")
    live.signal(signal.SIGTERM)
    done = live.wait()
    assert done.code == 143, done
    logs = [path.read_text() for path in sorted(Path(folder(project).logs_dir).glob("attempt-*.log"))]
    assert len(logs) == 2
    assert "in act" in logs[1]
    assert all("most recent call first" in log for log in logs)
    assert "Traceback" not in done.stderr


def test_nothing_outlives_a_supervisor_that_is_killed(
    project: Path, start_cli: Callable[..., Live], wait_until: Callable[..., Any]
) -> None:
    live = start_cli(
        "fit", "data.init_args.num_workers=1", *NEVER_ENDING, happens("on_train_batch_end", 2, "leave grandchildren")
        .replace("callbacks.2", "callbacks.3"),
    )  # fmt: skip
    live.wait_for_step(4, "demo")
    assert len(alive(folder(project))) >= 4
    live.signal(signal.SIGKILL)
    wait_until(lambda: not live.survivors() and not alive(folder(project)), 2.0, what="all to end within 2 s")
    assert read_status(folder(project)).status == "LOST"  # type: ignore[union-attr]


def test_an_error_is_told_once_and_prints_come_through(project: Path, start_cli: Callable[..., Live]) -> None:
    live = start_cli(
        "fit",
        happens("on_train_start", 1, "print"),
        happens("on_train_batch_end", 3, "raise", 1).replace("callbacks.2", "callbacks.3"),
    )
    done = live.wait()
    assert done.code == 1, done
    assert done.stderr.count("the user's own error in rank 1") == 1
    assert "Rank 1 on " in done.stderr
    assert done.stdout == "out of rank 0\n"
    assert "err of rank 0\n" in done.stderr
    assert "rank 1" not in done.stdout


def test_a_module_that_cannot_be_imported(project: Path, start_cli: Callable[..., Live]) -> None:
    (project / "broken.py").write_text("raise RuntimeError('while importing')\n")
    done = start_cli("fit", "model.class_path=broken.Model").wait()
    assert done.code == 1, done
    assert done.stderr.count("RuntimeError: while importing") == 1
    wrong = start_cli("fit", "--run", "other", "model.class_path=rank_work.Modell").wait()
    assert wrong.code == 2, wrong
    assert "Model" in wrong.stderr
    # As where one rank runs in the command's own process: nothing was started, so there is no run and no attempt.
    assert not folder(project).exists() and not folder(project, "other").exists()


def files(project: Path) -> dict[str, bytes]:
    passing = ("lease.json", "registry.json", "ranks.json")
    return {
        str(path): path.read_bytes()
        for path in (project / "runs").rglob("*")
        if path.is_file() and path.name not in passing
    }


def test_a_refusal_in_the_ranks_starts_nothing(project: Path, start_cli: Callable[..., Live]) -> None:
    live = start_cli("fit", "trainer.max_steps=8")
    assert live.wait().code == 0
    was = files(project)
    for other, reasons in (
        ("--nproc=1", ("written by 2 ranks and there is 1 now", "A step took")),
        ("trainer.num_threads=2", ("with 1 thread per rank and there are 2 now",)),
    ):
        done = start_cli("fit", "--ckpt", "last", "trainer.max_steps=12", other, "--exact").wait()
        assert done.code == 5, done
        assert all(text in done.stderr for text in reasons), done
        assert "failed at step" not in done.stderr
        assert files(project) == was
