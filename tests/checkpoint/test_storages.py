"""What a file will hold of a state's tensors."""

from __future__ import annotations

import torch

from ckptrun.checkpoint.storages import size_of


def test_size_of_counts_tensors_wherever_they_are() -> None:
    assert size_of({"a": [torch.zeros(3), (torch.zeros(2, dtype=torch.int8),)], "b": 5}) == 14


def test_what_shares_a_storage_is_counted_once() -> None:
    """As a file holds it: tied weights, views of a part."""
    weight = torch.zeros(10, 10)
    assert size_of({"a": weight, "b": [weight, weight[:3]], "c": torch.zeros(2)}) == 400 + 8
