"""DistributedDataParallel as a strategy: what one process can tell of it. Several ranks are in test_exact_ddp."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptrun.strategies import strategy_from_name
from ckptrun.strategies.ddp import DDPStrategy
from ckptrun.strategies.ranks import is_collective_error


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DDPStrategy]:
    """A group of one rank."""
    for name, value in (
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "0"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    ):
        monkeypatch.setenv(name, value)
    initialize = dist.init_process_group

    def with_a_file(backend: str, **options: Any) -> None:
        initialize(backend, init_method=f"file://{tmp_path}/store", **options)

    monkeypatch.setattr(dist, "init_process_group", with_a_file)
    strategy = DDPStrategy(process_group_backend="gloo")
    before = dict(os.environ)
    strategy.setup_environment()
    yield strategy
    strategy.teardown()
    assert not dist.is_initialized()
    os.environ.clear()
    os.environ.update(before)


class Model(nn.Module):
    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def test_what_ranks_exchange(group: DDPStrategy) -> None:
    assert group.broadcast({"a": [1]}) == {"a": [1]}
    assert group.gather("mine") == group.gather_all("mine") == ["mine"]
    assert group.agree([3, -7]) == [3, -7]
    assert group.all_here("a point", patience_s=60.0)
    group.barrier()


@pytest.mark.parametrize(
    ("given", "manual", "finds"),
    [({}, False, False), ({}, True, True), ({"find_unused_parameters": False}, True, False)],
)
def test_unused_parameters_are_looked_for_where_a_step_has_several_backward_passes(
    group: DDPStrategy, given: dict[str, Any], manual: bool, finds: bool
) -> None:
    strategy, model = DDPStrategy(**given), Model()
    model.automatic_optimization = not manual
    strategy.setup(model, [])
    assert strategy._ddp is not None
    assert strategy._ddp.find_unused_parameters == finds
    loss = strategy.training_step(model, torch.randn(4, 3))
    strategy.backward(loss, model)
    assert model.net[0].weight.grad is not None


def test_the_module_keeps_its_names(group: DDPStrategy) -> None:
    model = Model()
    group.setup(model, [])
    assert list(group.model_state_dict(model)) == list(Model().state_dict())


def test_gradients_of_a_window_that_was_not_synced(group: DDPStrategy) -> None:
    model = Model()
    group.setup(model, [])
    with group.no_sync():
        group.backward(group.training_step(model, torch.randn(4, 3)), model)
    before = model.net[0].weight.grad.clone()
    group.sync_gradients(model)
    group.sync_buffers(model)
    assert torch.equal(model.net[0].weight.grad, before)


def test_a_parameter_that_only_another_rank_has_used_takes_part(
    group: DDPStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank makes the same collectives: where one has no gradient it brings zeros."""
    module = Model()
    module.to(group.root_device)
    group.setup(module, [])
    module.net[0].weight.grad = torch.ones(3, 3)
    asked: list[list[int]] = []

    def agree(words: Any) -> list[int]:
        asked.append([int(word) for word in words])
        return [1, 1, 0, 0]  # the other rank has used the bias too, and nobody the rest

    monkeypatch.setattr(group, "agree", agree)
    group.sync_gradients(module)
    assert asked == [[1, 0, 0, 0]]
    weight, bias, *rest = module.parameters()
    assert torch.equal(weight.grad, torch.ones(3, 3))
    assert torch.equal(bias.grad, torch.zeros(3))
    assert [parameter.grad for parameter in rest] == [None, None]


def test_a_model_without_parameters_is_not_wrapped(group: DDPStrategy) -> None:
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad = False
    group.setup(model, [])
    assert group.training_step(model, torch.randn(4, 3)).ndim == 0
    with group.no_sync():
        pass


def test_buffers_are_each_ranks_own_where_they_are_not_broadcast() -> None:
    assert not DDPStrategy().own_buffers
    assert DDPStrategy(broadcast_buffers=False).own_buffers
    assert not strategy_from_name("single").own_buffers


def test_by_name() -> None:
    strategy = strategy_from_name("ddp", rank=1, local_rank=1, world_size=2, bucket_cap_mb=5)
    assert (strategy.name, strategy.rank, strategy.is_global_zero) == ("ddp", 1, False)


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_what_only_says_that_somebody_else_failed(error: BaseException, follows: bool) -> None:
    assert is_collective_error(error) == follows
