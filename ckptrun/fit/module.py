"""What does a user write to say what is trained? :class:`Module`, under Lightning's names.

Decision: hooks are plain methods with empty bodies, and the trainer calls only those that a subclass overrides
(found once, before the first step). Turned down: a registry of hooks or decorators, which Lightning users do not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckptrun.errors import MisconfigurationException

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from ckptrun.fit.trainer import Trainer


class HyperParameters(dict[str, Any]):
    """A dict whose keys can be read as attributes, as in ``self.hparams.lr``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"no hyperparameter {name!r}; there are: {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def collect_init_args(frame: Any, owner: object, names: tuple[Any, ...], ignore: Any) -> dict[str, Any]:
    """The arguments of the ``__init__`` that runs in ``frame``, as ``save_hyperparameters`` stores them."""
    ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
    if len(names) == 1 and isinstance(names[0], Mapping):
        return {key: value for key, value in names[0].items() if key not in ignored}
    # The frame's own arguments: with inheritance each __init__ in turn saves those that it has.
    found = inspect.getargvalues(frame)
    arguments = {name: found.locals[name] for name in found.args[1:] if name in found.locals}
    if found.keywords is not None:
        arguments.update(found.locals.get(found.keywords, {}))
    unknown = [name for name in names if name not in arguments]
    if unknown:
        raise MisconfigurationException(
            f"save_hyperparameters({', '.join(map(repr, unknown))}): {type(owner).__name__}.__init__ has no such "
            f"argument; it has {', '.join(arguments) or 'none'}."
        )
    chosen = names or tuple(arguments)
    return {name: arguments[name] for name in chosen if name not in ignored}


class HyperParametersMixin:
    """``save_hyperparameters`` and ``hparams``, shared by Module and DataModule."""

    def save_hyperparameters(self, *args: Any, ignore: Any = None, logger: bool = True) -> None:
        """Keep the arguments of ``__init__`` as ``self.hparams``; they are stored in every checkpoint.

        Args:
            args: names of arguments to keep (all when none is given), or one mapping.
            ignore: a name or names to leave out.
            logger: whether the loggers get them too.
        """
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        self.__dict__["_log_hyperparams"] = logger
        self.hparams.update(collect_init_args(frame.f_back, self, args, ignore))

    @property
    def hparams(self) -> HyperParameters:
        """Hyperparameters; change them only before training."""
        if "_hparams" not in self.__dict__:
            self.__dict__["_hparams"] = HyperParameters()
        return self.__dict__["_hparams"]  # type: ignore[no-any-return]


class DataHooks:
    """How a batch reaches the device; both Module and DataModule may override these."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def move_to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor on ``device``; lists, tuples, named tuples and dicts are walked."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, Mapping):
        moved = {key: move_to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple):
        items = [move_to_device(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [move_to_device(value, device) for value in batch]
    return batch.to(device) if hasattr(batch, "to") else batch


class Module(HyperParametersMixin, DataHooks, nn.Module):
    """A ``torch.nn.Module`` that knows how it is trained.

    Override ``training_step`` and ``configure_optimizers``, and of the rest what is needed. Names, arguments and
    meaning are those of ``LightningModule``; ``docs/differences.md`` lists what differs.
    """

    _trainer: Trainer | None

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_trainer"] = None
        self.__dict__["_automatic_optimization"] = True

    # -- what a user overrides ---------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss (a scalar tensor), a dict with ``loss``, or None to skip the batch."""
        raise MisconfigurationException(
            f"{type(self).__name__} has no training_step.",
            hint="Define training_step(self, batch, batch_idx).",
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch of the validation data."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch of the test data."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for one batch; by default ``self(batch)``."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with its schedulers in any of Lightning's forms; None trains without one."""
        raise MisconfigurationException(
            f"{type(self).__name__} has no configure_optimizers.",
            hint="Define configure_optimizers(self) and return an optimizer, or None.",
        )

    def configure_model(self) -> None:
        """Build what ``__init__`` did not; called once before weights are restored."""

    def configure_callbacks(self) -> Any:
        """Return callbacks that belong to this model."""
        return []

    def prepare_data(self) -> None: ...
    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any: ...
    def val_dataloader(self) -> Any: ...
    def test_dataloader(self) -> Any: ...
    def predict_dataloader(self) -> Any: ...

    # -- hooks -------------------------------------------------------------------------------------

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_sanity_check_start(self) -> None: ...
    def on_sanity_check_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, loss: Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    # -- how the update is made; override to change it -------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients before the backward pass that begins an accumulation window."""
        optimizer.zero_grad()

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Make one update; the closure runs forward, zero_grad and backward of the step."""
        optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients just before the update."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the total norm (``norm``) or each value (``value``); nothing where the value is None."""
        if gradient_clip_val is None:
            return
        trainer = self.__dict__["_trainer"]
        if trainer is not None:
            trainer.precision_plugin.unscale(getattr(optimizer, "optimizer", optimizer))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance one scheduler; ``metric`` is the monitored value for a plateau scheduler, else None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- what a user calls ---------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module.

        Raises:
            RuntimeError: the module is not attached to one.
        """
        trainer = self.__dict__["_trainer"]
        if trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer.")
        return trainer  # type: ignore[no-any-return]

    @property
    def automatic_optimization(self) -> bool:
        """Whether the trainer makes the update; set to False to make it in ``training_step`` yourself."""
        return bool(self.__dict__.get("_automatic_optimization", True))

    @automatic_optimization.setter
    def automatic_optimization(self, value: bool) -> None:
        self.__dict__["_automatic_optimization"] = value

    @property
    def current_epoch(self) -> int:
        """Epochs completed so far in this run, which is the index of the current one."""
        trainer = self.__dict__["_trainer"]
        return trainer.current_epoch if trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps completed so far in this run."""
        trainer = self.__dict__["_trainer"]
        return trainer.global_step if trainer is not None else 0

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self.trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self.trainer.loggers

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or a list of several, for manual optimization. Each ``step()`` counts as a step."""
        found = self.trainer.counted_optimizers() if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """The LR scheduler, a list of several, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call this instead of ``loss.backward()`` with manual optimization."""
        trainer = self.trainer
        trainer.strategy.backward(trainer.precision_plugin.scale(loss), self, *args, **kwargs)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number or scalar tensor under ``name``.

        Args:
            prog_bar: show it on the progress bar.
            logger: send it to the loggers.
            on_step: at this step; default True in training, else False.
            on_epoch: reduced over the epoch; default False in training, else True.
            reduce_fx: ``mean`` (weighted by batch size), ``sum``, ``min``, ``max`` or a function of a 1-d tensor.
            sync_dist: reduce over ranks too.
            batch_size: weight in the mean; taken from the batch when not given.

        Raises:
            MisconfigurationException: the value is not one number, or ``reduce_fx`` is not known.
            RuntimeError: the module is not attached to a Trainer.
        """
        trainer = self.__dict__["_trainer"]
        if trainer is None:
            raise RuntimeError("self.log() needs a Trainer; this module is not attached to one.")
        trainer.logs.log(
            name,
            value,
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            sync_dist,
            add_dataloader_idx,
            batch_size,
        )

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """``log`` for every entry."""
        for name, value in dictionary.items():
            self.log(name, value, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0 only."""
        if self.trainer.is_global_zero:
            print(*args, **kwargs)

    def freeze(self) -> None:
        """Turn gradients off for every parameter and go to eval mode."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        self.eval()

    def unfreeze(self) -> None:
        """Turn gradients on for every parameter and go to training mode."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        self.train()
