"""Is this value one that the option takes, and which?

Decision: a few dozen lines that know the handful of types the flat sections use, so that reading a config
costs milliseconds and every message says place, found and expected. Turned down: jsonargparse or pydantic
for these too, which take longer to import than `ckptrun resolve` may take in all, and know nothing of lines
in files.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from ckptrun.config.tree import Node, plain

_DURATION_UNITS = {"weeks": 604800, "days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_DURATION = re.compile(r"(?:(\d+)[-:])?(\d+):(\d\d):(\d\d)$")
DURATION_FORMS = "seconds, 'HH:MM:SS', 'DD:HH:MM:SS', 'DD-HH:MM:SS' or a mapping such as {hours: 4}"


class Mismatch(Exception):  # noqa: N818 - becomes a ConfigError once key and place are known
    """The value is not one that the option takes; ``expected`` says what is."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def number(text: str) -> int | float | None:
    """Return the number that a text such as ``1_000``, ``1e3`` or ``0.5`` writes, or None."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return None


def describe(annotation: Any) -> str:
    """Return what a type takes, for people: ``true or false``, ``a whole number or null``."""
    origin = get_origin(annotation)
    if origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(annotation))
    if origin is list:
        return f"a list of {describe(get_args(annotation)[0])}"
    if origin is dict:
        return f"a mapping to {describe(get_args(annotation)[1])}"
    names = {
        bool: "true or false",
        types.NoneType: "null",
        str: "text",
        float: "a number",
        int: "a whole number",
    }
    names |= {list: "a list", dict: "a mapping"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def takes_none(annotation: Any) -> bool:
    """Return whether null is a value of its own for this type."""
    return annotation is types.NoneType or types.NoneType in get_args(annotation)


def knows(annotation: Any) -> bool:
    """Return whether :func:`coerce` reads this type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return True
    if origin in (Union, types.UnionType, list):
        return all(knows(part) for part in arguments)
    if origin is dict:
        return arguments[0] is str and knows(arguments[1])
    return isinstance(annotation, type) and annotation in _CONVERTERS


def show(node: Node) -> str:
    """Return a found value for a message, with its kind where the look of it does not tell."""
    value = plain(node)
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)


def coerce(node: Node, annotation: Any) -> Any:
    """Return the node's value as ``annotation`` has it.

    Numbers may be written in any way: ``1e3`` and ``"1000"`` are ints too, where nothing is lost. Text is
    taken as it was written, so that a name ``007`` stays that.

    Raises:
        Mismatch: the value is not of that type.
    """
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _coerce_union(node, get_args(annotation), annotation)
    if origin is Literal:
        for choice in get_args(annotation):
            same_kind = isinstance(node.value, bool) == isinstance(choice, bool)
            if (node.value == choice and same_kind) or (isinstance(choice, str) and node.text == choice):
                return choice
        raise Mismatch(describe(annotation))
    if origin is list:
        if not isinstance(node.value, list):
            raise Mismatch(describe(annotation))
        return [coerce(item, get_args(annotation)[0]) for item in node.value]
    if origin is dict:
        if not isinstance(node.value, dict):
            raise Mismatch(describe(annotation))
        return {str(key): coerce(item, get_args(annotation)[1]) for key, item in node.value.items()}
    convert = _CONVERTERS.get(annotation)
    if convert is None:
        raise TypeError(f"no option may have the type {annotation}")
    return convert(node)


def _coerce_union(node: Node, members: tuple[Any, ...], annotation: Any) -> Any:
    exact = [member for member in members if type(node.value) is member]
    for member in (*exact, *(member for member in members if member not in exact)):
        try:
            return coerce(node, member)
        except Mismatch:
            continue
    raise Mismatch(describe(annotation))


def _none(node: Node) -> None:
    if node.value is not None:
        raise Mismatch("null")


def _bool(node: Node) -> bool:
    if isinstance(node.value, bool):
        return node.value
    if isinstance(node.value, str) and node.value.lower() in ("true", "false"):
        return node.value.lower() == "true"
    raise Mismatch(describe(bool))


def _float(node: Node) -> float:
    value = number(node.value) if isinstance(node.value, str) else node.value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Mismatch(describe(float))
    return float(value)


def _int(node: Node) -> int:
    value = number(node.value) if isinstance(node.value, str) else node.value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Mismatch(describe(int))
    if isinstance(value, float) and not value.is_integer():
        raise Mismatch(describe(int))
    return int(value)


def _str(node: Node) -> str:
    if isinstance(node.value, str):
        return node.value
    if node.value is None or isinstance(node.value, (dict, list)):
        raise Mismatch(describe(str))
    return node.text if node.text is not None else str(node.value)


def _list(node: Node) -> Any:
    if not isinstance(node.value, list):
        raise Mismatch(describe(list))
    return plain(node)


def _dict(node: Node) -> Any:
    if not isinstance(node.value, dict):
        raise Mismatch(describe(dict))
    return plain(node)


_CONVERTERS: dict[Any, Callable[[Node], Any]] = {
    types.NoneType: _none,
    bool: _bool,
    float: _float,
    int: _int,
    str: _str,
    list: _list,
    dict: _dict,
}


def duration_s(node: Node) -> float:
    """Return a length of time in seconds.

    Raises:
        Mismatch: it is written in none of the forms of ``DURATION_FORMS``, or is negative.
    """
    value = plain(node)
    if isinstance(value, dict):
        total = 0.0
        for unit, amount in value.items():
            if (
                unit not in _DURATION_UNITS
                or isinstance(amount, bool)
                or not isinstance(amount, (int, float))
            ):
                raise Mismatch(f"a mapping of {', '.join(_DURATION_UNITS)} to numbers")
            total += _DURATION_UNITS[unit] * amount
        return total
    if isinstance(value, str) and (match := _DURATION.match(value.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(86400 * days + 3600 * hours + 60 * minutes + seconds)
    try:
        seconds_given = _float(node)
    except Mismatch:
        raise Mismatch(DURATION_FORMS) from None
    if not 0 <= seconds_given < float("inf"):
        raise Mismatch(DURATION_FORMS)
    return seconds_given
