"""Merging files, environment, overrides and flags into one config that knows its sources."""

# ruff: noqa: E501 - a table reads best with one case a line

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrun.config.load import load_config, read_tree
from ckptrun.config.options import TrainerOptions
from ckptrun.errors import ConfigError

Write = Callable[..., str]

BASE = """\
run:
  name: base
trainer:
  max_steps: 100
  seed: 1
model:
  class_path: tasks.GPT
  init_args:
    width: 32
    optimizer: {lr: 1e-3, betas: [0.9, 0.95]}
callbacks:
- class_path: ckptrun.callbacks.ModelCheckpoint
  init_args:
    monitor: val_loss
- class_path: ckptrun.callbacks.EarlyStopping
"""


@pytest.fixture
def write(in_tmp_path: Path) -> Write:
    def write(text: str = BASE, name: str = "c.yaml") -> str:
        (in_tmp_path / name).write_text(text)
        return name

    return write


def test_nothing_given_is_all_defaults() -> None:
    config = load_config(files=[])
    assert config.trainer == TrainerOptions()
    assert (config.model, config.data, config.callbacks, config.loggers) == (None, None, [], [])
    assert config.tree == {}
    assert config.root == "./runs"
    assert config.source("trainer.seed").kind == "default"


def test_later_sources_win(write: Write) -> None:
    first, second = write(), write("trainer: {seed: 2, max_epochs: 2, log_every_n_steps: 2}\n", "d.yaml")
    config = load_config(
        files=[first, second],
        env={"CKPTRUN_TRAINER__MAX_EPOCHS": "3", "CKPTRUN_TRAINER__LOG_EVERY_N_STEPS": "3", "HOME": "/x"},
        overrides=["trainer.log_every_n_steps=4", "run.name=override"],
        flags={"run.name": "flag", "run.root": None, "strategy.name": "ddp"},
    )
    assert config.trainer.max_steps == 100
    assert config.trainer.seed == 2
    assert config.trainer.max_epochs == 3
    assert config.trainer.log_every_n_steps == 4
    assert config.run.name == "flag"
    places = {
        "trainer.max_steps": "c.yaml:4",
        "trainer.seed": "d.yaml:1",
        "trainer.max_epochs": "environment variable CKPTRUN_TRAINER__MAX_EPOCHS",
        "trainer.log_every_n_steps": "override 'trainer.log_every_n_steps=4'",
        "run.name": "--run",
        "run.root": "default",
        "strategy.name": "--strategy",
        "callbacks.0.init_args.monitor": "c.yaml:14",
    }
    assert {key: str(config.source(key)) for key in places} == places


def test_mappings_merge_and_lists_are_replaced(write: Write) -> None:
    first = write()
    second = write(
        "model: {init_args: {optimizer: {lr: 2, betas: [0]}, depth: 3}}\ncallbacks: [{class_path: a.B}]\n",
        "d.yaml",
    )
    config = load_config(files=[first, second])
    assert config.model is not None
    assert config.model.class_path == "tasks.GPT"
    assert config.model.init_args == {"width": 32, "optimizer": {"lr": 2, "betas": [0]}, "depth": 3}
    assert [spec.class_path for spec in config.callbacks] == ["a.B"]


def test_empty_sections_are_nothing_given(write: Write) -> None:
    config = load_config(
        files=[write("run:\ntrainer:\nmodel:\ndata: {class_path: a.B, init_args: null}\ncallbacks:\n")]
    )
    assert config.trainer == TrainerOptions()
    assert config.model is None
    assert config.data is not None
    assert config.data.init_args == {}
    assert config.callbacks == []


def test_an_empty_section_in_a_later_file_takes_nothing_away(write: Write) -> None:
    config = load_config(files=[write(), write("trainer:\n  # max_steps: 5\nrun:\n", "d.yaml")])
    assert config.trainer.max_steps == 100
    assert config.run.name == "base"


def test_a_later_file_takes_a_class_or_a_list_away(write: Write) -> None:
    config = load_config(files=[write(), write("model: null\ncallbacks: []\n", "d.yaml")])
    assert config.model is None
    assert config.callbacks == []


