"""Where does each value of the config come from, and how do several sources become one tree?

Decision: values and sources live in one tree of nodes, so that a merge cannot separate them. Turned down:
plain dicts beside a table from dotted keys to sources, which every merge, replacement and list index would
have to keep in step.

    configs/gpt.yaml            trainer.max_steps=20
    trainer:                    ------------------->   trainer:
      max_steps: 2000   (line 2)                         max_steps: 20   (override 'trainer.max_steps=20')
      seed: 1           (line 3)                         seed: 1         (configs/gpt.yaml:3)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptrun.errors import ConfigError

CLASS_PATH = "class_path"
INIT_ARGS = "init_args"
# Arguments that were given for a class which a later source replaced. They go to the new class where it has
# an argument of that name. A key of its own, so that the stored config says the same as the one that was
# given.
INIT_ARGS_IF_FIT = "init_args_if_fit"


@dataclass(frozen=True)
class Source:
    """Who gave a value. ``text`` is the override, or the variable's or flag's name; lines count from 1."""

    kind: Literal["default", "file", "environment", "override", "flag"]
    file: str | None = None
    line: int | None = None
    text: str | None = None

    @property
    def place(self) -> str:
        """The source as messages name it: ``configs/gpt.yaml:12``, ``override 'a.b=1'``, ``--run``."""
        if self.kind == "file":
            return f"{self.file}:{self.line}"
        if self.kind == "environment":
            return f"environment variable {self.text}"
        if self.kind == "override":
            return f"override '{self.text}'"
        return str(self.text) if self.kind == "flag" else "default"

    def __str__(self) -> str:
        return self.place


DEFAULT = Source("default")


@dataclass
class Node:
    """One value with its source. ``value`` is a scalar, a dict of nodes or a list of nodes.

    ``text`` is a scalar as it was written, so that a name like ``007`` or ``1e3`` can still be read as text.
    """

    value: Any
    source: Source
    text: str | None = field(default=None, compare=False)


def plain(node: Node) -> Any:
    """Return the values without their sources."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def from_plain(value: Any, source: Source) -> Node:
    """Wrap a value of Python's in nodes that all name one source."""
    if isinstance(value, dict):
        return Node({key: from_plain(child, source) for key, child in value.items()}, source)
    if isinstance(value, (list, tuple)):
        return Node([from_plain(child, source) for child in value], source)
    return Node(value, source)


def child(node: Node, part: str) -> Node | None:
    """Return the child of a mapping or list that one part of a dotted key names, or None."""
    if isinstance(node.value, dict):
        if part in node.value:
            found = node.value[part]
        else:  # keys of a user's own dict may be numbers
            found = next((value for key, value in node.value.items() if str(key) == part), None)
        return found if isinstance(found, Node) else None
    if isinstance(node.value, list) and part.isdigit() and int(part) < len(node.value):
        item = node.value[int(part)]
        return item if isinstance(item, Node) else None
    return None


def lookup(root: Node, key: str) -> Node | None:
    """Return the node at a dotted key such as ``callbacks.0.init_args.monitor``, or None."""
    node: Node | None = root
    for part in key.split("."):
        if node is None:
            return None
        node = child(node, part)
    return node


