"""Does training still get better? :class:`EarlyStopping` ends it when a logged metric does not.

Decision: what has been counted (how long nothing got better, since which best value) comes back from a
checkpoint exactly; how long to be patient is always the one that is configured now. Turned down: restoring
``patience`` too, as Lightning does, by which a changed config has no effect on a resumed run and nobody is
told.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.callback import Callback

if TYPE_CHECKING:
    from ckptrun.fit.module import Module
    from ckptrun.fit.trainer import Trainer

log = logging.getLogger(__name__)

_SIGN = {"min": "<", "max": ">"}


class EarlyStopping(Callback):
    """Stop training when ``monitor`` has not got better for ``patience`` checks.

    Args:
        monitor: name of the logged metric.
        min_delta: how much better it must get to count; a change of this much or less does not.
        patience: number of checks without getting better after which training stops. A check comes with each
            validation, or each training epoch (``check_on_train_epoch_end``).
        verbose: say when it got better and why training stops.
        mode: ``min`` or ``max``, which values are better.
        strict: raise where the metric was not logged; else the check is left out.
        check_finite: stop when the metric is NaN or infinite.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this.
        check_on_train_epoch_end: check at the end of the training epoch instead of after validation; the
            default is the former where there is one validation per epoch.
        log_rank_zero_only: with ``verbose``, only rank 0 says it.

    Attributes:
        wait_count: checks since it got better.
        best_score: the best value so far.
        stopped_epoch: the epoch in which it stopped training; 0 before that.
        stopping_reason: why it stopped training, as a sentence; None before that.

    Raises:
        MisconfigurationException: ``mode`` is neither, or (when checking) the metric was not logged.
    """

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if mode not in _SIGN:
            raise MisconfigurationException(f"EarlyStopping(mode={mode!r}): expected 'min' or 'max'.")
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score: Tensor = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.stopping_reason: str | None = None
        self._check_on_train_epoch_end = check_on_train_epoch_end

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = state_dict["best_score"]

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if self._check_on_train_epoch_end is None:
            # With several validations per epoch, or epochs without one, the check follows the validations.
            interval = trainer.val_check_interval  # a whole number counts batches: 1 is not 1.0
            once = isinstance(interval, float) and interval == 1.0
            self._check_on_train_epoch_end = once and trainer.check_val_every_n_epoch == 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._check_on_train_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._check_on_train_epoch_end:
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        found = trainer.monitored(self.monitor)
        if found is None:
            self._missing(trainer, list(trainer.callback_metrics))
            return
        value = found.detach().reshape(()).to("cpu", copy=True)
        reason = self._why_stop(value)
        if reason is not None:
            self.stopping_reason = reason
            self.stopped_epoch = trainer.current_epoch
            trainer.should_stop = True
            self._say(trainer, reason)
        elif self.wait_count == 0:
            self._say(trainer, f"{self.monitor} got better: {float(value):.5f}.")

    def _missing(self, trainer: Trainer, names: list[str]) -> None:
        message = (
            f"EarlyStopping(monitor={self.monitor!r}): no such metric was logged; there are: "
            f"{', '.join(sorted(names)) or 'none'}."
        )
        if self.strict:
            raise MisconfigurationException(
                message, hint=f"Call self.log({self.monitor!r}, value) in the module, or name another metric."
            )
        self._say(trainer, message)

    def _why_stop(self, value: Tensor) -> str | None:
        """Count this check; the reason to stop, None to go on."""
        shown, best = f"{self.monitor} = {float(value):g}", f"{float(self.best_score):g}"
        if self.check_finite and not bool(torch.isfinite(value)):
            return f"{shown} is not finite; the best before was {best}."
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            return f"{shown} {_SIGN[self.mode]} {self.stopping_threshold:g}, the stopping threshold."
        if self.divergence_threshold is not None and self._better(self.divergence_threshold, value):
            return f"{shown} is worse than {self.divergence_threshold:g}, the divergence threshold."
        delta = self.min_delta if self.mode == "min" else -self.min_delta
        if self._better(value + delta, self.best_score):
            self.best_score = value
            self.wait_count = 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return f"{self.monitor} did not get better in the last {self.wait_count} checks; the best was {best}."

    def _better(self, a: Tensor | float, b: Tensor | float) -> bool:
        return bool(a < b) if self.mode == "min" else bool(a > b)

    def _say(self, trainer: Trainer, text: str) -> None:
        if self.verbose and (trainer.is_global_zero or not self.log_rank_zero_only):
            log.info("EarlyStopping: %s", text)
