"""Which tensors hang where in the objects of a file?

Decision: one walk without recursion that visits every container once, so that neither deep nesting, nor a
cycle, nor a container that holds another one twice on sixty levels costs more than the file's own objects.
Turned down: a walk along every path, which gives shared containers all their names and takes forever on a
crafted file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptrun.inspect.pickle_values import SCALARS, Global, Instance, MalformedPickleError, Ordered
from ckptrun.inspect.torch_objects import Storage, Tensor

MAX_VALUES = 10_000_000  # looked at in all walks over a file
MAX_LEAVES = 2_000_000  # tensors found in all of them
MAX_DEPTH = 500  # containers inside each other; what lies deeper is counted, not walked
_MAX_NAME = 250  # characters
_CONTAINERS = frozenset({dict, Ordered, list, tuple, Instance})
_LEAVES = frozenset({Tensor, Storage})
_TRANSPARENT = frozenset({"_parameters", "_buffers", "_modules"})  # how a module keeps its parts


class Walker:
    """Walks over the objects of one file; ``num_too_deep`` counts containers that lay too deep."""

    def __init__(self) -> None:
        self.num_too_deep = 0
        self._values_left = MAX_VALUES
        self._leaves_left = MAX_LEAVES

    def leaves(self, value: Any, name: str = "") -> Iterator[tuple[str, Tensor | Storage]]:
        """Tensors and bare storages below a value with their names, in the order of the file.

        Raises:
            MalformedPickleError: there is more than is looked at.
        """
        seen = {id(value)}
        waiting: list[tuple[str, Any, int]] = [(name, value, 0)]
        while waiting:
            name, value, depth = waiting.pop()
            if type(value) in _LEAVES:
                yield name, value
            elif depth > MAX_DEPTH:
                self.num_too_deep += 1
            else:
                waiting.extend(reversed(self._worth_a_look(name, value, depth + 1, seen)))

    def _worth_a_look(self, name: str, value: Any, depth: int, seen: set[int]) -> list[tuple[str, Any, int]]:
        """The children that are leaves, or containers not seen before."""
        found = []
        for key, child in _children(value):
            self._values_left -= 1
            if self._values_left < 0 or self._leaves_left < 0:
                raise MalformedPickleError("it has more objects than are looked at")
            kind = type(child)
            if kind in _LEAVES:
                self._leaves_left -= 1
            elif kind in _CONTAINERS and id(child) not in seen:
                seen.add(id(child))
            else:
                continue
            found.append((_join(name, key), child, depth))
        return found


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    kind = type(value)
    if kind is dict or kind is Ordered:
        yield from _pairs(value)
    elif kind is list or kind is tuple:
        yield from enumerate(value)
    elif kind is Instance:
        yield from _children_of_instance(value)


def _pairs(value: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """A dict's items; those of a dict that ckptrun stored as pairs because of its keys."""
    pairs = value.get("items")
    if value.get("__ckptrun__") not in ("dict", "OrderedDict") or type(pairs) is not list:
        yield from value.items()
    elif all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
        yield from pairs


def _children_of_instance(value: Instance) -> Iterator[tuple[Any, Any]]:
    if type(value.args) is tuple:
        yield from enumerate(value.args)
    yield from (value.items or {}).items()
    yield from enumerate(value.elements or ())
    # A state is the attributes, or a pair of them and the slots.
    parts = value.state if type(value.state) is tuple else (value.state,)
    for index, part in enumerate(parts):
        if type(part) is not dict and type(part) is not Ordered:
            yield index, part
            continue
        is_module = "_parameters" in part and "_modules" in part
        for key, child in part.items():
            if is_module and key in _TRANSPARENT and isinstance(child, dict):
                yield from child.items()
            else:
                yield key, child


def _join(name: str, key: Any) -> str:
    part = key_text(key)
    joined = f"{name}.{part}" if name else part
    return joined if len(joined) <= _MAX_NAME else joined[: _MAX_NAME - 1] + "…"


def key_text(key: Any) -> str:
    """A dict's key as a part of a name."""
    kind = type(key)
    if kind is str:
        return str(key)
    if kind in SCALARS or kind is tuple:
        return str(key)
    if kind is Global:
        return str(key.full_name)
    return "<object>"
