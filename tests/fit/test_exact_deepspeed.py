"""Two ranks under DeepSpeed that were stopped or killed and resumed end with the same bits as two that never were."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_work import Event, Played, SharedServer, Work, assert_same, picture, play, shared_server

from ckptrun import Callback
from ckptrun.callbacks import ModelCheckpoint
from ckptrun.checkpoint.storages import size_of

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server(DS_ACCELERATOR="cpu", CKPTRUN_ALSO_IMPORTED="deepspeed") as shared:
        yield shared


def run(server: SharedServer, root: Path, run: str, work: Work, **spec: Any) -> Played:
    return play(server, root, run, work, strategy="deepspeed", **spec)


def done(played: Played) -> Played:
    assert played.code == 0, "\n".join([str(played.outcome.error), *played.said, *played.logs()])
    return played


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stopped_and_killed(server: SharedServer, tmp_path: Path, stage: int) -> None:
    """SIGTERM in mid-epoch, then SIGKILL to a rank in a validation, then to the end."""
    work = Work(strategy={"stage": stage})
    plain = done(run(server, tmp_path, "plain", work))
    stop = Work(**{**vars(work), "events": (Event("on_train_batch_end", 4, "sigterm", 1),)})
    assert run(server, tmp_path, "stopped", stop).code == 143
    kill = Work(**{**vars(work), "events": (Event("on_validation_batch_start", 2, "sigkill", 1),)})
    killed = run(server, tmp_path, "stopped", kill, reference="last")
    assert killed.code == 70, killed.logs(2)
    resumed = done(run(server, tmp_path, "stopped", work, reference="last"))
    assert_same(picture(plain.folder), picture(resumed.folder))


ADAM = {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 10, "warmup_min_lr": 0.001},
}
MID_EPOCH = (Event("on_train_batch_end", 9, "sigterm", 1),)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(Work(strategy={"stage": 1}, options={"accumulate_grad_batches": 4}), id="accumulated"),
        pytest.param(
            Work(strategy={"stage": 3}, options={"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
            id="accumulated and clipped, stage 3",
        ),
        pytest.param(
            Work(strategy={"stage": 2}, options={"precision": "bf16-mixed"}, model={"norm": False}),
            id="bf16-mixed",
        ),
        pytest.param(
            Work(
                strategy={"stage": 1, "config": {"optimizer": ADAM, "scheduler": WARMUP}},
                model={"optimizer": False},
            ),
            id="optimizer and scheduler of DeepSpeed's config",
        ),
        pytest.param(Work(strategy={"stage": 2, "offload_optimizer": True}), id="optimizer offloaded"),
        pytest.param(
            Work(strategy={"stage": 1}, model={"scheduler": "plateau"}), id="a scheduler that watches"
        ),
    ],
)
def test_what_is_trained(server: SharedServer, tmp_path: Path, work: Work) -> None:
    plain = done(run(server, tmp_path, "plain", work))
    stop = Work(**{**vars(work), "events": MID_EPOCH})
    stopped = run(server, tmp_path, "stopped", stop)
    assert stopped.code == 143, stopped.logs()
    resumed = done(run(server, tmp_path, "stopped", work, reference="last"))
    assert_same(picture(plain.folder), picture(resumed.folder))


@pytest.mark.parametrize("stage", [1, 3])
def test_another_optimizer_is_refused(server: SharedServer, tmp_path: Path, stage: int) -> None:
    """Also with --override, which is for values: what DeepSpeed has saved does not go with it."""
    stop = Work(strategy={"stage": stage}, model={"optimizer": "two groups"}, events=MID_EPOCH)
    assert run(server, tmp_path, "stopped", stop).code == 143
    for optimizer, why in (
        (True, "The checkpoint's optimizer has 2 parameter groups, this Adam has 1."),
        ("sgd", "The checkpoint's optimizer has 2 parameter groups, this SGD has 1."),
        (
            "other groups",
            "The parameters lie in other groups or in another order than when the checkpoint was written",
        ),
    ):
        changed = Work(strategy={"stage": stage}, model={"optimizer": optimizer})
        refused = run(server, tmp_path, "stopped", changed, reference="last", override=True)
        assert refused.code == 5, "\n".join([str(refused.outcome.error), *refused.logs(2)])
        assert why in str(refused.outcome.error)


@pytest.mark.parametrize("stage", [0, 3])
def test_another_kind_of_optimizer_is_refused(server: SharedServer, tmp_path: Path, stage: int) -> None:
    stopped = run(server, tmp_path, "stopped", Work(strategy={"stage": stage}, events=MID_EPOCH))
    assert stopped.code == 143
    changed = Work(strategy={"stage": stage}, model={"optimizer": "sgd"})
    refused = run(server, tmp_path, "stopped", changed, reference="last", override=True)
    assert refused.code == 5, "\n".join([str(refused.outcome.error), *refused.logs(2)])
    assert "was written with another optimizer than SGD" in str(refused.outcome.error)


def test_what_deepspeed_refuses_is_one_error(server: SharedServer, tmp_path: Path) -> None:
    """float16 on a CPU, for one."""
    work = Work(strategy={"stage": 3}, options={"precision": "16-mixed"})
    refused = run(server, tmp_path, "refused", work)
    assert refused.code == 2, refused.logs()
    assert "DeepSpeed refuses this set-up: " in str(refused.outcome.error)


def test_accumulating_and_clipping_are_the_same_as_ddps(server: SharedServer, tmp_path: Path) -> None:
    """The same numbers but for the order of sums."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
    ddp = done(play(server, tmp_path, "ddp", Work(options=options)))
    zero = done(run(server, tmp_path, "zero", Work(options=options, strategy={"stage": 2})))
    there, here = ddp.checkpoints()[0].metrics, zero.checkpoints()[0].metrics
    assert here["loss_epoch"] == pytest.approx(there["loss_epoch"], rel=1e-5)


