"""Which of DeepSpeed's operations have to be compiled before training can begin?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptrun.strategies.deepspeed_ops import not_compiled

pytestmark = pytest.mark.deepspeed
NAME = "deepspeed_shm_comm"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    return ShareMemCommBuilder()


def put_library(folder: Path, sources: list[str]) -> Path:
    """What a build leaves, as far as it tells what it was built from."""
    (folder / NAME).mkdir(exist_ok=True)
    (folder / NAME / "build.ninja").write_text("\n".join(f"build o.o: compile {path}" for path in sources))
    library = folder / NAME / f"{NAME}.so"
    library.touch()
    return library


def test_a_library_of_this_installation_is_used(builder: Any, tmp_path: Path) -> None:
    assert not_compiled({}) == ["ShareMemCommBuilder"]
    library = put_library(tmp_path, [builder.deepspeed_src_path(s) for s in builder.sources()])
    assert not_compiled({}) == []
    (library.parent / "lock").touch()
    assert not_compiled({}) == ["ShareMemCommBuilder"]


def test_one_of_another_environment_would_be_built_anew(builder: Any, tmp_path: Path) -> None:
    put_library(tmp_path, [f"/elsewhere/{source}" for source in builder.sources()])
    assert not_compiled({}) == ["ShareMemCommBuilder"]


def test_one_that_is_older_than_its_sources_would_be_built_anew(builder: Any, tmp_path: Path) -> None:
    sources = [builder.deepspeed_src_path(s) for s in builder.sources()]
    library = put_library(tmp_path, sources)
    before = min(os.stat(source).st_mtime for source in sources) - 10
    os.utime(library, (before, before))
    assert not_compiled({}) == ["ShareMemCommBuilder"]
