"""What of a changed config changes the result, by the README's rule, as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptrun.config.diff import ABSENT, config_diff
from ckptrun.config.load import load_config

BASE = """\
trainer: {max_steps: 100}
model: {class_path: a.Model, init_args: {width: 3, layers: [1, 2], inner: {class_path: a.In}}}
data: {class_path: a.Data, init_args: {batch_size: 8, val: {num_workers: 2, size: 3}}}
strategy: {name: deepspeed, stage: 1, config: {zero_optimization: {stage: 1}, bf16: true}}
callbacks: [{class_path: c.D, init_args: {every_n_train_steps: 5}}]
"""


def _tree(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    file = tmp_path / "c.yaml"
    file.write_text(BASE)
    return load_config(files=[str(file)], overrides=overrides).resolved_tree()


CHANGES, STEERS = "changes result", "steers"


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        # everything under model, data and strategy
        ("model.class_path=a.Other", CHANGES),
        ("model.init_args.width=4", CHANGES),
        ("model.init_args.layers.1=4", CHANGES),
        ("model.init_args.new=4", CHANGES),
        ("model.init_args.inner.init_args.x=1", CHANGES),
        ("data.init_args.batch_size=9", CHANGES),
        ("data.init_args.val.size=9", CHANGES),
        ("strategy.config.bf16=false", CHANGES),
        ("strategy.name=single", CHANGES),
        # seed, precision, clipping, accumulation, and what an epoch is
        ("trainer.seed=1", CHANGES),
        ("trainer.precision=bf16-mixed", CHANGES),
        ("trainer.gradient_clip_val=1", CHANGES),
        ("trainer.gradient_clip_algorithm=value", CHANGES),
        ("trainer.accumulate_grad_batches=2", CHANGES),
        ("trainer.deterministic=true", CHANGES),
        ("trainer.limit_train_batches=5", CHANGES),
        # what only steers
        ("data.init_args.num_workers=4", STEERS),
        ("data.init_args.val.num_workers=4", STEERS),
        ("trainer.max_steps=7", STEERS),
        ("trainer.max_epochs=7", STEERS),
        ("trainer.max_time=7", STEERS),
        ("trainer.log_every_n_steps=7", STEERS),
        ("trainer.val_check_interval=7", STEERS),
        ("trainer.num_threads=7", STEERS),
        ("trainer.enable_progress_bar=false", STEERS),
        ("run.name=x", STEERS),
        ("run.save_on_stop=false", STEERS),
        ("launch.nproc=2", STEERS),
        ("slurm.requeue=none", STEERS),
        ("callbacks.0.init_args.every_n_train_steps=7", STEERS),
        ("callbacks.1=c.E", STEERS),
        ("loggers=[c.F]", STEERS),
        ("strategy.stage=2", STEERS),
        ("strategy.offload_optimizer=true", STEERS),
        ("strategy.config.zero_optimization.stage=2", STEERS),
        # repeated in DeepSpeed's config: what they follow from is compared where it stands
        ("strategy.config.train_batch_size=4", STEERS),
        ("strategy.config.train_micro_batch_size_per_gpu=4", STEERS),
        ("strategy.config.zero_optimization.train_batch_size=4", CHANGES),
        ("strategy.config.zero_optimization.offload_optimizer.device=cpu", STEERS),
    ],
)
def test_the_rule(tmp_path: Path, override: str, kind: str) -> None:
    found = config_diff(_tree(tmp_path), _tree(tmp_path, override))
    assert found
    assert found[0].kind == kind
    assert found[0].key.startswith(override.partition("=")[0].removesuffix(".1"))


def test_single_against_ddp_steers() -> None:
    single, ddp = ({"strategy": {"name": name}} for name in ("single", "ddp"))
    assert [(d.key, d.kind) for d in config_diff(single, ddp)] == [("strategy.name", STEERS)]
    assert [(d.key, d.kind) for d in config_diff({}, ddp)] == [("strategy.name", STEERS)]


def test_the_same_is_no_difference(tmp_path: Path) -> None:
    assert config_diff(_tree(tmp_path), _tree(tmp_path)) == []
    assert config_diff({"model": {"x": 1}}, {"model": {"x": 1.0}}) == []
    assert config_diff({"model": {"x": float("nan")}}, {"model": {"x": float("nan")}}) == []
    assert config_diff({"model": {"init_args": {}}}, {"model": {}}) == []
    assert len(config_diff({"model": {"x": 1}}, {"model": {"x": True}})) == 1


def test_an_option_that_one_side_does_not_know_has_its_default() -> None:
    assert config_diff({}, {"trainer": {"seed": 0, "max_steps": -1}, "slurm": {"signals": ["SIGUSR1"]}}) == []
    (found,) = config_diff({"trainer": {}}, {"trainer": {"seed": 3}})
    assert (found.key, found.stored, found.given) == ("trainer.seed", 0, 3)


def test_values_of_both_sides_and_order(tmp_path: Path) -> None:
    given = _tree(tmp_path, "trainer.max_steps=5", "model.init_args.depth=2", "model.init_args.width=4")
    found = config_diff(_tree(tmp_path), given)
    assert [(d.key, d.stored, d.given) for d in found] == [
        ("model.init_args.width", 3, 4),
        ("model.init_args.depth", ABSENT, 2),
        ("trainer.max_steps", 100, 5),
    ]
    assert str(found[1]) == "model.init_args.depth: nothing in the run, 2 given"


def test_neither_tree_is_changed() -> None:
    stored: dict[str, Any] = {"trainer": {"seed": 1}}
    config_diff(stored, {})
    assert stored == {"trainer": {"seed": 1}}
