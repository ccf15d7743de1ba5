"""How does a model meet the hardware when there is one process? As it is, on one device."""

from __future__ import annotations

from ckptrun.strategies.strategy import Strategy


class SingleStrategy(Strategy):
    """One process, one device."""

    name = "single"
