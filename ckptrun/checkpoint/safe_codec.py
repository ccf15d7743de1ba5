"""What does it take to turn one type into plain values and back, and what is said where nothing does?

The vocabulary that :mod:`safe_state` (walks through containers), :mod:`safe_values` (the table) and
:mod:`safe_classes` (classes of the user) share.

Decision: errors collect the way to the value while they pass through the containers, innermost first. Turned
down: carrying the place along on the way down, which costs a string for each of 10,000 tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

Fields = dict[str, Any]


class Refused(Exception):  # noqa: N818 - never leaves this package
    """A value that cannot be encoded; ``steps`` lead to it, innermost first."""

    def __init__(self, why: str, hint: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint
        self.steps: list[str] = []


class Walk(Protocol):
    """What goes on into the values inside: the encoder in one direction, the decoder in the other."""

    def value(self, obj: Any, /) -> Any: ...

    def items(self, items: Iterable[Any], /) -> list[Any]: ...

    def pairs(self, pairs: Any, /) -> list[tuple[Any, Any]]:
        """Encoding takes a mapping, decoding the list of pairs that this made of it."""

    def attributes(self, attributes: Mapping[str, Any], /) -> Any: ...


class Codec(NamedTuple):
    """Both directions for one type."""

    tag: str
    kind: type
    encode: Callable[[Any, Walk], Fields]
    decode: Callable[[Fields, Walk], Any]
    subclasses: bool = False  # True: for subclasses of ``kind`` too


def refusal(obj: Any) -> Refused:
    """Why ``obj`` cannot be saved, and what to do instead."""
    kind = type(obj)
    for base, hint in _HINTS:
        if isinstance(obj, base):
            return Refused(f"its type is {named(kind)}", hint)
    for plain in (bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset):
        if isinstance(obj, plain):
            return Refused(
                f"its type is {named(kind)}, a subclass of {plain.__name__}",
                f"Convert it: {plain.__name__}(value).",
            )
    return Refused(
        f"its type is {named(kind)}",
        "Save numbers, strings, tensors, arrays, paths, enums, dates, or lists, dicts, dataclasses of them.",
    )


def named(kind: type) -> str:
    """A type as a user writes it."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_HINTS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (
        torch.Tensor,
        "Save a plain tensor: value.as_subclass(torch.Tensor), or full_tensor() of a distributed one.",
    ),
    ((torch.nn.Module, torch.optim.Optimizer), "Save its state_dict()."),
    (torch.Generator, "Save its get_state()."),
    (np.random.Generator, "Save its bit_generator.state."),
    (np.random.RandomState, "Save its get_state()."),
    (np.ndarray, "Save a plain array: numpy.array(value, subok=False)."),
    (
        (types.FunctionType, types.BuiltinFunctionType, types.MethodType),
        "Save its name or the numbers that it is made from, and build it again in on_load_checkpoint.",
    ),
    (type, "Save its name, and look the class up again in on_load_checkpoint."),
)
