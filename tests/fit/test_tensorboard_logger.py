"""Event files whose curves do not fold after a resume, read with TensorBoard itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.loggers.tensorboard import TensorBoardLogger

pytest.importorskip("tensorboard")


def started(folder: Path, state: dict[str, Any] | None = None, run_id: str = "one") -> TensorBoardLogger:
    logger = TensorBoardLogger()
    context = SimpleNamespace(run=SimpleNamespace(logs_dir=str(folder)), run_id=run_id, attempt=1)
    trainer: Any = SimpleNamespace(log_dir=str(folder), state=SimpleNamespace(fn="fit"), context=context)
    logger.setup(trainer)
    if state is not None:
        logger.load_state_dict(state)
    return logger


def curve(folder: Path, name: str = "loss") -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_metrics(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"loss": 1.5, "acc": 0.5}, 1)
    logger.log_metrics({"loss": 1.0}, step=2)
    logger.save()
    assert curve(tmp_path) == [(1, 1.5), (2, 1.0)]
    assert curve(tmp_path, "acc") == [(1, 0.5)]
    logger.finalize("success")
    logger.finalize("success")


def test_nothing_is_written_before_there_is_something(tmp_path: Path) -> None:
    logger = started(tmp_path)
    assert logger.state_dict() == {"run_id": "one", "last_step": -1}
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_curve_does_not_fold(tmp_path: Path) -> None:
    first = started(tmp_path)
    for step in range(1, 5):
        first.log_metrics({"loss": 1.0}, step)
    state = first.state_dict()
    for step in range(5, 9):
        first.log_metrics({"loss": 1.0}, step)
    first.finalize("interrupted")
    second = started(tmp_path, state)
    for step in range(5, 7):
        second.log_metrics({"loss": 2.0}, step)
    assert second.state_dict()["last_step"] == 6
    second.finalize("success")
    assert curve(tmp_path) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]


@pytest.mark.parametrize("state", [None, {"run_id": "another", "last_step": 2}])
def test_a_fresh_start_hides_what_stood_there(tmp_path: Path, state: dict[str, Any] | None) -> None:
    for value in (1.0, 2.0):
        logger = started(tmp_path, state)
        for step in (1, 2, 3) if value == 1.0 else (1, 2):
            logger.log_metrics({"loss": value}, step)
        logger.finalize("success")
    assert curve(tmp_path) == [(1, 2.0), (2, 2.0)]


def test_metrics_after_the_end_open_it_again_and_hide_nothing(tmp_path: Path) -> None:
    logger = started(tmp_path)
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0}, step)
        logger.finalize("success")
    assert curve(tmp_path) == [(1, 1.0), (2, 1.0)]


def test_hyperparameters_and_the_writer_itself(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "nested": {"path": Path("x"), "deep": True}})
    logger.experiment.add_text("note", "hello", 1)
    logger.finalize("success")
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    for word in (b"nested/path", b"hello"):
        assert word in written


def test_where_it_writes(tmp_path: Path) -> None:
    assert TensorBoardLogger(tmp_path, "name", 3).log_dir == f"{tmp_path}/name/version_3"
    assert started(tmp_path).log_dir == f"{tmp_path}/tensorboard"


def test_prefix(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "tensorboard", prefix="mine")
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize("success")
    assert curve(tmp_path, "mine-loss") == [(1, 1.0)]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match=r"pip install 'ckptrun\[tensorboard\]'") as caught:
        TensorBoardLogger()
    assert "\n" not in str(caught.value)
