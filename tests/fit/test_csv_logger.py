"""A table of metrics that is right after a resume, a kill and a full disk."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.loggers.csv import CSVLogger


def trainer(
    folder: Path, *, fn: str = "fit", run_id: str = "one", attempt: int = 1, log_dir: str = ""
) -> Any:
    run = SimpleNamespace(logs_dir=str(folder))
    return SimpleNamespace(
        log_dir=log_dir or str(folder),
        state=SimpleNamespace(fn=fn),
        context=SimpleNamespace(run=run, run_id=run_id, attempt=attempt),
    )


def started(folder: Path, state: dict[str, Any] | None = None, **options: Any) -> CSVLogger:
    """A logger as a process that goes on from ``state`` has it."""
    flush = options.pop("flush_logs_every_n_steps", 100)
    logger = CSVLogger(flush_logs_every_n_steps=flush)
    logger.setup(trainer(folder, **options))
    if state is not None:
        logger.load_state_dict(state)
    return logger


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def steps(path: Path) -> list[int]:
    return [int(row["step"]) for row in rows(path)]


def test_one_row_a_call_and_columns_that_grow(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"loss": 2.5, "epoch": 0}, 1)
    logger.save()
    logger.log_metrics({"loss": 1.5}, 2)
    logger.log_metrics({"val/loss, mean": 3.0}, step=2)
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == (
        'step,loss,epoch,"val/loss, mean"\n1,2.5,0,\n2,1.5,,\n2,,,3.0\n'
    )


def test_nothing_is_written_before_there_is_something(tmp_path: Path) -> None:
    logger = started(tmp_path / "logs")
    logger.state_dict()
    logger.finalize("failed")
    assert list(tmp_path.iterdir()) == []


def test_rows_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ckptrun.fit.loggers.csv.time", SimpleNamespace(monotonic=lambda: now[0]))
    logger, path = started(tmp_path, flush_logs_every_n_steps=3), tmp_path / "metrics.csv"
    logger.log_metrics({"loss": 0.0}, 0)
    assert steps(path) == [0]  # the first one is seen at once
    for step in range(1, 6):
        logger.log_metrics({"loss": 1.0}, step)
    assert steps(path) == [0, 1, 2, 3]
    now[0] = 60.0  # a slow training is seen too
    logger.log_metrics({"loss": 1.0}, 6)
    assert steps(path) == [0, 1, 2, 3, 4, 5, 6]
    logger.log_metrics({"loss": 1.0}, 7)
    logger.save()
    assert steps(path)[-1] == 7
    logger.finalize("success")


def test_values_of_every_kind(tmp_path: Path) -> None:
    logger = started(tmp_path)
    metrics: dict[str, Any] = {
        "tensor": torch.tensor(0.5), "whole": 3, "nan": float("nan"), "text": "two\nlines, one cell",
    }  # fmt: skip
    logger.log_metrics(metrics, 1)
    logger.finalize("success")
    assert rows(tmp_path / "metrics.csv") == [
        {"step": "1", "tensor": "0.5", "whole": "3", "nan": "nan", "text": "two lines, one cell"}
    ]


def test_a_dict_that_is_used_again_is_copied(tmp_path: Path) -> None:
    logger, metrics = started(tmp_path), {"loss": 1.0}
    for step in range(3):
        metrics["loss"] = float(step)
        logger.log_metrics(metrics, step)
    logger.finalize("success")
    assert [row["loss"] for row in rows(tmp_path / "metrics.csv")] == ["0.0", "1.0", "2.0"]


def test_a_resume_goes_on_after_the_rows_of_its_checkpoint(tmp_path: Path) -> None:
    logger = started(tmp_path)
    for step in range(1, 6):
        logger.log_metrics({"loss": 1.0}, step)
    state = logger.state_dict()
    logger.log_metrics({"loss": 1.0, "late": 2.0}, 6)  # the header gets longer after the checkpoint
    logger.log_metrics({"loss": 1.0}, 7)
    logger.save()

    again = started(tmp_path, state, attempt=2)
    assert steps(tmp_path / "metrics.csv") == [1, 2, 3, 4, 5]
    again.log_metrics({"loss": 3.0}, 6)
    again.finalize("success")
    assert steps(tmp_path / "metrics.csv") == [1, 2, 3, 4, 5, 6]
    assert rows(tmp_path / "metrics.attempt-2-cut.csv") == [
        {"step": "6", "loss": "1.0", "late": "2.0"},
        {"step": "7", "loss": "1.0"},
    ]
    logger.finalize("failed")


def test_the_table_is_that_of_a_training_that_never_stopped(tmp_path: Path) -> None:
    def log(logger: CSVLogger, first: int, last: int) -> CSVLogger:
        for step in range(first, last + 1):
            logger.log_metrics({"loss": 1 / step}, step)
            if step % 4 == 0:
                logger.log_metrics({"val": step / 7}, step)
        return logger

    log(started(tmp_path / "whole"), 1, 12).finalize("success")
    first = log(started(tmp_path / "cut"), 1, 3)
    state = first.state_dict()
    log(first, 4, 9)  # killed here
    second = log(started(tmp_path / "cut", state, attempt=2), 4, 10)
    state = second.state_dict()
    second.finalize("interrupted")
    log(started(tmp_path / "cut", state, attempt=3), 11, 12).finalize("success")
    whole, cut = ((tmp_path / name / "metrics.csv").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    first.finalize("failed")


def test_a_row_that_was_torn_by_a_kill_is_cut(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    state = logger.state_dict()
    logger.finalize("interrupted")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,0.")
    again = started(tmp_path, state)
    again.log_metrics({"loss": 9.0}, 2)
    again.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,1.0\n2,9.0\n"
    assert (tmp_path / "metrics.attempt-1-cut.csv").read_text() == "step,loss\n2,0.\n"


def test_rows_that_were_lost_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = started(tmp_path)
    for step in range(1, 5):
        logger.log_metrics({"loss": 1.0}, step)
    state = logger.state_dict()
    logger.finalize("interrupted")
    path = tmp_path / "metrics.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    again = started(tmp_path, state)
    assert "has 2 rows where the checkpoint knows of 4" in caplog.text
    again.log_metrics({"loss": 1.0}, 5)
    assert again.state_dict()["rows"] == 3
    assert steps(path) == [1, 2, 5]
    again.finalize("success")


def test_a_table_that_is_gone_is_noted_and_begun_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = started(tmp_path, {"run_id": "one", "rows": 7})
    assert "its 7 rows are lost" in caplog.text
    again.log_metrics({"loss": 1.0}, 8)
    again.finalize("success")
    assert steps(tmp_path / "metrics.csv") == [8]


@pytest.mark.parametrize("state", [None, {"run_id": "another", "rows": 2}])
def test_a_fresh_start_sets_the_old_table_aside(tmp_path: Path, state: dict[str, Any] | None) -> None:
    for attempt in (1, 2, 2):
        logger = started(tmp_path, state, attempt=attempt)
        for step in (1, 2, 3):
            logger.log_metrics({"loss": float(attempt)}, step)
        logger.finalize("success")
    assert steps(tmp_path / "metrics.csv") == [1, 2, 3]
    for name in ("metrics.attempt-2-cut.csv", "metrics.attempt-2-cut-2.csv"):
        assert steps(tmp_path / name) == [1, 2, 3]


@pytest.mark.parametrize("content", ["", "step,lo"])
def test_a_file_without_a_whole_line_is_begun_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "metrics.csv").write_text(content)
    logger = started(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,1.0\n"


def test_a_full_disk_is_said_once_and_the_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.save()
    real, budget = os.pwrite, [5]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if not budget[0]:
            raise OSError(28, "No space left on device")
        written = real(fd, bytes(data)[: budget[0]], offset)
        budget[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    for step in (2, 3):
        logger.log_metrics({"loss": 1.0}, step)
        logger.save()
    assert caplog.text.count("No space left on device") == 1
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,1.0\n"
    assert logger.state_dict()["rows"] == 3
    monkeypatch.undo()
    logger.finalize("success")
    assert steps(tmp_path / "metrics.csv") == [1, 2, 3]


def test_hyperparameters(tmp_path: Path) -> None:
    logger = started(tmp_path / "logs")
    logger.log_hyperparams({"lr": 0.1, "sizes": (1, 2), "path": Path("x"), "nested": {"a": None, 1: True}})
    assert yaml.safe_load((tmp_path / "logs" / "hparams.yaml").read_text()) == {
        "lr": 0.1, "sizes": [1, 2], "path": "x", "nested": {"a": None, "1": True},
    }  # fmt: skip


def test_hyperparameters_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A table beside the training is no reason to end it."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckptrun.fit.loggers.csv.write_atomic", full)
    started(tmp_path).log_hyperparams({"lr": 0.1})
    assert "hparams.yaml: [Errno 28] No space left on device" in caplog.text


def test_where_it_writes(tmp_path: Path) -> None:
    assert CSVLogger(tmp_path, "name", 3).path == f"{tmp_path}/name/version_3/metrics.csv"
    assert CSVLogger(tmp_path, version="v").log_dir == f"{tmp_path}/v"
    logger = CSVLogger(name="name")
    assert (logger.name, logger.version, logger.save_dir) == ("name", None, None)
    with pytest.raises(MisconfigurationException, match="does not know where to write"):
        _ = logger.log_dir
    logger.setup(trainer(tmp_path))
    assert logger.log_dir == f"{tmp_path}/name"


def test_an_evaluation_never_touches_the_table_of_the_training(tmp_path: Path) -> None:
    fit = started(tmp_path)
    fit.log_metrics({"loss": 1.0}, 1)
    fit.save()
    for logger in (CSVLogger(), CSVLogger(tmp_path)):
        logger.setup(trainer(tmp_path, fn="test"))
        assert logger.path == f"{tmp_path}/test/metrics.csv"
    logger = CSVLogger()
    logger.setup(trainer(tmp_path, fn="test", log_dir=str(tmp_path / "evals")))
    assert logger.path == f"{tmp_path}/evals/metrics.csv"
    logger.log_metrics({"acc": 1.0}, 1)
    logger.finalize("success")
    fit.log_metrics({"loss": 1.0}, 2)
    fit.finalize("success")
    assert steps(tmp_path / "metrics.csv") == [1, 2]


def test_prefix(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="mine")
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    assert rows(tmp_path / "metrics.csv") == [{"step": "1", "mine-loss": "1.0"}]
