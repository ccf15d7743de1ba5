"""What DeepSpeed's converter has made is looked through: each parameter of the model has to be in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.launch.universal import unsuited
from ckptrun.launch.universal_convert import UnsuitedError, for_every_stage

pytestmark = pytest.mark.deepspeed

MADE = ("fp32", "exp_avg", "exp_avg_sq")


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def folders(tmp_path: Path, *, made: tuple[str, ...] = MADE, **model: Any) -> tuple[str, str]:
    """Shards of stage 3 with one trained parameter, and what the tool has made of them."""
    source, target = tmp_path / "source", tmp_path / "target"
    state = {"module": {"net.weight": torch.empty(0)}, "param_shapes": [{"net.weight": torch.Size((2, 3))}]}
    state["module"] |= model.pop("module", {})
    for rank in (0, 1):
        parts = {name: parts[rank] for name, parts in model.get("fragments", {}).items()}
        shapes = model.get("shapes", {})
        content = {**state, "frozen_param_shapes": shapes, "frozen_param_fragments": parts}
        write(source / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", content)
    for name in made:
        write(target / "zero/net.weight" / f"{name}.pt", torch.arange(6.0))
    inner = {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": []}
    write(target / "zero/optimizer_state.pt", {"optimizer_state_dict": inner, "param_groups": [{"lr": 0.1}]})
    return str(source), str(target)


def test_a_frozen_parameter_is_put_together_in_its_own_type(tmp_path: Path) -> None:
    parts = [torch.arange(3, dtype=torch.int8), torch.arange(3, 6, dtype=torch.int8)]  # the last is padding
    source, target = folders(
        tmp_path,
        module={"still": torch.empty(0)},
        shapes={"still": torch.Size((5, 1))},
        fragments={"still": parts},
    )
    for_every_stage(source, target)
    still = torch.load(Path(target, "zero/still/fp32.pt"))["param"]
    assert (still.dtype, still.tolist()) == (torch.int8, [[0], [1], [2], [3], [4]])
    trained = {path.stem: torch.load(path) for path in Path(target, "zero/net.weight").iterdir()}
    assert trained.pop("step") == 4
    assert {name: value["param"].shape for name, value in trained.items()} == dict.fromkeys(MADE, (2, 3))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"made": MADE[:2]}, "DeepSpeed's tool has made no exp_avg_sq of net.weight"),
        ({"made": ()}, "DeepSpeed's tool has made no fp32 of net.weight"),
        ({"module": {"loose": torch.empty(0)}}, "its shards do not hold loose"),
    ],
)
def test_what_is_missing_is_told(tmp_path: Path, spec: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsuitedError, match=why):
        for_every_stage(*folders(tmp_path, **spec))


@pytest.mark.parametrize(
    ("kept", "suited"),
    [
        (["exp_avg", "exp_avg_sq"], True),
        (["exp_avg", "exp_avg_sq", "step"], True),
        ([], False),  # plain SGD
        (["momentum_buffer"], False),
        (["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"], False),  # amsgrad
        (["exp_avg", "exp_avg_sq", "mu_product", "step"], False),  # NAdam
    ],
)
def test_what_an_optimizer_keeps(kept: list[str], suited: bool) -> None:
    assert (unsuited(kept) is None) is suited
