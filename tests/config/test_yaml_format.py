"""YAML in and out: numbers, marks, broken files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptrun.config.tree import Source, leaves, lookup, plain
from ckptrun.config.yaml_format import dump, dump_inline, parse_value, read_file
from ckptrun.errors import ConfigError

OVERRIDE = Source("override", text="a=b")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("1_000", 1000),
        ("0x10", 16),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("1E3", 1000.0),
        ("1e-4", 1e-4),
        ("-1e-4", -1e-4),
        ("1.0e-4", 1e-4),
        (".5", 0.5),
        (".5e1", 5.0),
        ("5.", 5.0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        # YAML 1.1 would make other things of these
        ("010", "010"),
        ("4:00:00", "4:00:00"),
        ("1:00:00:00", "1:00:00:00"),
        ("2024-01-02", "2024-01-02"),
        ("e3", "e3"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("12ab", "12ab"),
        ("=", "="),
        ("true", True),
        ("on", True),
        ("off", False),
        ("yes", True),
        ("no", False),
        ("null", None),
        ("~", None),
        ("text", "text"),
        ("'1'", "1"),
        ('"1e3"', "1e3"),
        ("[1, 1e-1, a]", [1, 0.1, "a"]),
        ("{a: 1, b: [2]}", {"a": 1, "b": [2]}),
        ("!!str 1", "1"),
        # not YAML, or something else in it: text
        ("*.py", "*.py"),
        ("@home", "@home"),
        ("%x", "%x"),
        ("a: b: c", "a: b: c"),
        ("# note", "# note"),
        ("", ""),
        ("val/loss", "val/loss"),
        ("{epoch", ConfigError),
        ("[1, 2", ConfigError),
    ],
)
def test_values(text: str, value: Any) -> None:
    if value is ConfigError:
        with pytest.raises(ConfigError, match=r"override 'a=b'.*not YAML"):
            parse_value(text, OVERRIDE)
        return
    found = plain(parse_value(text, OVERRIDE))
    assert found == value
    assert type(found) is type(value)


def test_every_value_knows_its_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "trainer:\n"
        "  max_steps: 5\n"
        "\n"
        "  seed:\n"
        "    7\n"
        "callbacks:\n"
        "- class_path: a.B\n"
        "  init_args: {x: 1,\n"
        "    y: [2,\n"
        "        3]}\n"
    )
    root = read_file(str(file))
    lines = {key: node.source.line for key, node in leaves(root)}
    assert lines == {
        "trainer.max_steps": 2,
        "trainer.seed": 4,  # where its key stands
        "callbacks.0.class_path": 7,
        "callbacks.0.init_args.x": 8,
        "callbacks.0.init_args.y.0": 9,
        "callbacks.0.init_args.y.1": 10,
    }
    found = lookup(root, "callbacks.0.init_args.y")
    assert found is not None
    assert found.source.place == f"{file}:9"


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "base: &base {lr: 1, wd: 2}\nmore: &more {wd: 3, x: 4}\n"
        "one: *base\ntwo: {<<: *base, lr: 5}\nthree: {<<: [*base, *more]}\n"
    )
    tree = plain(read_file(str(file)))
    assert tree["one"] == {"lr": 1, "wd": 2}
    assert tree["two"] == {"lr": 5, "wd": 2}
    assert tree["three"] == {"lr": 1, "wd": 2, "x": 4}


def test_keys_that_yaml_reads_as_booleans_stay_words(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("on: 1\nno: 2\ny: 3\nnull: 4\n5: five\n")
    assert plain(read_file(str(file))) == {"on": 1, "no": 2, "y": 3, "null": 4, 5: "five"}


BAD_FILES = [
    (b"", ": the config file is empty", "ckptrun init"),
    (b"# only a comment\n", ": the config file is empty", "ckptrun init"),
    (b"- a\n- b\n", ":1: found a list at the top level", None),
    (b"\njust text\n", ":2: found 'just text' at the top level", None),
    (b"a: 1\nb: [1, 2\n", ":3:1: this is not YAML", None),
    (b"a: 1\nb: c: d\n", ":2:5: this is not YAML: mapping values are not allowed", None),
    (b"a:\n\t- b\n", ":2:1: this is not YAML", None),
    (b"a: 1\nb: {c: 1}\n\na: 2\n", ":4: the key 'a' stands here twice, first at ", None),
    (b"m:\n  x: 1\n  y: 1\n  x: 1\n", ":4: the key 'x' stands here twice, first at ", None),
    (b"a: 1\nb: \xff\n", ":2: found byte 0xff, expected text in UTF-8", None),
    ("a: ü\n".encode("utf-16"), ":1: found byte 0xff, expected text in UTF-8", None),
    (b"a: \x00\n", ": this is not YAML", None),
    (b"a: !!python/object:os.system {}\n", ":1: the tag !!python/object:os.system is not read here", None),
    (b"a: 1\nb: !new x\n", ":2: the tag !new is not read here", None),
    (b"a: 1\n? [1, 2]\n: b\n", ":2: found a list or mapping as a key", None),
    (b"a: &x\n  b: *x\n", ":2: an alias (*name) stands inside what it names", None),
    (b"a: *nowhere\n", ":1:4: this is not YAML: found undefined alias", None),
    (b"a: 1\n---\nb: 2\n", ":2:1: this is not YAML: but found another document", None),
    (b"a: {<<: 3}\n", ":1: `<<` takes a mapping", None),
    (b"a: !!int x\n", ":1: invalid literal for int", None),
    (b"a: " + b"[" * 3000, "", None),
]


@pytest.mark.parametrize(("data", "message", "hint"), BAD_FILES)
def test_bad_files(tmp_path: Path, data: bytes, message: str, hint: str | None) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_file(str(file))
    assert str(caught.value).startswith(f"{file}{message}")
    assert hint is None or hint in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_the_second_of_two_equal_keys_names_the_first(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(ConfigError) as caught:
        read_file(str(file))
    assert caught.value.message == f"{file}:3: the key 'a' stands here twice, first at {file}:1"


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert plain(read_file(str(file))) == {"a": 1}


def test_a_missing_file_names_the_one_that_is_near(tmp_path: Path) -> None:
    (tmp_path / "stdlib_gpt.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path / "stdlib-gtp.yaml"))
    assert "there is no such config file" in caught.value.message
    assert caught.value.hint == f"Did you mean {tmp_path}/stdlib_gpt.yaml?"


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(str(tmp_path / "none" / "c.yaml"), named_by="CKPTRUN_CONFIG")
    assert "(named by CKPTRUN_CONFIG)" in caught.value.message
    assert caught.value.hint == f"The folder {tmp_path}/none does not exist either."


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder, expected a config file"):
        read_file(str(tmp_path))


def test_what_is_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot read the config file: Not a directory"):
        read_file(str(tmp_path / "file" / "c.yaml"))


AWKWARD: list[Any] = [
    "1e3",
    "1e-4",
    "010",
    "4:00:00",
    "on",
    "null",
    "",
    " padded ",
    "a: b",
    "# no comment",
    "two\nlines",
    "two\n\nlines  ",
    "tab\there",
    "ü 漢 😀",
    "'\"",
    "- x",
    "x" * 500 + " " + "y" * 500,
    1e-5,
    1e20,
    float("inf"),
    1,
    True,
    None,
    {},
    [],
]


@pytest.mark.parametrize("value", AWKWARD)
def test_what_is_written_reads_back(tmp_path: Path, value: Any) -> None:
    line = dump_inline(value)
    assert "\n" not in line
    file = tmp_path / "c.yaml"
    file.write_text(f"a: {line}  # comment\n" + dump({"b": {"c": [value, {"d": value}]}}))
    assert plain(read_file(str(file))) == {"a": value, "b": {"c": [value, {"d": value}]}}
