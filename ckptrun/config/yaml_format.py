"""How does YAML text become nodes that know their line, and a tree become YAML text again?

Decision: PyYAML's composer, which keeps a mark for every node, with YAML 1.1's traps for numbers taken out:
``1e3`` and ``1e-4`` are numbers, ``4:00:00`` is text and not 14400, ``010`` and dates are text. ``on``,
``off``, ``yes`` and ``no`` stay booleans as values, because files written for other tools rely on it, and
are text as keys. The same table of what looks like a number serves reading and writing, so that what is
written reads back as it was. Turned down: ruamel.yaml, which keeps comments and formatting that nobody
here needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from ckptrun.config.tree import Node, Source
from ckptrun.errors import ConfigError

_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_TAG = "tag:yaml.org,2002:"


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    dropped = {_TAG + name for name in ("int", "float", "timestamp", "value")}
    table = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in dropped]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        table.setdefault(first, []).extend([(_TAG + "int", _INT), (_TAG + "float", _FLOAT)])
    return table


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def read_file(path: str, *, named_by: str | None = None) -> Node:
    """Read a config file; an empty section or file of comments gives an empty mapping.

    Args:
        path: as the user gave it; places in messages show it so.
        named_by: who asked for this file where it was not ``-c``, for the message when it is missing.

    Raises:
        ConfigError: the file is missing, a folder, not readable, not UTF-8, not YAML, empty, not a mapping at
            its top level, or has a key twice.
    """
    by = f" (named by {named_by})" if named_by else ""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise ConfigError(f"there is no such config file{by}", place=path, hint=_near_files(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"this is a folder, expected a config file{by}", place=path) from None
    except OSError as error:
        raise ConfigError(f"cannot read the config file{by}: {error.strerror}", place=path) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"found byte 0x{data[error.start]:02x}, expected text in UTF-8"
        raise ConfigError(found, place=f"{path}:{line}") from None

    def source(line: int) -> Source:
        return Source("file", file=path, line=line)

    root = _parse(text, source, place=path)
    if root is None:
        raise ConfigError(
            "the config file is empty, expected sections such as model: and trainer:",
            place=path,
            hint="`ckptrun init` writes a commented example.",
        )
    if not isinstance(root.value, dict):
        found = "a list" if isinstance(root.value, list) else repr(root.value)
        raise ConfigError(
            f"found {found} at the top level, expected sections such as model: and trainer:",
            place=root.source.place,
        )
    return root


def parse_value(text: str, source: Source) -> Node:
    """Read the value of an override or an environment variable, as YAML where it is YAML, else as text.

    ``*.py`` and ``@x`` mean something else in YAML and are taken as the text they are; something that begins
    like a list or a mapping is not.

    Raises:
        ConfigError: a list or mapping that is not whole.
    """
    if not text.strip():
        return Node(text, source, text)
    try:
        node = _parse(text, lambda _: source, place=source.place)
    except ConfigError:
        if text.lstrip()[0] in "[{":
            raise
        node = None
    if node is None:  # only a comment, or no YAML
        return Node(text, source, text)
    return node


def _near_files(path: str) -> str | None:
    import os

    from ckptrun.config.nearest import did_you_mean

    folder, name = os.path.split(path)
    try:
        names = [entry for entry in os.listdir(folder or ".") if entry.endswith((".yaml", ".yml"))]
    except OSError:
        return f"The folder {folder} does not exist either." if folder else None
    return did_you_mean(name, names, prefix=os.path.join(folder, "") if folder else "")


def _parse(text: str, source: Callable[[int], Source], *, place: str) -> Node | None:
    loader = None
    try:
        loader = _Loader(text)
        composed = loader.get_single_node()
        return None if composed is None else _Builder(loader, source, place).build(composed, None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.problem, error.context) if part)
        where = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark is not None else place
        raise ConfigError(f"this is not YAML: {what}", place=where) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {' '.join(str(error).split())}", place=place) from None
    except RecursionError:
        raise ConfigError("this is nested too deeply", place=place) from None
    finally:
        if loader is not None:
            loader.dispose()


class _Builder:
    """Turns composed YAML nodes into ours."""

    def __init__(self, loader: Any, source: Callable[[int], Source], place: str) -> None:
        self._loader = loader
        self._source = source
        self._place = place
        self._open: set[int] = set()  # mappings and lists that are being built: an alias to one never ends

    def build(self, node: yaml.Node, key_line: int | None) -> Node:
        line = node.start_mark.line + 1 if key_line is None else key_line
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node), self._source(line), str(node.value))
        if id(node) in self._open:
            raise ConfigError("an alias (*name) stands inside what it names", place=f"{self._place}:{line}")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return Node([self.build(item, None) for item in node.value], self._source(line))
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return Node(self._mapping(node), self._source(line))
        finally:
            self._open.discard(id(node))
        raise self._bad_tag(node)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == _TAG + "str":
            return node.value
        if node.tag not in {_TAG + name for name in ("int", "float", "bool", "null")}:
            raise self._bad_tag(node)
        try:
            return self._loader.construct_object(node)
        except ValueError as error:  # `!!int x`
            raise ConfigError(str(error), place=f"{self._place}:{node.start_mark.line + 1}") from None

    def _bad_tag(self, node: yaml.Node) -> ConfigError:
        tag = str(node.tag).replace(_TAG, "!!")
        return ConfigError(
            f"the tag {tag} is not read here, expected plain values",
            place=f"{self._place}:{node.start_mark.line + 1}",
        )

    def _mapping(self, node: yaml.MappingNode) -> dict[Any, Node]:
        inherited: dict[Any, Node] = {}
        own: dict[Any, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError("found a list or mapping as a key", place=f"{self._place}:{line}")
            if key_node.tag == _TAG + "merge":
                for merged in self._merged(value_node, line):
                    inherited = {**merged, **inherited}
                continue
            key = self._scalar(key_node)
            if key is None or isinstance(key, bool):
                key = key_node.value  # a key `on` or `no` is a word, not true or false
            if key in own:
                raise ConfigError(
                    f"the key {key!r} stands here twice, first at {own[key].source.place}",
                    place=f"{self._place}:{line}",
                )
            own[key] = self.build(value_node, line)
        return {**inherited, **own}

    def _merged(self, node: yaml.Node, line: int) -> list[dict[Any, Node]]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found = []
        for each in nodes:
            value = self.build(each, None).value
            if not isinstance(value, dict):
                raise ConfigError("`<<` takes a mapping or a list of them", place=f"{self._place}:{line}")
            found.append(value)
        return found


def dump(tree: Any) -> str:
    """Return a tree of plain values as YAML that :func:`read_file` reads back as the same tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def dump_inline(value: Any) -> str:
    """Return one value as YAML on one line."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, allow_unicode=True, width=10**9
    )
    # A bare scalar is followed by the marker of the document's end; line breaks in text are escaped by
    # quoting.
    text = text.removesuffix("\n").removesuffix("\n...")
    if "\n" in text:
        text = yaml.dump(
            value,
            Dumper=_Dumper,
            sort_keys=False,
            default_flow_style=True,
            default_style='"',
            allow_unicode=True,
            width=10**9,
        ).removesuffix("\n")
    return text
