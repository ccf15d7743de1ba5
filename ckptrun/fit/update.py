"""How does one batch become gradients, and a window of batches an update, with automatic optimization?

Order within a step, as in Lightning: training_step, zero_grad (at the beginning of an accumulation window), backward,
and at its end on_before_optimizer_step, clipping, the optimizer; what ``16-mixed`` adds is in
:mod:`ckptrun.fit.precision`. An optimizer that evaluates the model itself (LBFGS), or an overridden
``optimizer_step``, gets all of it as a closure.
Decision: the functions are built once, around what somebody switched on, because a small model's step costs no more
than a few lookups. Turned down: one general function that asks at every step.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.hooks import overridden
from ckptrun.fit.module import Module
from ckptrun.fit.optimizers import CountedOptimizer
from ckptrun.strategies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from ckptrun.fit.fit_loop import FitLoop
    from ckptrun.fit.trainer import Trainer

    Step = Callable[[Any, int], Any]
    Update = Callable[[Any, int, bool, bool], Any]
    """(batch, its index, it begins a window, it ends one) -> what training_step returned."""


def step_function(trainer: Trainer) -> Step:
    """``training_step`` through the strategy, with the arguments that it takes."""
    module, strategy = trainer.lightning_module, trainer.strategy
    parameters = inspect.signature(module.training_step).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    takes_index = count >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if type(strategy).training_step is Strategy.training_step:
        training_step = module.training_step
        return training_step if takes_index else lambda batch, _: training_step(batch)
    call = strategy.training_step
    if takes_index:
        return lambda batch, index: call(module, batch, index)
    return lambda batch, _: call(module, batch)


class AutomaticUpdate:
    """Updates of one fit.

    ``in_update`` of the loop is set before the optimizer may change a weight; the loop clears it once its position
    stands behind the update.
    """

    def __init__(self, loop: FitLoop, step: Step) -> None:
        trainer = loop.trainer
        if len(trainer.optimizers) > 1:
            raise MisconfigurationException(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers; automatic optimization takes "
                "one.",
                hint="Set self.automatic_optimization = False and step them in training_step.",
            )
        self._loop = loop
        self._trainer = trainer
        self._clips = (
            overridden(trainer.lightning_module, "configure_gradient_clipping", Module) is not None
            or trainer.options.gradient_clip_val is not None
        )
        self._precision = trainer.precision_plugin
        self._before_step_hooks = trainer.hooks.get("on_before_optimizer_step")
        self._optimizer: Optimizer | None = trainer.optimizers[0] if trainer.optimizers else None
        self._needs_closure = self._optimizer is not None and (
            overridden(trainer.lightning_module, "optimizer_step", Module) is not None
            or _needs_closure(self._optimizer)
        )
        self.update = self._choose(step)

    def _choose(self, step: Step) -> Update:
        if self._precision.name != "32":
            step = self._under_autocast(step)
        if self._optimizer is None:
            return lambda batch, index, _begins, _ends: step(batch, index)
        if self._trainer.strategy.updates_itself:
            return self._by_strategy(step, self._optimizer)
        forward_backward = self._forward_backward(step, self._optimizer)
        update = (self._with_closure if self._needs_closure else self._directly)(
            forward_backward, self._optimizer
        )
        strategy = self._trainer.strategy
        if self._loop.accumulate == 1 or type(strategy).no_sync is Strategy.no_sync:
            return update

        def unsynced(batch: Any, index: int, begins: bool, ends: bool) -> Any:
            if ends:
                return update(batch, index, begins, ends)
            with strategy.no_sync():
                return update(batch, index, begins, ends)

        return unsynced

    def _under_autocast(self, step: Step) -> Step:
        trainer = self._trainer

        def mixed(batch: Any, index: int) -> Any:
            with trainer.forward_context():
                return step(batch, index)

        return mixed

    def _forward_backward(self, step: Step, optimizer: Optimizer) -> Callable[[Any, int, bool], Any]:
        loop, trainer, accumulate = self._loop, self._trainer, self._loop.accumulate
        module, strategy, hooks = trainer.lightning_module, trainer.strategy, trainer.hooks
        before_zero = hooks.get("on_before_zero_grad")
        before_backward = hooks.get("on_before_backward")
        after_backward = hooks.get("on_after_backward")
        own_zero_grad = overridden(module, "optimizer_zero_grad", Module)
        scale = self._precision.scale if self._precision.scales else None
        own_backward = (
            overridden(module, "backward", Module) is not None
            or type(strategy).backward is not Strategy.backward
        )
        zero_grad = optimizer.zero_grad

        def forward_backward(batch: Any, index: int, begins: bool) -> Any:
            outputs = step(batch, index)
            loss = outputs if type(outputs) is Tensor else loss_of(outputs)
            if begins:
                for hook in before_zero:
                    hook(optimizer)
                if own_zero_grad is None:
                    zero_grad()
                else:
                    own_zero_grad(loop.epoch, index, optimizer)
            if loss is None:
                if strategy.syncs:
                    trainer.together("training_step returned None")
                return outputs
            if accumulate > 1:
                loss = loss / accumulate
            if scale is not None:
                loss = scale(loss)
            for hook in before_backward:
                hook(loss)
            if own_backward:
                strategy.backward(loss, module)
            else:
                loss.backward()
            for hook in after_backward:
                hook()
            return outputs

        return forward_backward

    def _by_strategy(self, step: Step, optimizer: Optimizer) -> Update:
        """Scaling, accumulating, clipping and stepping are the strategy's; the hooks around them are called."""
        loop, trainer = self._loop, self._trainer
        module, strategy, hooks = trainer.lightning_module, trainer.strategy, trainer.hooks
        before_zero, before_step = hooks.get("on_before_zero_grad"), self._before_step_hooks
        before_backward = hooks.get("on_before_backward")
        after_backward = hooks.get("on_after_backward")

        def update(batch: Any, index: int, begins: bool, ends: bool) -> Any:
            strategy.begin_batch(ends_window=ends)
            outputs = step(batch, index)
            loss = loss_of(outputs)
            if loss is None:
                raise MisconfigurationException(
                    f"training_step returned None; the strategy {strategy.name} cannot leave a batch out.",
                    hint="Return a loss of 0 that depends on the parameters, or use another strategy.",
                )
            if begins:
                for hook in before_zero:
                    hook(optimizer)
            for hook in before_backward:
                hook(loss)
            strategy.backward(loss, module)
            for hook in after_backward:
                hook()
            if ends:
                for hook in before_step:
                    hook(optimizer)
                loop.in_update = True
            strategy.step()
            return outputs

        return update

    def _directly(self, forward_backward: Callable[..., Any], optimizer: Optimizer) -> Update:
        loop, before_step = self._loop, self._before_step
        scales = self._precision.scales
        plain = not self._before_step_hooks and not self._clips and not scales
        optimizer_step = self._scaled_step if scales else optimizer.step

        def update(batch: Any, index: int, begins: bool, ends: bool) -> Any:
            outputs = forward_backward(batch, index, begins)
            if ends:
                if not plain:
                    before_step(optimizer)
                loop.in_update = True
                optimizer_step()
            return outputs

        return update

    def _scaled_step(self) -> None:
        self._precision.step(self._optimizer)
        self._precision.steps_are_done()

    def _step_with_closure(self, optimizer: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        """``optimizer.step(closure=...)`` of an own ``optimizer_step`` where gradients are scaled."""
        loss = closure() if closure is not None else None
        self._precision.step(optimizer, **kwargs)
        self._precision.steps_are_done()
        return loss

    def _for_own_step(self, optimizer: Optimizer) -> Any:
        """What ``optimizer_step`` is given."""
        if not self._precision.scales:
            return optimizer
        if _needs_closure(optimizer):
            self._precision.step(optimizer, closure=_needs_closure)  # which it refuses
        return CountedOptimizer(optimizer, self._step_with_closure)

    def _with_closure(self, forward_backward: Callable[..., Any], optimizer: Optimizer) -> Update:
        loop, module = self._loop, self._trainer.lightning_module
        given = self._for_own_step(optimizer)

        def update(batch: Any, index: int, begins: bool, ends: bool) -> Any:
            if not ends:
                return forward_backward(batch, index, begins)
            outputs: list[Any] = []

            def closure() -> Any:
                if not outputs:
                    loop.in_update = False  # nothing is changed before the first evaluation
                outputs[:] = [forward_backward(batch, index, begins)]
                self._before_step(optimizer)
                loop.in_update = True
                return loss_of(outputs[0])

            loop.in_update = True
            module.optimizer_step(loop.epoch, index, given, closure)
            return outputs[0] if outputs else None

        return update

    def _before_step(self, optimizer: Optimizer) -> None:
        self._precision.unscale(optimizer)
        for hook in self._before_step_hooks:
            hook(optimizer)
        if self._clips:
            options = self._trainer.options
            self._trainer.lightning_module.configure_gradient_clipping(
                optimizer, options.gradient_clip_val, options.gradient_clip_algorithm
            )

    def flush(self, index: int, outputs: Any) -> None:
        """The update of a window that the data ended: with the gradients that there are.

        Args:
            index: of the last batch.
            outputs: what training_step returned for it.
        """
        optimizer = self._optimizer
        if optimizer is None:
            return
        if self._trainer.strategy.updates_itself:
            raise MisconfigurationException(
                f"The training data ended inside an accumulation window, after batch {index}; the strategy "
                f"{self._trainer.strategy.name} has to know beforehand which batch is the last of a window.",
                hint="Give the loader its true length, drop what does not fill a window, or set "
                "trainer.accumulate_grad_batches=1.",
            )
        self._trainer.strategy.sync_gradients(self._trainer.lightning_module)
        if not self._needs_closure:
            self._before_step(optimizer)
            self._loop.in_update = True
            if self._precision.scales:
                self._scaled_step()
            else:
                optimizer.step()
            return

        def closure() -> Any:
            self._before_step(optimizer)
            self._loop.in_update = True
            return loss_of(outputs)

        given = self._for_own_step(optimizer)
        self._trainer.lightning_module.optimizer_step(self._loop.epoch, index, given, closure)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer evaluates the model more than once a step, as LBFGS does."""
    parameters = inspect.signature(type(optimizer).step).parameters
    closure = parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def loss_of(outputs: Any) -> Any:
    """The loss in what ``training_step`` returned; None to skip the batch.

    Raises:
        MisconfigurationException: there is none.
    """
    if outputs is None or isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, dict) and "loss" in outputs:
        return outputs["loss"]
    raise MisconfigurationException(
        f"training_step returned {type(outputs).__name__}"
        + (f" with keys {', '.join(map(repr, outputs))}" if isinstance(outputs, dict) else "")
        + "; expected the loss as a tensor, a dict with 'loss', or None to skip the batch."
    )
