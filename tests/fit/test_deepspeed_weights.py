"""What is saved under DeepSpeed: its own tools read it, every strategy evaluates it, and runs begin from it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_work import Event, Model, Played, SharedServer, Work, play, shared_server

from ckptrun.callbacks import ModelCheckpoint
from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.checkpoint.state_file import read_state
from ckptrun.checkpoint.verify import verify_checkpoint
from ckptrun.errors import DamagedCheckpointError, IncompatibleError
from ckptrun.fit.capture import read_init_weights

pytestmark = pytest.mark.deepspeed

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server(DS_ACCELERATOR="cpu", CKPTRUN_ALSO_IMPORTED="deepspeed") as shared:
        yield shared


def with_weights_only() -> list[Any]:
    return [ModelCheckpoint(every_n_train_steps=4, save_weights_only=True, save_top_k=-1)]


def run(server: SharedServer, root: Path, name: str, work: Work, **spec: Any) -> Played:
    played = play(server, root, name, work, **{"strategy": "deepspeed", **spec})
    assert played.code == 0, "\n".join([str(played.outcome.error), *played.said, *played.logs()])
    return played


@pytest.fixture(scope="module")
def root(server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch in each stage, and with DDP, all from the same weights; weights alone are saved at step 4."""
    root = tmp_path_factory.mktemp("runs")
    options = {"max_epochs": 1}
    for stage in STAGES:
        work = Work(options=options, strategy={"stage": stage}, callbacks=with_weights_only)
        run(server, root, f"zero{stage}", work)
    run(server, root, "ddp", Work(options=options, callbacks=with_weights_only), strategy="ddp")
    return root


def checkpoint(root: Path, name: str, step: int = 6) -> str:
    return str(next((root / name / "checkpoints").glob(f"*{step:08d}")))


