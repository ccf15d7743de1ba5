"""The options of the flat sections: values, defaults, documentation, and what is not available yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptrun.config.load import load_config
from ckptrun.config.sections import all_options, section_tree
from ckptrun.config.support import check_supported, unsupported, without_effect
from ckptrun.errors import ConfigError


def test_every_option_says_what_it_does_and_takes() -> None:
    options = list(all_options())
    assert len({option.key for option in options}) == len(options)
    for option in options:
        assert option.doc, option.key
        assert "\n" not in option.doc
        assert option.takes, option.key


def test_defaults_read_as_themselves() -> None:
    config = load_config(files=[])
    for option in all_options():
        section, name = option.key.split(".")
        assert getattr(getattr(config, section), name) == option.default, option.key
        stored = section_tree(getattr(config, section))[name]
        assert stored == (list(option.default) if isinstance(option.default, tuple) else option.default)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.precision=32", "32"),
        ("trainer.precision=32-true", "32"),
        ("trainer.precision=bf16", "bf16-mixed"),
        ("trainer.precision=bf16-mixed", "bf16-mixed"),
        ("trainer.precision=16", "16-mixed"),
        ("trainer.limit_train_batches=1e3", 1000),
        ("trainer.limit_train_batches=1.0", 1.0),
        ("trainer.limit_train_batches=1", 1),
        ("trainer.limit_train_batches=0.25", 0.25),
        ("trainer.limit_val_batches=0", 0),
        ("trainer.val_check_interval=0.5", 0.5),
        ("trainer.val_check_interval=500", 500),
        ("trainer.check_val_every_n_epoch=null", None),
        ("trainer.max_time=00:12:00:00", 43200.0),
        ("trainer.max_time={minutes: 3}", 180.0),
        ("trainer.max_epochs=-1", -1),
        ("trainer.max_steps=2e3", 2000),
        ("trainer.fast_dev_run=true", True),
        ("trainer.fast_dev_run=3", 3),
        ("trainer.deterministic=warn", "warn"),
        # LightningCLI writes null for what it leaves alone
        ("trainer.limit_train_batches=null", 1.0),
        ("trainer.deterministic=null", False),
        ("trainer.num_sanity_val_steps=null", 2),
        ("launch.nproc=auto", "auto"),
        ("launch.nproc='2'", 2),
        ("launch.time_limit=4:00:00", 14400.0),
        ("launch.grace_s=90", 90.0),
        ("slurm.requeue=none", "none"),
        ("slurm.requeue=null", None),
        ("slurm.signals=[SIGUSR1, SIGTERM]", ("SIGUSR1", "SIGTERM")),
        ("run.root=s3://bucket/runs", "s3://bucket/runs"),
        ("run.save_on_stop=no", False),
    ],
)
def test_values(override: str, value: Any) -> None:
    config = load_config(files=[], overrides=[override])
    section, name = override.partition("=")[0].split(".")
    found = getattr(getattr(config, section), name)
    assert found == value
    assert type(found) is type(value)


def test_what_works_now_is_not_refused() -> None:
    config = load_config(
        files=[],
        overrides=[
            "trainer.precision=bf16-mixed",
            "launch.grace_s=9",
            "launch.launcher=torchrun",
            "launch.nproc=2",
            "launch.nnodes=2",
            "launch.rdzv_endpoint=host1:29500",
            "launch.rdzv_timeout_s=60",
            "launch.max_restarts=1",
            "launch.hang_timeout_s=60",
            "strategy.name=ddp",
            "strategy.find_unused_parameters=true",
        ],
    )
    assert unsupported(config) == []
    check_supported(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.stage=2", "the strategy single has no option 'stage'; it has: none"),
        ("launch.launcher=srun", "launch.launcher srun is not available yet; now: auto, inline, torchrun"),
    ],
)
def test_what_is_not_there_yet_is_refused_with_its_place(override: str, message: str) -> None:
    config = load_config(files=[], overrides=[override])
    assert [each.key for each in unsupported(config)] == [override.partition("=")[0]]
    with pytest.raises(ConfigError) as caught:
        check_supported(config)
    assert f"override '{override}': {message}" in caught.value.message


@pytest.mark.parametrize("value", ["abc", "0", "true"])
def test_a_timeout_is_a_number_of_seconds(value: str) -> None:
    config = load_config(files=[], overrides=["strategy.name=ddp", f"strategy.timeout_s={value}"])
    with pytest.raises(ConfigError, match="expected a number of seconds above 0"):
        check_supported(config)


def test_a_key_that_deepspeed_does_not_read_is_told_with_the_nearest_one() -> None:
    overrides = [
        "strategy.config={gradient_cliping: 3, zero_optimisation: {}, gradient_clipping: auto, mine: 1}"
    ]
    config = load_config(files=[], overrides=["strategy.name=deepspeed", *overrides])
    told = "strategy.config has the key {!r}, which DeepSpeed is not known to read{}"
    assert without_effect(config) == [
        told.format("gradient_cliping", ". Did you mean gradient_clipping?"),
        told.format("zero_optimisation", ". Did you mean zero_optimization?"),
        told.format("mine", ""),
    ]
    assert without_effect(load_config(files=[], overrides=overrides)) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("deepspeed_stage_2", "--strategy deepspeed strategy.stage=2."),
        ("deepspeed_stage_2_offload", "--strategy deepspeed strategy.stage=2 strategy.offload_optimizer=true."),
        ("deepspeed_stage_3_offload", ".stage=3 strategy.offload_optimizer=true strategy.offload_parameters=true."),
        ("deepspeed_stage_3_offload_nvme", ".offload_parameters=true, which is the CPU: NVMe is not available."),
    ],
)  # fmt: skip
def test_lightnings_names_of_deepspeeds_stages_are_led_on(name: str, meant: str) -> None:
    flag: dict[str, Any] = {"flags": {"strategy.name": name}}
    for given in (flag, {"overrides": [f"strategy.name={name}"]}, {"overrides": [f"strategy={name}"]}):
        with pytest.raises(ConfigError) as caught:
            load_config(files=[], **given)
        assert str(caught.value.hint).endswith(meant)
        assert "write strategy: {" not in caught.value.message


DEEPSPEED = "strategy: {name: deepspeed, stage: 2, config: {}, timeout_s: 60}\nlaunch: {nproc: 1}\n"


@pytest.mark.parametrize(
    "given", [{"flags": {"strategy.name": "single"}}, {"overrides": ["strategy.name=single"]}]
)
def test_a_strategy_named_on_the_command_line_comes_without_the_others_options(
    given: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(DEEPSPEED)
    config = load_config(files=[str(tmp_path / "c.yaml")], **given)
    check_supported(config)
    assert config.resolved_tree()["strategy"] == config.tree["strategy"] == {"name": "single"}
    assert config.notices == (
        "the config's options of the strategy deepspeed are left out, for single runs: strategy.stage, "
        "strategy.config, strategy.timeout_s",
    )


def test_what_both_strategies_have_and_what_the_command_line_gives_stays(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(DEEPSPEED)
    flags = {"strategy.name": "ddp"}
    assert load_config(files=[str(path)], flags=flags).strategy.options == {"timeout_s": 60}
    with pytest.raises(
        ConfigError, match=r"override 'strategy\.stage=3': the strategy ddp has no option 'stage'"
    ):
        check_supported(load_config(files=[str(path)], overrides=["strategy.stage=3"], flags=flags))
    unchanged = load_config(files=[str(path)], flags={"strategy.name": "deepspeed"})
    assert unchanged.strategy.options == {"stage": 2, "config": {}, "timeout_s": 60}
    assert unchanged.notices == ()


def test_options_of_a_strategy_that_the_config_leaves_open(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("strategy: {stage: 2, find_unused_parameters: true, typo: 1}\n")
    config = load_config(files=[str(path)], flags={"strategy.name": "ddp"})
    assert config.strategy.options == {"find_unused_parameters": True, "typo": 1}
    assert config.notices == ("the config's options are left out, for ddp runs: strategy.stage",)
