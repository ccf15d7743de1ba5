"""Which learning rates are in use? :class:`LearningRateMonitor` gives them to the loggers.

Names are Lightning's: ``lr-Adam``; ``lr-Adam/pg1`` where there are several parameter groups; ``lr-Adam-1``
for the second optimizer of a class; the scheduler's own ``name`` where it has one, and a parameter group's
``name``.
Decision: the names are found anew at each logging, in a few microseconds, because parameter groups may be
added in the middle of a training. Turned down: naming them once, as plain optimizers would allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.callback import Callback

if TYPE_CHECKING:
    from ckptrun.fit.module import Module
    from ckptrun.fit.trainer import Trainer


class LearningRateMonitor(Callback):
    """Log the learning rate of every parameter group, under the number of the step that uses it.

    Args:
        logging_interval: ``step`` (every ``log_every_n_steps``) or ``epoch``; None: each at the interval of
            its scheduler, and those without one at both.
        log_momentum: also log ``<name>-momentum`` (the first of Adam's betas).
        log_weight_decay: also log ``<name>-weight_decay``.

    Raises:
        MisconfigurationException: an unknown interval; on start, a trainer without a logger, or two parameter
            groups of one optimizer with the same name.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise MisconfigurationException(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): expected step, epoch or None."
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self._last_step_logged = -1

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        # fast_dev_run logs nothing, and with several ranks only the first one does.
        if not trainer.loggers and trainer.is_global_zero and not trainer.fast_dev_run:
            raise MisconfigurationException(
                "LearningRateMonitor has nowhere to log to: the trainer has no logger.",
                hint="Add one, such as ckptrun.loggers.CSVLogger, or leave the callback out.",
            )
        self._last_step_logged = -1
        for optimizer, name, _ in _named(trainer):
            _group_names(optimizer, name)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if step % trainer.log_every_n_steps or step == self._last_step_logged:
            return  # not due, or said already by an earlier batch of an accumulation window
        self._last_step_logged = step
        if self.logging_interval != "epoch":
            self._log(trainer, "step", step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch", trainer.global_step)

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        values: dict[str, float] = {}
        for optimizer, name, its_interval in _named(trainer):
            if self.logging_interval is None and its_interval not in (None, interval):
                continue
            for group, group_name in zip(optimizer.param_groups, _group_names(optimizer, name), strict=True):
                values[group_name] = float(group["lr"])
                if self.log_momentum:
                    betas = group.get("betas")
                    values[f"{group_name}-momentum"] = float(
                        betas[0] if betas else group.get("momentum", 0.0)
                    )
                if self.log_weight_decay:
                    values[f"{group_name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)


def _named(trainer: Trainer) -> Iterator[tuple[Optimizer, str, str | None]]:
    """Each optimizer with its name and its scheduler's interval; those without a scheduler come last."""
    seen: list[Optimizer] = []
    num_of_class: Counter[type] = Counter()

    def name_of(optimizer: Optimizer, given: str | None) -> str:
        seen.append(optimizer)
        kind = type(optimizer)
        if given is None:
            num_of_class[kind] += 1
        name = given if given is not None else f"lr-{kind.__name__}"
        return name if num_of_class[kind] <= 1 else f"{name}-{num_of_class[kind] - 1}"

    for config in trainer.lr_scheduler_configs:
        optimizer = config.scheduler.optimizer
        yield optimizer, name_of(optimizer, config.name), config.interval
    for optimizer in trainer.optimizers:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # a wrapper's own one
        if not any(optimizer is other for other in seen):
            yield optimizer, name_of(optimizer, None), None


def _group_names(optimizer: Optimizer, name: str) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        own = groups[0].get("name")
        return [f"{name}/{own}" if own else name]
    names = [group.get("name", f"pg{number}") for number, group in enumerate(groups, 1)]
    twice = sorted({found for found in names if names.count(found) > 1})
    if twice:
        raise MisconfigurationException(
            f"LearningRateMonitor: parameter groups of {name} share the name {', '.join(map(repr, twice))}.",
            hint="Give each parameter group of an optimizer a name of its own.",
        )
    return [f"{name}/{found}" for found in names]