def test_a_class_that_stands_alone_is_an_entry(write: Write) -> None:
    config = load_config(files=[write("model: a.B\ncallbacks: [c.D, {class_path: e.F}]\n")])
    assert config.model is not None
    assert config.model.class_path == "a.B"
    assert [spec.class_path for spec in config.callbacks] == ["c.D", "e.F"]
    assert [spec.key for spec in config.callbacks] == ["callbacks.0", "callbacks.1"]


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["trainer.max_steps=1e3"], "trainer.max_steps", 1000.0),
        (["callbacks.0.init_args.save_top_k=3"], "callbacks.0.init_args.save_top_k", 3),
        (["callbacks.1.init_args.patience=3"], "callbacks.1.init_args.patience", 3),
        (["callbacks.2=a.B", "callbacks.2.init_args.x=1"], "callbacks.2.init_args.x", 1),
        (["callbacks=[a.B]"], "callbacks.0.class_path", "a.B"),
        (["callbacks=[]", "callbacks.0.class_path=a.B"], "callbacks.0.class_path", "a.B"),
        (
            ["loggers.0.class_path=ckptrun.loggers.CSVLogger"],
            "loggers.0.class_path",
            "ckptrun.loggers.CSVLogger",
        ),
        (["data=a.D", "data.init_args.num_workers=2"], "data.init_args.num_workers", 2),
        (["data.init_args.num_workers=2", "data.class_path=a.D"], "data.init_args.num_workers", 2),
        (["model.init_args.optimizer.lr=1e-4"], "model.init_args.optimizer.lr", 1e-4),
        (["model.init_args.optimizer.betas.1=0.99"], "model.init_args.optimizer.betas", [0.9, 0.99]),
        (["model.init_args={width: 3}"], "model.init_args.width", 3),
        (["model.init_args.text=a=b"], "model.init_args.text", "a=b"),
        (["model.init_args.text="], "model.init_args.text", ""),
        (["model.init_args.pattern=*.py"], "model.init_args.pattern", "*.py"),
        (["trainer.seed=3", "trainer.seed=4"], "trainer.seed", 4),
        (["strategy.config.zero_optimization.stage=2"], "strategy.config.zero_optimization.stage", 2),
    ],
)
def test_overrides(write: Write, overrides: list[str], key: str, value: Any) -> None:
    config = load_config(files=[write()], overrides=overrides)
    found: Any = config.tree
    for part in key.split("."):
        found = found[int(part) if isinstance(found, list) else part]
    assert found == value
    assert config.source(f"{key}.1" if isinstance(value, list) else key).kind == "override"


def test_an_override_leaves_what_stands_beside_it(write: Write) -> None:
    config = load_config(files=[write()], overrides=["callbacks.0.init_args.save_top_k=3"])
    assert config.callbacks[0].init_args == {"monitor": "val_loss", "save_top_k": 3}
    assert config.source("callbacks.0.init_args.monitor").place == "c.yaml:14"


def test_a_strategys_own_options_stand_beside_its_name(write: Write) -> None:
    config = load_config(files=[write("strategy: {name: deepspeed, stage: 2, config: ds.json}\n")])
    assert config.strategy.name == "deepspeed"
    assert config.strategy.options == {"stage": 2, "config": "ds.json"}
    assert config.resolved_tree()["strategy"] == {"name": "deepspeed", "stage": 2, "config": "ds.json"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.class_path=tasks.Big", "model.init_args.depth=2"],
        ["model.init_args.depth=2", "model.class_path=tasks.Big"],
        ["model=tasks.Big", "model.init_args.depth=2"],
        ["model={class_path: tasks.Big, init_args: {depth: 2}}"],
    ],
)
def test_another_class_keeps_the_old_arguments_apart(write: Write, overrides: list[str]) -> None:
    config = load_config(files=[write()], overrides=overrides)
    assert config.model is not None
    assert config.model.class_path == "tasks.Big"
    assert config.model.init_args == {"depth": 2}
    assert config.model.init_args_if_fit == {"width": 32, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}}


