"""How does an entry with a class path become an object, and what is said where its arguments are wrong?

Decision: everything is checked first and built then, so that a typo in the last argument costs no
half-built model. Unknown, missing and plainly typed arguments are answered here, with their place and the
nearest name; jsonargparse follows ``**kwargs`` into other signatures and reads the types that are not plain
(paths, enums, dataclasses, nested classes, callables that make an optimizer). Turned down: jsonargparse for
all of it, which says neither line nor nearest name, refuses ``1e3`` for an int and reads ``a: b`` in an
untyped text as a mapping.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from ckptrun.config.classes import UserCodeError, import_class
from ckptrun.config.coerce import Mismatch, coerce, describe, knows, show
from ckptrun.config.nearest import did_you_mean
from ckptrun.config.run_config import ClassSpec, RunConfig
from ckptrun.config.signatures import UNTYPED, Parameters, class_parser, parameters_of
from ckptrun.config.tree import CLASS_PATH, INIT_ARGS, INIT_ARGS_IF_FIT, from_plain, lookup
from ckptrun.errors import CkptrunError, ConfigError

__all__ = ["UserCodeError", "build", "import_class"]

_ENTRY_KEYS = {CLASS_PATH, INIT_ARGS, INIT_ARGS_IF_FIT, "dict_kwargs"}
Make = Callable[[], Any]


def build(
    spec: ClassSpec,
    *,
    base: type | None = None,
    config: RunConfig | None = None,
    notices: list[str] | None = None,
) -> Any:
    """Import the entry's class, check its arguments, and return the object.

    Args:
        base: what the class must be a subclass of.
        config: where the entry stands, so that messages name the line of each argument.
        notices: collects what the user should know, such as arguments of a replaced class that do not fit.

    Raises:
        ConfigError: an unknown module, class or argument, a missing argument, or one of a wrong type.
        UserCodeError: the user's module or ``__init__`` raised.
    """
    at = _At(spec.key, spec, config, notices if notices is not None else [])
    cls = import_class(spec.class_path, place=spec.source.place, base=base)
    return _plan(cls, spec.init_args, spec.init_args_if_fit, at)()


@dataclass(frozen=True)
class _At:
    """Where in the config an entry stands."""

    key: str
    spec: ClassSpec
    config: RunConfig | None
    notices: list[str]

    def below(self, *parts: str) -> _At:
        return _At(".".join([self.key, *parts]), self.spec, self.config, self.notices)

    @property
    def place(self) -> str:
        """The place of this key, else of what it stands in."""
        if self.config is not None:
            parts = self.key.split(".")
            for length in range(len(parts), 0, -1):
                node = lookup(self.config.nodes, ".".join(parts[:length]))
                if node is not None:
                    return node.source.place
        return self.spec.source.place


def _plan(
    cls: type, given: Mapping[str, Any], if_fit: Mapping[str, Any], at: _At, *, partial: bool = False
) -> Make:
    """Check every argument and return what builds the object; ``partial``: others add arguments later."""
    parameters = parameters_of(cls)
    arguments = {**_fitting(cls, given, if_fit, parameters, at), **given}
    for name in given:
        if name not in parameters.named and not parameters.takes_any:
            raise _unknown_argument(cls, name, parameters, at)
    missing = [
        name for name, parameter in parameters.named.items() if parameter.required and name not in arguments
    ]
    if missing and not partial:
        names = ", ".join(f"{at.key}.init_args.{name}" for name in missing)
        raise ConfigError(
            f"{_name(cls)} needs {names}, and nobody gives it", place=at.below(CLASS_PATH).place
        )
    makes: dict[str, Make] = {}
    for name, value in arguments.items():
        section = INIT_ARGS if name in given else INIT_ARGS_IF_FIT
        makes[name] = _plan_argument(cls, name, value, parameters, at.below(section, name))
    return lambda: _call(cls, {name: make() for name, make in makes.items()}, at)


def _call(cls: type, arguments: dict[str, Any], at: _At) -> Any:
    try:
        return cls(**arguments)
    except (CkptrunError, UserCodeError):
        raise
    except (Exception, SystemExit) as error:  # an exit would end the command without a word
        raise UserCodeError(error, f"building {at.key} ({_name(cls)})") from error


def _fitting(
    cls: type, given: Mapping[str, Any], if_fit: Mapping[str, Any], parameters: Parameters, at: _At
) -> dict[str, Any]:
    """The arguments of a replaced class that the new one takes; the others are dropped with a notice."""
    fitting = {
        name: value for name, value in if_fit.items() if name in parameters.named and name not in given
    }
    dropped = [name for name in if_fit if name not in parameters.named]
    if dropped:
        at.notices.append(
            f"{at.key}: {_name(cls)} takes no {', '.join(dropped)}, given for the class that it replaces"
        )
    return fitting


def _unknown_argument(cls: type, name: str, parameters: Parameters, at: _At) -> ConfigError:
    prefix = f"{at.key}.{INIT_ARGS}."
    hint = did_you_mean(name, parameters.named, prefix=prefix)
    if hint is None:
        names = ", ".join(parameters.named)
        hint = f"{_name(cls)} takes {names}." if names else f"{_name(cls)} takes no arguments."
    return ConfigError(
        f"unknown argument '{prefix}{name}' of {_name(cls)}", place=at.below(INIT_ARGS, name).place, hint=hint
    )


def _plan_argument(cls: type, name: str, value: Any, parameters: Parameters, at: _At) -> Make:
    parameter = parameters.named.get(name)
    annotation = parameter.annotation if parameter is not None else UNTYPED
    if _is_open(annotation, value):
        return _plan_untyped(value, at)
    if knows(annotation):
        # The config's own node still has the text as it was written.
        node = lookup(at.config.nodes, at.key) if at.config is not None else None
        node = node if node is not None else from_plain(value, at.spec.source)
        try:
            read = coerce(node, annotation)
        except Mismatch as mismatch:
            raise ConfigError(
                f"{at.key} is {show(node)}, expected {mismatch.expected}", place=at.place
            ) from None
        return lambda: read
    return _plan_by_jsonargparse(cls, name, value, parameters, at)


def _is_open(annotation: Any, value: Any) -> bool:
    """Whether the type says nothing about what is in the value."""
    if annotation in (UNTYPED, Any, object):
        return True
    container = get_origin(annotation)
    return container in (dict, list) and get_args(annotation)[-1] is Any and isinstance(value, container)


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get(CLASS_PATH), str) and value.keys() <= _ENTRY_KEYS


def _plan_untyped(value: Any, at: _At) -> Make:
    """Build the class entries within a value and leave everything else as it is."""
    if _is_entry(value) and "." in value[CLASS_PATH]:
        cls = import_class(value[CLASS_PATH], place=at.below(CLASS_PATH).place)
        return _plan(cls, _given(value), value.get(INIT_ARGS_IF_FIT) or {}, at)
    if isinstance(value, dict):
        items = {key: _plan_untyped(item, at.below(str(key))) for key, item in value.items()}
        return lambda: {key: make() for key, make in items.items()}
    if isinstance(value, list):
        entries = [_plan_untyped(item, at.below(str(index))) for index, item in enumerate(value)]
        return lambda: [make() for make in entries]
    return lambda: value


def _given(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**(entry.get(INIT_ARGS) or {}), **(entry.get("dict_kwargs") or {})}


def _plan_by_jsonargparse(cls: type, name: str, value: Any, parameters: Parameters, at: _At) -> Make:
    value = _checked_entries(value, at)
    parser = class_parser(cls, only=name)
    try:
        parsed = parser.parse_object({"init": {name: value}})
    except argparse.ArgumentError as error:
        try:  # 1e3 is a float in YAML, and an int here
            parsed = parser.parse_object({"init": {name: _whole_numbers(value)}})
        except argparse.ArgumentError:
            raise _wrong_type(error, name, value, parameters, at) from None

    def make() -> Any:
        try:
            instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
            return instantiate(parsed)["init"][name]
        except (CkptrunError, UserCodeError):
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError(error, f"building {at.key}") from error

    return make


def _checked_entries(value: Any, at: _At) -> Any:
    """Check the class entries within a value for jsonargparse, so that names and places are in the messages.

    What is left to jsonargparse may be a callable that gets more arguments later, so none is missing here.
    """
    if isinstance(value, dict):
        items = {key: _checked_entries(item, at.below(str(key))) for key, item in value.items()}
        if not _is_entry(value) or "." not in value[CLASS_PATH]:
            return items
        cls = import_class(value[CLASS_PATH], place=at.below(CLASS_PATH).place)
        if_fit = items.pop(INIT_ARGS_IF_FIT, None) or {}
        given = items.get(INIT_ARGS) or {}
        _plan(cls, given, if_fit, at, partial=True)
        fitting = _fitting(cls, given, if_fit, parameters_of(cls), _At(at.key, at.spec, at.config, []))
        return {**items, INIT_ARGS: {**fitting, **given}} if fitting else items
    if isinstance(value, list):
        return [_checked_entries(item, at.below(str(index))) for index, item in enumerate(value)]
    return value


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


def _wrong_type(
    error: argparse.ArgumentError, name: str, value: Any, parameters: Parameters, at: _At
) -> ConfigError:
    key, expected = at.key, describe(parameters.named[name].annotation).replace("typing.", "")
    # jsonargparse says which part is wrong over several lines; the key is ours to say.
    reason = " ".join(str(error).replace(f'Parser key "init.{name}":', "").replace("init.", "").split())
    if _is_entry(value):
        found, at = value[CLASS_PATH], at.below(CLASS_PATH)
    else:
        found = show(from_plain(value, at.spec.source))
    return ConfigError(f"{key} is {found}, expected {expected}", place=at.place, hint=reason)


def _name(cls: type) -> str:
    return cls.__qualname__
