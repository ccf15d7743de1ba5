"""The random state of a process is put back in every generator."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from fit_helpers import disturb_random

from ckptrun.checkpoint.safe_state import decode, encode
from ckptrun.fit.random_state import capture_random_state, restore_random_state, seed_everything


def draw() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(1)),
        float(torch.randn(1)),
    ]  # fmt: skip


def test_what_was_captured_comes_back_through_a_file() -> None:
    disturb_random()
    random.gauss(0, 1)  # leaves a second number behind, as numpy's does
    np.random.randn()
    state = capture_random_state()
    expected = draw()
    file = io.BytesIO()
    torch.save(encode(state, "random"), file)
    file.seek(0)
    draw()
    restore_random_state(decode(torch.load(file, weights_only=True)))
    assert draw() == expected


def test_a_state_of_before_is_read() -> None:
    """Python's numbers were a tuple once."""
    state = capture_random_state()
    version, numbers, gauss = state["python"]
    expected = draw()
    restore_random_state({**state, "python": (version, tuple(numbers.tolist()), gauss)})
    assert draw() == expected


def test_seed_everything_seeds_all() -> None:
    seed_everything(2**40 + 1)
    first = draw()
    disturb_random()
    seed_everything(2**40 + 1)
    assert draw() == first


def test_a_state_that_lacks_a_generator_is_an_error() -> None:
    state = capture_random_state()
    del state["numpy"]
    with pytest.raises(KeyError):
        restore_random_state(state)
