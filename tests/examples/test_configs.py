"""The configs in ``configs/``: complete, and every class and argument in them is real."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptrun
from ckptrun import DataModule, Module
from ckptrun.callbacks import Callback
from ckptrun.config.build import build
from ckptrun.config.load import load_config
from ckptrun.loggers import Logger

CONFIGS = sorted((Path(ckptrun.__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_all_classes_are_built(path: Path) -> None:
    config = load_config(files=[str(path)])
    assert config.run.name == path.stem
    assert config.model is not None
    assert config.data is not None
    assert isinstance(build(config.model, config=config), Module)
    assert isinstance(build(config.data, config=config), DataModule)
    assert all(isinstance(build(spec, config=config), Callback) for spec in config.callbacks)
    assert all(isinstance(build(spec, config=config), Logger) for spec in config.loggers)


def test_both_examples_are_there() -> None:
    assert [path.stem for path in CONFIGS] == ["digits", "stdlib_gpt"]
