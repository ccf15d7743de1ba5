from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.errors import NoCheckpointError, UsageError
from ckptrun.resolve.gather import resolve_run
from ckptrun.resolve.pin import checkpoint_path, keep, pin, unkeep, unpin
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import Registry


def save(folder: RunFolder, sequence: int, **more: Any) -> str:
    name = naming.folder_name(sequence, "a")
    fields: dict[str, Any] = {
        "run_id": "r",
        "epoch": 0,
        "reason": "periodic",
        "line": ((1, sequence),),
        **more,
    }
    manifest = Manifest(sequence=sequence, step=sequence, **fields)
    commit(folder.checkpoints_dir, name, {"state.ckpt": lambda f: f.write(b"x")}, manifest)
    return os.path.join(folder.checkpoints_dir, name)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.at(str(tmp_path), "gpt")
    os.makedirs(folder.checkpoints_dir)
    return folder


def test_a_pin_is_what_the_words_meant_when_it_was_set(run: RunFolder) -> None:
    first = save(run, 1)
    assert pin(run, "last").path == first
    save(run, 2)
    resolution = resolve_run(run)
    assert (resolution.rule, resolution.ref, resolution.path) == (3, "last", first)
    assert Registry.load(run.registry).pin["reference"] == "last"  # type: ignore[index]


def test_it_stays_until_it_is_removed(run: RunFolder) -> None:
    save(run, 1)
    pin(run, "seq:1")
    assert resolve_run(run, reference="last").removes_pin
    assert resolve_run(run).rule == 3
    removed = unpin(run)
    assert removed is not None
    assert removed["reference"] == "seq:1"
    assert unpin(run) is None
    assert resolve_run(run).rule == 6


def test_a_pin_rebuilds_a_lost_registry_first(run: RunFolder) -> None:
    save(run, 1, reason="hpc", job="7")
    pin(run, "last")
    assert Registry.load(run.registry).hpc == {"7": ["00000001-a"]}


def test_a_pin_past_weights_only_and_on_them_where_they_are_meant(run: RunFolder) -> None:
    first, weights = save(run, 1), save(run, 2, weights_only=True)
    assert pin(run, "last").path == first
    assert pin(run, "seq:2").path == weights
    error = resolve_run(run).error
    assert error is not None
    assert error.exit_code == 5


def test_a_pinned_checkpoint_that_is_damaged_is_exit_3(run: RunFolder) -> None:
    path = save(run, 1)
    pin(run, "seq:1")
    Path(path, "state.ckpt").unlink()
    error = resolve_run(run).error
    assert error is not None
    assert error.exit_code == 3
    assert "lacks its file" in error.message


@pytest.mark.parametrize(
    ("reference", "kind"),
    [("none", UsageError), ("last", NoCheckpointError), ("seq:9", NoCheckpointError), ("step:x", UsageError)],
)
def test_only_a_checkpoint_can_be_pinned_or_kept(
    run: RunFolder, reference: str, kind: type[Exception]
) -> None:
    for act in (pin, keep, unkeep):
        with pytest.raises(kind):
            act(run, reference)
    assert not os.path.exists(run.registry)


def test_keep_and_unkeep(run: RunFolder) -> None:
    save(run, 1)
    keep(run, "last")
    keep(run, "seq:1")
    assert Registry.load(run.registry).keeps == ["00000001-a"]
    assert unkeep(run, "seq:1")
    assert not unkeep(run, "seq:1")
    assert Registry.load(run.registry).keeps == []


def test_what_is_gone_can_be_unkept_by_its_name(run: RunFolder) -> None:
    path = save(run, 1)
    keep(run, "last")
    shutil.rmtree(path)
    assert unkeep(run, os.path.basename(path)) == path
    assert Registry.load(run.registry).keeps == []


def test_another_runs_checkpoint_can_be_pinned_and_not_kept(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.at(str(tmp_path), "other")
    os.makedirs(other.checkpoints_dir)
    path = save(other, 1, run_id="other")
    assert pin(run, path).path == path
    with pytest.raises(UsageError, match="not a checkpoint of run 'gpt'"):
        keep(run, path)


@pytest.mark.parametrize("act", [pin, keep, unkeep, checkpoint_path])
def test_a_word_that_names_nothing_gets_a_hint_that_fits(
    run: RunFolder, in_tmp_path: Path, act: Callable[[RunFolder, str], object]
) -> None:
    other = RunFolder.at(run.root, "other")
    other.create()
    Path(other.run_json).write_text('{"id": "o"}')
    hints = {
        "nope": "A checkpoint is named by",
        "lst": "Did you mean last? ",
        "other": "last --run other.",
    }
    for word, hint in hints.items():
        with pytest.raises(NoCheckpointError, match=f"has no checkpoint '{word}'") as caught:
            act(run, word)
        assert hint in str(caught.value.hint)
        assert "--ckpt" not in str(caught.value.hint)
