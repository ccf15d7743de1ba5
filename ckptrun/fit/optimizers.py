"""Which optimizers and LR schedulers did the user's ``configure_optimizers`` return?

All of Lightning's forms: nothing, one optimizer, a list of them, two lists, a dict with ``optimizer`` and
``lr_scheduler`` (a scheduler or a dict of its options), a tuple of such dicts.
Facts: LightningModule.configure_optimizers in Lightning's documentation.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ckptrun.errors import MisconfigurationException

_SCHEDULER_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor")


@dataclass
class LRSchedulerConfig:
    """One scheduler and when it is stepped."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


class CountedOptimizer:
    """An optimizer whose ``step`` counts as a step of training; what manual optimization gets.

    Everything else is the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, step: Any) -> None:
        self.optimizer = optimizer
        self._step = step

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._step(self.optimizer, closure, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def _wrong(found: Any) -> MisconfigurationException:
    return MisconfigurationException(
        f"configure_optimizers returned {type(found).__name__}; expected an optimizer, a list or tuple of them, "
        "a dict with 'optimizer', or None."
    )


def _scheduler(value: Any, monitor: str | None) -> LRSchedulerConfig:
    if isinstance(value, dict):
        unknown = [key for key in value if key not in _SCHEDULER_KEYS]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), _SCHEDULER_KEYS, 1)
            raise MisconfigurationException(
                f"configure_optimizers: unknown key {unknown[0]!r} in the LR scheduler's dict; expected some of "
                f"{', '.join(_SCHEDULER_KEYS)}." + (f" Did you mean {near[0]!r}?" if near else "")
            )
        if "scheduler" not in value:
            raise MisconfigurationException(
                "configure_optimizers: the LR scheduler's dict has no key 'scheduler'."
            )
        config = LRSchedulerConfig(**value)
        if monitor is not None and config.monitor is None:
            config.monitor = monitor
    else:
        config = LRSchedulerConfig(value, monitor=monitor)
    if not hasattr(config.scheduler, "step") or isinstance(config.scheduler, Optimizer):
        raise MisconfigurationException(
            f"configure_optimizers: found {type(config.scheduler).__name__} where an LR scheduler is expected."
        )
    if config.interval not in ("epoch", "step"):
        raise MisconfigurationException(
            f"configure_optimizers: interval is {config.interval!r}; expected 'epoch' or 'step'."
        )
    if isinstance(config.scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
    if config.reduce_on_plateau and config.monitor is None:
        raise MisconfigurationException(
            "configure_optimizers: ReduceLROnPlateau needs the metric to watch.",
            hint="Return {'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}.",
        )
    return config


def parse_configured(returned: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Optimizers and scheduler configs from what ``configure_optimizers`` returned.

    Raises:
        MisconfigurationException: it is none of Lightning's forms.
    """
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, dict):
        unknown = [key for key in returned if key not in _OPTIMIZER_KEYS]
        if unknown or "optimizer" not in returned:
            raise MisconfigurationException(
                f"configure_optimizers: found a dict with {', '.join(map(repr, returned))}; expected 'optimizer' and "
                "perhaps 'lr_scheduler'."
            )
        schedulers = returned.get("lr_scheduler")
        chosen = [] if schedulers is None else [_scheduler(schedulers, returned.get("monitor"))]
        return [returned["optimizer"]], chosen
    if not isinstance(returned, (list, tuple)):
        raise _wrong(returned)
    items = list(returned)
    if len(items) == 2 and isinstance(items[0], (list, tuple)):
        second = items[1] if isinstance(items[1], (list, tuple)) else [items[1]]
        optimizers = list(items[0])
        chosen = [_scheduler(value, None) for value in second]
    elif items and all(isinstance(item, dict) for item in items):
        pairs = [parse_configured(item) for item in items]
        optimizers = [optimizer for found, _ in pairs for optimizer in found]
        chosen = [config for _, found in pairs for config in found]
    else:
        optimizers, chosen = items, []
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise _wrong(optimizer)
    return optimizers, chosen


def scheduler_state(config: LRSchedulerConfig) -> dict[str, Any]:
    """State of a scheduler for a checkpoint."""
    state: dict[str, Any] = config.scheduler.state_dict()
    return state
