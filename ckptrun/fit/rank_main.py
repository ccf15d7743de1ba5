"""What does one rank do from its first line? Seed, build what the config names, and let the trainer run it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptrun.errors import CkptrunError
from ckptrun.fit.context import RankContext
from ckptrun.fit.random_state import seed_everything
from ckptrun.fit.trainer import Trainer
from ckptrun.records import Fn, Outcome, StopReason
from ckptrun.run.step_trace import VARIABLE
from ckptrun.strategies import strategy_from_name


@dataclass
class Built:
    """The objects that a config names. ``loggers`` is None where it does not mention any."""

    model: Any
    data: Any = None
    callbacks: Sequence[Any] = ()
    loggers: Sequence[Any] | None = None
    strategy_options: Mapping[str, Any] = field(default_factory=dict)


def run_rank(
    context: RankContext, *, fn: Fn, options: Mapping[str, Any], build: Callable[[], Built]
) -> Outcome:
    """Run ``fn``. The seed is set before anything of the user's is built, so that weights begin the same."""
    if (request := context.stop.request) is not None:
        return Outcome(request.reason)
    if options.get("num_threads") is not None:
        torch.set_num_threads(int(options["num_threads"]))
    seed = options.get("seed")
    if seed is not None:
        seed_everything(int(seed))
    try:
        built = build()
    except Exception as error:
        ours = isinstance(error, CkptrunError)
        return Outcome(StopReason.EXCEPTION, error=error, user_error=not ours, built=False)
    if (request := context.stop.request) is not None:
        return Outcome(request.reason)
    trainer = Trainer(
        dict(options),
        callbacks=[*with_default_checkpoint(built.callbacks), *_step_trace()],
        loggers=default_loggers() if built.loggers is None else built.loggers,
        strategy=strategy_from_name(
            context.strategy,
            rank=context.rank,
            local_rank=context.local_rank,
            world_size=context.world_size,
            **built.strategy_options,
        ),
    )
    return trainer.execute(fn, built.model, datamodule=built.data, context=context)


def _step_trace() -> list[Any]:
    """What `ckptrun selftest` adds."""
    if VARIABLE not in os.environ:
        return []
    from ckptrun.fit.step_trace import step_trace_from_environment

    return step_trace_from_environment()


def with_default_checkpoint(callbacks: Sequence[Any]) -> list[Any]:
    """As in Lightning, a run without a checkpoint callback gets a ModelCheckpoint with its defaults."""
    from ckptrun.fit.callbacks.model_checkpoint import ModelCheckpoint

    given = list(callbacks)
    return given if any(isinstance(cb, ModelCheckpoint) for cb in given) else [*given, ModelCheckpoint()]


def default_loggers() -> list[Any]:
    """A CSV table in the run's folder of logs."""
    from ckptrun.fit.loggers.csv import CSVLogger

    return [CSVLogger()]
