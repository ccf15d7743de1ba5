"""The small example: a fixed split, and an error of one line where scikit-learn is missing."""

from __future__ import annotations

import sys

import pytest
import torch

from ckptrun.errors import MisconfigurationException
from ckptrun.examples.digits import Digits, DigitsClassifier


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MisconfigurationException) as caught:
        Digits().setup("fit")
    assert "\n" not in caught.value.message
    assert caught.value.hint is not None
    assert "ckptrun[examples]" in caught.value.hint


def test_the_split_is_the_same_whatever_the_seed() -> None:
    pytest.importorskip("sklearn")
    parts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        data = Digits()
        data.setup("fit")
        parts.append([data.train, data.val, data.test])
    assert [len(part) for part in parts[0]] == [1197, 300, 300]
    for first, second in zip(*parts, strict=True):
        assert torch.equal(first.tensors[0], second.tensors[0])
        assert torch.equal(first.tensors[1], second.tensors[1])
    pixels, digits = parts[0][0].tensors
    assert pixels.shape == (1197, 64)
    assert pixels.dtype == torch.float32
    assert 0 <= pixels.min() < pixels.max() <= 1
    assert digits.unique().tolist() == list(range(10))


def test_shapes_from_pixels_to_digits() -> None:
    module = DigitsClassifier(width=8)
    pixels = torch.rand(5, 64)
    assert module(pixels).shape == (5, 10)
    predicted = module.predict_step([pixels, torch.zeros(5)], 0)
    assert predicted.shape == (5,)
    assert predicted.dtype == torch.int64


def test_the_learning_rate_watches_what_is_logged() -> None:
    configured = DigitsClassifier().configure_optimizers()
    assert configured["lr_scheduler"]["monitor"] == "val_loss"
