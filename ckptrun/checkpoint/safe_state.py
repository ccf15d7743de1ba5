"""How do values that users put into a checkpoint come through ``torch.load(weights_only=True)``?

What that loader reads without an allow-list (containers, numbers, strings, tensors, dtypes and a few more)
passes as it is: the very same objects, so that a ``state_dict`` of 10,000 tensors costs some milliseconds.
Everything else that is known becomes a dict with a tag, and a value again when decoded:

    numpy.float32(1.5)    {"__ckptrun__": "numpy.scalar", "dtype": "<f4", "value": 1.5}
    pathlib.Path("a")     {"__ckptrun__": "path", "class": "PosixPath", "value": "a"}
    {"__ckptrun__": 1}    {"__ckptrun__": "dict", "items": [("__ckptrun__", 1)]}    a user's own, escaped

What cannot be encoded is an error that names the value's place, before the first step and not after hours.

Decision: tagged plain values, which any torch reads without code of ours, and which ``inspect`` can show.
Turned down: allow-listing more classes at load (``add_safe_globals``), which every other program would have
to repeat; pickling such values to bytes, which opens the door that ``weights_only`` closes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from ckptrun.checkpoint.safe_classes import DATACLASS
from ckptrun.checkpoint.safe_codec import Codec, Fields, Refused, named, refusal
from ckptrun.checkpoint.safe_values import CODECS
from ckptrun.errors import IncompatibleError, MisconfigurationException

TAG: Final = "__ckptrun__"

# Read by the loader as they are.
_PLAIN: Final = frozenset(
    {str, float, bool, type(None), complex, bytearray, torch.dtype, torch.device, torch.layout, torch.Size}
)
_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_CONTAINERS: Final = frozenset({dict, list, tuple, OrderedDict})
_MAX_INT_BITS: Final = 255 * 8 - 1  # the loader knows the short form of long integers only
_MAX_KEY_CHARS: Final = 60

_EXACT: Final[dict[type, Codec]] = {codec.kind: codec for codec in CODECS if not codec.subclasses}
_BASES: Final = tuple(codec for codec in CODECS if codec.subclasses)
_BY_TAG: Final[dict[str, Codec]] = {codec.tag: codec for codec in (*CODECS, DATACLASS)}


def encode(obj: Any, where: str = "checkpoint") -> Any:
    """``obj`` with everything that ``weights_only=True`` would refuse replaced by plain values.

    What occurs twice occurs twice in the result. Tensors are never copied and keep their storages; NumPy
    arrays share their memory with the result where torch has their type and they have no gaps. ``obj`` is not
    changed.

    Args:
        where: what ``obj`` is called in an error, as ``callbacks['EMA']``.

    Raises:
        MisconfigurationException: a value cannot be encoded; names its place and type, and what to do.
    """
    try:
        return _Encoder().value(obj)
    except Refused as refused:
        place = where + "".join(reversed(refused.steps))
        raise MisconfigurationException(
            f"{place} cannot be saved: {refused.why}", hint=refused.hint
        ) from None
    except RecursionError:
        raise MisconfigurationException(f"{where} cannot be saved: it is nested too deeply") from None


def decode(obj: Any) -> Any:
    """The inverse of :func:`encode`, for what ``torch.load`` returned. Unchanged parts are the same objects.

    Raises:
        IncompatibleError: a class is not there or has changed, or this version does not know the encoded
            form.
    """
    return _Decoder().value(obj)


class _Encoder:
    def __init__(self) -> None:
        # By id. The original is kept beside its encoded form, so that no id is used for a second object.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()

    def value(self, obj: Any, /) -> Any:
        """The encoded form of ``obj``; ``obj`` itself where it is plain through and through."""
        kind = type(obj)
        if kind in _PLAIN:
            return obj
        if kind is int and obj.bit_length() <= _MAX_INT_BITS:
            return obj
        if kind in _TENSORS:
            if obj.__dict__:
                self._check_tensor(obj)
            return obj
        found = self._done.get(id(obj))
        if found is not None:
            return found[1]
        if id(obj) in self._open:
            raise Refused(f"the {named(kind)} contains itself", "Save it without the reference to itself.")
        self._open.add(id(obj))
        try:
            result = self._compound(obj, kind)
        finally:
            self._open.discard(id(obj))
        self._done[id(obj)] = (obj, result)
        return result

    def _compound(self, obj: Any, kind: type) -> Any:
        if kind is dict:
            return self._dict(obj)
        if kind is list or kind is tuple:
            items = self.items(obj)
            return obj if _same(items, obj) else kind(items)
        if kind is OrderedDict:
            return self._ordered_dict(obj)
        if kind is bytes and obj:
            return obj
        if (kind is set and _same(self.items(obj), obj)) or (kind is Counter and self._dict(obj) is obj):
            return obj
        codec = _EXACT.get(kind)
        if codec is None:
            codec = next((base for base in _BASES if isinstance(obj, base.kind)), None)
        if codec is None:
            if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
                raise refusal(obj)
            codec = DATACLASS
        return {TAG: codec.tag, **codec.encode(obj, self)}

    def _dict(self, obj: Mapping[Any, Any]) -> Any:
        """``obj`` itself, a dict with encoded values, or (where a key needs it) the tagged form."""
        if TAG in obj or not all(type(key) is str or self._key(key) is key for key in obj):
            return {TAG: "dict", "items": self.pairs(obj)}
        return self._mapping(obj, _key_step)

    def _ordered_dict(self, obj: OrderedDict[Any, Any]) -> Any:
        """Its attributes too: modules keep ``_metadata`` on what ``state_dict()`` returns."""
        content = self._dict(obj)
        attributes = self.attributes(obj.__dict__)
        if content is obj and attributes is obj.__dict__:
            return obj
        if TAG in content:
            return {TAG: "OrderedDict", "items": content["items"], "attributes": attributes}
        return _ordered(content, attributes)

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        if self.attributes(tensor.__dict__) is not tensor.__dict__:
            raise Refused(
                f"the tensor has attributes that are not plain values ({', '.join(tensor.__dict__)})",
                "Save value.detach(), which has none, and the attributes beside it.",
            )

    def _key(self, key: Any) -> Any:
        try:
            return self.value(key)
        except Refused as refused:
            refused.steps = [f" with the key {_key_text(key)}"]
            raise

    def _mapping(self, mapping: Mapping[Any, Any], step: Callable[[Any], str]) -> Any:
        """The mapping with encoded values, or itself where all are plain."""
        changed: dict[Any, Any] = {}
        key: Any = None
        try:
            for key, value in mapping.items():
                kind = type(value)
                if kind in _PLAIN or (kind in _TENSORS and not value.__dict__):
                    continue
                result = self.value(value)
                if result is not value:
                    changed[key] = result
        except Refused as refused:
            refused.steps.append(step(key))
            raise
        return {**mapping, **changed} if changed else mapping

    def items(self, items: Iterable[Any], /) -> list[Any]:
        """The encoded form of each item."""
        results: list[Any] = []
        try:
            for item in items:
                results.append(self.value(item))
        except Refused as refused:
            refused.steps.append(f"[{len(results)}]")
            raise
        return results

    def pairs(self, pairs: Any, /) -> list[tuple[Any, Any]]:
        """The encoded form of a mapping's keys and values."""
        return [(self._key(key), value) for key, value in self._mapping(pairs, _key_step).items()]

    def attributes(self, attributes: Mapping[str, Any], /) -> Any:
        """The encoded form of an object's attributes: the mapping itself where all are plain."""
        return self._mapping(attributes, ".{}".format)


