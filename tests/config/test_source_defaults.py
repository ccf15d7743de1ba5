"""A default is read from the source, and no class is imported for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptrun.config.load import load_config
from ckptrun.config.source_defaults import default_in_source, find_module

SOURCE = """
raise SystemExit("this module is not to be imported")
from elsewhere import Far
import outside

class Plain:
    def __init__(self, size, num_workers: int = 2): ...

class ByName:
    def __init__(self, *, num_workers=3, size): ...

class Required:
    def __init__(self, num_workers): ...

class Computed:
    def __init__(self, num_workers=outside.count()): ...

class Without(Plain): ...

class HandsOn(ByName):
    def __init__(self, size=1, **kwargs): ...

class Takes(Plain):
    def __init__(self, size=1): ...

class FromFar(Far): ...

class OfItself(OfItself): ...

class Unknown(outside.Base): ...
"""


@pytest.fixture
def modules(in_tmp_path: Path) -> Path:
    (in_tmp_path / "lit.py").write_text(SOURCE)
    (in_tmp_path / "elsewhere.py").write_text("class Far:\n    def __init__(self, num_workers=7): ...\n")
    (in_tmp_path / "package").mkdir()
    (in_tmp_path / "package" / "__init__.py").write_text("raise SystemExit\nfrom lit import Plain as Other\n")
    (in_tmp_path / "package" / "part.py").write_text(
        "class Deep:\n    def __init__(self, num_workers=4): ...\n"
    )
    (in_tmp_path / "broken.py").write_text("class :\n")
    return in_tmp_path


@pytest.mark.parametrize(
    ("class_path", "default"),
    [
        ("lit.Plain", 2),
        ("lit.ByName", 3),
        ("lit.Required", None),
        ("lit.Computed", None),
        ("lit.Without", 2),
        ("lit.HandsOn", 3),
        ("lit.Takes", None),
        ("lit.FromFar", 7),
        ("lit.OfItself", None),
        ("lit.Unknown", None),
        ("lit.Missing", None),
        ("package.part.Deep", 4),
        ("package.Other", 2),
        ("broken.It", None),
        ("nowhere.It", None),
        ("lit.part.It", None),
        ("It", None),
        ("ckptrun.examples.digits.Digits", 0),
    ],
)
def test_defaults(modules: Path, class_path: str, default: int | None) -> None:
    assert default_in_source(class_path, "num_workers") == default
    assert not {"lit", "elsewhere", "package", "broken"} & set(sys.modules)


def test_a_module_is_looked_for_in_the_folder_that_is_named(modules: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert find_module("lit", str(modules)) is not None
    assert find_module("lit", str(tmp_path / "there")) is None
    assert find_module("json", str(tmp_path / "there")) is not None


@pytest.mark.parametrize(("given", "number"), [([], 2), (["data.init_args.num_workers=5"], 5)])
def test_loader_workers_are_counted(modules: Path, given: list[str], number: int) -> None:
    (modules / "c.yaml").write_text("data: {class_path: lit.Plain}\n")
    config = load_config(files=["c.yaml"], overrides=given, flags={}, env={}, how="flag")
    assert config.num_loader_workers == number
