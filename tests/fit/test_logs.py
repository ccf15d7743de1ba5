"""What ``self.log`` makes of a value: at a step, over an epoch, for whom, and back from a checkpoint."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import Tiny, loader, make_trainer

from ckptrun import MisconfigurationException, Module
from ckptrun.fit.logs import Logs, batch_size_of

BATCH = torch.zeros(4, 2)


def step(logs: Logs, value: Any, name: str = "x", *, batch: Any = BATCH, **options: Any) -> None:
    """One batch of training that logs ``value``."""
    logs.enter_step()
    logs.batch = batch
    logs.log(name, value, **options)
    logs.commit()


def finish(logs: Logs) -> dict[str, float]:
    logs.enter_epoch()
    return logs.finish_epoch(evaluating=False)


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "at_step", "over_epoch", "callbacks"),
    [
        ({}, ["x"], [], ["x"]),
        ({"on_step": True}, ["x"], [], ["x"]),
        ({"on_step": False, "on_epoch": True}, [], ["x"], ["x"]),
        ({"on_step": True, "on_epoch": True}, ["x_step"], ["x_epoch"], ["x", "x_epoch", "x_step"]),
        ({"on_step": True, "on_epoch": True, "logger": False}, [], [], ["x", "x_epoch", "x_step"]),
    ],
)
def test_names_in_training(
    options: dict[str, Any], at_step: list[str], over_epoch: list[str], callbacks: list[str]
) -> None:
    logs = Logs(1)
    step(logs, 1.0, **options)
    assert list(logs.step_metrics()) == at_step
    assert list(finish(logs)) == over_epoch
    assert sorted(logs.callback_metrics) == callbacks


def test_defaults_depend_on_where_it_is_logged() -> None:
    logs = Logs(1)
    logs.enter_epoch()
    logs.log("in_epoch_hook", 1.0)
    assert finish(logs) == {"in_epoch_hook": 1.0}
    logs.enter_evaluation()
    logs.log("in_evaluation", 2.0)
    assert logs.finish_epoch(evaluating=True) == {"in_evaluation": 2.0}


def test_several_evaluation_loaders_get_a_suffix() -> None:
    logs = Logs(1)
    logs.enter_evaluation()
    for index in range(2):
        logs.enter_dataloader(index, 2)
        logs.log("x", float(index))
        logs.log("whole", float(index), add_dataloader_idx=False)
    assert logs.finish_epoch(evaluating=True) == {
        "x/dataloader_idx_0": 0,
        "whole": 0.5,
        "x/dataloader_idx_1": 1,
    }


def test_prog_bar_chooses_what_the_bar_shows() -> None:
    logs = Logs(1)
    step(logs, 1.0, "shown", prog_bar=True)
    step(logs, 2.0, "hidden")
    step(logs, 3.0, "epoch", prog_bar=True, on_step=False, on_epoch=True)
    assert logs.progress_bar_metrics == {"shown": 1.0}
    finish(logs)
    assert logs.progress_bar_metrics == {"shown": 1.0, "epoch": 3.0}


# -- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [
        ("mean", 3.0),
        ("sum", 6.0),
        ("min", 1.0),
        ("max", 5.0),
        (torch.median, 1.0),
        (lambda v: v.sum() * 10, 60.0),
    ],
)
def test_reductions(reduce_fx: Any, expected: float) -> None:
    logs = Logs(1)
    for value in (5.0, 1.0):
        step(logs, value, on_epoch=True, reduce_fx=reduce_fx)
    assert finish(logs) == {"x_epoch": expected}


def test_a_mean_is_weighted_by_the_batch_size() -> None:
    logs = Logs(1)
    step(logs, 1.0, batch=torch.zeros(3, 1), on_epoch=True)
    step(logs, 5.0, batch=torch.zeros(1, 1), on_epoch=True)
    assert finish(logs) == {"x_epoch": 2.0}
    step(logs, 1.0, on_epoch=True, batch_size=1)
    step(logs, 5.0, on_epoch=True, batch_size=3)
    assert finish(logs) == {"x_epoch": 4.0}, "and sums begin anew with each epoch"


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(2)], 4),
        ({"text": ["abc"], "x": torch.zeros(5)}, 3),
        ({"x": {"y": torch.zeros(6, 1)}}, 6),
        (torch.tensor(1.0), 1),
        (None, 1),
        ([], 1),
        (7, 1),
    ],
)
def test_batch_size_of(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size


def test_a_value_is_taken_when_it_is_logged() -> None:
    logs = Logs(1)
    weight = torch.ones((), requires_grad=True)
    counter = torch.zeros(1)
    step(logs, weight * 2, "loss")
    step(logs, counter, "counter")
    counter += 1
    assert logs.step_metrics() == {"loss": 2.0, "counter": 0.0}
    assert not logs.callback_metrics["loss"].requires_grad
    assert logs.callback_metrics["counter"].shape == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), r"shape \(2,\), expected one number"),
        ("much", "found str, expected a number"),
        ({"a": 1}, "found dict, expected a number"),
        (None, "found NoneType, expected a number"),
    ],
)
def test_wrong_values_are_named(value: Any, message: str) -> None:
    logs = Logs(1)
    for _ in range(2):
        with pytest.raises(MisconfigurationException, match=message):
            logs.log("x", value)
    logs.log("x", 1.0)
    with pytest.raises(MisconfigurationException, match=message):
        logs.log("x", value)


def test_a_wrong_reduction_is_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"reduce_fx='average'\): expected one of mean, sum"):
        Logs(1).log("x", 1.0, on_epoch=True, reduce_fx="average")


def test_what_a_failed_step_logged_does_not_count() -> None:
    logs = Logs(1)
    step(logs, 1.0, on_epoch=True)
    logs.log("x", 100.0, on_epoch=True)
    logs.discard_pending()
    assert finish(logs) == {"x_epoch": 1.0}


# -- checkpoint ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max", torch.median])
@pytest.mark.parametrize("more", [True, False])
def test_sums_go_on_after_a_resume(reduce_fx: Any, more: bool) -> None:
    options = {"on_epoch": True, "reduce_fx": reduce_fx}
    whole, first, second = Logs(1), Logs(1), Logs(1)
    for value in (3.0, 7.0):
        step(whole, value, **options)
        step(first, value, **options)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict(), "also where it is saved again before anything is logged"
    if more:
        step(whole, 4.0, **options)
        step(second, 4.0, **options)
    assert finish(second) == finish(whole)
    step(second, 9.0, **options)
    assert finish(second) == {"x_epoch": 9.0}


def test_what_callbacks_and_schedulers_look_at_comes_back() -> None:
    first, second = Logs(1), Logs(1)
    step(first, 1.0, on_epoch=True, prog_bar=True)
    finish(first)
    second.load_state_dict(first.state_dict())
    assert second.callback_metrics == first.callback_metrics
    assert second.logged_metrics == first.logged_metrics
    assert second.progress_bar_metrics == first.progress_bar_metrics


# -- to the loggers ------------------------------------------------------------------------------------------


def rows(root: Path) -> list[dict[str, str]]:
    with (root / "demo" / "logs" / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_rows_at_every_nth_step_and_at_each_epoch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=2, log_every_n_steps=4)
    trainer.fit(Tiny(), loader(), loader(8, shuffle=False))
    found = [(int(row["step"]), sorted(row.keys() - {"step", "epoch"})) for row in rows(tmp_path)]
    assert found == [
        (4, ["loss_step"]), (5, ["val_loss"]), (5, ["loss_epoch"]), (8, ["loss_step"]), (10, ["val_loss"]),
        (10, ["loss_epoch"]),
    ]  # fmt: skip


def test_what_batch_end_hooks_log_stands_in_the_row_of_their_step(tmp_path: Path) -> None:
    class Late(Tiny):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("late", batch_idx)

    make_trainer(tmp_path, max_epochs=1).fit(Late(), loader())
    assert [float(row["late"]) for row in rows(tmp_path) if "late" in row] == [0, 1, 2, 3, 4]


def test_the_epochs_mean_of_unequal_batches(tmp_path: Path) -> None:
    class Logged(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("size", len(batch[0]), on_step=False, on_epoch=True)
            return self.loss(batch)

    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(Logged(), loader(6, batch_size=4))
    assert float(trainer.callback_metrics["size"]) == pytest.approx((4 * 4 + 2 * 2) / 6)


def test_log_dict_and_a_module_without_a_trainer(tmp_path: Path) -> None:
    class Dict(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"a": 1.0, "b": 2.0}, on_step=False, on_epoch=True)
            return self.loss(batch)

    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(Dict(), loader())
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {"a": 1.0, "b": 2.0}
    with pytest.raises(RuntimeError, match="not attached"):
        Module().log("x", 1.0)
