"""What did ``configure_optimizers`` set, and what does it mean that a resumed run sets something else?

An optimizer's and a scheduler's state bring back the values that they had, so a learning rate that was changed since
would be ignored without a word. What was configured is therefore kept beside the state. Where it differs, going on is
refused (exit 5) with both values; with ``--override`` the new ones are put in: a learning rate that a scheduler has
moved is scaled by new/old, everything else is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from ckptrun.errors import IncompatibleError
from ckptrun.fit.optimizers import LRSchedulerConfig

Configured = dict[str, Any]

# What a scheduler counts or remembers, as opposed to what it was given. ``base_lrs`` follow from the optimizer.
_MOVES = frozenset(
    (
        "last_epoch",
        "base_lrs",
        "best",
        "num_bad_epochs",
        "cooldown_counter",
        "num_steps",
        "step_size_up",
        "T_cur",
    )
)


def configured(optimizers: Sequence[Optimizer], schedulers: Sequence[LRSchedulerConfig]) -> Configured:
    """What the user's code has just set: options of each parameter group, and each scheduler's own numbers."""
    return {
        "optimizers": [[_options(group) for group in optimizer.param_groups] for optimizer in optimizers],
        "schedulers": [_numbers(config.scheduler.state_dict()) for config in schedulers],
    }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params" and _is_plain(value)}
    # A scheduler has moved the rate already when it was made; what it moves from stays as it was given.
    options["lr"] = options.pop("initial_lr", options.get("lr"))
    return options


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in state.items()
        if not name.startswith("_") and name not in _MOVES and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def differences(then: Configured, now: Configured) -> list[str]:
    """What is set otherwise now, in words; nothing where the numbers of groups or schedulers differ."""
    told = []
    for number, (old_groups, new_groups) in enumerate(
        zip(then["optimizers"], now["optimizers"], strict=False)
    ):
        for index, (old, new) in enumerate(zip(old_groups, new_groups, strict=False)):
            where = f"optimizer {number}, group {index}"
            told += [f"{where}: {name} was {old[name]!r}, is {new[name]!r}" for name in _changed(old, new)]
    for number, (old, new) in enumerate(zip(then["schedulers"], now["schedulers"], strict=False)):
        where = f"scheduler {number}"
        told += [f"{where}: {name} was {old[name]!r}, is {new[name]!r}" for name in _changed(old, new)]
    return told


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    # An option that only one side has came or went with a version of torch, and has its default.
    return [name for name in sorted(old.keys() & new.keys()) if _listed(old[name]) != _listed(new[name])]


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def check(then: Configured | None, now: Configured, *, override: bool) -> list[str]:
    """The differences that are to be put in.

    Raises:
        IncompatibleError: there are some, and ``override`` is not given.
    """
    told = [] if then is None else differences(then, now)
    if told and not override:
        raise IncompatibleError(
            "configure_optimizers sets something else than when the checkpoint was written: "
            + "; ".join(told)
            + ".",
            hint="--override goes on with what is set now; --run NAME starts another run.",
        )
    return told


def put_in(
    then: Configured,
    now: Configured,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRSchedulerConfig],
) -> None:
    """Put what is configured now into optimizers and schedulers whose state has been restored."""
    for optimizer, old_groups, new_groups in zip(
        optimizers, then["optimizers"], now["optimizers"], strict=False
    ):
        for group, old, new in zip(optimizer.param_groups, old_groups, new_groups, strict=False):
            for name in _changed(old, new):
                if name == "lr":
                    _put_rate(group, old["lr"], new["lr"])
                else:
                    group[name] = new[name]
    for config, old, new in zip(schedulers, then["schedulers"], now["schedulers"], strict=False):
        scheduler = config.scheduler
        if hasattr(scheduler, "base_lrs"):
            groups = scheduler.optimizer.param_groups
            scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in groups]
        for name in _changed(old, new):
            setattr(scheduler, name, new[name])


def _put_rate(group: dict[str, Any], old: float, new: float) -> None:
    group["lr"] = group["lr"] * new / old if old else new
    if "initial_lr" in group:
        group["initial_lr"] = new
