"""What does ``trainer.precision`` change in a step? Autocast, and for ``16-mixed`` a scaler of gradients.

Order, as in Lightning: the loss is scaled before ``on_before_backward`` and the backward pass; gradients are unscaled
before ``on_before_optimizer_step`` and clipping; an update whose gradients are not finite is left out by the scaler,
and counts as a step all the same. The scaler's state is in a checkpoint under Lightning's key, ``MixedPrecision``.

Decision: with manual optimization the scale moves at the first backward pass after a step, and at the end of
``training_step``. Turned down: Lightning's moving it after each optimizer, which unscales gradients that were there
already by another scale than theirs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ckptrun.errors import MisconfigurationException

_NOTHING = contextlib.nullcontext()


class Precision:
    """Precision of one fn; this one is ``32``, where nothing is done, and ``bf16-mixed``.

    Args:
        name: the trainer's option.
        device_type: ``cpu`` or ``cuda``.
    """

    key: str | None = None
    """Under which name the state stands in a checkpoint; None for no state."""

    scales = False

    def __init__(self, name: str, device_type: str) -> None:
        self.name = name
        self._device_type = device_type
        self._dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward pass."""
        return _NOTHING if self._dtype is None else torch.autocast(self._device_type, dtype=self._dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss of which gradients are computed."""
        return loss

    def unscale(self, optimizer: Any) -> None:
        """Bring the optimizer's gradients to their true size, once before its step."""

    def step(self, optimizer: Any, **kwargs: Any) -> Any:
        """The optimizer's step, with gradients as they are."""
        return optimizer.step(**kwargs)

    def steps_are_done(self) -> None:
        """All optimizers that have gradients of one scale have been stepped."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MixedPrecision(Precision):
    """``16-mixed``: float16 under autocast, and gradients scaled so that small ones are not lost."""

    key = "MixedPrecision"
    scales = True

    def __init__(self, name: str, device_type: str) -> None:
        super().__init__(name, device_type)
        self.scaler = torch.amp.GradScaler(device_type)
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        self.steps_are_done()
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Any) -> None:
        if id(optimizer) in self._stepped:
            self.steps_are_done()  # a second step with the same gradients
        if id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            self._unscaled.add(id(optimizer))
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Raises: MisconfigurationException: the optimizer evaluates the model itself."""
        if kwargs.get("closure") is not None:
            raise MisconfigurationException(
                f"{type(optimizer).__name__} with a closure does not go together with precision 16-mixed.",
                hint="Use bf16-mixed or 32, or an optimizer without a closure.",
            )
        kwargs.pop("closure", None)
        self.unscale(optimizer)
        if id(optimizer) not in self._unscaled:
            return None  # no batch gave gradients, so there is nothing to check nor to apply
        self._stepped.add(id(optimizer))
        return self.scaler.step(optimizer, **kwargs)

    def steps_are_done(self) -> None:
        if self._stepped:
            self.scaler.update()
        self._stepped.clear()
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


def _has_gradients(optimizer: Any) -> bool:
    return any(
        parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
    )


def make_precision(name: str, device_type: str) -> Precision:
    """The precision of that (normalized) name."""
    return (MixedPrecision if name == "16-mixed" else Precision)(name, device_type)