class _Decoder:
    def __init__(self) -> None:
        self._done: dict[int, Any] = {}  # by id; what was loaded lives as long as the decoder

    def value(self, obj: Any, /) -> Any:
        """The decoded form of ``obj``; ``obj`` itself where nothing in it is encoded."""
        kind = type(obj)
        if kind not in _CONTAINERS:
            return obj
        if id(obj) in self._done:
            return self._done[id(obj)]
        if kind is dict and TAG in obj:
            result = self._tagged(obj)
        elif kind is list or kind is tuple:
            items = self.items(obj)
            result = obj if _same(items, obj) else kind(items)
        else:
            result = self.attributes(obj) if kind is dict else self._ordered_dict(obj)
        self._done[id(obj)] = result
        return result

    def _ordered_dict(self, obj: OrderedDict[Any, Any]) -> Any:
        content, attributes = self.attributes(obj), self.attributes(obj.__dict__)
        if content is obj and attributes is obj.__dict__:
            return obj
        return _ordered(content, attributes)

    def _tagged(self, obj: Fields) -> Any:
        tag = obj[TAG]
        try:
            if tag == "dict":
                return dict(self.pairs(obj["items"]))
            if tag == "OrderedDict":
                return _ordered(self.pairs(obj["items"]), self.attributes(obj["attributes"]))
            return _BY_TAG[tag].decode(obj, self)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IncompatibleError(
                f"the checkpoint holds an encoded value of the kind {tag!r} that cannot be read: "
                f"{type(error).__name__}: {error}",
                hint="It was written by a newer ckptrun or another program; use the version that wrote it.",
            ) from error

    def items(self, items: Iterable[Any], /) -> list[Any]:
        """The decoded form of each item."""
        return [self.value(item) for item in items]

    def pairs(self, pairs: Any, /) -> list[tuple[Any, Any]]:
        """The decoded keys and values of a mapping, from a list of pairs."""
        return [(self.value(key), self.value(value)) for key, value in pairs]

    def attributes(self, attributes: Mapping[Any, Any], /) -> Any:
        """The mapping with decoded values, or itself where none is encoded."""
        changed: dict[Any, Any] = {}
        for key, value in attributes.items():
            if type(value) in _CONTAINERS:
                result = self.value(value)
                if result is not value:
                    changed[key] = result
        return {**attributes, **changed} if changed else attributes


def _ordered(content: Any, attributes: Mapping[str, Any]) -> OrderedDict[Any, Any]:
    result = OrderedDict(content)
    result.__dict__.update(attributes)
    return result


def _same(items: Iterable[Any], originals: Iterable[Any]) -> bool:
    return all(item is original for item, original in zip(items, originals, strict=True))


def _key_step(key: Any) -> str:
    return f"[{_key_text(key)}]"


def _key_text(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= _MAX_KEY_CHARS else f"{text[:_MAX_KEY_CHARS]}…"