def test_an_argument_given_for_the_new_class_is_its_own(write: Write) -> None:
    overrides = ["model.class_path=tasks.Big", "model.init_args.width=3", "model.init_args.optimizer.lr=2"]
    config = load_config(files=[write()], overrides=overrides)
    assert config.model is not None
    assert config.model.init_args == {"width": 3, "optimizer": {"lr": 2, "betas": [0.9, 0.95]}}
    assert config.model.init_args_if_fit == {}


def test_the_same_class_again_changes_nothing(write: Write) -> None:
    config = load_config(files=[write(), write("model: {class_path: tasks.GPT}\n", "d.yaml")])
    assert config.model is not None
    assert config.model.init_args["width"] == 32
    assert config.model.init_args_if_fit == {}


def test_a_file_can_replace_a_class(write: Write) -> None:
    second = write("model: {class_path: tasks.Big, init_args: {width: 5}}\n", "d.yaml")
    config = load_config(files=[write(), second])
    assert config.model is not None
    assert config.model.init_args == {"width": 5}
    assert config.model.init_args_if_fit == {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}}


def test_the_resolved_tree_reads_back_as_the_same_config(write: Write) -> None:
    from ckptrun.config.yaml_format import dump

    overrides = ["model.class_path=tasks.Big", "trainer.max_time=01:00:00:00", "trainer.precision=32"]
    config = load_config(files=[write()], overrides=overrides)
    stored = write(dump(config.resolved_tree()), "stored.yaml")
    again = load_config(files=[stored])
    assert again.resolved_tree() == config.resolved_tree()
    assert again.trainer == config.trainer
    assert again.model is not None
    assert again.model.init_args_if_fit == config.model.init_args_if_fit  # type: ignore[union-attr]
    assert read_tree(stored) == config.resolved_tree()


def test_a_config_can_be_sent_to_another_process(write: Write) -> None:
    config = load_config(files=[write()], overrides=["trainer.seed=9"])
    again = pickle.loads(pickle.dumps(config))
    assert again.resolved_tree() == config.resolved_tree()
    assert again.source("trainer.seed") == config.source("trainer.seed")


def test_read_tree_takes_keys_of_another_version(write: Write) -> None:
    assert read_tree(write("trainer: {from_the_future: 1}\n")) == {"trainer": {"from_the_future": 1}}


# --- the run's name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flag", "task", "name", "given"),
    [
        ("run: {name: mine}\n", None, None, "mine", True),
        ("run: {name: mine}\n", "flag", None, "flag", True),
        ("run: {name: mine}\n", None, "7", "mine", True),
        ("trainer: {}\n", None, None, "my-config", False),
        ("trainer: {}\n", None, "7", "my-config-a7", False),
        ("run: {name: null}\n", None, None, "my-config", False),
        ("run: {name: 007}\n", None, None, "007", True),
        ("run: {name: 1e3}\n", None, None, "1e3", True),
        ("run: {name: 2024-01-01}\n", None, None, "2024-01-01", True),
        ("run: {name: on}\n", None, None, "on", True),
    ],
)
def test_run_name(
    write: Write, text: str, flag: str | None, task: str | None, name: str, given: bool
) -> None:
    config = load_config(files=[write(text, "my config.yaml")], flags={"run.name": flag})
    assert config.run_name(task) == name
    assert config.name_was_given is given


def test_of_several_files_the_last_names_the_run(write: Write) -> None:
    config = load_config(files=[write("trainer: {}\n", "base.yaml"), write("trainer: {}\n", "big.yaml")])
    assert config.run_name(None) == "big"


