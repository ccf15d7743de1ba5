"""The main example's two classes, with a small model and a small library in place of the machine's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptrun.errors import MisconfigurationException
from ckptrun.examples import stdlib_corpus
from ckptrun.examples.stdlib_corpus import held_out
from ckptrun.examples.stdlib_gpt import StdlibBytes, StdlibGPT


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library of a few files, of 450 bytes each."""
    monkeypatch.setattr(stdlib_corpus, "_LEAST_BYTES", 1)
    names = [f"m{i}.py" for i in range(200)]
    chosen = [name for name in names if not held_out(name)][:4] + [name for name in names if held_out(name)][
        :2
    ]
    for name in chosen:
        (tmp_path / name).write_bytes(b"def f(x):\n    return x + 1\n\n\n" * 15 + name.encode())
    return str(tmp_path)


@pytest.fixture
def data(library: str) -> StdlibBytes:
    data = StdlibBytes(context=8, batch_size=4, num_val_windows=6, root=library)
    data.setup("fit")
    return data


def small(**init_args: int | float) -> StdlibGPT:
    torch.manual_seed(0)
    arguments: dict[str, int | float] = {"width": 16, "depth": 1, "heads": 2, "context": 8, "num_bytes": 12}
    return StdlibGPT(**(arguments | init_args))  # type: ignore[arg-type]


def logging_into(logged: dict[str, float], module: StdlibGPT, data: StdlibBytes) -> StdlibGPT:
    module.__dict__["_trainer"] = SimpleNamespace(
        datamodule=data,
        logs=SimpleNamespace(log=lambda name, value, *args: logged.__setitem__(name, float(value.detach()))),
        callback_metrics={},
        is_global_zero=True,
    )
    module.setup("fit")
    return module


def test_an_index_is_a_place_in_the_text(data: StdlibBytes) -> None:
    windows = data.train_dataloader().dataset
    tokens, targets = windows[3]
    assert tokens.shape == targets.shape == (8,)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[1:], targets[:-1])
    assert bytes(tokens.tolist()) == bytes(data._train[24:32].tolist())
    assert torch.equal(windows[3][0], tokens)
    last = windows[len(windows) - 1]  # type: ignore[arg-type]
    assert last[0].shape == last[1].shape == (8,)


def test_validation_windows_are_spread_over_the_held_out_text_and_always_the_same(data: StdlibBytes) -> None:
    first, second = (list(data.val_dataloader()) for _ in range(2))
    assert sum(len(tokens) for tokens, _ in first) == 6
    assert all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert data.val_dataloader().dataset.starts[-1] > len(data._val) * 3 // 4  # type: ignore[attr-defined]


def test_no_window_to_validate_on_is_an_error(data: StdlibBytes) -> None:
    data.num_val_windows = 0
    with pytest.raises(MisconfigurationException, match="num_val_windows is 0"):
        data.val_dataloader()


def test_there_is_no_test_data(data: StdlibBytes) -> None:
    with pytest.raises(MisconfigurationException, match="no test data"):
        data.test_dataloader()


def test_byte_bits_are_those_of_the_training_text(data: StdlibBytes) -> None:
    assert data.byte_bits is not None
    assert (2.0**-data.byte_bits).sum().item() == pytest.approx(1)
    text = data._train.tolist()
    expected = (text.count(ord("x")) + 1) / (len(text) + 256)
    assert 2.0 ** -data.byte_bits[ord("x")].item() == pytest.approx(expected)


def test_both_measures_start_where_they_must_and_are_of_the_same_bytes(data: StdlibBytes) -> None:
    logged: dict[str, float] = {}
    module = logging_into(logged, small(), data)
    batch = next(iter(data.val_dataloader()))
    module.validation_step(batch, 0)
    assert logged["val_bpb"] == pytest.approx(8, abs=0.3)  # knows nothing yet: 8 bits for each byte
    assert data.byte_bits is not None
    expected = sum(data.byte_bits[target].item() for target in batch[1].flatten()) / batch[1].numel()
    assert logged["baseline_bpb"] == pytest.approx(expected)


def test_a_few_steps_beat_the_byte_frequency_model(data: StdlibBytes) -> None:
    logged: dict[str, float] = {}
    module = logging_into(logged, small(warmup_steps=5, lr=1e-2, decay_steps=150), data)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    steps = 0
    while steps < 150:
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            module.training_step(batch, steps).backward()
            optimizer.step()
            scheduler.step()
            steps += 1
    module.validation_step(next(iter(data.val_dataloader())), 0)
    assert logged["val_bpb"] < logged["baseline_bpb"] - 1


def test_the_learning_rate_warms_up_and_comes_down() -> None:
    module = small(warmup_steps=10, decay_steps=100, final_lr_ratio=0.1)
    factors = [module._lr_factor(step) for step in range(201)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1, abs=0.03)
    assert factors.index(max(factors)) in (9, 10)
    assert factors[100] == factors[200] == pytest.approx(0.1)
    assert factors[10:101] == sorted(factors[10:101], reverse=True)


def test_every_parameter_is_trained_and_only_matrices_decay() -> None:
    module = small()
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.dim() == 1 for p in groups[1]["params"])


def test_both_measures_are_told_at_the_end(data: StdlibBytes, capsys: pytest.CaptureFixture[str]) -> None:
    module = logging_into({}, small(), data)
    module.on_fit_end()  # stopped before the first validation: nothing to tell
    assert capsys.readouterr().out == ""
    module.trainer.callback_metrics.update(val_bpb=torch.tensor(2.312), baseline_bpb=torch.tensor(4.82))
    module.on_fit_end()
    assert capsys.readouterr().out == ("validation: 2.31 bits per byte; a byte-frequency model needs 4.82\n")


def test_prediction_goes_on_from_each_prompt_and_is_text(library: str) -> None:
    data = StdlibBytes(
        context=8, prompts=["def ", "a prompt that is longer than the context "], root="/nowhere"
    )
    data.setup("predict")  # needs no text
    module = small()
    for prompt in data.predict_dataloader():
        torch.manual_seed(1)
        text = module.predict_step(prompt, 0)
        torch.manual_seed(1)
        assert text == module.predict_step(prompt, 0)
        assert isinstance(text, str)
        assert text.startswith(prompt)


def test_other_text_than_the_checkpoints_is_said_once(data: StdlibBytes, library: str) -> None:
    state = data.state_dict()
    resumed = StdlibBytes(context=8, root=library)
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.setup("fit")
    changed = StdlibBytes(context=8, root=library)
    changed.setup("fit")
    with pytest.warns(UserWarning, match="was trained on the library of Python 2.7"):
        changed.load_state_dict({"fingerprint": "0" * 16, "python": "2.7"})
    assert StdlibBytes(root="/nowhere").state_dict() == {}
    StdlibBytes(root="/nowhere").load_state_dict({})
