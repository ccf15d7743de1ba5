"""What can callbacks, modules and loggers read of a trainer? Lightning's attributes, under Lightning's names.

They only read; what happens, and when, is :mod:`ckptrun.fit.trainer`'s.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ckptrun.fit.hooks import Hooks, part_of
from ckptrun.fit.module import Module
from ckptrun.fit.optimizers import CountedOptimizer, LRSchedulerConfig
from ckptrun.records import Stage

if TYPE_CHECKING:
    from ckptrun.fit.agreement import Agreement
    from ckptrun.fit.callback import Callback
    from ckptrun.fit.checkpoints import CheckpointService
    from ckptrun.fit.context import RankContext, StopSource
    from ckptrun.fit.datamodule import DataModule
    from ckptrun.fit.fit_loop import FitLoop
    from ckptrun.fit.logs import Logs
    from ckptrun.fit.options import TrainerOptions
    from ckptrun.fit.precision import Precision
    from ckptrun.fit.state import TrainerState
    from ckptrun.strategies.strategy import Strategy


class TrainerView:
    """The readable side of a trainer; the attributes are set by the trainer itself."""

    options: TrainerOptions
    strategy: Strategy
    state: TrainerState
    context: RankContext
    logs: Logs
    datamodule: DataModule | None
    fit_loop: FitLoop | None
    checkpoints: CheckpointService
    agreement: Agreement | None
    callbacks: list[Callback]
    loggers: list[Any]
    optimizers: list[Any]
    lr_scheduler_configs: list[LRSchedulerConfig]
    precision_plugin: Precision
    _module: Module | None
    _hooks: Hooks | None
    _evaluated_step: int
    _counted: list[CountedOptimizer]

    @property
    def lightning_module(self) -> Module:
        """The module that is trained or evaluated."""
        assert self._module is not None, "no fn runs"
        return self._module

    model = lightning_module

    @property
    def hooks(self) -> Hooks:
        assert self._hooks is not None, "no fn runs"
        return self._hooks

    @property
    def stop(self) -> StopSource:
        """What the loops look at: the supervisor's requests, with several ranks those that all know of."""
        return self.context.stop if self.agreement is None else self.agreement

    @property
    def progress(self) -> Any:
        return self.context.progress

    @property
    def global_step(self) -> int:
        """Optimizer steps completed in this run."""
        return self.fit_loop.global_step if self.fit_loop is not None else self._evaluated_step

    @property
    def current_epoch(self) -> int:
        """Index of the running epoch; after training, the number of epochs completed."""
        return self.fit_loop.epoch if self.fit_loop is not None else 0

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """All that was logged, for callbacks: the newest values."""
        return self.logs.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """What was sent to the loggers."""
        return self.logs.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What was logged with ``prog_bar=True``."""
        return self.logs.progress_bar_metrics

    @property
    def logger(self) -> Any:
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """Where loggers write."""
        return self.context.logs_dir

    @property
    def default_root_dir(self) -> str:
        """The run's folder."""
        return self.context.run.path if self.context.run is not None else "."

    @property
    def attempt(self) -> int:
        return self.context.attempt

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.is_global_zero

    @property
    def global_rank(self) -> int:
        return self.strategy.rank

    @property
    def local_rank(self) -> int:
        return self.strategy.local_rank

    @property
    def world_size(self) -> int:
        return self.strategy.world_size

    @property
    def max_steps(self) -> int:
        """-1 where there is no limit, as in Lightning."""
        return -1 if self.options.max_steps is None else self.options.max_steps

    @property
    def max_epochs(self) -> int:
        """-1 where there is no limit."""
        return -1 if self.options.max_epochs is None else self.options.max_epochs

    @property
    def min_steps(self) -> int:
        return self.options.min_steps

    @property
    def min_epochs(self) -> int:
        return self.options.min_epochs

    @property
    def fast_dev_run(self) -> bool:
        return bool(self.options.fast_dev_run)

    @property
    def val_check_interval(self) -> int | float:
        return self.options.val_check_interval

    @property
    def check_val_every_n_epoch(self) -> int | None:
        return self.options.check_val_every_n_epoch

    @property
    def accumulate_grad_batches(self) -> int:
        return self.options.accumulate_grad_batches

    @property
    def precision(self) -> str:
        """``32``, ``bf16-mixed`` or ``16-mixed``."""
        return self.options.precision

    @property
    def log_every_n_steps(self) -> int:
        return self.options.log_every_n_steps

    @property
    def num_training_batches(self) -> float:
        """Batches in a training epoch; infinite where the loader does not say."""
        return self.fit_loop.num_batches if self.fit_loop is not None else 0

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader."""
        validation = self.fit_loop.validation if self.fit_loop is not None else None
        return validation.num_batches if validation is not None else []

    @property
    def validation_due(self) -> bool:
        """Whether a validation follows the update that was just made."""
        return self.fit_loop is not None and self.fit_loop.validation_due

    @property
    def enable_validation(self) -> bool:
        return bool(self.num_val_batches) and self.options.limit_val_batches != 0

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps that training will take in all; infinite where that is not known."""
        limit = math.inf if self.options.max_steps is None else self.options.max_steps
        if self.options.max_epochs is None:
            return limit
        per_epoch = self.num_training_batches / self.options.accumulate_grad_batches
        total = math.inf if math.isinf(per_epoch) else math.ceil(per_epoch) * self.options.max_epochs
        return min(limit, total)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if part_of(callback) == "checkpoint"]

    @property
    def checkpoint_callback(self) -> Any:
        """The first of them, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        from ckptrun.fit.callbacks.early_stopping import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def training(self) -> bool:
        return self.state.stage is Stage.TRAINING

    @property
    def validating(self) -> bool:
        return self.state.stage is Stage.VALIDATING

    @property
    def testing(self) -> bool:
        return self.state.stage is Stage.TESTING

    @property
    def predicting(self) -> bool:
        return self.state.stage is Stage.PREDICTING

    def counted_optimizers(self) -> list[CountedOptimizer]:
        """Optimizers whose ``step()`` counts, for manual optimization."""
        assert self.fit_loop is not None
        if not self._counted:
            self._counted = [CountedOptimizer(o, self.fit_loop.manual_step) for o in self.optimizers]
        return self._counted
