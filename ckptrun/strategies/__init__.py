"""How does a model meet the hardware? One module a strategy, chosen by name."""

from __future__ import annotations

from typing import Any

from ckptrun.errors import MisconfigurationException
from ckptrun.strategies.strategy import Strategy

AVAILABLE = ("single", "ddp", "deepspeed")


def strategy_from_name(name: str | Strategy, **options: Any) -> Strategy:
    """The strategy of that name.

    Raises:
        MisconfigurationException: there is none.
    """
    if isinstance(name, Strategy):
        return name
    if name in ("single", "auto"):
        from ckptrun.strategies.single import SingleStrategy

        return SingleStrategy(**options)
    if name == "ddp":
        from ckptrun.strategies.ddp import DDPStrategy

        return DDPStrategy(**options)
    if name == "deepspeed":
        from ckptrun.strategies.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(**options)
    raise MisconfigurationException(
        f"strategy is {name!r}; available in this version: {', '.join(AVAILABLE)}."
    )