def test_a_save_that_fails_on_any_rank_is_made_again(server: SharedServer, tmp_path: Path) -> None:
    """The disk gives an error while the other rank writes its part; the second try is good."""
    work = Work(strategy={"stage": 1}, callbacks=failing_shards)
    played = done(run(server, tmp_path, "failing", work))
    assert sum("Trying again" in text for text in played.said) == 1
    assert any("disk is away" in text for text in played.said)
    assert [record.step for record in played.checkpoints()] == [18, 12, 6]
    assert sorted(os.listdir(played.folder.checkpoints_dir)) == sorted(r.name for r in played.checkpoints())


class FailingShard(Callback):
    """The second rank's first part of a checkpoint cannot be written, once."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from ckptrun.fit import shards

        real, left = shards.write_file, [trainer.global_rank]

        def write_file(*args: Any, **options: Any) -> Any:
            if left[0]:
                left[0] = 0
                raise OSError(errno.EIO, "the disk is away", args[0])
            return real(*args, **options)

        shards.write_file = write_file


def failing_shards() -> list[Callback]:
    return [ModelCheckpoint(monitor="val_loss", save_top_k=-1), FailingShard()]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 4)])
def test_a_save_asks_for_the_room_that_it_takes(
    server: SharedServer, tmp_path: Path, stage: int, ranks: int
) -> None:
    """What all ranks have is written by one of them, so it is counted once."""
    work = Work(
        strategy={"stage": stage},
        options={"max_steps": 2, "limit_val_batches": 0},
        callbacks=functools.partial(noting_room, str(tmp_path)),
    )
    played = done(run(server, tmp_path, "room", work, num_ranks=ranks))
    folder = Path(played.checkpoints()[0].path)
    files = [folder / "state.ckpt", *folder.glob("global_step2/*.pt")]
    tensors = sum(size_of(torch.load(path, weights_only=False)) for path in files)
    assert int((tmp_path / "needed").read_text()) == tensors > 0


class NotesRoom(Callback):
    """How many bytes the newest commit asks for."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, "needed")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from ckptrun.fit import checkpoint_writer

        real = checkpoint_writer.commit

        def commit(*args: Any, needed_bytes: int, **options: Any) -> Any:
            self._path.write_text(str(needed_bytes))
            return real(*args, needed_bytes=needed_bytes, **options)

        checkpoint_writer.commit = commit


def noting_room(folder: str) -> list[Callback]:
    return [ModelCheckpoint(every_n_train_steps=2), NotesRoom(folder)]
