"""Which files of DeepSpeed's a folder lacks, by their names and by what they say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.inspect.deepspeed_files import DeepSpeedFiles, foreign

TAG = "global_step4"


def model(rank: int | None) -> str:
    return f"{TAG}/{'' if rank is None else f'zero_pp_rank_{rank}_'}mp_rank_00_model_states.pt"


def optimizer(rank: int, kind: str = "") -> str:
    return f"{TAG}/{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


STAGE_1 = [model(None), *map(optimizer, range(3))]
STAGE_3 = [*map(model, range(3)), *map(optimizer, range(3))]


@pytest.mark.parametrize("files", [[model(None)], STAGE_1, STAGE_3, [*STAGE_1, f"{TAG}/zero/a/fp32.pt"]])
def test_nothing(files: list[str]) -> None:
    assert DeepSpeedFiles.of(files).missing() == []


@pytest.mark.parametrize("gone", STAGE_3)
def test_either_kind_of_stage_3_shows_what_lacks_of_the_other(gone: str) -> None:
    assert DeepSpeedFiles.of(f for f in STAGE_3 if f != gone).missing() == [gone]


def test_in_stage_3_without_any_of_the_optimizer() -> None:
    assert DeepSpeedFiles.of(map(model, range(2))).missing() == [optimizer(0), optimizer(1)]


@pytest.mark.parametrize("files", [STAGE_1, STAGE_3])
def test_the_last_rank_is_known_by_the_number_of_ranks(files: list[str]) -> None:
    left = [f for f in files if "rank_2" not in f]
    assert DeepSpeedFiles.of(left).missing(3) == sorted(set(files) - set(left), key=lambda f: "model" in f)


def test_names_of_the_older_kind() -> None:
    files = [model(None), optimizer(0, "bf16_"), optimizer(2, "bf16_")]
    assert DeepSpeedFiles.of(files).missing() == [optimizer(1, "bf16_")]


def test_without_the_model() -> None:
    assert DeepSpeedFiles.of([optimizer(0)]).missing() == [f"{TAG}/*mp_rank_00_model_states.pt"]


@pytest.mark.parametrize(
    ("kept", "content", "gone"),
    [
        ([model(None), optimizer(0)], {"dp_world_size": 2}, [optimizer(1)]),
        ([model(0), optimizer(0)], {"dp_world_size": 2}, [optimizer(1), model(1)]),
        ([model(None), optimizer(0)], {"optimizer_state_dict": {"partition_count": [3]}}, [optimizer(1), optimizer(2)]),
        ([model(None), optimizer(0)], {"optimizer_state_dict": {"partition_count": 2}}, [optimizer(1)]),
        ([model(None), optimizer(0)], {"optimizer_state_dict": {}}, []),
        ([model(None)], {"dp_world_size": 2}, []),  # stage 0: one rank wrote all
        ([model(None), optimizer(0)], b"no torch file", []),
    ],
)  # fmt: skip
def test_the_files_say_how_many_ranks_there_were(
    tmp_path: Path, kept: list[str], content: Any, gone: list[str]
) -> None:
    os.mkdir(tmp_path / TAG)
    for name in kept:
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            torch.save(content, tmp_path / name)
    found = foreign(str(tmp_path))
    assert found is not None
    assert found.missing() == gone
