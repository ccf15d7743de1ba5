"""Is a model compiled, and what are its weights called all the same?

``torch.compile`` of a module in a model puts a wrapper around it, whose name (``_orig_mod``) is then part of the
names of its weights. In a checkpoint it is not: a compiled model and a plain one read each other's.

Decision: ``trainer.compile`` and a model that was compiled as a whole are compiled in place (``Module.compile``), which
changes no name. Shapes are static unless said otherwise: each has kernels of its own, so that which kernel computes a
batch does not depend on the batches that came before, which are others after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_WRAPPER = "_orig_mod"


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or one inside of it is compiled."""
    return any(
        _WRAPPER in part._modules or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def unwrapped(model: Any) -> Any:
    """The model in what ``torch.compile(model)`` gave, compiled in place; anything else as it is."""
    if not isinstance(model, nn.Module) or _WRAPPER not in model._modules:
        return model
    original: Any = model._modules[_WRAPPER]
    if original._compiled_call_impl is None:
        dynamo: Any = model.dynamo_ctx
        original._compiled_call_impl = dynamo(original._call_impl)
    return original


def compile_in_place(module: nn.Module, how: bool | str | Mapping[str, Any]) -> None:
    """Compile what is called in a step: the module's ``forward``, and each of its children.

    Args:
        how: True, a backend's name, or arguments of ``torch.compile``.
    """
    given = dict(how) if isinstance(how, Mapping) else {} if how is True else {"backend": how}
    options = {"dynamic": False, **given}
    for part in (*module.children(), module):
        if part._compiled_call_impl is None and _WRAPPER not in part._modules:
            part.compile(**options)


def plain_names(module: nn.Module) -> dict[str, str]:
    """The name of each weight and buffer in a checkpoint, by its name in the module, where the two differ."""
    wrappers = [name for name, part in module.named_modules() if _WRAPPER in part._modules]
    if not wrappers:
        return {}
    own = list(module.state_dict())
    taken = set(own)
    names = {name: _without_wrappers(name) for name in own}
    return {name: plain for name, plain in names.items() if plain != name and plain not in taken}


def for_checkpoint(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A module's weights under their names in a checkpoint."""
    names = plain_names(module)
    return {names.get(name, name): value for name, value in state.items()} if names else state


def for_module(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's weights under the module's names; names with a wrapper are taken too."""
    own = {plain: name for name, plain in plain_names(module).items()}
    known = set(module.state_dict())
    result = {}
    for name, value in state.items():
        plain = name if name in known or name in own else _without_wrappers(name)
        result[own.get(plain, plain)] = value
    return result


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _WRAPPER)
