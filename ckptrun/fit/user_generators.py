"""Which generators did the user make, so that ckptrun cannot restore them? Named where they can be found.

Looked for in what the loader calls: attributes of the dataset, its transforms and ``collate_fn``, and the globals and
closures that these functions use. Where one is not found there, nothing can be said of it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_KINDS: tuple[tuple[type, str], ...] = (
    (torch.Generator, "torch Generator"),
    (np.random.Generator, "numpy Generator"),
    (np.random.RandomState, "numpy RandomState"),
    (random.Random, "random.Random"),
)
_MAX_DEPTH = 4
_MAX_ITEMS = 32  # of a container
_MAX_LOOKED_AT = 2000
_METHODS = ("__getitem__", "__getitems__", "__call__", "forward")


def user_generators(dataset: Any, collate_fn: Any = None, *, known: Collection[int] = ()) -> list[str]:
    """Each generator that is found, as ``dataset.rng (numpy Generator)``, in the order in which it was found.

    Args:
        known: ids of those that are not meant.
    """
    seen = set(known)
    found: list[str] = []
    waiting = [("dataset", dataset, 0), ("collate_fn", collate_fn, 0)]
    while waiting and len(seen) < _MAX_LOOKED_AT:
        name, value, depth = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = next((kind for known, kind in _KINDS if isinstance(value, known)), None)
        if kind is not None:
            if value is not torch.default_generator:
                found.append(f"{name} ({kind})")
        elif depth < _MAX_DEPTH:
            waiting += [(inner_name, inner, depth + 1) for inner_name, inner in _inside(name, value)]
    return found


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor | np.ndarray | str | bytes | int | float | type | torch.dtype):
        return
    if isinstance(value, Mapping):
        for key, inner in list(value.items())[:_MAX_ITEMS]:
            yield f"{name}[{key!r}]", inner
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value[:_MAX_ITEMS]):
            yield f"{name}[{number}]", inner
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from _inside(name, value.args)
        yield from _inside(name, value.keywords)
    elif hasattr(value, "__code__"):
        yield from _used_by(value)
    elif hasattr(value, "__func__"):
        yield f"{name}.__self__", value.__self__
        yield from _used_by(value.__func__)
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, type(torch)):
            for attribute, inner in list(attributes.items()):
                yield f"{name}.{attribute}", inner
            for method in _METHODS:
                function = getattr(type(value), method, None)
                if hasattr(function, "__code__"):
                    yield from _used_by(function)


def _used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Generators among the globals and closure of a function, under the names that it uses."""
    kinds = tuple(kind for kind, _ in _KINDS)
    code, names = function.__code__, getattr(function, "__globals__", {})
    for name in code.co_names:
        if isinstance(names.get(name), kinds):
            yield f"{function.__module__}.{name}", names[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{name} of {function.__qualname__}", cell.cell_contents
        except ValueError:  # not set yet
            continue
