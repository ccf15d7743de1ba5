"""What is the config that counts, and who gave each value?

Decision: YAML with the source of each value as a comment behind it, so that the output is itself a config
that gives the same run. Turned down: a table, which nobody can start a run from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptrun.config.run_config import RunConfig
from ckptrun.config.sections import all_options
from ckptrun.config.yaml_format import dump_inline

_COMMENT_COLUMN = 44

_Comment = Callable[[str], str]  # dotted key -> what stands behind its value
_Line = tuple[str, str | None]  # text and comment


def show_config(config: RunConfig) -> str:
    """Return the text of ``--print-config``: each value with its source; it reads back as the same config.

    An option that nobody gave shows what it does.
    """
    docs = {option.key: option.doc for option in all_options()}

    def comment(key: str) -> str:
        source = config.source(key)
        return f"default; {docs[key]}" if source.kind == "default" and key in docs else str(source)

    lines: list[_Line] = []
    for section, value in config.resolved_tree().items():
        lines += _lines(section, value, section, comment)
    return "".join(
        f"{text.ljust(_COMMENT_COLUMN)}  # {said}\n" if said else f"{text}\n" for text, said in lines
    )


def _lines(name: str, value: Any, key: str, comment: _Comment) -> list[_Line]:
    """The lines of one ``name: value``, not indented."""
    if isinstance(value, dict) and value:
        return [(f"{name}:", None), *_indented(_items(value, key, comment))]
    if isinstance(value, list) and value and not _is_short(value, key, comment):
        items = [_list_item(item, f"{key}.{index}", comment) for index, item in enumerate(value)]
        return [(f"{name}:", None), *_indented([line for lines in items for line in lines])]
    return [(f"{name}: {dump_inline(value)}", comment(key))]


def _is_short(value: list[Any], key: str, comment: _Comment) -> bool:
    """Whether a list fits on one line: plain items, all from where the list itself is from."""
    return not any(isinstance(item, (dict, list)) for item in value) and all(
        comment(f"{key}.{index}") in (comment(key), "default") for index in range(len(value))
    )


def _items(value: dict[Any, Any], key: str, comment: _Comment) -> list[_Line]:
    return [
        line
        for name, item in value.items()
        for line in _lines(dump_inline(name), item, f"{key}.{name}", comment)
    ]


def _list_item(item: Any, key: str, comment: _Comment) -> list[_Line]:
    if isinstance(item, dict) and item:
        inner = _items(item, key, comment)
    elif isinstance(item, list) and item:
        inner = [line for i, each in enumerate(item) for line in _list_item(each, f"{key}.{i}", comment)]
    else:
        inner = [(dump_inline(item), comment(key))]
    (text, said), *rest = inner
    return [(f"- {text}", said), *_indented(rest)]


def _indented(lines: list[_Line]) -> list[_Line]:
    return [(f"  {text}", said) for text, said in lines]
