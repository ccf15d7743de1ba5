"""What DeepSpeed reads by itself is read as everything else: verified, and with weights only."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.strategies.deepspeed import loading_through


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_a_file_of_the_checkpoint_comes_from_the_reader(tmp_path: Path) -> None:
    asked: list[str] = []
    real = torch.load
    with loading_through(str(tmp_path), lambda path: asked.append(path) or "read"):
        assert (
            torch.load(os.path.join(tmp_path, "tag", "zero", "a.b", "fp32.pt"), weights_only=False) == "read"
        )
        assert torch.load(tmp_path / "tag" / "other.pt") == "read"
    assert asked == ["tag/zero/a.b/fp32.pt", "tag/other.pt"]
    assert torch.load is real


@pytest.mark.parametrize("opened", [False, True])
def test_no_other_file_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    path = tmp_path / "elsewhere.pt"
    torch.save({"a": Evil()}, path)
    real = torch.load
    with loading_through(str(tmp_path / "checkpoint"), lambda path: path):
        with path.open("rb") as file, pytest.raises(pickle.UnpicklingError):
            torch.load(file if opened else path, weights_only=False)
        torch.save({"a": torch.ones(2)}, path)
        assert torch.load(path, weights_only=False)["a"].sum() == 2
    assert torch.load is real
    assert not (tmp_path / "ran").exists()
