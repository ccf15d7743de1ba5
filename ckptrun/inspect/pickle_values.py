"""What stands for an object that a pickle describes?

Decision: containers, strings and numbers stand for themselves; a class or function is its name
(:class:`Global`); whatever a pickle would call is a record of the call (:class:`Instance`). All are
compared by identity, so that nothing which a file describes is ever hashed or compared at a cost that the
file chooses. Turned down: stand-in classes made per name, which look like the real thing and invite calling
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_PLAIN_KEYS = frozenset({str, bytes, bool, float, type(None)})
SCALARS = frozenset({str, bytes, bool, float, int, type(None)})


class MalformedPickleError(ValueError):
    """The bytes are no pickle, or one that ends too soon, or one that breaks a limit."""


@dataclass(slots=True, eq=False)
class Global:
    """A class or function by its name; the same name is the same object within a file."""

    module: str
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Instance:
    """What calling ``cls(*args, **kwargs)`` would give, with all that the pickle puts into it afterwards."""

    cls: Any
    args: Any = ()
    kwargs: Any = None
    state: Any = None
    items: dict[Any, Any] | None = None
    elements: list[Any] | None = None


class Ordered(dict[Any, Any]):
    """An OrderedDict; ``state`` is what was set on it (``_metadata`` of a state dict)."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None


@dataclass(slots=True, eq=False)
class Oversized:
    """A string, bytes or number that was passed over because of its size."""

    kind: str
    size_bytes: int


@dataclass(slots=True, eq=False)
class OpaqueKey:
    """A dict's key that is no plain value."""

    value: Any


def as_key(value: Any) -> Any:
    """A value as a dict's key; what could be slow or impossible to hash is wrapped."""
    kind = type(value)
    if _is_plain_key(value) or kind is Global or kind is Instance:
        return value
    if kind is tuple and len(value) <= 8 and all(map(_is_plain_key, value)):
        return value
    return OpaqueKey(value)


def _is_plain_key(value: Any) -> bool:
    # Larger numbers can be chosen to have all the same hash.
    return type(value) in _PLAIN_KEYS or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def record_call(function: Any, args: tuple[Any, ...]) -> Any:
    """What a call gives where nothing is known about the function."""
    return Instance(function, args)
