"""Reading a value by its type."""

from __future__ import annotations

from typing import Any, Literal, Optional

import pytest

from ckptrun.config.coerce import Mismatch, coerce, describe, duration_s, knows, number
from ckptrun.config.tree import DEFAULT, Source, from_plain
from ckptrun.config.yaml_format import parse_value

SOURCE = Source("override", text="x")


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("1e3", int, 1000),
        ("'1e3'", int, 1000),
        ("'12'", int, 12),
        ("1_000", int, 1000),
        ("010", int, 10),
        ("1.5", int, Mismatch),
        (".inf", int, Mismatch),
        ("true", int, Mismatch),
        ("null", int, Mismatch),
        ("3", float, 3.0),
        ("'1e-3'", float, 1e-3),
        ("true", float, Mismatch),
        ("x", float, Mismatch),
        ("on", bool, True),
        ("'False'", bool, False),
        ("1", bool, Mismatch),
        ("1e3", str, "1e3"),
        ("on", str, "on"),
        ("[1]", str, Mismatch),
        ("null", str, Mismatch),
        ("null", Optional[int], None),  # noqa: UP045 - users write it so too
        ("3", int | None, 3),
        ("x", int | None, Mismatch),
        ("1.0", int | float, 1.0),
        ("1", int | float, 1),
        ("true", bool | int, True),
        ("2", bool | int, 2),
        ("warn", bool | Literal["warn"], "warn"),
        ("32", Literal["32", "bf16-mixed"], "32"),
        ("3", Literal[3], 3),
        ("true", Literal[1], Mismatch),
        ("auto", int | Literal["auto"], "auto"),
        ("5", str | int, 5),
        ("'5'", int | str, "5"),
        ("[1e1, 2]", list[int], [10, 2]),
        ("[a]", list[int], Mismatch),
        ("3", list[int], Mismatch),
        ("{a: 1}", dict[str, float], {"a": 1.0}),
        ("{a: x}", dict[str, float], Mismatch),
        ("{a: {b: 1}}", dict, {"a": {"b": 1}}),
        ("[1, {a: 2}]", list, [1, {"a": 2}]),
        ("1", dict, Mismatch),
        ("1", list, Mismatch),
    ],
)
def test_coerce(text: str, annotation: Any, value: Any) -> None:
    node = parse_value(text, SOURCE)
    if value is Mismatch:
        with pytest.raises(Mismatch):
            coerce(node, annotation)
        return
    found = coerce(node, annotation)
    assert found == value
    assert type(found) is type(value)
    assert knows(annotation)


@pytest.mark.parametrize("annotation", [tuple[int, ...], Any, object, bytes, list[bytes], dict[int, int]])
def test_what_is_left_to_others(annotation: Any) -> None:
    assert not knows(annotation)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "a whole number"),
        (bool | Literal["warn"], "true or false or warn"),
        (Literal["norm", "value"], "one of norm, value"),
        (float | None, "a number or null"),
        (list[int], "a list of a whole number"),
        (dict[str, float], "a mapping to a number"),
    ],
)
def test_describe(annotation: Any, text: str) -> None:
    assert describe(annotation) == text


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("90", 90.0),
        ("00:12:00:00", 43200.0),
        ("01:00:00:00", 86400.0),
        ("1-00:00:01", 86401.0),
        ("4:00:00", 14400.0),
        ({"hours": 4, "minutes": 30}, 16200.0),
        ({"days": 0.5}, 43200.0),
        (0, 0.0),
        (-1, Mismatch),
        ("4h", Mismatch),
        ("5:00", Mismatch),  # minutes, or hours?
        (True, Mismatch),
        ([1], Mismatch),
        ({"hours": "x"}, Mismatch),
        (float("inf"), Mismatch),
    ],
)
def test_duration(value: Any, seconds: Any) -> None:
    node = from_plain(value, DEFAULT)
    if seconds is Mismatch:
        with pytest.raises(Mismatch):
            duration_s(node)
    else:
        assert duration_s(node) == seconds


def test_number() -> None:
    assert [number(text) for text in ("3", "1e2", " 4 ", "x", "")] == [3, 100.0, 4, None, None]