def leaves(node: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every scalar, empty mapping and empty list with its dotted key."""
    if isinstance(node.value, (dict, list)) and node.value:
        items = node.value.items() if isinstance(node.value, dict) else enumerate(node.value)
        for key, value in items:
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def merge(base: Node | None, over: Node) -> Node:
    """Return ``base`` with ``over`` laid on it: mappings are merged, everything else is replaced.

    Where both are entries with a ``class_path`` and the class changes, the arguments of the old class move to
    ``init_args_if_fit``: whether they fit is only known once the class is imported.
    """
    if base is None or not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    if _class_changes(base, over):
        for key in (INIT_ARGS_IF_FIT, INIT_ARGS):
            merged.pop(key, None)
        old = [node for key in (INIT_ARGS_IF_FIT, INIT_ARGS) if (node := base.value.get(key)) is not None]
        kept = {
            name: value for node in old if isinstance(node.value, dict) for name, value in node.value.items()
        }
        if kept:
            merged[INIT_ARGS_IF_FIT] = Node(kept, old[-1].source)
    for key, value in over.value.items():
        merged[key] = merge(merged.get(key), value)
    _settle_if_fit(merged)
    return Node(merged, base.source)


def _class_changes(base: Node, over: Node) -> bool:
    old, new = base.value.get(CLASS_PATH), over.value.get(CLASS_PATH)
    return old is not None and new is not None and old.value != new.value


def _settle_if_fit(entry: dict[Any, Node]) -> None:
    """An argument that is given for the new class leaves ``init_args_if_fit``."""
    kept, given = entry.get(INIT_ARGS_IF_FIT), entry.get(INIT_ARGS)
    if kept is None or given is None or not isinstance(kept.value, dict) or not isinstance(given.value, dict):
        return
    rest = {name: value for name, value in kept.value.items() if name not in given.value}
    if rest:
        entry[INIT_ARGS_IF_FIT] = Node(rest, kept.source)
    else:
        del entry[INIT_ARGS_IF_FIT]


def assign(root: Node, key: str, value: Node) -> Node:
    """Return ``root`` with ``value`` laid on the dotted ``key``; mappings on the way are made where absent.

    A part that meets a list is an index into it; the one after the last adds an entry.

    Raises:
        ConfigError: the key has an empty part, goes into a scalar, or a list has no such entry.
    """
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"the key {key!r} has an empty part", place=value.source.place)
    return _assign(root, parts, 0, value)


def _assign(node: Node | None, parts: list[str], depth: int, value: Node) -> Node:
    if depth == len(parts):
        return merge(node, value)
    part = parts[depth]
    if node is not None and isinstance(node.value, list):
        items = list(node.value)
        index = int(part) if part.isdigit() else -1
        if not 0 <= index <= len(items):
            raise ConfigError(_no_entry(".".join(parts[:depth]), part, items), place=value.source.place)
        items[index:] = [
            _assign(items[index] if index < len(items) else None, parts, depth + 1, value),
            *items[index + 1 :],
        ]
        return Node(items, node.source)
    if node is not None and not isinstance(node.value, dict) and node.value is not None:
        where = ".".join(parts[:depth])
        raise ConfigError(
            f"{where} is {node.value!r} ({node.source}), so there is no {'.'.join(parts)} in it",
            place=value.source.place,
        )
    if part == INIT_ARGS and depth + 1 < len(parts) and node is not None and node.value is not None:
        node = _claimed(node, parts[depth + 1])
    # Only the part that is given goes into the merge, so that a changed class_path is seen there.
    below = None if node is None else child(node, part)
    given = Node({part: _assign(below, parts, depth + 1, value)}, value.source)
    if node is None or node.value is None:
        return given
    if depth + 1 < len(parts):
        return Node({**node.value, part: given.value[part]}, node.source)
    return merge(node, given)


def _claimed(entry: Node, name: str) -> Node:
    """Return the entry with the old class's argument ``name`` among its own, as a part of it is changed."""
    kept, given = child(entry, INIT_ARGS_IF_FIT), child(entry, INIT_ARGS)
    own = given.value if given is not None and isinstance(given.value, dict) else {}
    if kept is None or not isinstance(kept.value, dict) or name not in kept.value or name in own:
        return entry
    value = dict(entry.value)
    value[INIT_ARGS] = Node({**own, name: kept.value[name]}, (given or kept).source)
    _settle_if_fit(value)
    return Node(value, entry.source)


def _no_entry(where: str, part: str, items: list[Node]) -> str:
    if not items:
        return f"{where} is an empty list: {where}.0 adds the first entry, found {part!r}"
    names = []
    for index, item in enumerate(items):
        path = child(item, CLASS_PATH)
        names.append(f"{where}.{index}" + (f" ({path.value})" if path is not None else ""))
    return f"{where} has no entry {part!r}; it has {', '.join(names)}"
