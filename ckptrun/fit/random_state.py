"""What is the random state of this rank, and how is it put back?

Python's, NumPy's and torch's global generators, and each CUDA device's. Generators that a user made are out of reach.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_random_state() -> RandomState:
    """The state of every global generator, as plain values and tensors that ``weights_only=True`` reads."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: RandomState = {
        # A tensor, for a tuple of 625 numbers costs each save a millisecond.
        "python": (version, torch.tensor(internal), gauss),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: RandomState) -> None:
    """Put back what :func:`capture_random_state` gave.

    Raises:
        KeyError: a generator's state is missing.
    """
    version, internal, gauss = state["python"]
    numbers = internal.tolist() if isinstance(internal, torch.Tensor) else internal  # a tuple of old
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        # A run that moved to fewer devices keeps the states of those it still has.
        for index, value in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(value, index)