def weights(folder: str) -> dict[str, torch.Tensor]:
    return dict(read_init_weights(folder))


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("step", [6, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_tool_reads_the_same_weights(root: Path, stage: int, step: int) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = checkpoint(root, f"zero{stage}", step)
    assert_equal(weights(folder), dict(get_fp32_state_dict_from_zero_checkpoint(folder)))


@pytest.mark.parametrize("stage", STAGES)
def test_the_stages_train_the_same(root: Path, stage: int) -> None:
    """Sums are made in another order, so nearly the same; DDP takes BatchNorm's buffers from rank 0, as DeepSpeed does
    not, which no update depends on."""
    ddp = read_state(os.path.join(checkpoint(root, "ddp"), "state.ckpt"))["state_dict"]
    ours = weights(checkpoint(root, f"zero{stage}"))
    assert set(ours) == set(ddp) == set(Model().state_dict())
    for name, value in ours.items():
        torch.testing.assert_close(value, ddp[name], msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_alone_are_smaller_and_committed_all_the_same(root: Path, stage: int) -> None:
    folder = checkpoint(root, f"zero{stage}", 4)
    manifest = read_manifest(folder)
    assert manifest.weights_only
    assert manifest.extra["deepspeed"]["stage"] == stage
    assert verify_checkpoint(folder).state == "good"
    for path in Path(folder).glob("global_step4/*.pt"):
        text = str(torch.load(path, weights_only=False))
        assert "exp_avg" not in text


def test_the_manifest_names_every_shard(root: Path) -> None:
    folder = Path(checkpoint(root, "zero3"))
    manifest = json.loads((folder / "manifest.json").read_text())
    on_disk = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert {file["path"] for file in manifest["files"]} == on_disk
    assert len([name for name in on_disk if "global_step6/zero_pp_rank_" in name]) == 4
    assert (folder / "latest").read_text() == "global_step6"
    assert (manifest["strategy"], manifest["world_size"]) == ("deepspeed", 2)


@pytest.mark.parametrize(
    ("stage", "strategy", "ranks"), [(1, "single", 1), (3, "ddp", 2), (3, "deepspeed", 2)]
)
def test_every_strategy_evaluates_it(
    server: SharedServer, root: Path, stage: int, strategy: str, ranks: int
) -> None:
    name = f"zero{stage}"
    metrics = read_manifest(checkpoint(root, name)).metrics
    played = run(
        server, root, name, Work(fn="validate"), strategy=strategy, num_ranks=ranks, reference="last"
    )
    found = played.outcome.results[0]["val_loss"]
    assert found == pytest.approx(metrics["val_loss"], rel=0.3)  # BatchNorm's buffers are rank 0's
    again = run(server, root, name, Work(fn="validate"), strategy="single", num_ranks=1, reference="last")
    assert found == pytest.approx(again.outcome.results[0]["val_loss"], rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_are_not_put_together_from_some_of_the_parts(root: Path, tmp_path: Path, stage: int) -> None:
    shutil.copytree(Path(checkpoint(root, f"zero{stage}")) / "global_step6", tmp_path / "global_step6")
    assert_equal(weights(str(tmp_path)), weights(checkpoint(root, f"zero{stage}")))
    for path in tmp_path.glob("global_step6/zero_pp_rank_1_*"):
        path.unlink()
    with pytest.raises(DamagedCheckpointError, match="lacks global_step6/zero_pp_rank_1_"):
        weights(str(tmp_path))


NOTHING_YET = {"max_epochs": 1, "limit_train_batches": 0, "num_sanity_val_steps": 0}


@pytest.mark.parametrize(
    ("before", "strategy", "stage"),
    [("zero1", "ddp", None), ("zero3", "ddp", None), ("ddp", "deepspeed", 1), ("ddp", "deepspeed", 3)],
)
def test_a_run_begins_from_the_weights_of_the_other_strategy(
    server: SharedServer, root: Path, tmp_path: Path, before: str, strategy: str, stage: int | None
) -> None:
    """One step with a learning rate of 0, so that what is saved is what was begun from."""
    folder = checkpoint(root, before)
    options = {"max_steps": 1, "limit_val_batches": 0}
    work = Work(options=options, model={"lr": 0.0}, strategy={} if stage is None else {"stage": stage})
    run(server, tmp_path, "next", work, strategy=strategy, init_from=folder)
    trained = [name for name, _ in Model().named_parameters()]
    began, ended = weights(folder), weights(checkpoint(tmp_path, "next", 1))
    for name in trained:
        assert torch.equal(began[name], ended[name]), name


@pytest.mark.parametrize(("written", "strategy"), [("zero1", "ddp"), ("ddp", "deepspeed")])
def test_going_on_with_the_other_strategy_is_refused(
    server: SharedServer, root: Path, tmp_path: Path, written: str, strategy: str
) -> None:
    work = Work(options={"max_epochs": 2})
    folder = checkpoint(root, written)
    played = play(server, tmp_path, "next", work, strategy=strategy, reference=folder)
    assert (played.code, played.result.outcome) == (IncompatibleError.exit_code, None)  # no rank was started
    assert played.result.resolution is not None
    assert played.result.resolution.error is not None
    assert "--init-from" in str(played.result.resolution.error.hint)


def test_load_full_weights_goes_on_from_a_plain_checkpoint(
    server: SharedServer, root: Path, tmp_path: Path
) -> None:
    folder = checkpoint(root, "ddp")
    work = Work(
        options={"max_steps": 7, "limit_val_batches": 0},
        model={"lr": 0.0},
        strategy={"stage": 3, "load_full_weights": True},
    )
    played = run(server, tmp_path, "next", work, reference=folder, override=True)
    assert any("it starts anew" in text for text in played.said)
    ended = weights(checkpoint(tmp_path, "next", 7))
    began = weights(folder)
    assert all(torch.equal(began[name], ended[name]) for name, _ in Model().named_parameters())


def test_a_save_needs_every_rank(server: SharedServer, tmp_path: Path) -> None:
    """Rank 1 raises with OnExceptionCheckpoint set: nobody tries to save."""
    from rank_work import with_exception_checkpoint

    work = Work(
        options={"limit_val_batches": 0},
        strategy={"stage": 1},
        callbacks=with_exception_checkpoint,
        events=(Event("on_train_batch_end", 3, "raise", 1),),
    )
    played = play(server, tmp_path, "failed", work, strategy="deepspeed")
    assert played.code == 1
    assert played.checkpoints() == []
    assert os.listdir(played.folder.checkpoints_dir) == []
