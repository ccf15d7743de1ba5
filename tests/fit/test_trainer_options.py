"""What the Trainer's options mean, and how wrong ones are told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ckptrun import MisconfigurationException
from ckptrun.fit.options import TrainerOptions, seconds


def parse(**options: Any) -> TrainerOptions:
    return TrainerOptions.parse({"max_steps": 1, **options})


def test_without_any_limit_it_ends_after_1000_epochs_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="1000 epochs"):
        assert TrainerOptions.parse({}).max_epochs == 1000
    with pytest.warns(UserWarning, match="1000 epochs"):
        assert TrainerOptions.parse({"max_steps": -1}).max_epochs == 1000


def test_minus_one_is_no_limit() -> None:
    options = TrainerOptions.parse({"max_epochs": -1})
    assert (options.max_epochs, options.max_steps) == (None, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (90, 90.0),
        ("00:00:01:30", 90.0),
        ("01:02:03:04", 93784.0),
        ({"minutes": 2}, 120.0),
        (timedelta(seconds=5), 5.0),
    ],
)
def test_max_time(given: Any, expected: float | None) -> None:
    assert seconds(given) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epoch": 3}, "no option 'max_epoch'. Did you mean 'max_epochs'"),
        ({"precision": "8"}, "precision is '8'"),
        ({"gradient_clip_algorithm": "global"}, "expected 'norm' or 'value'"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0"),
        ({"limit_val_batches": 1.5}, "limit_val_batches is 1.5"),
        ({"limit_test_batches": -1}, "limit_test_batches is -1"),
        ({"limit_train_batches": "all"}, "limit_train_batches is 'all'; expected a number"),
        ({"val_check_interval": -0.5}, "val_check_interval is -0.5"),
        ({"check_val_every_n_epoch": None}, "must be a number of batches"),
        ({"num_sanity_val_steps": -2}, "num_sanity_val_steps is -2"),
        ({"log_every_n_steps": 0}, "log_every_n_steps is 0"),
        ({"fast_dev_run": -1}, "fast_dev_run is -1"),
        ({"max_time": "1 hour"}, "max_time is '1 hour'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        parse(**options)


@pytest.mark.parametrize("given", [32, "32", "32-true"])
def test_precision(given: Any) -> None:
    assert parse(precision=given).precision == "32"
    assert parse(precision="bf16-mixed").precision == "bf16-mixed"
    assert parse(precision=16).precision == parse(precision="16-mixed").precision == "16-mixed"


def test_a_whole_share_above_one_is_a_number_of_batches() -> None:
    assert parse(limit_train_batches=5.0).limit_train_batches == 5
    assert isinstance(parse(val_check_interval=1.0).val_check_interval, float)
    assert isinstance(parse(val_check_interval=1).val_check_interval, int)


def test_fast_dev_run_limits_everything() -> None:
    options = TrainerOptions.parse({"fast_dev_run": 3, "max_epochs": 50, "val_check_interval": 7})
    assert (options.max_steps, options.max_epochs, options.num_sanity_val_steps) == (3, 1, 0)
    assert {options.limit_train_batches, options.limit_val_batches, options.limit_test_batches} == {3}
    assert TrainerOptions.parse({"fast_dev_run": True}).max_steps == 1
    assert parse(fast_dev_run=False).fast_dev_run == 0
