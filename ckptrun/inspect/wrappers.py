"""Was a model saved inside a wrapper, and what must go from its names?

Decision: a wrapper is told by a whole component of a name (``_orig_mod``), and ``module`` only where every
name begins with it, since a user may have a part of that name. Turned down: stripping it, which is for
``convert`` to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_COMPONENTS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
}


@dataclass(frozen=True)
class Wrapper:
    """A component that a wrapper put into ``num_names`` names."""

    prefix: str
    by: str
    num_names: int


def find_wrappers(names: Sequence[str]) -> list[Wrapper]:
    """The wrappers that show in the names of a state dict."""
    counts: dict[str, int] = {}
    outermost = 0
    for name in names:
        components = name.split(".")
        first = next((part for part in components if part not in _COMPONENTS), "")
        outermost += first == "module" and len(components) > 1
        for component in _COMPONENTS.keys() & set(components):
            counts[component] = counts.get(component, 0) + 1
    found = [Wrapper(f"{part}.", by, counts[part]) for part, by in _COMPONENTS.items() if part in counts]
    if names and outermost == len(names):
        found.insert(0, Wrapper("module.", "DistributedDataParallel or DataParallel", outermost))
    return found
