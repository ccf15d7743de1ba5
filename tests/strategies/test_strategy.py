"""How one process meets its device, and how state that does not fit is told."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from ckptrun import MisconfigurationException, Module
from ckptrun.errors import IncompatibleError
from ckptrun.strategies import strategy_from_name
from ckptrun.strategies.deepspeed import DeepSpeedStrategy
from ckptrun.strategies.single import SingleStrategy


class Model(Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, 1) for _ in range(4)])

    def training_step(self, batch: int, batch_idx: int) -> int:
        return batch + batch_idx


def test_names() -> None:
    assert isinstance(strategy_from_name("single"), SingleStrategy)
    assert isinstance(strategy_from_name("auto"), SingleStrategy)
    own = SingleStrategy()
    assert strategy_from_name(own) is own
    with pytest.raises(
        MisconfigurationException, match="strategy is 'dpp'; available in this version: single, ddp, deep"
    ):
        strategy_from_name("dpp")


def test_one_process() -> None:
    strategy = SingleStrategy()
    assert (strategy.rank, strategy.world_size, strategy.is_global_zero) == (0, 1, True)
    assert not strategy.restore_checkpoint_after_setup
    assert strategy.broadcast("x") == "x"
    assert strategy.gather("x") == ["x"]
    assert strategy.agree([1, 0]) == [1, 0]
    assert strategy.all_here("a point", patience_s=0.0)
    strategy.setup_environment()
    strategy.barrier()
    with strategy.no_sync():
        pass
    strategy.teardown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_the_cpu() -> None:
    strategy, model = SingleStrategy(), Model()
    strategy.place(model)
    assert strategy.root_device == model.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("visible", "device"),
    [
        pytest.param(4, 3, id="all of the node's"),
        pytest.param(8, 3, id="more than there are ranks"),
        pytest.param(1, 0, id="each task its own"),
        pytest.param(2, 1, id="each task two of its own"),
    ],
)
def test_the_gpu_of_the_fourth_rank_on_a_node(
    visible: int, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert SingleStrategy(local_rank=3).root_device == torch.device("cuda", device)


@pytest.mark.deepspeed
def test_deepspeed_is_told_the_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each of SLURM's tasks sees one, the fourth rank's is device 0."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    DeepSpeedStrategy(local_rank=3, world_size=4)._name_device()
    assert os.environ["LOCAL_RANK"] == "0"


def test_a_step_and_its_gradients_go_through_the_module() -> None:
    model, strategy = Model(), SingleStrategy()
    assert strategy.training_step(model, 3, 4) == 7
    loss = model.layers[0](torch.ones(1, 2)).sum()
    strategy.backward(loss, model)
    assert model.layers[0].weight.grad is not None


def test_weights_that_do_not_fit_are_named() -> None:
    strategy, model = SingleStrategy(), Model()
    state = {name: value.clone() for name, value in strategy.model_state_dict(model).items()}
    strategy.load_model_state_dict(model, state)
    del state["layers.0.weight"]
    state["more"] = torch.zeros(1)
    with pytest.raises(IncompatibleError, match=r"missing layers\.0\.weight; unexpected more"):
        strategy.load_model_state_dict(model, state)
    wide = Model(3).state_dict()
    with pytest.raises(IncompatibleError, match=r"layers\.0\.weight: saved \(1, 3\), model \(1, 2\)"):
        strategy.load_model_state_dict(model, wide)
    with pytest.raises(IncompatibleError, match=r"missing .* and 3 more"):
        strategy.load_model_state_dict(model, {})


def test_state_of_an_optimizer() -> None:
    strategy, model = SingleStrategy(), Model()
    one, two = (torch.optim.Adam(model.parameters(), lr=lr) for lr in (0.1, 0.2))
    strategy.load_optimizer_state_dict(two, strategy.optimizer_state_dict(one))
    assert two.param_groups[0]["lr"] == 0.1
