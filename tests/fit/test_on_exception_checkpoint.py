"""An exception in user code asks for a checkpoint of the last boundary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptrun.fit.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from ckptrun.records import SaveReason


class Trainer:
    def __init__(self, **options: Any) -> None:
        self.fast_dev_run = options.get("fast_dev_run", False)
        self.state = SimpleNamespace(fn=options.get("fn", "fit"))
        self.is_global_zero = True
        self.calls: list[Any] = []
        self.checkpoints = self

    def reserve(self, label: str | None) -> str:
        self.calls.append(label)
        return "a ticket"

    def save(self, ticket: str, **options: Any) -> bool:
        self.calls.append((ticket, options))
        return True


def raised(callback: OnExceptionCheckpoint, **options: Any) -> list[Any]:
    trainer: Any = Trainer(**options)
    callback.setup(trainer, None, "fit")  # type: ignore[arg-type]
    callback.on_exception(trainer, None, RuntimeError("no"))  # type: ignore[arg-type]
    return trainer.calls


@pytest.mark.parametrize("filename", [None, "crashed"])
def test_an_exception_saves(filename: str | None) -> None:
    options = {"reason": SaveReason.EXCEPTION, "owner": "OnExceptionCheckpoint", "on_exception": True}
    assert raised(OnExceptionCheckpoint(filename=filename)) == [filename, ("a ticket", options)]


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"fn": "test"}])
def test_where_nothing_is_trained_nothing_is_saved(options: dict[str, Any]) -> None:
    assert raised(OnExceptionCheckpoint(), **options) == []


def test_dirpath_is_ignored_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    raised(OnExceptionCheckpoint())
    assert not caplog.text
    raised(OnExceptionCheckpoint("elsewhere", "crashed"))
    assert "OnExceptionCheckpoint(dirpath='elsewhere') is ignored" in caplog.text


def test_the_registry_learns_that_it_is_set() -> None:
    entry = OnExceptionCheckpoint().registry_entry()
    assert entry["on_exception"] is True
    assert entry["state_key"] == "OnExceptionCheckpoint"
    assert entry["class"] == "ckptrun.fit.callbacks.on_exception_checkpoint.OnExceptionCheckpoint"
    assert (entry["best_k"], entry["best"], entry["last"], entry["monitor"]) == ({}, None, None, None)
