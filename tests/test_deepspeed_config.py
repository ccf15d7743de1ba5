"""What DeepSpeed's config and the options beside it say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptrun.deepspeed_config import Given, merged, stage_of
from ckptrun.errors import MisconfigurationException

GIVEN = Given(
    accumulate_grad_batches=2, gradient_clip_val=0.5, precision="bf16-mixed", world_size=4, micro_batch_size=8
)
WHOLE = {
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 8,
    "train_batch_size": 64,
    "zero_optimization": {"stage": 1},
}


def of(config: dict[str, Any]) -> dict[str, Any]:
    """What the two forms of a config have in common."""
    return {name: value for name, value in config.items() if name in WHOLE}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="left out"),
        pytest.param(WHOLE, id="repeated"),
        pytest.param(
            {
                **dict.fromkeys(WHOLE, "auto"),
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": "auto"},
            },
            id="auto",
        ),
        pytest.param({"zero_optimization": "auto", "bf16": "auto"}, id="auto for a whole section"),
    ],
)
def test_what_the_options_say_is_put_in(config: dict[str, Any]) -> None:
    before = json.dumps(config)
    assert of(merged({"stage": 1, "config": config}, GIVEN)) == WHOLE
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("config", "both"),
    [
        ({"gradient_accumulation_steps": 4}, "_steps: 4, and trainer.accumulate_grad_batches is 2"),
        ({"gradient_clipping": 1.0}, "gradient_clipping: 1.0, and trainer.gradient_clip_val is 0.5"),
        ({"bf16": {"enabled": False}}, "bf16.enabled: False, and trainer.precision is 'bf16-mixed'"),
        ({"fp16": {"enabled": True}}, "fp16.enabled: True, and trainer.precision is 'bf16-mixed'"),
        ({"bfloat16": {"enabled": False}}, "bfloat16.enabled: False, and trainer.precision is 'bf16-mixed'"),
        ({"amp": {"enabled": True}}, "amp.enabled: True, and trainer.precision is 'bf16-mixed'"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled: True, and trainer.precision is"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: 3, and strategy.stage is 1"),
        ({"train_micro_batch_size_per_gpu": 16}, "_per_gpu: 16, and the data loader's batch size is 8"),
        ({"train_batch_size": 32}, "train_batch_size: 32, and 8 samples a rank and batch x 2 batches x 4 ranks is 64"),
    ],
)  # fmt: skip
def test_a_contradiction_shows_both(config: dict[str, Any], both: str) -> None:
    with pytest.raises(MisconfigurationException, match="Make them the same") as caught:
        merged({"stage": 1, "config": config}, GIVEN)
    assert both in str(caught.value)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp16", "torch_autocast", "amp"])
def test_every_way_to_another_precision_contradicts_32(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"{name}.enabled: True, and .* is '32'"):
        merged({"config": {name: {"enabled": True}}}, Given())
    settled = merged({"config": {name: {"enabled": "auto"}}}, Given())
    assert settled[name] == {"enabled": False}
    assert merged({"config": {name: {"enabled": False}}}, Given())[name] == {"enabled": False}


def test_the_old_name_of_bf16() -> None:
    settled = merged({"config": {"bfloat16": {"enabled": True}}}, Given(precision="bf16-mixed"))
    assert settled["bfloat16"] == {"enabled": True}
    assert "bf16" not in settled
    with pytest.raises(MisconfigurationException, match="both bf16 and bfloat16"):
        merged({"config": {"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}}, Given())


def test_no_clipping_is_said_too_because_deepspeed_would_clip() -> None:
    assert merged({}, Given())["gradient_clipping"] == 0.0
    with pytest.raises(MisconfigurationException, match=r"gradient_clipping: 1.0, and .* is None"):
        merged({"config": {"gradient_clipping": 1.0}}, Given())


def test_the_stage_is_found_in_either_place() -> None:
    assert stage_of({}) == 2
    assert stage_of({"stage": 3}) == 3
    assert stage_of({"config": {"zero_optimization": {"stage": 0}}}) == 0


def test_a_loader_without_a_batch_size_leaves_it_to_the_config() -> None:
    config = {"train_micro_batch_size_per_gpu": 4}
    assert merged({"config": config}, Given(world_size=2))["train_batch_size"] == 8
    assert "train_batch_size" not in merged({}, Given(world_size=2))


def test_a_loader_without_a_batch_size_and_a_batch_size_of_all_ranks() -> None:
    given = Given(world_size=2, accumulate_grad_batches=3)
    settled = merged({"config": {"train_batch_size": 24}}, given)
    assert (settled["train_micro_batch_size_per_gpu"], settled["train_batch_size"]) == (4, 24)
    settled = merged(
        {"config": {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}}, given
    )
    assert "train_batch_size" not in settled
    assert "train_micro_batch_size_per_gpu" not in settled
    with pytest.raises(
        MisconfigurationException, match="train_batch_size: 4, and 3 batches x 2 ranks cannot"
    ):
        merged({"config": {"train_batch_size": 4}}, given)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu"])
@pytest.mark.parametrize("value", [None, "4", 0, True, 2.5])
def test_a_batch_size_that_is_no_number(key: str, value: Any) -> None:
    with pytest.raises(MisconfigurationException, match=f"{key}: {value!r}; expected a number of samples"):
        merged({"config": {key: value}}, Given())


def test_offloading_and_buckets() -> None:
    options = {"stage": 3, "offload_optimizer": True, "offload_parameters": "cpu", "reduce_bucket_size": 1000}
    zero = merged(options, None)["zero_optimization"]
    assert zero == {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stage": 4}, "strategy.stage is 4; expected 0, 1, 2 or 3"),
        ({"stages": 1}, "has no option 'stages'"),
        ({"config": [1]}, "expected a mapping"),
        ({"config": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"config": {"zero_optimization": {"offload_param": {"device": "nvme"}}}}, "not available yet"),
        ({"config": {"checkpoint": {"use_node_local_storage": True}}}, "have to lie in the run's folder"),
        ({"offload_optimizer": "nvme"}, "strategy.offload_optimizer is 'nvme'"),
        ({"config": {"zero_optimization": 3}}, "zero_optimization: 3; expected a mapping"),
    ],
)
def test_what_cannot_be_served(options: dict[str, Any], why: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        merged(options, None)
    assert why in str(caught.value)


def test_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert stage_of({"config": str(path)}) == 1
    path.write_text("{")
    with pytest.raises(MisconfigurationException, match=r"ds\.json is no JSON"):
        stage_of({"config": str(path)})


def test_clipping_by_value_is_not_deepspeeds() -> None:
    with pytest.raises(MisconfigurationException, match="clips the norm"):
        merged({}, Given(gradient_clip_val=1.0, gradient_clip_algorithm="value"))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": ["auto", 0.9]}}}, "optimizer.params.betas.0"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "scheduler.params.warmup_num_st"),
        ({"prescale_gradients": "auto"}, "prescale_gradients"),
        ({"torch_autocast": "auto"}, "torch_autocast"),
    ],
)  # fmt: skip
def test_an_auto_that_nothing_fills_in_is_refused(config: dict[str, Any], path: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"strategy.config has {path}.*nothing to fill in"):
        merged({"config": config}, None)


def test_an_auto_that_deepspeed_fills_in() -> None:
    zero = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    config = {
        "zero_optimization": zero,
        "fp16": {"enabled": False, "loss_scale": "auto"},
        "data_types": {"keep_in_fp32_modules": "auto"},
        "steps_per_print": "auto",
        "zero_allow_untested_optimizer": "auto",
    }
    settled = merged({"config": config}, Given())
    assert settled["zero_optimization"] == {**zero, "stage": 2}
    assert settled["steps_per_print"] == 2**31
    assert settled["zero_allow_untested_optimizer"] is True


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_offloaded_in_stage_3_only(stage: int) -> None:
    message = f"is for stage 3, where parameters are in parts; the stage is {stage}"
    by_option = {"stage": stage, "offload_parameters": True}
    inner: dict[str, Any] = {"stage": stage, "offload_param": {"device": "cpu"}}
    for options in (by_option, {"config": {"zero_optimization": inner}}):
        with pytest.raises(MisconfigurationException, match=message):
            merged(options, None)
    for unset in (None, {"device": "none"}, "auto", {}):
        merged({"config": {"zero_optimization": {**inner, "offload_param": unset}}}, None)
    merged({"stage": 3, "offload_parameters": True}, None)
