"""How does a flat section of the config become typed options, and what is said where it cannot?

Decision: the first wrong key or value is the error, with its place and the nearest right name, looked for
in the other sections too. Turned down: collecting every error, since most of them follow from the first.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ckptrun.config.coerce import Mismatch, coerce, describe, show, takes_none
from ckptrun.config.nearest import did_you_mean, nearest
from ckptrun.config.options import SECTION_TYPES
from ckptrun.config.tree import Node, from_plain, plain
from ckptrun.errors import ConfigError

FLAT_SECTIONS = tuple(SECTION_TYPES)
CLASS_SECTIONS = ("model", "data")
LIST_SECTIONS = ("callbacks", "loggers")
SECTIONS = FLAT_SECTIONS + CLASS_SECTIONS + LIST_SECTIONS

# Where users of LightningCLI look for a thing, and where it is here.
_ELSEWHERE = {
    "seed_everything": "Write trainer.seed.",
    "ckpt_path": "Which checkpoint to start from is said with --ckpt.",
    "optimizer": "The optimizer is made in the model's configure_optimizers.",
    "lr_scheduler": "The scheduler is made in the model's configure_optimizers.",
    "trainer.callbacks": "Write the list under callbacks: at the top level.",
    "trainer.logger": "Write the list under loggers: at the top level.",
    "trainer.devices": "Write launch.nproc.",
    "trainer.num_nodes": "Write launch.nnodes.",
    "trainer.strategy": "Write strategy.name.",
    "trainer.accelerator": "The device is found by itself: a GPU where there is one, else the CPU.",
    "trainer.default_root_dir": "Write run.root.",
    "trainer.enable_checkpointing": "Leave ModelCheckpoint out of callbacks.",
    "logger": "Write the list under loggers: at the top level.",
    "data.batch_size": "Arguments of the class go under data.init_args.",
}


@dataclass(frozen=True)
class OptionInfo:
    """One option of a flat section, for docs and messages. ``key`` is dotted."""

    key: str
    default: Any
    takes: str
    doc: str


@cache
def _hints(section: str) -> dict[str, Any]:
    return typing.get_type_hints(SECTION_TYPES[section])


@cache
def _fields(section: str) -> dict[str, dataclasses.Field[Any]]:
    named = {item.name: item for item in dataclasses.fields(SECTION_TYPES[section])}
    named.pop("options", None)
    return named


def all_options() -> Iterator[OptionInfo]:
    """Yield every option of the flat sections in the order in which docs list them."""
    for section in FLAT_SECTIONS:
        for name, item in _fields(section).items():
            takes = item.metadata.get("forms") or describe(_hints(section)[name])
            yield OptionInfo(f"{section}.{name}", item.default, takes, item.metadata["doc"])


def is_option(key: str) -> bool:
    """Return whether a dotted key is an option of a flat section; a strategy's own options count."""
    section, _, name = key.partition(".")
    return section == "strategy" or (section in SECTION_TYPES and name in _fields(section))


def unknown_key(key: str, place: str | None) -> ConfigError:
    """Return the error for a key that does not exist, with where it belongs or the nearest name."""
    section, _, name = key.rpartition(".")
    hint = _ELSEWHERE.get(key)
    homes = [home for home in FLAT_SECTIONS if home != section and (name or key) in _fields(home)]
    if hint is None and homes:
        hint = f"{name or key} belongs under {homes[0]}: write {homes[0]}.{name or key}."
    if hint is None and section in SECTION_TYPES:
        hint = did_you_mean(name, _fields(section), prefix=f"{section}.") or _in_other_section(name)
        hint = hint or f"{section} has {', '.join(_fields(section))}."
    if hint is None:
        hint = did_you_mean(key, SECTIONS) or _in_other_section(key) or f"Sections are {', '.join(SECTIONS)}."
    return ConfigError(f"unknown key '{key}'", place=place, hint=hint)


def _in_other_section(name: str) -> str | None:
    every = {option: section for section in FLAT_SECTIONS for option in _fields(section)}
    found = nearest(name, every)
    return None if found is None else f"Did you mean {every[found]}.{found}?"


def read_section(section: str, node: Node | None) -> Any:
    """Return a flat section's options, typed, from what the sources say; null means the default.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range, with its place.
    """
    given: Mapping[str, Node] = {} if node is None or node.value is None else node.value
    if not isinstance(given, dict):
        assert node is not None
        hint = _lightning_strategy(node) if section == "strategy" else None
        if hint is not None:
            raise ConfigError(
                f"{section} is {show(node)}, expected a mapping", place=node.source.place, hint=hint
            )
        example = (
            f"write {section}: {{name: {plain(node)}}}"
            if section == "strategy"
            else "write key: value below it"
        )
        raise ConfigError(
            f"{section} is {show(node)}, expected a mapping: {example}", place=node.source.place
        )
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in given.items():
        item = _fields(section).get(name)
        if item is not None:
            values[name] = _read_option(section, item, value)
        elif section == "strategy":
            extra[str(name)] = plain(value)
        else:
            raise unknown_key(f"{section}.{name}", value.source.place)
    if section == "strategy":
        values["options"] = extra
    return SECTION_TYPES[section](**values)


def _read_option(section: str, item: dataclasses.Field[Any], node: Node) -> Any:
    annotation = _hints(section)[item.name]
    if node.value is None:
        # LightningCLI writes null for what it leaves to the trainer.
        return None if takes_none(annotation) else item.default
    aliases = item.metadata.get("aliases", {})
    written = str(node.text if node.text is not None else node.value)
    if written in aliases:
        node = from_plain(aliases[written], node.source)
    convert = item.metadata.get("convert")
    key = f"{section}.{item.name}"
    try:
        value = convert(node) if convert is not None else coerce(node, annotation)
    except Mismatch as mismatch:
        hint = _lightning_strategy(node) if key == "strategy.name" else None
        raise _wrong(key, node, mismatch.expected, hint=hint) from None
    check = item.metadata.get("check")
    expected = check(value) if check is not None else None
    if expected is not None:
        raise _wrong(key, node, expected)
    return value


def _wrong(key: str, node: Node, expected: str, *, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{key} is {show(node)}, expected {expected}", place=node.source.place, hint=hint)


def _lightning_strategy(node: Node) -> str | None:
    """How to say what Lightning has a name of its own for; None where it is no such name."""
    match = re.fullmatch(r"deepspeed_stage_([0-3])(_offload(?:_nvme)?)?", str(node.value))
    if match is None:
        return None
    stage, offload = match.groups()
    words = ["--strategy deepspeed", f"strategy.stage={stage}"]
    if offload:
        words.append("strategy.offload_optimizer=true")
        if stage == "3":
            words.append("strategy.offload_parameters=true")
    at_the_cpu = ", which is the CPU: NVMe is not available" if offload == "_offload_nvme" else ""
    return f"Write {' '.join(words)}{at_the_cpu}."


def section_tree(options: Any) -> dict[str, Any]:
    """Return a section's options as plain values that read back as the same options."""
    tree = {item.name: getattr(options, item.name) for item in dataclasses.fields(options)}
    extra = tree.pop("options", {})
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in tree.items()}
    return {**values, **extra}
