"""What is the config of this command, from files, environment, overrides and flags together?

Decision: one pass that merges nodes which carry their source, then types the flat sections and checks the
shape of the class entries; no class is imported, so commands that do not train answer in milliseconds.
Turned down: one jsonargparse parser for the whole, which imports the user's classes to know its own keys.

    defaults < files (later wins) < CKPTRUN_<SECTION>__<OPTION> < key=value < flags
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptrun.config.nearest import did_you_mean
from ckptrun.config.replaced import without_replaced_options
from ckptrun.config.run_config import ClassSpec, RunConfig
from ckptrun.config.sections import (
    CLASS_SECTIONS,
    FLAT_SECTIONS,
    LIST_SECTIONS,
    SECTIONS,
    is_option,
    read_section,
    unknown_key,
)
from ckptrun.config.tree import (
    CLASS_PATH,
    DEFAULT,
    INIT_ARGS,
    INIT_ARGS_IF_FIT,
    Node,
    Source,
    assign,
    child,
    from_plain,
    merge,
    plain,
)
from ckptrun.config.yaml_format import parse_value, read_file
from ckptrun.errors import ConfigError

_ENVIRONMENT_PREFIX = "CKPTRUN_"
_ENTRY_KEYS = (CLASS_PATH, INIT_ARGS, INIT_ARGS_IF_FIT)
# Flags whose name is not their key's last part with dashes.
_FLAG_NAMES = {"run.name": "--run", "strategy.name": "--strategy"}


def load_config(
    *,
    files: Sequence[str],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    how: str = "flag",
) -> RunConfig:
    """Read and merge everything that says something about the run.

    Args:
        files: config files, later ones win; none at all is a config of defaults.
        overrides: ``key=value`` as given on the command line; the value is read as YAML.
        flags: dotted key to value, e.g. ``{"run.name": "a"}``; a value of None was not given.
        env: environment variables; None reads none. ``CKPTRUN_TRAINER__MAX_STEPS=5`` sets
            ``trainer.max_steps``.
        how: who named the files (``FoundConfig.how``), for the message where one is missing.

    Raises:
        ConfigError: with the place and the nearest right name, whatever is wrong.
    """
    named_by = None if how == "flag" else how
    root = Node({}, DEFAULT)
    for path in files:
        root = merge(root, _normalised(read_file(path, named_by=named_by)))
    root = Node({**{name: Node([], DEFAULT) for name in LIST_SECTIONS}, **root.value}, root.source)
    before = root = _laid_on(root, _environment(env or {}))
    root = _laid_on(root, _in_order([_override(text) for text in overrides]))
    for key, value in (flags or {}).items():
        if value is not None:
            name = _FLAG_NAMES.get(key, "--" + key.rpartition(".")[2].replace("_", "-"))
            root = assign(root, key, from_plain(value, Source("flag", text=name)))
    return without_replaced_options(_typed(root, tuple(files)), before)


def read_tree(path: str) -> dict[str, Any]:
    """Return one config file as plain values, unchecked: another version's keys may be in it.

    Raises:
        ConfigError: it cannot be read as YAML.
    """
    tree: dict[str, Any] = plain(_normalised(read_file(path)))
    return tree


def _laid_on(root: Node, given: Sequence[tuple[str, Node]]) -> Node:
    for key, node in given:
        section, _, index = key.partition(".")
        if key in CLASS_SECTIONS or (section in LIST_SECTIONS and index.isdigit()):
            node = _entry(node)
        root = _normalised(assign(root, key, node))
    return root


def _normalised(root: Node) -> Node:
    """Return the top level with its short forms written out, so that merging meets one form only.

    An empty flat section gives nothing, an empty list section is an empty list, and a class that stands
    alone is an entry without arguments.
    """
    sections: dict[Any, Node] = {}
    for name, node in root.value.items():
        if name in FLAT_SECTIONS and node.value is None:
            continue
        if name in CLASS_SECTIONS:
            node = _entry(node)
        elif name in LIST_SECTIONS and node.value is None:
            node = Node([], node.source)
        elif name in LIST_SECTIONS and isinstance(node.value, list):
            node = Node([_entry(item) for item in node.value], node.source)
        sections[name] = node
    return Node(sections, root.source)


def _entry(node: Node) -> Node:
    return Node({CLASS_PATH: node}, node.source) if isinstance(node.value, str) else node


def _override(text: str) -> tuple[str, Node]:
    key, equals, value = text.partition("=")
    source = Source("override", text=text)
    if not equals or not key.strip():
        hint = "Write trainer.max_steps=100, for example."
        if text.endswith((".yaml", ".yml")):
            hint = f"A config file is given with -c: -c {text}"
        raise ConfigError("expected key=value", place=source.place, hint=hint)
    return key.strip(), parse_value(value, source)


def _in_order(overrides: list[tuple[str, Node]]) -> list[tuple[str, Node]]:
    """Return the overrides with a new class before the arguments that are meant for it."""
    ordered: list[tuple[str, Node]] = []
    for key, node in overrides:
        entry = key.removesuffix("." + CLASS_PATH)
        if entry != key or key in CLASS_SECTIONS:
            later = [i for i, (other, _) in enumerate(ordered) if other.startswith(f"{entry}.{INIT_ARGS}")]
            ordered.insert(later[0] if later else len(ordered), (key, node))
        else:
            ordered.append((key, node))
    return ordered


def _environment(env: Mapping[str, str]) -> list[tuple[str, Node]]:
    found = []
    for variable in sorted(env):
        section, double, option = variable.removeprefix(_ENVIRONMENT_PREFIX).partition("__")
        if not variable.startswith(_ENVIRONMENT_PREFIX) or not double:
            continue
        source = Source("environment", text=variable)
        key = f"{section}.{option}".lower()
        if not is_option(key):
            raise unknown_key(key, source.place)
        found.append((key, parse_value(env[variable], source)))
    return found


def _typed(root: Node, files: tuple[str, ...]) -> RunConfig:
    for name, node in root.value.items():
        if name not in SECTIONS:
            raise unknown_key(str(name), node.source.place)
    sections = {name: read_section(name, root.value.get(name)) for name in FLAT_SECTIONS}
    return RunConfig(
        **sections,
        model=_class_spec(root.value.get("model"), "model"),
        data=_class_spec(root.value.get("data"), "data"),
        callbacks=_class_specs(root.value["callbacks"], "callbacks"),
        loggers=_class_specs(root.value["loggers"], "loggers"),
        files=files,
        nodes=root,
    )


def _class_specs(node: Node, key: str) -> list[ClassSpec]:
    if not isinstance(node.value, list):
        raise ConfigError(
            f"{key} is {'a mapping' if isinstance(node.value, dict) else repr(node.value)}, expected a list",
            place=node.source.place,
            hint=f"Write each entry as `- class_path: ...` under {key}:.",
        )
    specs = []
    for index, item in enumerate(node.value):
        spec = _class_spec(item, f"{key}.{index}")
        if spec is None:
            raise ConfigError(f"{key}.{index} is empty, expected a class_path", place=item.source.place)
        specs.append(spec)
    return specs


def _class_spec(node: Node | None, key: str) -> ClassSpec | None:
    if node is None or node.value is None:
        return None
    place = node.source.place
    if not isinstance(node.value, dict):
        found = "a list" if isinstance(node.value, list) else repr(node.value)
        raise ConfigError(f"{key} is {found}, expected a class_path with optional init_args", place=place)
    for name, value in node.value.items():
        if name not in _ENTRY_KEYS:
            hint = did_you_mean(str(name), _ENTRY_KEYS[:2], prefix=f"{key}.")
            raise ConfigError(
                f"unknown key '{key}.{name}', expected class_path and init_args",
                place=value.source.place,
                hint=hint or f"Arguments of the class go under {key}.init_args: {key}.init_args.{name}.",
            )
    path = child(node, CLASS_PATH)
    if path is None or path.value is None:
        raise ConfigError(f"{key} has no class_path", place=place)
    if not isinstance(path.value, str) or not path.value.strip():
        raise ConfigError(
            f"{key}.class_path is {plain(path)!r}, expected a class such as package.module.Class",
            place=path.source.place,
        )
    return ClassSpec(
        key=key,
        class_path=path.value.strip(),
        init_args=_arguments(node, INIT_ARGS, key),
        source=path.source,
        init_args_if_fit=_arguments(node, INIT_ARGS_IF_FIT, key),
    )


def _arguments(node: Node, name: str, key: str) -> dict[str, Any]:
    arguments = child(node, name)
    if arguments is None or arguments.value is None:
        return {}
    if not isinstance(arguments.value, dict):
        raise ConfigError(
            f"{key}.{name} is {plain(arguments)!r}, expected a mapping of arguments",
            place=arguments.source.place,
        )
    return {str(argument): plain(value) for argument, value in arguments.value.items()}
