"""A compiled model is trained, and its weights are called as those of a plain one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptrun import MisconfigurationException, Module, Trainer
from ckptrun.strategies.compiled import (
    compile_in_place,
    for_checkpoint,
    for_module,
    is_compiled,
    plain_names,
    unwrapped,
)
from ckptrun.strategies.single import SingleStrategy


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Net(Module):
    """A part that the user compiles, in one of the places where users do."""

    def __init__(self, where: str = "nowhere", backend: Any = "eager") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.where, self.backend = where, backend
        self.net: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self._compile("init")

    def _compile(self, where: str) -> None:
        if self.where == where:
            self.net = torch.compile(self.net, backend=self.backend)

    def setup(self, stage: str) -> None:
        self._compile("setup")

    def configure_model(self) -> None:
        self._compile("configure_model")

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def batches() -> list[torch.Tensor]:
    return list(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1)))


class Graphs:
    """A backend that counts what it was given, and runs it as it is."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def fit(root: Path, model: Any, run: str = "demo", **options: Any) -> Trainer:
    options = {"max_epochs": 1, "enable_progress_bar": False, "log_every_n_steps": 1} | options
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(root=root, run=run, **options)
    trainer.fit(model, batches(), ckpt_path=ckpt_path)
    return trainer


def saved(root: Path, run: str = "demo") -> Any:
    folder = root / run / "checkpoints"
    return torch.load(folder / max(os.listdir(folder)) / "state.ckpt", weights_only=True)


PLACES = ("init", "setup", "configure_model", "whole", "option")


def make(where: str, backend: Any) -> tuple[Any, dict[str, Any]]:
    model: Any = Net(where, backend)
    if where == "whole":
        model = torch.compile(model, backend=backend)
    return model, {"compile": {"backend": backend}} if where == "option" else {}


@pytest.mark.parametrize("where", PLACES)
def test_compiled_anywhere_it_is_saved_as_a_plain_one(tmp_path: Path, where: str) -> None:
    graphs = Graphs()
    model, options = make(where, graphs)
    fit(tmp_path, model, **options)
    assert graphs.count > 0, "nothing was compiled"
    plain = Net()
    fit(tmp_path, plain, "plain")
    weights, expected = saved(tmp_path)["state_dict"], plain.state_dict()
    assert list(weights) == list(expected)
    # The same operations, run one by one.
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    # It goes on as a plain one, and a plain one as a compiled one.
    fit(tmp_path, Net(), max_epochs=2, ckpt_path="last")
    model, options = make(where, graphs)
    trainer = fit(tmp_path, model, max_epochs=3, ckpt_path="last", **options)
    assert trainer.global_step == 18
    plain = Net()
    fit(tmp_path, plain, "long", max_epochs=3)
    weights = saved(tmp_path)["state_dict"]
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())


# torch's own, when inductor is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_model_is_really_compiled_to_code_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "compile_threads", 1)  # or it leaves a pool of processes behind
    monkeypatch.setenv(
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", ""
    )  # set by torch; unset again after the test
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    whole = Net()
    fit(tmp_path, whole, "whole", max_epochs=2, compile=True)
    assert is_compiled(whole)
    fit(tmp_path, Net(), max_epochs=1, compile=True)
    torch.compiler.reset()
    parts = Net()
    fit(tmp_path, parts, max_epochs=2, compile=True, ckpt_path="last")
    assert all(torch.equal(value, parts.state_dict()[name]) for name, value in whole.state_dict().items())


def test_names_that_would_be_taken_twice_stay() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = nn.Linear(1, 1)
            self.compiled: Any = torch.compile(self.net, backend="eager")

    model = Both()
    assert plain_names(model) == {
        "compiled._orig_mod.weight": "compiled.weight",
        "compiled._orig_mod.bias": "compiled.bias",
    }
    state = for_checkpoint(model, model.state_dict())
    assert list(state) == ["net.weight", "net.bias", "compiled.weight", "compiled.bias"]
    assert list(for_module(model, state)) == list(model.state_dict())


def test_names_with_a_wrapper_are_read() -> None:
    """As ``torch.save(torch.compile(model).state_dict())`` writes them."""
    compiled: Any = torch.compile(Net(), backend="eager")
    assert list(for_module(Net(), compiled.state_dict())) == list(Net().state_dict())
    assert is_compiled(compiled)
    model = unwrapped(compiled)
    assert type(model) is Net
    assert is_compiled(model)
    assert unwrapped(model) is model


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    model = Net("init")
    net = model.net
    compile_in_place(model, {"backend": "eager"})
    compile_in_place(model, {"backend": "eager"})
    assert model.net is net
    assert not is_compiled(Net())


@pytest.mark.parametrize("where", PLACES)
def test_a_strategy_that_cannot_take_one_says_so(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleStrategy, "takes_compiled", False)
    model, options = make(where, "eager")
    with pytest.raises(MisconfigurationException, match="strategy single cannot train a compiled model"):
        fit(tmp_path, model, **options)
    fit(tmp_path, Net(), run="plain")
