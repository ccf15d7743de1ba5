"""When training ends because a metric does not get better, and that a resume counts on."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.callbacks.early_stopping import EarlyStopping


class Trainer:
    """As much of a Trainer as EarlyStopping looks at."""

    def __init__(self, callback: EarlyStopping, **options: Any) -> None:
        self.state = SimpleNamespace(fn="fit")
        self.fast_dev_run = self.sanity_checking = self.should_stop = False
        self.val_check_interval: int | float = 1.0
        self.check_val_every_n_epoch: int | None = 1
        self.is_global_zero = True
        self.current_epoch = 0
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.__dict__.update(options)
        self.callback: Any = callback
        self.callback.setup(self, None, "fit")

    def monitored(self, name: str) -> torch.Tensor | None:
        return self.callback_metrics.get(name)

    def epochs(self, *losses: float, name: str = "loss") -> int:
        """Epochs until it stops."""
        for loss in losses:
            self.callback_metrics = {name: torch.tensor(loss)}
            self.callback.on_validation_end(self, None)
            self.callback.on_train_epoch_end(self, None)
            self.current_epoch += 1
            if self.should_stop:
                break
        return self.current_epoch


@pytest.mark.parametrize(
    ("options", "losses", "epochs"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 4),
        ({"patience": 0}, [2.0, 1.0, 1.0], 3),
        ({"patience": 1}, [6.0, 5.0, 5.0, 4.0], 3),
        ({"patience": 2}, [3.0, 4.0, 2.0, 3.0, 4.0, 1.0], 5),
        ({"patience": 1, "mode": "max"}, [1.0, 2.0, 1.5, 3.0], 3),
        ({"patience": 1, "min_delta": 0.5}, [2.0, 1.5, 1.0], 2),
        ({"patience": 1, "min_delta": -0.5}, [2.0, 1.4, 1.2], 3),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1.0, 1.6, 2.1], 3),
        ({"stopping_threshold": 0.5}, [1.0, 0.5, 0.4, 0.1], 3),
        ({"stopping_threshold": 0.9, "mode": "max"}, [0.1, 0.95, 0.1], 2),
        ({"divergence_threshold": 9.0}, [1.0, 9.0, 9.5, 1.0], 3),
        ({"divergence_threshold": 0.1, "mode": "max"}, [1.0, 0.05, 1.0], 2),
        ({}, [1.0, math.nan, 1.0], 2),
        ({}, [1.0, -math.inf, 1.0], 2),
        ({"check_finite": False, "patience": 3}, [1.0, math.nan, math.nan, math.nan, 0.5], 4),
    ],
)
def test_when_it_stops(options: dict[str, Any], losses: list[float], epochs: int) -> None:
    callback = EarlyStopping("loss", **options)
    assert Trainer(callback).epochs(*losses) == epochs
    assert callback.stopped_epoch == epochs - 1
    assert callback.stopping_reason is not None
    assert callback.stopping_reason.startswith("loss ")


def test_why_it_stops() -> None:
    callback = EarlyStopping("loss", patience=2)
    Trainer(callback).epochs(1.0, 2.0, 3.0)
    assert callback.stopping_reason == "loss did not get better in the last 2 checks; the best was 1."
    assert (callback.wait_count, callback.best_score) == (2, 1.0)


def test_while_it_gets_better_it_goes_on() -> None:
    callback = EarlyStopping("loss")
    trainer = Trainer(callback)
    assert trainer.epochs(5.0, 4.0, 3.0, 2.0) == 4
    assert not trainer.should_stop
    assert (callback.stopped_epoch, callback.stopping_reason, callback.best_score) == (0, None, 2.0)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_resume_counts_on(cut: int) -> None:
    losses = [3.0, 2.0, 2.5, 2.1, 1.9, 2.0, 2.0, 2.0]
    whole = EarlyStopping("loss", patience=3)
    epochs = Trainer(whole).epochs(*losses)
    first = EarlyStopping("loss", patience=3)
    Trainer(first).epochs(*losses[:cut])
    second = EarlyStopping("loss", patience=3)
    trainer = Trainer(second, current_epoch=cut)
    second.load_state_dict(first.state_dict())
    assert trainer.epochs(*losses[cut:]) == epochs
    assert second.state_dict() == whole.state_dict()
    assert second.stopping_reason == whole.stopping_reason


def test_a_patience_that_was_changed_applies_at_once() -> None:
    first = EarlyStopping("loss", patience=2)
    Trainer(first).epochs(1.0, 2.0, 2.0)
    second = EarlyStopping("loss", patience=4)
    trainer = Trainer(second)
    second.load_state_dict(first.state_dict())
    assert second.patience == 4
    assert trainer.epochs(2.0, 2.0, 2.0) == 2


def test_the_best_score_is_a_copy() -> None:
    callback = EarlyStopping("loss")
    trainer = Trainer(callback)
    trainer.epochs(1.0)
    trainer.callback_metrics["loss"].fill_(7.0)
    assert callback.best_score == 1.0


@pytest.mark.parametrize(
    ("options", "on_epoch"),
    [
        ({}, True),
        ({"val_check_interval": 0.5}, False),
        ({"val_check_interval": 1}, False),
        ({"check_val_every_n_epoch": 2}, False),
    ],
)
def test_the_check_follows_the_validations_where_there_are_several(
    options: dict[str, Any], on_epoch: bool
) -> None:
    callback: Any = EarlyStopping("loss")
    trainer = Trainer(callback, callback_metrics={"loss": torch.tensor(1.0)}, **options)
    callback.on_validation_end(trainer, None)
    assert math.isinf(callback.best_score) == on_epoch
    callback.on_train_epoch_end(trainer, None)
    assert callback.best_score == 1.0
    assert callback.wait_count == 0


@pytest.mark.parametrize(
    "options", [{"sanity_checking": True}, {"fast_dev_run": True}, {"state": SimpleNamespace(fn="validate")}]
)
def test_where_it_does_not_check(options: dict[str, Any]) -> None:
    callback = EarlyStopping("loss", patience=0, check_on_train_epoch_end=False)
    assert Trainer(callback, **options).epochs(1.0, 1.0, 1.0) == 3


def test_a_metric_that_was_not_logged() -> None:
    with pytest.raises(MisconfigurationException, match=r"(?s)monitor='loss'.*there are: los"):
        Trainer(EarlyStopping("loss")).epochs(1.0, name="los")


def test_a_metric_that_was_not_logged_may_be_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    callback = EarlyStopping("loss", strict=False, verbose=True)
    assert Trainer(callback).epochs(1.0, name="los") == 1
    assert "there are: los" in caplog.text


def test_verbose(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Trainer(EarlyStopping("loss", verbose=True, patience=1)).epochs(1.0, 2.0)
    assert "loss got better: 1.0" in caplog.text
    assert "did not get better" in caplog.text
    caplog.clear()
    Trainer(EarlyStopping("loss", verbose=True, log_rank_zero_only=True), is_global_zero=False).epochs(1.0)
    assert not caplog.text


def test_arguments() -> None:
    with pytest.raises(MisconfigurationException, match="mode='up'"):
        EarlyStopping("loss", mode="up")
    assert EarlyStopping("loss", mode="max").state_key == "EarlyStopping{'monitor': 'loss', 'mode': 'max'}"
