"""Where does a user find the loggers? Here: ``ckptrun.loggers.CSVLogger`` and its siblings.

Looked up when first used, as the package's own names are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptrun.fit.loggers.csv import CSVLogger
    from ckptrun.fit.loggers.logger import Logger
    from ckptrun.fit.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

_HOMES = {
    "CSVLogger": "ckptrun.fit.loggers.csv",
    "Logger": "ckptrun.fit.loggers.logger",
    "TensorBoardLogger": "ckptrun.fit.loggers.tensorboard",
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
