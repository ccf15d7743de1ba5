"""Which types of NumPy and of the standard library can be turned into plain values and back, and how?

One codec for each, with both directions side by side. A codec's ``encode`` gives the fields of the tagged
dict that :mod:`ckptrun.checkpoint.safe_state` shows, its ``decode`` gets them.

Decision: a closed table. Turned down: a registry to which users add their classes, since a checkpoint would
then only load where the same additions were made; they have ``state_dict`` for that.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import pathlib
import types
import uuid
import zoneinfo
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import torch

from ckptrun.checkpoint.safe_classes import ENUM, NAMEDTUPLE
from ckptrun.checkpoint.safe_codec import Codec, Fields, Refused, Walk, refusal

# NumPy

_IN_TORCH: Final = frozenset(
    {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
)


def _encode_array(obj: np.ndarray[Any, Any], _: Walk) -> Fields:
    descr = _dtype_fields(obj.dtype)
    # torch takes no negative strides, warns of read-only memory, and would save the gaps of a view too.
    # An array of one element counts as contiguous whatever its strides are.
    has_gaps = not (obj.flags.c_contiguous or obj.flags.f_contiguous) or min(obj.strides, default=0) < 0
    if has_gaps or not obj.flags.writeable:
        obj = obj.copy(order="K")
    if obj.dtype.isnative and f"{obj.dtype.kind}{obj.dtype.itemsize}" in _IN_TORCH:
        return {"data": torch.from_numpy(obj)}
    order: Literal["C", "F"] = "F" if obj.flags.f_contiguous and not obj.flags.c_contiguous else "C"
    return {**descr, "shape": obj.shape, "order": order, "data": _bytes_tensor(obj.tobytes(order))}


def _decode_array(fields: Fields, _: Walk) -> Any:
    data = fields["data"].numpy()
    if "dtype" not in fields:
        return data
    dtype, shape, order = _dtype_of(fields), fields["shape"], fields["order"]
    if data.size == 0:
        return np.empty(shape, dtype, order)
    return np.ndarray(shape, dtype, data.data, order=order)


def _encode_scalar(obj: np.generic, walk: Walk) -> Fields:
    kind, itemsize = obj.dtype.kind, obj.dtype.itemsize
    if kind in "biuUS" or (kind == "f" and itemsize <= 8) or (kind == "c" and itemsize <= 16):
        return {**_dtype_fields(obj.dtype), "value": walk.value(obj.item())}
    return {**_dtype_fields(obj.dtype), "data": _bytes_tensor(obj.tobytes())}


def _decode_scalar(fields: Fields, walk: Walk) -> Any:
    dtype = _dtype_of(fields)
    if "value" in fields:
        return dtype.type(walk.value(fields["value"]))
    return np.ndarray((1,), dtype, fields["data"].numpy().data)[0]


def _dtype_fields(dtype: np.dtype[Any]) -> Fields:
    if dtype.hasobject:
        raise Refused(
            f"it is made of Python objects (NumPy dtype {dtype})",
            "Save a list, or an array of numbers or fixed-length strings.",
        )
    return {"dtype": np.lib.format.dtype_to_descr(dtype)}


def _dtype_of(fields: Fields) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(fields["dtype"])


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# Containers and the standard library

_FACTORIES: Final[dict[str, Any]] = {
    factory.__name__: factory for factory in (int, float, complex, str, bool, list, dict, set, tuple)
}
_MEMORY_FORMATS: Final[dict[str, torch.memory_format]] = {
    str(value): value
    for value in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
_PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}


def _encode_defaultdict(obj: Any, walk: Walk) -> Fields:
    factory = obj.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise Refused(
            f"the defaultdict makes its values with {factory!r}",
            "Save a plain dict: dict(value). Only built-in types come back as default_factory.",
        )
    return {"factory": name, "items": walk.pairs(obj)}


def _decode_defaultdict(fields: Fields, walk: Walk) -> Any:
    factory = None if fields["factory"] is None else _FACTORIES[fields["factory"]]
    return defaultdict(factory, walk.pairs(fields["items"]))


def _encode_path(obj: pathlib.PurePath, _: Walk) -> Fields:
    kind = type(obj)
    if _PATHS.get(kind.__name__) is not kind:
        raise refusal(obj)
    return {"class": kind.__name__, "value": str(obj)}


def _encode_zone(obj: zoneinfo.ZoneInfo, _: Walk) -> Fields:
    if obj.key is None:
        raise Refused("it is a time zone without a name", "Use zoneinfo.ZoneInfo(name).")
    return {"value": obj.key}


def _encode_timezone(obj: datetime.timezone, walk: Walk) -> Fields:
    offset, name = obj.utcoffset(None), obj.tzname(None)
    unnamed = datetime.timezone(offset).tzname(None) == name
    return {"offset": walk.value(offset), "name": None if unnamed else name}


def _decode_timezone(fields: Fields, walk: Walk) -> Any:
    offset = walk.value(fields["offset"])
    return datetime.timezone(offset) if fields["name"] is None else datetime.timezone(offset, fields["name"])


def _encode_clock(obj: datetime.datetime | datetime.time, walk: Walk) -> Fields:
    return {"value": obj.replace(tzinfo=None).isoformat(), "fold": obj.fold, "zone": walk.value(obj.tzinfo)}


def _decode_clock(kind: type[datetime.datetime] | type[datetime.time]) -> Callable[[Fields, Walk], Any]:
    def decode(fields: Fields, walk: Walk) -> Any:
        naive = kind.fromisoformat(fields["value"])
        return naive.replace(fold=fields["fold"], tzinfo=walk.value(fields["zone"]))

    return decode


def _namespace(tag: str, kind: type) -> Codec:
    return Codec(
        tag,
        kind,
        lambda obj, walk: {"attributes": walk.attributes(vars(obj))},
        lambda fields, walk: kind(**walk.attributes(fields["attributes"])),
    )


def _collection(tag: str, kind: type) -> Codec:
    return Codec(
        tag,
        kind,
        lambda obj, walk: {"items": walk.items(obj)},
        lambda fields, walk: kind(walk.items(fields["items"])),
    )


def _text(tag: str, kind: type, encode: Callable[[Any], str], decode: Callable[[str], Any]) -> Codec:
    return Codec(tag, kind, lambda obj, _: {"value": encode(obj)}, lambda fields, _: decode(fields["value"]))


# The order counts where one type is a subclass of another. Codecs marked ``subclasses`` are tried after the
# exact ones.
CODECS: Final[tuple[Codec, ...]] = (
    _text("int", int, hex, lambda text: int(text, 16)),  # those that are too long for the loader
    Codec("bytes", bytes, lambda *_: {}, lambda *_: b""),  # the empty one
    _collection("set", set),  # one whose elements are not all plain
    _collection("frozenset", frozenset),
    Codec(
        "deque",
        deque,
        lambda obj, walk: {"items": walk.items(obj), "maxlen": obj.maxlen},
        lambda fields, walk: deque(walk.items(fields["items"]), fields["maxlen"]),
    ),
    Codec("defaultdict", defaultdict, _encode_defaultdict, _decode_defaultdict),
    Codec(
        "Counter",  # one whose keys are not all plain
        Counter,
        lambda obj, walk: {"items": walk.pairs(obj)},
        lambda fields, walk: Counter(dict(walk.pairs(fields["items"]))),
    ),
    Codec(
        "range",
        range,
        lambda obj, walk: {"value": walk.items((obj.start, obj.stop, obj.step))},
        lambda fields, walk: range(*walk.items(fields["value"])),
    ),
    Codec(
        "Fraction",
        fractions.Fraction,
        lambda obj, walk: {"value": walk.items((obj.numerator, obj.denominator))},
        lambda fields, walk: fractions.Fraction(*walk.items(fields["value"])),
    ),
    _text("Decimal", decimal.Decimal, str, decimal.Decimal),
    _text("UUID", uuid.UUID, str, uuid.UUID),
    _text("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    Codec("datetime", datetime.datetime, _encode_clock, _decode_clock(datetime.datetime)),
    Codec("time", datetime.time, _encode_clock, _decode_clock(datetime.time)),
    Codec(
        "timedelta",
        datetime.timedelta,
        lambda obj, _: {"value": (obj.days, obj.seconds, obj.microseconds)},
        lambda fields, _: datetime.timedelta(*fields["value"]),
    ),
    Codec("timezone", datetime.timezone, _encode_timezone, _decode_timezone),
    Codec(
        "zoneinfo",
        zoneinfo.ZoneInfo,
        _encode_zone,
        lambda fields, _: zoneinfo.ZoneInfo(fields["value"]),
    ),
    _namespace("argparse.Namespace", argparse.Namespace),
    _namespace("types.SimpleNamespace", types.SimpleNamespace),
    _text("torch.memory_format", torch.memory_format, str, lambda name: _MEMORY_FORMATS[name]),
    Codec("numpy.ndarray", np.ndarray, _encode_array, _decode_array),
    Codec(
        "numpy.dtype", np.dtype, lambda obj, _: _dtype_fields(obj), lambda f, _: _dtype_of(f), subclasses=True
    ),
    ENUM,
    Codec("numpy.scalar", np.generic, _encode_scalar, _decode_scalar, subclasses=True),
    Codec(
        "path",
        pathlib.PurePath,
        _encode_path,
        lambda fields, _: _PATHS[fields["class"]](fields["value"]),
        subclasses=True,
    ),
    NAMEDTUPLE,
)
