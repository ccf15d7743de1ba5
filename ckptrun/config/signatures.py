"""Which arguments does a class take?

Decision: ``inspect`` for what a signature says by itself, and jsonargparse for where ``**kwargs`` goes,
which it finds by reading the source. Turned down: ``inspect`` alone, which would take any typo for a class
that hands its ``**kwargs`` to its base.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from typing import Any, Final


class _Untyped:
    def __repr__(self) -> str:
        return "untyped"


class _Unresolved:
    """The annotation cannot be evaluated here; jsonargparse may know more."""

    def __repr__(self) -> str:
        return "the annotated type"


UNTYPED: Final = _Untyped()
_UNRESOLVED: Final = _Unresolved()


@dataclass(frozen=True)
class Parameter:
    """One argument; ``annotation`` is ``UNTYPED`` where the class says none."""

    annotation: Any
    required: bool


@dataclass(frozen=True)
class Parameters:
    """The arguments that a class takes by name; ``takes_any``: and any other too."""

    named: dict[str, Parameter]
    takes_any: bool


def parameters_of(cls: type) -> Parameters:
    """Return the arguments of a class, those that its ``**kwargs`` hands on included."""
    try:
        signature = inspect.signature(cls)
    except (ValueError, TypeError):  # made in C, without a signature
        return Parameters({}, takes_any=True)
    kinds = inspect.Parameter
    named = {
        name: _parameter(cls, name)
        for name, parameter in signature.parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    if not any(parameter.kind is kinds.VAR_KEYWORD for parameter in signature.parameters.values()):
        return Parameters(named, takes_any=False)
    handed_on = [name for name in _names_by_jsonargparse(cls) if name not in named]
    named |= {name: _parameter(cls, name) for name in handed_on}
    return Parameters(named, takes_any=not handed_on)


def _parameter(cls: type, name: str) -> Parameter:
    """Find the argument in the nearest ``__init__`` that names it."""
    for owner in inspect.getmro(cls):
        init = owner.__dict__.get("__init__") or owner.__dict__.get("__new__")
        if init is None or not callable(getattr(init, "__func__", init)):
            continue
        function = getattr(init, "__func__", init)
        try:
            parameter = inspect.signature(function).parameters.get(name)
        except (ValueError, TypeError):
            continue
        if parameter is None:
            continue
        required = parameter.default is inspect.Parameter.empty
        if parameter.annotation is inspect.Parameter.empty:
            return Parameter(UNTYPED, required)
        return Parameter(_evaluated(parameter.annotation, function), required)
    return Parameter(_UNRESOLVED, required=False)


def _evaluated(annotation: Any, function: Any) -> Any:
    """Return one annotation as a type, read alone: another may name what only type checkers see."""

    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    try:
        return typing.get_type_hints(holder, globalns=getattr(function, "__globals__", {}))["it"]
    except Exception:  # whatever an annotation of the user's does when it is evaluated
        return _UNRESOLVED


def _names_by_jsonargparse(cls: type) -> list[str]:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    try:
        keys = parser.add_class_arguments(cls, "init", fail_untyped=False, instantiate=False)
    except ValueError:
        return []
    return list(dict.fromkeys(key.split(".")[1] for key in keys))


def class_parser(cls: type, *, only: str) -> Any:
    """Return a jsonargparse parser that reads the one argument ``init.<only>`` of the class."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    others = set(_names_by_jsonargparse(cls)) - {only}
    parser.add_class_arguments(cls, "init", fail_untyped=False, instantiate=False, skip=others)
    return parser
