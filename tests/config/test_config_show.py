"""The text of --print-config."""

from __future__ import annotations

from pathlib import Path

from ckptrun.config.load import load_config
from ckptrun.config.sections import all_options
from ckptrun.config.show import show_config

CONFIG = """\
run: {name: 1e3}
trainer:
  max_time: 00:01:00:00
  precision: 32
model:
  class_path: a.B
  init_args:
    text: "two\\nlines # not a comment"
    lr: 1e-4
    sizes: [1, 2]
    nested: [[1, 2], {a: {}, b: []}, {class_path: c.D, init_args: {x: 1}}]
    on: {1: one, "1.5": b}
callbacks:
- class_path: ckptrun.callbacks.ModelCheckpoint
  init_args: {filename: "{epoch}-{val_loss:.2f}"}
"""
OVERRIDES = ["model.init_args.sizes.1=5", "callbacks.1=e.F", "data=g.H", "trainer.seed=4"]


def test_it_reads_back_as_the_same_config(in_tmp_path: Path) -> None:
    (in_tmp_path / "c.yaml").write_text(CONFIG)
    config = load_config(files=["c.yaml"], overrides=OVERRIDES, flags={"run.root": "here"})
    (in_tmp_path / "d.yaml").write_text(show_config(config))
    again = load_config(files=["d.yaml"])
    assert again.resolved_tree() == config.resolved_tree()
    assert show_config(load_config(files=[])).count("\n") > len(list(all_options()))


def test_each_value_has_its_source(in_tmp_path: Path) -> None:
    (in_tmp_path / "c.yaml").write_text(CONFIG)
    text = show_config(
        load_config(
            files=["c.yaml"],
            overrides=OVERRIDES,
            flags={"run.root": "here"},
            env={"CKPTRUN_TRAINER__MAX_STEPS": "7"},
        )
    )
    lines = {line.split("#")[0].strip(): line.split("#")[-1].strip() for line in text.splitlines()}
    assert lines["name: '1e3'"] == "c.yaml:1"
    assert lines["root: here"] == "--root"
    assert lines["max_steps: 7"] == "environment variable CKPTRUN_TRAINER__MAX_STEPS"
    assert lines["max_time: 3600.0"] == "c.yaml:3"
    assert lines["seed: 4"] == "override 'trainer.seed=4'"
    assert lines["gradient_clip_val: null"].startswith("default; clip gradients")
    assert lines["lr: 0.0001"] == "c.yaml:9"
    assert lines["- 1"] == "c.yaml:10"
    assert lines["- 5"] == "override 'model.init_args.sizes.1=5'"
    assert lines["- class_path: e.F"] == "override 'callbacks.1=e.F'"
    assert lines["signals: [SIGUSR1]"].startswith("default; signals")
