"""Which hooks does anybody override? Found once, before the first step.

The order at each point: callbacks, then the module, then callbacks that monitor a metric (so that they see what the
module's hook logged), then the checkpoint callbacks, so that what these save is the state after everybody has acted.
``docs/differences.md`` gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from ckptrun.fit.callback import Callback
from ckptrun.fit.module import Module

Hook = Callable[..., Any]
Part = Literal["first", "monitoring", "checkpoint"]
PARTS: tuple[Part, ...] = ("first", "monitoring", "checkpoint")


def overridden(owner: object, name: str, base: type) -> Hook | None:
    """The hook of ``owner``, or None where it is ``base``'s empty one."""
    hook: Hook | None = getattr(owner, name, None)
    if hook is None:
        return None
    function = getattr(hook, "__func__", hook)
    return None if function is getattr(base, name, None) else hook


class Hooks:
    """The overridden hooks of a module and its callbacks."""

    def __init__(self, trainer: Any, module: Module, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._module = module
        self._groups: dict[Part, list[Callback]] = {"first": [], "monitoring": [], "checkpoint": []}
        for callback in callbacks:
            self._groups[part_of(callback)].append(callback)
        self._found: dict[tuple[str, Part], tuple[Hook, ...]] = {}

    def part(self, name: str, part: Part) -> tuple[Hook, ...]:
        """The hooks of one part, to be called with the arguments that the module's hook takes."""
        found = self._found.get((name, part))
        if found is None:
            hooks = [
                partial(hook, self._trainer, self._module)
                for callback in self._groups[part]
                if (hook := overridden(callback, name, Callback)) is not None
            ]
            if part == "first" and (own := overridden(self._module, name, Module)) is not None:
                hooks.append(own)  # type: ignore[arg-type]
            found = self._found[name, part] = tuple(hooks)
        return found

    def get(self, name: str) -> tuple[Hook, ...]:
        """All parts, in order."""
        return tuple(hook for part in PARTS for hook in self.part(name, part))

    def call(self, name: str, *args: Any) -> None:
        """Call every hook of that name."""
        for part in PARTS:
            for hook in self.part(name, part):
                hook(*args)

    def call_part(self, name: str, part: Part, *args: Any) -> None:
        """Call the hooks of one part."""
        for hook in self.part(name, part):
            hook(*args)


def part_of(callback: Callback) -> Part:
    """Checkpoint callbacks have an entry in the registry; monitoring ones have a ``monitor``."""
    if hasattr(callback, "registry_entry"):
        return "checkpoint"
    return "monitoring" if hasattr(callback, "monitor") else "first"
