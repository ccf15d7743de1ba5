"""A run under DeepSpeed that goes on with another number of ranks, or in another stage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_work import Event, Played, SharedServer, Work, play, shared_server
from torch import nn

from ckptrun import Module
from ckptrun.callbacks import ModelCheckpoint
from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.checkpoint.verify import verify_checkpoint
from ckptrun.errors import IncompatibleError
from ckptrun.fit.capture import read_init_weights
from ckptrun.records import ResolutionError
from ckptrun.run.registry import Registry

pytestmark = pytest.mark.deepspeed

GLOBAL_BATCH, STOPPED_AT = 8, 8


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server(DS_ACCELERATOR="cpu", CKPTRUN_ALSO_IMPORTED="deepspeed") as shared:
        yield shared


class Varied(Module):
    """What a conversion has to carry over: parameters that are frozen, that are tied, that lie in two groups of the
    optimizer, and a buffer; nothing random.

    Args:
        begins_at: weights start from elsewhere; a run that goes on from a checkpoint does not see it.
    """

    def __init__(self, *, begins_at: float = 0.0, optimizer: str = "adamw") -> None:
        super().__init__()
        self.still = nn.Linear(4, 5).requires_grad_(False)
        first, again = nn.Linear(5, 5), nn.Linear(5, 5)
        again.weight = first.weight
        self.net = nn.Sequential(first, nn.Tanh(), again, nn.Tanh(), nn.Linear(5, 2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: torch.Tensor
        self.optimizer = optimizer
        with torch.no_grad():
            for value in self.parameters():
                value += begins_at

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        return nn.functional.mse_loss(self.net(self.still(x).tanh()), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.01)
        decayed = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in self.parameters() if p.requires_grad and p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


@dataclass(frozen=True)
class VariedWork(Work):
    def _model(self) -> Any:
        return Varied(**self.model)


def keeping_all() -> list[Any]:
    return [ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)]


def work(ranks: int, stage: int, *events: Event, config: dict[str, Any] | None = None, **model: Any) -> Work:
    """The same samples in each step, whatever the number of ranks."""
    return VariedWork(
        strategy={"stage": stage, "config": config or {}},
        model=model,
        data={"batch": GLOBAL_BATCH // ranks},
        options={"max_epochs": 3, "limit_val_batches": 0, "num_sanity_val_steps": 0},
        callbacks=keeping_all,
        events=events,
    )


def run(
    server: SharedServer,
    root: Path,
    ranks: int,
    stage: int,
    *events: Event,
    model: dict[str, Any] | None = None,
    **spec: Any,
) -> Played:
    return play(
        server,
        root,
        "demo",
        work(ranks, stage, *events, **(model or {})),
        strategy="deepspeed",
        num_ranks=ranks,
        **spec,
    )


def stopped(server: SharedServer, root: Path, ranks: int, stage: int) -> Played:
    waits = [Event("on_train_batch_end", STOPPED_AT, "wait", rank) for rank in range(1, ranks)]
    played = run(server, root, ranks, stage, Event("on_train_batch_end", STOPPED_AT, "sigterm", 0), *waits)
    assert played.code == 143, played.logs()
    return played


@pytest.fixture(scope="module")
def whole(server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a run that was never stopped."""
    played = run(server, tmp_path_factory.mktemp("whole"), 2, 1)
    assert played.code == 0, played.logs()
    return dict(read_init_weights(played.checkpoints()[0].path))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, 1), (4, 1), id="2 to 4 ranks, stage 1"),
        pytest.param((4, 2), (2, 2), id="4 to 2 ranks, stage 2"),
        pytest.param((2, 3), (4, 3), id="2 to 4 ranks, stage 3"),
        pytest.param((2, 3), (1, 3), id="2 to 1 ranks, stage 3"),
        pytest.param((2, 1), (2, 3), id="stage 1 to 3"),
        pytest.param((2, 3), (1, 1), id="stage 3 to 1, 2 to 1 ranks"),
        pytest.param((2, 0), (1, 0), id="2 to 1 ranks, stage 0"),
    ],
)
def test_it_goes_on_as_if_nothing_had_changed(
    server: SharedServer,
    tmp_path: Path,
    whole: dict[str, torch.Tensor],
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    """The same weights at the end as without a change, but for the order of sums: so optimizer, learning rate and the
    order of the data went on."""
    original = stopped(server, tmp_path, *before).checkpoints()[0]
    done = run(server, tmp_path, *after, reference="last", model={"begins_at": 1.0})
    assert done.code == 0, "\n".join([str(done.outcome.error), *done.said, *done.logs(2)])
    assert done.outcome.step == 18
    found = dict(read_init_weights(done.checkpoints()[0].path))
    assert set(found) == set(whole) == set(Varied().state_dict())
    for name, value in found.items():
        exact = name.startswith(("still.", "seen"))
        rtol, atol = (0.0, 0.0) if exact else (2e-5, 1e-6)
        torch.testing.assert_close(value, whole[name], rtol=rtol, atol=atol, msg=name)
    converted = [each for each in done.checkpoints() if each.name.endswith("-universal")]
    assert len(converted) == (0 if before[1] == 0 else 1)
    for each in converted:
        manifest = read_manifest(each.path)
        assert (manifest.parent, manifest.step, manifest.reason) == (
            original.name,
            STOPPED_AT,
            original.reason,
        )
        assert verify_checkpoint(each.path).state == "good"
        assert any("universal format, once" in text for text in done.said)


def test_it_is_converted_once_and_weights_are_read_from_it(server: SharedServer, tmp_path: Path) -> None:
    original = stopped(server, tmp_path, 2, 3).checkpoints()[0]
    stop = Event("on_train_start", 1, "sigterm", 0)
    for command in ("one", "another"):  # the same one would go on with what it has saved
        again = run(server, tmp_path, 1, 3, stop, reference=original.path, command=("ckptrun", command))
        assert again.code == 143, again.logs(2)
    names = [each.name for each in again.checkpoints()]
    assert sum(name.endswith("-universal") for name in names) == 1
    assert any("is the same in DeepSpeed's universal format" in text for text in again.said)
    first, second = (dict(read_init_weights(each.path)) for each in (original, again.checkpoints()[0]))
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Its own number of ranks and stage can go on from it too, and it is measured like any other.
    measured = play(
        server, tmp_path, "demo", VariedWork(fn="validate"), strategy="single", num_ranks=1,
        reference="last",
    )  # fmt: skip
    assert measured.code == 0, measured.said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_damaged_copy_is_set_aside_and_made_anew(server: SharedServer, tmp_path: Path, stage: int) -> None:
    """DeepSpeed itself reads the files of the universal format; they are verified before it is given them."""
    original = stopped(server, tmp_path, 2, stage).checkpoints()[0]
    stop = Event("on_train_start", 1, "sigterm", 0)

    def again(command: str) -> Played:
        played = run(server, tmp_path, 1, stage, stop, reference=original.path, command=("ckptrun", command))
        assert played.code == 143, "\n".join([str(played.outcome.error), *played.said, *played.logs(1)])
        return played

    def copies(played: Played) -> list[str]:
        return [each.name for each in played.checkpoints() if each.name.endswith("-universal")]

    (copy,) = copies(played := again("one"))
    shard = next(Path(played.folder.checkpoints_dir, copy).glob("*/zero/net.0.weight/fp32.pt"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    played = again("another")
    assert len(copies(played)) == 2
    assert list(Registry.load(played.folder.registry).quarantine) == [copy]
    assert any(f"{copy} is damaged, in two reads" in text for text in played.said)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ((2, 0), (2, 1), "was written in ZeRO stage 0, and stage 1 is asked for"),
        ((2, 1), (2, 0), "was written in ZeRO stage 1, and stage 0 is asked for"),
    ],
)
def test_stage_0_is_refused_before_a_rank_is_started(
    server: SharedServer, tmp_path: Path, before: tuple[int, int], after: tuple[int, int], why: str
) -> None:
    stopped(server, tmp_path, *before)
    refused = run(server, tmp_path, *after, reference="last")
    assert (refused.code, refused.result.outcome) == (5, None)
    assert refused.result.resolution is not None
    assert refused.result.resolution.error is not None
    assert why in refused.result.resolution.error.message
    assert "--init-from" in str(refused.result.resolution.error.hint)


def test_an_optimizer_that_the_format_has_no_place_for(server: SharedServer, tmp_path: Path) -> None:
    """Refused before anything is started; a checkpoint that does not tell of its optimizer, by the converter."""
    sgd, stopping = {"optimizer": "sgd"}, Event("on_train_batch_end", 1, "sigterm")
    assert run(server, tmp_path, 2, 1, stopping, model=sgd).code == 143
    refused = run(server, tmp_path, 1, 1, reference="last", model=sgd)
    assert (refused.code, refused.result.outcome) == (5, None)
    assert refused.result.resolution is not None
    (checkpoint,) = refused.checkpoints()
    manifest = Path(checkpoint.path, "manifest.json")
    content = json.loads(manifest.read_text())
    assert content["deepspeed"].pop("optimizer_state") == []
    manifest.write_text(json.dumps(content))
    converted = run(server, tmp_path, 1, 1, reference="last", model=sgd)
    assert converted.code == 5
    for error in (refused.result.resolution.error, converted.outcome.error):
        assert isinstance(error, IncompatibleError | ResolutionError)
        assert (
            "its optimizer keeps nothing, and the format takes exp_avg and exp_avg_sq only" in error.message
        )
        assert "--init-from" in str(error.hint)
    assert [each.name for each in refused.checkpoints()] == [checkpoint.name]


def test_exactness_is_not_claimed(server: SharedServer, tmp_path: Path) -> None:
    stopped(server, tmp_path, 2, 0)
    refused = run(server, tmp_path, 1, 0, reference="last", exact=True)
    assert refused.code == 5
    assert "written by 2 ranks and there is 1 now" in str(refused.outcome.error)
