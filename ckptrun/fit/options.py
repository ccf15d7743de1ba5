"""What do the Trainer's options mean? Checked once, under Lightning's names."""

from __future__ import annotations

import datetime
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptrun.errors import MisconfigurationException

_NUMBERS = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches", "gradient_clip_val",
    "val_check_interval", "check_val_every_n_epoch", "limit_train_batches", "limit_val_batches",
    "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps", "log_every_n_steps", "fast_dev_run",
    "seed", "num_threads",
)  # fmt: skip
_PRECISIONS = {
    "32": "32", "32-true": "32", "bf16-mixed": "bf16-mixed", "bf16": "bf16-mixed", "16-mixed": "16-mixed",
    "16": "16-mixed",
}  # fmt: skip


@dataclass
class TrainerOptions:
    """Options of a trainer, normalized: None is "no limit", times are seconds."""

    max_epochs: int | None = None
    min_epochs: int = 0
    max_steps: int | None = None
    min_steps: int = 0
    max_time: Any = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    precision: str = "32"
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    fast_dev_run: int = 0
    deterministic: bool | str = False
    compile: bool | str | Mapping[str, Any] = False
    seed: int = 0
    num_threads: int | None = None
    enable_progress_bar: bool = True
    max_time_s: float | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> TrainerOptions:
        """Normalize what a user gave.

        Raises:
            MisconfigurationException: an unknown option, a wrong value, or two that exclude each other.
        """
        known = [name for name in cls.__dataclass_fields__ if name != "max_time_s"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise MisconfigurationException(
                    f"Trainer has no option {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""),
                    hint=f"It has: {', '.join(known)}.",
                )
        chosen = cls(
            **{
                name: value
                for name, value in options.items()
                if value is not None or name == "check_val_every_n_epoch"
            }
        )
        chosen._check()
        return chosen

    def _check(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, float)):
                raise MisconfigurationException(f"{name} is {value!r}; expected a number.")
        self.fast_dev_run = int(self.fast_dev_run)
        if self.fast_dev_run < 0:
            raise MisconfigurationException(
                f"fast_dev_run is {self.fast_dev_run}; expected true, false or a number."
            )
        if self.log_every_n_steps < 1:
            raise MisconfigurationException(
                f"log_every_n_steps is {self.log_every_n_steps}; expected at least 1.",
                hint="To log nothing, give no loggers.",
            )
        self.max_time_s = seconds(self.max_time)
        if self.max_steps is not None and self.max_steps < 0:
            self.max_steps = None
        if (
            self.max_epochs is None
            and self.max_steps is None
            and self.max_time_s is None
            and not self.fast_dev_run
        ):
            warnings.warn(
                "Neither max_epochs, max_steps nor max_time is set: training ends after 1000 epochs.",
                stacklevel=4,
            )
            self.max_epochs = 1000
        if self.max_epochs is not None and self.max_epochs < 0:
            self.max_epochs = None
        precision = _PRECISIONS.get(str(self.precision))
        if precision is None:
            raise MisconfigurationException(
                f"precision is {self.precision!r}; expected one of {', '.join(map(repr, _PRECISIONS))}."
            )
        self.precision = precision
        if self.gradient_clip_algorithm not in (None, "norm", "value"):
            raise MisconfigurationException(
                f"gradient_clip_algorithm is {self.gradient_clip_algorithm!r}; expected 'norm' or 'value'."
            )
        if self.accumulate_grad_batches < 1:
            raise MisconfigurationException(
                f"accumulate_grad_batches is {self.accumulate_grad_batches}; expected at least 1."
            )
        for name in ("train", "val", "test", "predict"):
            self._check_share(f"limit_{name}_batches")
        self._check_share("val_check_interval")
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise MisconfigurationException(
                "check_val_every_n_epoch is None, so val_check_interval must be a number of batches; found "
                f"{self.val_check_interval}."
            )
        if self.num_sanity_val_steps < -1:
            raise MisconfigurationException(
                f"num_sanity_val_steps is {self.num_sanity_val_steps}; expected -1 or more."
            )
        if self.fast_dev_run:
            count = self.fast_dev_run
            self.max_steps, self.max_epochs, self.num_sanity_val_steps = count, 1, 0
            self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
            self.limit_train_batches = self.limit_val_batches = count
            self.limit_test_batches = self.limit_predict_batches = count

    def _check_share(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, float) and not 0.0 <= value <= 1.0:
            if not value.is_integer():
                raise MisconfigurationException(
                    f"{name} is {value}; expected a whole number of batches, or a share between 0.0 and 1.0."
                )
            setattr(self, name, int(value))
        elif value < 0:
            raise MisconfigurationException(f"{name} is {value}; expected 0 or more.")


def seconds(value: Any) -> float | None:
    """``max_time`` in seconds: None, a number, ``DD:HH:MM:SS``, a mapping of timedelta's arguments, a timedelta."""
    if value is None:
        return None
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Mapping):
        return datetime.timedelta(**value).total_seconds()
    parts = str(value).split(":")
    if len(parts) == 4 and all(part.strip().isdigit() for part in parts):
        days, hours, minutes, secs = (int(part) for part in parts)
        return datetime.timedelta(days=days, hours=hours, minutes=minutes, seconds=secs).total_seconds()
    raise MisconfigurationException(
        f"max_time is {value!r}; expected DD:HH:MM:SS, a number of seconds, or a mapping such as {{hours: 2}}."
    )
