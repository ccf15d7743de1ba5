"""Which run and config a command is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptrun.cli.options import FnOptions
from ckptrun.cli.settle import named_once, settle_fn, settle_root, settle_run
from ckptrun.errors import ConfigError, UnknownRunError, UsageError

CONFIG = """
run: {root: from-config}
trainer: {max_steps: 3}
data: {class_path: a.Data}
"""


def write_config(path: Path, text: str = CONFIG) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def make_run(path: Path, config: str | None = None) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    (path / "run.json").write_text('{"id": "r"}')
    if config is not None:
        (path / "config.yaml").write_text(config)
    return path


# --- fn commands


def test_fit_names_the_run_after_the_config(in_tmp_path: Path) -> None:
    write_config(in_tmp_path / "configs" / "gpt.yaml")
    settled = settle_fn("fit", FnOptions(config=["configs/gpt.yaml"]), {})
    assert (settled.folder.name, settled.name_was_given) == ("gpt", False)
    assert settled.folder.root == str(in_tmp_path / "from-config")


def test_flags_beat_the_config(in_tmp_path: Path) -> None:
    write_config(in_tmp_path / "ckptrun.yaml", "run: {name: a, root: b}")
    settled = settle_fn("fit", FnOptions(run="x", root="y", nproc="auto", grace_s="5"), {})
    assert settled.folder.path == str(in_tmp_path / "y" / "x")
    assert settled.name_was_given
    assert settled.config.launch.grace_s == 5.0
    assert settled.config.launch.nproc == "auto"
    assert settled.config.source("run.name").place == "--run"


def test_a_task_of_a_job_array_has_a_run_of_its_own(in_tmp_path: Path) -> None:
    write_config(in_tmp_path / "ckptrun.yaml")
    env = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
    assert settle_fn("fit", FnOptions(), env).folder.name == "ckptrun-a3"
    assert settle_fn("fit", FnOptions(run="mine"), env).folder.name == "mine"
    outside = settle_fn("fit", FnOptions(no_slurm=True), env)
    assert (outside.folder.name, outside.job) == ("ckptrun", None)


def test_fit_without_a_config_names_init(in_tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        settle_fn("fit", FnOptions(run="demo"), {})
    assert "ckptrun init" in str(caught.value)


def test_evaluation_uses_the_config_stored_with_the_run(in_tmp_path: Path) -> None:
    write_config(in_tmp_path / "ckptrun.yaml", "run: {name: demo}\ntrainer: {max_steps: 9}")
    make_run(in_tmp_path / "runs" / "demo", CONFIG)
    settled = settle_fn("test", FnOptions(overrides=["data.init_args.num_workers=2"]), {})
    assert settled.config.trainer.max_steps == 3
    assert settled.config.data is not None
    assert settled.config.data.init_args == {"num_workers": 2}
    # The stored config was written where its root was; the run is where it was found.
    assert settled.folder.path == str(in_tmp_path / "runs" / "demo")


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_evaluation_uses_a_config_that_is_given(in_tmp_path: Path, how: str) -> None:
    given = write_config(in_tmp_path / "other.yaml", "run: {name: demo}\ntrainer: {max_steps: 9}")
    make_run(in_tmp_path / "runs" / "demo", CONFIG)
    options = FnOptions(config=[str(given)]) if how == "flag" else FnOptions()
    env = {"CKPTRUN_CONFIG": str(given)} if how == "variable" else {}
    assert settle_fn("validate", options, env).config.trainer.max_steps == 9


def test_evaluation_of_a_named_run_needs_no_config(in_tmp_path: Path) -> None:
    make_run(in_tmp_path / "runs" / "demo", CONFIG)
    settled = settle_fn("predict", FnOptions(run="demo"), {})
    assert settled.config.trainer.max_steps == 3
    assert settled.folder.path == str(in_tmp_path / "runs" / "demo")
    with pytest.raises(UnknownRunError) as caught:
        settle_fn("predict", FnOptions(run="dmo"), {})
    assert caught.value.hint == "Did you mean demo?"


def test_evaluation_waits_for_no_hosts_that_training_had(in_tmp_path: Path) -> None:
    launch = "launch: {nnodes: 2, nproc: 2, rdzv_endpoint: 'a:29500'}"
    make_run(in_tmp_path / "runs" / "demo", f"{CONFIG}\n{launch}\n")
    one = settle_fn("validate", FnOptions(run="demo"), {}).config
    assert (one.launch.nnodes, one.launch.nproc, one.launch.rdzv_endpoint) == (1, 2, "")
    assert settle_fn("validate", FnOptions(run="demo", nnodes="2"), {}).config.launch.nnodes == 2
    given = FnOptions(run="demo", overrides=["launch.nnodes=3"])
    assert settle_fn("validate", given, {}).config.launch.nnodes == 3


def test_evaluation_of_a_run_without_a_stored_config_uses_the_one_found(in_tmp_path: Path) -> None:
    write_config(in_tmp_path / "ckptrun.yaml")
    assert settle_fn("test", FnOptions(), {}).config.trainer.max_steps == 3


def test_a_broken_pyproject_is_not_passed_over(in_tmp_path: Path) -> None:
    (in_tmp_path / "pyproject.toml").write_text("[tool.ckptrun\n")
    make_run(in_tmp_path / "runs" / "demo", CONFIG)
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        settle_fn("test", FnOptions(run="demo"), {})


# --- commands about a run


def test_a_named_run_needs_no_config(in_tmp_path: Path) -> None:
    run = make_run(in_tmp_path / "runs" / "demo")
    assert settle_run("demo", None, None, {}).path == str(run)
    assert settle_run("demo", "runs", None, {}).path == str(run)


def test_with_name_and_root_no_config_is_read(in_tmp_path: Path) -> None:
    write_config(in_tmp_path / "ckptrun.yaml", "nonsense: [")
    run = make_run(in_tmp_path / "runs" / "demo")
    assert settle_run("demo", "runs", None, {}).path == str(run)
    with pytest.raises(ConfigError):
        settle_run("demo", None, None, {})


def test_run_and_root_come_from_the_config(in_tmp_path: Path) -> None:
    write_config(in_tmp_path / "ckptrun.yaml")
    run = make_run(in_tmp_path / "from-config" / "ckptrun")
    assert settle_run(None, None, None, {}).path == str(run)
    assert settle_root(None, None, {}) == "from-config"


def test_the_root_comes_from_the_environment(in_tmp_path: Path) -> None:
    run = make_run(in_tmp_path / "elsewhere" / "demo")
    assert settle_run("demo", None, None, {"CKPTRUN_RUN__ROOT": "elsewhere"}).path == str(run)


def test_an_unknown_run_gets_the_nearest_names(in_tmp_path: Path) -> None:
    make_run(in_tmp_path / "runs" / "baseline")
    with pytest.raises(UnknownRunError) as caught:
        settle_run("basline", None, None, {})
    assert caught.value.exit_code == 2
    assert caught.value.hint == "Did you mean baseline?"


def test_no_run_and_no_config(in_tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config"):
        settle_run(None, None, None, {})


def test_a_url_as_root_is_not_available(in_tmp_path: Path) -> None:
    for act in (
        lambda: settle_root("s3://b/runs", None, {}),
        lambda: settle_run("demo", "s3://b/runs", None, {}),
    ):
        with pytest.raises(UsageError, match="URL"):
            act()


def test_a_run_is_named_once() -> None:
    assert named_once(None, None) is None
    assert named_once("a", None) == named_once(None, "a") == named_once("a", "a") == "a"
    with pytest.raises(UsageError, match="two runs"):
        named_once("a", "b")
