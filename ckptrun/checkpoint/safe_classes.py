"""How do a user's enums, namedtuples and dataclasses get into a checkpoint and back?

By the name of their class and their plain content.

Decision: the class is found again only in modules that are imported already. Turned down: importing the
module that the file names, which would let a file run the code of any module that is installed; the user's
model was imported before anything is decoded, and an error says what else to import.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterable
from typing import Any, Final

import torch

from ckptrun.checkpoint.safe_codec import Codec, Fields, Refused, Walk, named, refusal
from ckptrun.errors import IncompatibleError


def _class_fields(kind: type) -> Fields:
    if _find(kind.__module__, kind.__qualname__) is not kind:
        raise Refused(
            f"its class {named(kind)} cannot be found again by that name",
            "Define the class at the top level of a module, or save plain values.",
        )
    return {"module": kind.__module__, "class": kind.__qualname__}


def _find(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # getattr would start lazy imports of some modules
    return found


def _class_of(fields: Fields, base: type) -> Any:
    found = _find(fields["module"], fields["class"])
    if not (isinstance(found, type) and issubclass(found, base)):
        raise IncompatibleError(
            f"the checkpoint holds a value of {fields['module']}.{fields['class']}; there is no such class",
            hint=f"Import {fields['module']} where the model is defined, and give the class the name that it "
            "had when the checkpoint was written.",
        )
    return found


def _encode_enum(obj: enum.Enum, walk: Walk) -> Fields:
    kind = type(obj)
    if kind.__members__.get(obj.name) is obj:
        return {**_class_fields(kind), "name": obj.name}
    return {**_class_fields(kind), "value": walk.value(obj.value)}  # several flags at once


def _decode_enum(fields: Fields, walk: Walk) -> Any:
    kind = _class_of(fields, enum.Enum)
    try:
        return kind[fields["name"]] if "name" in fields else kind(walk.value(fields["value"]))
    except (KeyError, ValueError):
        member = fields.get("name", fields.get("value"))
        raise IncompatibleError(
            f"the checkpoint holds {named(kind)}.{member}, which that enum no longer has"
        ) from None


def _encode_tuple(obj: tuple[Any, ...], walk: Walk) -> Fields:
    names = getattr(type(obj), "_fields", None)
    if not isinstance(names, tuple) or len(names) != len(obj) or getattr(obj, "__dict__", None):
        raise refusal(obj)
    return {**_class_fields(type(obj)), "fields": names, "items": walk.items(obj)}


def _decode_tuple(fields: Fields, walk: Walk) -> Any:
    kind = _class_of(fields, tuple)
    _check_fields(kind, fields["fields"], getattr(kind, "_fields", ()))
    return tuple.__new__(kind, walk.items(fields["items"]))


def _encode_dataclass(obj: Any, walk: Walk) -> Fields:
    """The fields of a dataclass instance, which is made again without its ``__init__``."""
    kind = type(obj)
    names = [field.name for field in dataclasses.fields(obj)]
    # A dict or a tensor that is a dataclass too has content beside its fields.
    plain = getattr(kind, "__new__", None) is object.__new__ and not isinstance(obj, torch.nn.Module)
    if not plain or set(getattr(obj, "__dict__", ())) - set(names) or not all(hasattr(obj, n) for n in names):
        raise Refused(
            f"the {named(kind)} holds more or less than its dataclass fields", "Save a dict of plain values."
        )
    return {**_class_fields(kind), "fields": walk.attributes({name: getattr(obj, name) for name in names})}


def _decode_dataclass(fields: Fields, walk: Walk) -> Any:
    kind = _class_of(fields, object)
    current = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    _check_fields(kind, fields["fields"], current)
    obj = object.__new__(kind)
    for name, value in walk.attributes(fields["fields"]).items():
        object.__setattr__(obj, name, value)  # frozen ones too
    return obj


def _check_fields(kind: type, found: Iterable[str], expected: Iterable[str]) -> None:
    if sorted(found) != sorted(expected):
        raise IncompatibleError(
            f"the checkpoint holds a {named(kind)} with the fields {', '.join(found)}; "
            f"the class now has {', '.join(expected) or 'none'}"
        )


ENUM: Final = Codec("enum", enum.Enum, _encode_enum, _decode_enum, subclasses=True)
NAMEDTUPLE: Final = Codec("namedtuple", tuple, _encode_tuple, _decode_tuple, subclasses=True)
DATACLASS: Final = Codec("dataclass", object, _encode_dataclass, _decode_dataclass)
