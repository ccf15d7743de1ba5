"""How is a model evaluated? Validation, test and prediction over one or several loaders.

Decision: evaluation runs with the random state isolated, so that whether and how often it runs changes nothing in
training, and one that a stop cut short can be run again from the same state. Lightning does this for the sanity
check only.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.data import evaluation_loader, limited, loader_length
from ckptrun.fit.loader_workers import shield_workers, start_iterator
from ckptrun.fit.random_state import capture_random_state, restore_random_state
from ckptrun.fit.sample_order import epoch_seed
from ckptrun.fit.sample_seeds import mixed
from ckptrun.records import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptrun.fit.trainer import Trainer


_KINDS = ("validation", "test", "predict")
_EVALUATION = 0x2545F4914F6CDD1D  # so that no evaluation has the seed of an epoch


class EvaluationStopped(Exception):  # noqa: N818 - not an error: a stop was asked for in the middle
    """A stop was requested while evaluating; nothing of this evaluation counts."""


class Evaluation:
    """One pass of ``kind`` (validation, test or predict) over its loaders."""

    def __init__(self, trainer: Trainer, kind: str, loaders: Sequence[Any], limit: int | float) -> None:
        self.trainer = trainer
        self.kind = kind
        rank, world_size = trainer.strategy.rank, trainer.world_size
        seed = epoch_seed(trainer.seed, _KINDS.index(kind)) ^ _EVALUATION
        self.loaders = [
            evaluation_loader(loader, seed=mixed(seed, number), rank=rank, world_size=world_size)
            for number, loader in enumerate(loaders)
        ]
        name = {
            "validation": "limit_val_batches",
            "test": "limit_test_batches",
            "predict": "limit_predict_batches",
        }
        for loader in self.loaders:
            shield_workers(loader)
        self.num_batches = [limited(loader_length(loader), limit, name[kind]) for loader in self.loaders]
        self.step = self._step_function()
        self.predictions: list[list[Any]] = []

    def _step_function(self) -> Callable[[Any, int, int], Any]:
        module = self.trainer.lightning_module
        own = getattr(module, f"{self.kind}_step")
        parameters = inspect.signature(own).parameters.values()
        step = functools.partial(self.trainer.strategy.evaluation_step, module, own)
        count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            count = 2 if len(self.loaders) == 1 else 3
        if count >= 3:
            return step
        if len(self.loaders) > 1:
            raise MisconfigurationException(
                f"There are {len(self.loaders)} {self.kind} loaders but {self.kind}_step takes {count} arguments.",
                hint=f"Define {self.kind}_step(self, batch, batch_idx, dataloader_idx=0).",
            )
        if count == 2:
            return lambda batch, batch_idx, _: step(batch, batch_idx)
        return lambda batch, _, __: step(batch)

    def run(self, *, sanity_steps: int | None = None) -> list[dict[str, float]]:
        """Evaluate and return what was logged over the epoch, one dict (as Lightning: a list with one entry).

        Raises:
            EvaluationStopped: a stop was requested; random state and training mode are as before.
        """
        module = self.trainer.lightning_module
        random = capture_random_state()
        modes = {part: part.training for part in module.modules()}
        self.trainer.strategy.sync_buffers(module)
        try:
            with torch.no_grad():
                return self._run(sanity_steps)
        finally:
            for part, training in modes.items():
                part.training = training
            restore_random_state(random)
            self.trainer.progress.eval_batch = 0
            self.trainer.progress.num_eval_batches = None

    def _run(self, sanity_steps: int | None) -> list[dict[str, float]]:
        trainer, hooks, logs = self.trainer, self.trainer.hooks, self.trainer.logs
        kind, progress = self.kind, self.trainer.progress
        logs.enter_evaluation()
        trainer.lightning_module.eval()
        hooks.call(f"on_{kind}_start")
        hooks.call(f"on_{kind}_epoch_start")
        limits = [
            min(count, sanity_steps) if sanity_steps is not None else count for count in self.num_batches
        ]
        total = sum(limits)
        progress.eval_batch = 0
        progress.num_eval_batches = None if math.isinf(total) else int(total)
        self.predictions = []
        for index, (loader, limit) in enumerate(zip(self.loaders, limits, strict=True)):
            logs.enter_dataloader(index, len(self.loaders))
            self._run_loader(index, loader, limit)
        logs.enter_dataloader(0, 1)
        logs.batch = None
        hooks.call_part(f"on_{kind}_epoch_end", "first")
        metrics = logs.finish_epoch(evaluating=True)
        hooks.call_part(f"on_{kind}_epoch_end", "monitoring")
        hooks.call_part(f"on_{kind}_epoch_end", "checkpoint")
        if metrics and not trainer.sanity_checking:
            trainer.log_to_loggers(metrics)
        hooks.call_part(f"on_{kind}_end", "first")
        hooks.call_part(f"on_{kind}_end", "monitoring")
        return [metrics]

    def _run_loader(self, index: int, loader: Any, limit: float) -> None:
        trainer, hooks, logs, kind = self.trainer, self.trainer.hooks, self.trainer.logs, self.kind
        starts, ends = hooks.get(f"on_{kind}_batch_start"), hooks.get(f"on_{kind}_batch_end")
        stop, progress, agreement = trainer.stop, trainer.progress, trainer.agreement
        # Ranks ask each other where all are sure to come: how many batches there are must be known for that, and
        # not all may have the last one.
        ask_at = 0 if agreement is not None and not math.isinf(limit) else -1
        last, asked_at = limit - 1, 0
        loop, checkpoints = trainer.fit_loop, trainer.checkpoints
        outputs: list[Any] = []
        if kind == "predict":
            self.predictions.append(outputs)
        batches = start_iterator(loader)
        if not math.isinf(limit):
            batches = itertools.islice(batches, int(limit))
        for batch_idx, fetched in enumerate(
            self._in_company(batches) if trainer.strategy.collective_forward else batches
        ):
            if batch_idx == ask_at and batch_idx < last and agreement is not None:
                ask_at = batch_idx + agreement.ask(since=batch_idx - asked_at)
                asked_at = batch_idx
            if stop.request is not None:
                raise EvaluationStopped
            if checkpoints.landed:
                checkpoints.attend()
            if agreement is None and loop is not None and loop.validation is self:
                loop.serve_saves()
            if type(fetched) is _OnceMore:
                with trainer.forward_context():
                    self.step(trainer.transfer(fetched.batch, index), batch_idx, index)
                logs.discard_pending()
                continue
            batch = trainer.transfer(fetched, index)
            logs.batch = batch
            for hook in starts:
                hook(batch, batch_idx, index)
            with trainer.forward_context():
                output = self.step(batch, batch_idx, index)
            for hook in ends:
                hook(output, batch, batch_idx, index)
            logs.commit()
            if kind == "predict":
                outputs.append(output)
            progress.eval_batch += 1
        if agreement is not None:
            agreement.ask()
        if stop.request is not None:
            raise EvaluationStopped

    def _in_company(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Where a forward pass needs all ranks, one that has no batch left takes part with its last one."""
        strategy, last = self.trainer.strategy, None
        while True:
            batch = next(batches, _NONE_LEFT)
            if not strategy.agree([batch is not _NONE_LEFT])[0]:
                return
            if batch is not _NONE_LEFT:
                last = batch
                yield batch
            elif last is None:
                raise MisconfigurationException(
                    f"A rank has no batch at all of a {self.kind} loader, and {strategy.name} needs all ranks in each "
                    "forward pass.",
                    hint="Evaluate on at least one batch a rank, or take a smaller batch size.",
                )
            else:
                yield _OnceMore(last)


@dataclass(frozen=True)
class _OnceMore:
    """A batch that this rank has seen already; what comes of it does not count."""

    batch: Any


_NONE_LEFT: Any = object()
STAGES = {"validation": Stage.VALIDATING, "test": Stage.TESTING, "predict": Stage.PREDICTING}
