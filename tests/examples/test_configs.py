"""The configs in ``configs/``: complete, and every class and argument in them is real."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptrun
from ckptrun import DataModule, Module
from ckptrun.callbacks import Callback
from ckptrun.config.build import build
from ckptrun.config.load import load_config
from ckptrun.config.support import check_supported
from ckptrun.deepspeed_config import stage_of
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


def test_all_examples_are_there() -> None:
    zero = [f"deepspeed_zero{stage}" for stage in (1, 2, 3)]
    assert [path.stem for path in CONFIGS] == [*zero, "digits", "stdlib_gpt"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_deepspeed_configs_ask_for_nothing_that_is_not_there(stage: int) -> None:
    path = next(path for path in CONFIGS if path.stem == f"deepspeed_zero{stage}")
    config = load_config(files=[str(path)])
    check_supported(config)
    assert stage_of(config.strategy.options) == stage
