"""At which points can code that is not the model's take part? :class:`Callback`, under Lightning's names.

Decision: a plain class with empty methods. The trainer looks up once which of them a subclass overrides and
calls only those, so an unused hook costs nothing in a step. Turned down: a registry of functions by event
name, which nobody who comes from Lightning would know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ckptrun.fit.module import Module
    from ckptrun.fit.trainer import Trainer


class Callback:
    """Base of all callbacks. Override the hooks you need; names, arguments and meaning are Lightning's.

    ``stage`` is ``fit``, ``validate``, ``test`` or ``predict``. Indices count from 0.
    """

    # -- state -------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Under which name the state stands in a checkpoint (``checkpoint["callbacks"][state_key]``).

        Two callbacks of one class that both have state need different keys; see :meth:`_generate_state_key`.
        """
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """The class name and the arguments that tell two of them apart, in Lightning's format."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep of this callback: tensors, numbers, texts, containers of them."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint is saved, to put something into it."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Called when a checkpoint is loaded, before the weights are."""

    # -- the whole of a fn -------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Called when a fn begins, before anything is restored."""

    def teardown(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        """Called when a fn ends as it should; where a stop or an exception ends it, there is :meth:`on_exception`."""

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when fit begins."""

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when fit ends."""

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        """Called when a fn is ended by an exception."""

    # -- training ----------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when the few batches of validation before training begin."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when they end."""

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when training begins, after the sanity check."""

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when training ends."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a training epoch begins."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a training epoch ends, after its validation."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Called before a training batch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training batch; ``outputs`` is what ``training_step`` returned."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None:
        """Called before ``optimizer.zero_grad()``."""

    def on_before_backward(self, trainer: Trainer, pl_module: Module, loss: Tensor) -> None:
        """Called before ``loss.backward()``."""

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        """Called after ``loss.backward()``."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None:
        """Called before ``optimizer.step()``, with the gradients in place."""

    # -- validation --------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a validation begins, the sanity check's too."""

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a validation ends; its metrics are in ``trainer.callback_metrics``."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when the pass over the validation data begins."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when the pass over the validation data ends; may still log."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a validation batch."""

    # -- test --------------------------------------------------------------------------------------

    def on_test_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a test begins."""

    def on_test_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a test ends."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when the pass over the test data begins."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when the pass over the test data ends; may still log."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a test batch."""

    # -- prediction --------------------------------------------------------------------------------

    def on_predict_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a prediction begins."""

    def on_predict_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when a prediction ends."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when the pass over the data to predict begins."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        """Called when the pass over the data to predict ends."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a batch to predict."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a batch to predict."""