def test_without_a_file_and_a_name_there_is_no_run() -> None:
    with pytest.raises(ConfigError, match="no run is named"):
        load_config(files=[]).run_name(None)


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "..", " padded", "line\nbreak"])
def test_a_run_name_must_do_for_a_folder(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--run: run.name is .*, expected a name without '/'"):
        load_config(files=[], flags={"run.name": name})


# --- what bad input gets --------------------------------------------------------------------------

BAD = [
    # text, overrides, environment, message, hint
    ("trainer:\n  max_step: 3\n", [], {}, "c.yaml:2: unknown key 'trainer.max_step'", "Did you mean trainer.max_steps?"),
    ("trainer:\n  maxSteps: 3\n", [], {}, "c.yaml:2: unknown key", "Did you mean trainer.max_steps?"),
    ("run: {max_steps: 3}\n", [], {}, "c.yaml:1: unknown key 'run.max_steps'", "max_steps belongs under trainer"),
    ("max_steps: 3\n", [], {}, "c.yaml:1: unknown key 'max_steps'", "max_steps belongs under trainer"),
    ("launch: {max_step: 3}\n", [], {}, "unknown key 'launch.max_step'", "Did you mean trainer.max_steps?"),
    ("a: 1\n", [], {}, "c.yaml:1: unknown key 'a'", "Sections are run, trainer"),
    ("run:\n  zzz: 1\n", [], {}, "c.yaml:2: unknown key 'run.zzz'", "run has name, root"),
    ("trainr: {}\n", [], {}, "c.yaml:1: unknown key 'trainr'", "Did you mean trainer?"),
    ("callback: []\n", [], {}, "c.yaml:1: unknown key 'callback'", "Did you mean callbacks?"),
    ("seed_everything: 3\n", [], {}, "unknown key 'seed_everything'", "Write trainer.seed."),
    ("trainer: {callbacks: []}\n", [], {}, "unknown key 'trainer.callbacks'", "callbacks: at the top level"),
    ("trainer: {devices: 2}\n", [], {}, "unknown key 'trainer.devices'", "Write launch.nproc."),
    ("trainer: 5\n", [], {}, "c.yaml:1: trainer is 5, expected a mapping", None),
    ("strategy: ddp\n", [], {}, "c.yaml:1: strategy is 'ddp', expected a mapping: write strategy: {name: ddp}", None),
    ("trainer:\n  max_steps: many\n", [], {}, "c.yaml:2: trainer.max_steps is 'many', expected a whole number", None),
    ("trainer: {max_steps: 1.5}\n", [], {}, "trainer.max_steps is 1.5, expected a whole number", None),
    ("trainer: {max_steps: true}\n", [], {}, "trainer.max_steps is true, expected a whole number", None),
    ("trainer: {max_steps: -2}\n", [], {}, "trainer.max_steps is -2, expected -1 or more", None),
    ("trainer: {max_steps: [1]}\n", [], {}, "trainer.max_steps is a list, expected a whole number", None),
    ("trainer: {accumulate_grad_batches: 0}\n", [], {}, "is 0, expected 1 or more", None),
    ("trainer: {precision: 8}\n", [], {}, "trainer.precision is 8, expected one of 32, bf16-mixed, 16-mixed", None),
    ("trainer: {limit_val_batches: 1.5}\n", [], {}, "is 1.5, expected a fraction from 0.0 to 1.0", None),
    ("trainer: {val_check_interval: 0}\n", [], {}, "val_check_interval is 0, expected more than 0", None),
    ("trainer: {max_time: soon}\n", [], {}, "trainer.max_time is 'soon', expected seconds, 'HH:MM:SS'", None),
    ("trainer: {max_time: {hour: 1}}\n", [], {}, "is a mapping, expected a mapping of weeks, days, hours", None),
    ("trainer: {deterministic: maybe}\n", [], {}, "'maybe', expected true or false or warn", None),
    ("trainer: {enable_progress_bar: 1}\n", [], {}, "is 1, expected true or false", None),
    ("run: {on_save_error: ignore}\n", [], {}, "'ignore', expected one of retry, warn, stop", None),
    ("launch: {nproc: all}\n", [], {}, "launch.nproc is 'all', expected a whole number or auto", None),
    ("launch: {nproc: 0}\n", [], {}, "launch.nproc is 0, expected 1 or more", None),
    ("slurm: {signals: SIGUSR1}\n", [], {}, "slurm.signals is 'SIGUSR1', expected a list of text", None),
    ("model: {init_args: {x: 1}}\n", [], {}, "c.yaml:1: model has no class_path", None),
    ("model: [a.B]\n", [], {}, "c.yaml:1: model is a list, expected a class_path", None),
    ("model: {class_path: 3}\n", [], {}, "model.class_path is 3, expected a class", None),
    ("model: {class_path: ''}\n", [], {}, "model.class_path is '', expected a class", None),
    ("model: {class_path: a.B, init_args: [1]}\n", [], {}, "model.init_args is [1], expected a mapping", None),
    ("model: {class_path: a.B, init_arg: {}}\n", [], {}, "unknown key 'model.init_arg'", "Did you mean model.init_args?"),
    ("model: {class_path: a.B, width: 3}\n", [], {}, "unknown key 'model.width'", "model.init_args.width"),
    ("callbacks: {class_path: a.B}\n", [], {}, "callbacks is a mapping, expected a list", "- class_path"),
    ("callbacks:\n- class_path: a.B\n-\n", [], {}, "c.yaml:3: callbacks.1 is empty, expected a class_path", None),
    ("callbacks:\n- {init_args: {}}\n", [], {}, "c.yaml:2: callbacks.0 has no class_path", None),
    (BASE, ["max_steps"], {}, "override 'max_steps': expected key=value", "trainer.max_steps=100"),
    (BASE, ["other.yaml"], {}, "override 'other.yaml': expected key=value", "-c other.yaml"),
    (BASE, ["=3"], {}, "override '=3': expected key=value", None),
    (BASE, ["trainer..seed=3"], {}, "override 'trainer..seed=3': the key 'trainer..seed' has an empty part", None),
    (BASE, ["trainer.sede=3"], {}, "override 'trainer.sede=3': unknown key", "Did you mean trainer.seed?"),
    (BASE, ["trainer.seed.x=3"], {}, "trainer.seed is 1 (c.yaml:5), so there is no trainer.seed.x", None),
    (
        BASE,
        ["callbacks.5.init_args.x=3"],
        {},
        "callbacks has no entry '5'; it has callbacks.0 (ckptrun.callbacks.ModelCheckpoint), callbacks.1 ",
        None,
    ),
    (BASE, ["callbacks.ModelCheckpoint.x=3"], {}, "callbacks has no entry 'ModelCheckpoint'", None),
    (BASE, ["loggers.1=a.B"], {}, "loggers is an empty list: loggers.0 adds the first entry", None),
    (BASE, [], {"CKPTRUN_TRAINER__SEDE": "1"}, "CKPTRUN_TRAINER__SEDE: unknown key", "Did you mean trainer.seed?"),
    (BASE, [], {"CKPTRUN_MODEL__X": "1"}, "environment variable CKPTRUN_MODEL__X: unknown key 'model.x'", None),
    (
        BASE,
        [],
        {"CKPTRUN_TRAINER__SEED": "x"},
        "environment variable CKPTRUN_TRAINER__SEED: trainer.seed is 'x', expected a whole number",
        None,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "env", "message", "hint"), BAD)
def test_bad_input(
    write: Write, text: str, overrides: list[str], env: dict[str, str], message: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(files=[write(text)], overrides=overrides, env=env)
    assert message in caught.value.message
    assert hint is None or hint in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_who_named_a_missing_file_is_said(in_tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^c.yaml: there is no such config file \(named by pyproject.toml\)"
    ):
        load_config(files=["c.yaml"], how="pyproject.toml")
    with pytest.raises(ConfigError, match=r"^c.yaml: there is no such config file$"):
        load_config(files=["c.yaml"])


# --- cost -----------------------------------------------------------------------------------------


def test_loading_needs_no_heavy_library(write: Write) -> None:
    program = (
        "import sys\n"
        "from ckptrun.config.find import find_config\n"
        "from ckptrun.config.load import load_config\n"
        "from ckptrun.config.show import show_config\n"
        "from ckptrun.config.diff import config_diff\n"
        "from ckptrun.config.support import unsupported\n"
        f"config = load_config(files=[{write()!r}], overrides=['callbacks.0.init_args.save_top_k=3'])\n"
        "config_diff(config.resolved_tree(), config.resolved_tree()), unsupported(config), show_config(config)\n"
        "heavy = {'jsonargparse', 'torch', 'numpy', 'rich', 'typer', 'fsspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_loading_takes_milliseconds(write: Write) -> None:
    file = write(BASE + "loggers:\n" + "- class_path: a.B\n  init_args: {x: 1, y: 2}\n" * 12)
    load_config(files=[file])
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        load_config(files=[file])
        best = min(best, time.perf_counter() - start)
    assert best < 0.01  # seconds
