"""Where does a user find the callbacks? Here: ``ckptrun.callbacks.ModelCheckpoint`` and its siblings.

Looked up when first used, as the package's own names are, so that reading this module's names needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptrun.fit.callback import Callback
    from ckptrun.fit.callbacks.early_stopping import EarlyStopping
    from ckptrun.fit.callbacks.learning_rate_monitor import LearningRateMonitor
    from ckptrun.fit.callbacks.model_checkpoint import ModelCheckpoint
    from ckptrun.fit.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from ckptrun.fit.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "Callback",
    "EMAWeightAveraging",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "OnExceptionCheckpoint",
    "WeightAveraging",
]

_HOMES = {
    "Callback": "ckptrun.fit.callback",
    "EMAWeightAveraging": "ckptrun.fit.callbacks.weight_averaging",
    "EarlyStopping": "ckptrun.fit.callbacks.early_stopping",
    "LearningRateMonitor": "ckptrun.fit.callbacks.learning_rate_monitor",
    "ModelCheckpoint": "ckptrun.fit.callbacks.model_checkpoint",
    "OnExceptionCheckpoint": "ckptrun.fit.callbacks.on_exception_checkpoint",
    "WeightAveraging": "ckptrun.fit.callbacks.weight_averaging",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
