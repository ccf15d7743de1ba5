"""Does an iterable dataset keep its own position, and can it be had? torchdata's protocol, on the dataset itself.

``state_dict()`` and ``load_state_dict()`` of an ``IterableDataset``: after the second, ``iter(dataset)`` goes on where
the first was taken. Where loader workers run, each has a copy of the dataset that nobody here can ask; then the data
is read again up to the position, and that is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


def has_state(value: Any) -> bool:
    """Whether it follows the protocol."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def state_is_in_workers(loader: Any) -> bool:
    """Whether the dataset has a state that is out of reach."""
    return (
        isinstance(loader, DataLoader)
        and isinstance(loader.dataset, IterableDataset)
        and loader.num_workers > 0
        and has_state(loader.dataset)
    )


def state_can_be_had(loader: Any) -> bool:
    """Whether the dataset of a plain loader keeps its position in this process."""
    return (
        type(loader) is DataLoader
        and isinstance(loader.dataset, IterableDataset)
        and loader.num_workers == 0
        and has_state(loader.dataset)
    )


class WatchedDataset(IterableDataset[Any]):
    """The user's dataset, and whether its last pass came to its end."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.exhausted = False

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.dataset)
        self.exhausted = False
        return self._watched(iterator)

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self.exhausted = True

    def __len__(self) -> int:
        return len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "exhausted": self.exhausted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self.exhausted = state["exhausted"]
