"""Which storages do the tensors of a nested state have, and how large are they?"""

from __future__ import annotations

from typing import Any

import torch


def storage_sizes(state: Any) -> list[int]:
    """Bytes of each storage in a nested state that a file holds: once, whoever shares it."""
    sizes: dict[int, int] = {}
    _note_storages(state, sizes)
    return list(sizes.values())


def size_of(state: Any) -> int:
    """Bytes of all tensors in a nested state as a file holds them."""
    return sum(storage_sizes(state))


def _note_storages(state: Any, sizes: dict[int, int]) -> None:
    if isinstance(state, torch.Tensor):
        if state.layout is torch.strided and state.device.type != "meta":
            storage = state.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    elif isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            _note_storages(value, sizes)
