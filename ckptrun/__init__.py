"""Start, stop and resume PyTorch training from the shell, exactly.

The names below are looked up when they are first used, so that ``import ckptrun``, and with it every command
that does not train, never pays for torch. Turned down: importing them here, which made ``ckptrun --help``
wait more than a second for a framework that it does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptrun._version import __version__

if TYPE_CHECKING:
    from ckptrun.errors import MisconfigurationException
    from ckptrun.fit.callback import Callback
    from ckptrun.fit.datamodule import DataModule
    from ckptrun.fit.module import Module
    from ckptrun.stop import StopTraining
    from ckptrun.trainer import Trainer

__all__ = [
    "Callback",
    "DataModule",
    "MisconfigurationException",
    "Module",
    "StopTraining",
    "Trainer",
    "__version__",
]

_HOMES = {
    "Callback": "ckptrun.fit.callback",
    "DataModule": "ckptrun.fit.datamodule",
    "MisconfigurationException": "ckptrun.errors",
    "Module": "ckptrun.fit.module",
    "StopTraining": "ckptrun.stop",
    "Trainer": "ckptrun.trainer",
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
