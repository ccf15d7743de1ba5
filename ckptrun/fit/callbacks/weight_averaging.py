"""How are averaged weights kept beside those that are trained? :class:`WeightAveraging`, :class:`EMAWeightAveraging`.

Names, arguments and keys are Lightning's: a checkpoint has the averaged weights as ``state_dict``, so that evaluation
uses them, and those that are trained as ``current_model_state``; ``averaging_state`` says how many were averaged and
when last. All three are of one moment, whenever the save comes: also while the averaged weights are in the model for a
validation, where those that are trained are known to be here.

An update that a failure kept from being made (another callback raised first) is made up for before the next step, so
that the average is the same after a resume.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.callback import Callback
from ckptrun.strategies.compiled import for_checkpoint

if TYPE_CHECKING:
    from ckptrun.fit.module import Module
    from ckptrun.fit.trainer import Trainer


class WeightAveraging(Callback):
    """Average the weights in training; validate with the average, and leave it in the model at the end.

    Override :meth:`should_update` to say when the average is updated; here it is after every optimizer step.

    Args:
        device: where the average is kept; None: where the model is.
        use_buffers: average the buffers too; otherwise the average has those of the model.
        avg_fn: as of ``torch.optim.swa_utils.AveragedModel``; without it and the next it is the mean.
        multi_avg_fn: likewise.
    """

    # By name and not as **kwargs, so that a name that is mistyped in a config is found before anything is built.
    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: Any = None,
        multi_avg_fn: Any = None,
    ) -> None:
        self._device = device
        self._use_buffers = use_buffers
        self._avg_fn = avg_fn
        self._multi_avg_fn = multi_avg_fn
        self._average: AveragedModel | None = None
        self._swapped = False
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update now.

        Args:
            step_idx: index from 0 of the optimizer step that was just made; None at the end of an epoch.
            epoch_idx: index from 0 of the epoch that just ended; None after a step.
        """
        return step_idx is not None

    # -- when ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        self._average = None
        self._swapped = False
        self._latest_update_step, self._latest_update_epoch = 0, -1

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._averaged(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        self._after_step(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._after_step(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._after_step(trainer, pl_module)
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._averaged(pl_module).update_parameters(pl_module)
            self._latest_update_epoch = epoch

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._after_step(trainer, pl_module)
        self._share_buffers(trainer)
        with torch.no_grad():
            for current, averaged in self._pairs(pl_module):
                current.copy_(averaged)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: Module) -> None:
        if self._average is not None and not self._swapped:
            self._after_step(trainer, pl_module)
            self._share_buffers(trainer)
            self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if self._swapped:
            self._swap(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if self._swapped:
            self._swap(pl_module)

    def _after_step(self, trainer: Trainer, pl_module: Module) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._averaged(pl_module).update_parameters(pl_module)
            self._latest_update_step = step

    # -- the average -----------------------------------------------------------------------------------

    def _averaged(self, pl_module: nn.Module) -> AveragedModel:
        """The average, made from the model's weights when first needed."""
        if self._average is None:
            tensors = _Tensors(pl_module)
            self._average = AveragedModel(
                tensors,
                device=self._device,  # type: ignore[arg-type]
                avg_fn=self._avg_fn,
                multi_avg_fn=self._multi_avg_fn,
                use_buffers=self._use_buffers,
            )
            self._average.requires_grad_(False)
        return self._average

    def _pairs(self, pl_module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of the model with the one that is kept here."""
        return zip(_all(pl_module), _all(self._averaged(pl_module).module), strict=True)

    def _swap(self, pl_module: nn.Module) -> None:
        with torch.no_grad():
            for current, kept in self._pairs(pl_module):
                held = kept.clone()
                kept.copy_(current)
                current.copy_(held)
        self._swapped = not self._swapped

    def _share_buffers(self, trainer: Trainer) -> None:
        """With several ranks the average has rank 0's buffers, which are those of a checkpoint."""
        if trainer.world_size == 1 or self._average is None:
            return
        own = list(self._average.module.buffers())
        shared = trainer.strategy.broadcast([buffer.cpu() for buffer in own])
        with torch.no_grad():
            for buffer, value in zip(own, shared, strict=True):
                buffer.copy_(value)

    def unswapped_parameters(self) -> list[Tensor] | None:
        """The parameters that are trained, where the model holds the average now; else None."""
        if not self._swapped or self._average is None:
            return None
        return list(self._average.module.parameters())

    # -- checkpoint ------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        kept = self._kept_by_name(pl_module)
        current = checkpoint["state_dict"]
        others = {name: kept.get(name, value) for name, value in current.items()}
        averaged, trained = (_state(pl_module), others) if self._swapped else (others, current)
        checkpoint["state_dict"] = averaged
        checkpoint["current_model_state"] = trained
        checkpoint["averaging_state"] = {
            "n_averaged": self._averaged(pl_module).n_averaged.clone(),
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return  # evaluation uses the average, which stands as state_dict
        trained, state = checkpoint.pop("current_model_state", None), checkpoint.get("averaging_state")
        if trained is None or state is None:
            trainer.context.not_exact(
                f"The checkpoint has no averaged weights: {type(self).__name__} begins with those it has.",
                tell=trainer.is_global_zero,
            )
            self._latest_update_step = int(checkpoint.get("global_step", 0))
            return
        averaged, checkpoint["state_dict"] = checkpoint["state_dict"], trained
        average = self._averaged(pl_module)
        with torch.no_grad():
            for name, kept in self._kept_by_name(pl_module).items():
                # What does not fit is said where the weights are loaded.
                if name in averaged and averaged[name].shape == kept.shape:
                    kept.copy_(averaged[name])
            average.n_averaged.fill_(int(state["n_averaged"]))
        self._latest_update_step = int(state.get("latest_update_step", checkpoint.get("global_step", 0)))
        self._latest_update_epoch = int(state.get("latest_update_epoch", -1))

    def _kept_by_name(self, pl_module: nn.Module) -> dict[str, Tensor]:
        """What is kept here, by its name in a checkpoint."""
        kept = {id(current): other for current, other in self._pairs(pl_module)}
        return {name: kept[id(value)] for name, value in _state(pl_module).items() if id(value) in kept}


class EMAWeightAveraging(WeightAveraging):
    """Exponential moving average of the weights.

    Args:
        device: where the average is kept; None: where the model is.
        use_buffers: average the buffers too.
        decay: the share of the average that stays at an update, between 0 and 1.
        update_every_n_steps: update after every so many optimizer steps; 0 for never after a step.
        update_starting_at_step: index of the first step after which it is updated; None: the first.
        update_starting_at_epoch: index of the first epoch after which it is updated; None: never after an epoch.

    Raises:
        MisconfigurationException: ``decay`` is not between 0 and 1.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise MisconfigurationException(
                f"EMAWeightAveraging(decay={decay}): expected a number between 0 and 1."
            )
        average: Any = get_ema_multi_avg_fn
        super().__init__(device, use_buffers, multi_avg_fn=average(decay))
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            begun = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return begun and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        start = self.update_starting_at_epoch
        return epoch_idx is not None and start is not None and epoch_idx >= start


class _Tensors(nn.Module):
    """A module's parameters and buffers and nothing else, for ``AveragedModel`` copies what it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for number, parameter in enumerate(module.parameters()):
            self.register_parameter(f"parameter{number}", parameter)
        for number, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer{number}", buffer)


def _all(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _state(module: nn.Module) -> dict[str, Any]:
    """The module's own tensors by their names in a checkpoint."""
    return for_checkpoint(module, module.state_dict(keep_vars=True))
