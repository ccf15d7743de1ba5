"""``exact`` turns what is said otherwise into a refusal with exit code 5, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import CTRL_C, At, Scenario, loader, samples
from torch.utils.data import DataLoader, IterableDataset

from ckptrun.callbacks import EMAWeightAveraging, OnExceptionCheckpoint
from ckptrun.errors import IncompatibleError


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from samples()


class Positioned(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def streamed(dataset: Callable[[], Any] = Stream, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset(), batch_size=4, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stopped(root: Path, scenario: Scenario, hook: str = "on_train_batch_end", nth: int = 3) -> None:
    with pytest.raises(KeyboardInterrupt):
        scenario.fit(root, "demo", At(hook, nth, CTRL_C))


def refused_but_goes_on_without(
    root: Path, scenario: Scenario, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(IncompatibleError, match=message) as refused:
        scenario.fit(root, "demo", ckpt_path="last", exact=True)
    assert refused.value.exit_code == 5
    capsys.readouterr()
    trainer, _ = scenario.fit(root, "demo", ckpt_path="last")
    assert trainer.state.finished
    assert message.replace("\\", "") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (loader, lambda: loader(batch_size=2), "A step took 4 samples of all ranks together"),
        (loader, lambda: list(loader()), "The kind of the training data was 'indexed'"),
        (streamed(), streamed(), r"no state of its own: 12 samples \(3 batches\) are read again"),
        (
            streamed(Positioned, num_workers=1),
            streamed(Positioned, num_workers=1),
            r"in its loader workers, where it cannot be had: 12 samples \(3 batches\) are read again",
        ),
    ],
)
def test_data_that_is_not_the_same(
    tmp_path: Path, before: Any, after: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, Scenario(data=before))
    refused_but_goes_on_without(tmp_path, Scenario(data=after), message, capsys)


def test_at_the_start_of_an_epoch_nothing_is_read_again(tmp_path: Path) -> None:
    stopped(tmp_path, Scenario(data=streamed()), "on_train_epoch_end", 1)
    trainer, _ = Scenario(data=streamed()).fit(tmp_path, "demo", ckpt_path="last", exact=True)
    assert trainer.state.finished


def test_other_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        stopped(tmp_path, Scenario(num_threads=1))
        message = "written with 1 thread per rank and there are 2 now"
        refused_but_goes_on_without(tmp_path, Scenario(num_threads=2), message, capsys)
    finally:
        torch.set_num_threads(threads)


class BoomError(Exception):
    pass


def fails(trainer: Any) -> None:
    trainer.fit_loop.in_update = True
    raise BoomError


@pytest.mark.filterwarnings("ignore:.*does not stand at a boundary:UserWarning")
def test_a_checkpoint_that_is_not_exact(tmp_path: Path) -> None:
    scenario = Scenario(callbacks=lambda: [OnExceptionCheckpoint()])
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo", At("on_after_backward", 4, fails))
    with pytest.raises(IncompatibleError, match="was saved where no boundary was left"):
        scenario.fit(tmp_path, "demo", ckpt_path="last", exact=True)
    trainer, _ = scenario.fit(tmp_path, "demo", ckpt_path="last")
    assert trainer.state.finished


def test_what_is_the_same_goes_on(tmp_path: Path) -> None:
    whole = Scenario().picture(tmp_path, "whole")
    stopped(tmp_path, Scenario())
    whole.assert_equal(Scenario().picture(tmp_path, "demo", ckpt_path="last", exact=True))


def averaged() -> list[Any]:
    return [EMAWeightAveraging(decay=0.9)]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (averaged, tuple, "averaged weights are passed over: no WeightAveraging is set"),
        (tuple, averaged, "has no averaged weights: EMAWeightAveraging begins with those it has"),
    ],
)
def test_averaged_weights_that_are_dropped_or_added(
    tmp_path: Path, before: Any, after: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, Scenario(callbacks=before))
    refused_but_goes_on_without(tmp_path, Scenario(callbacks=after), message, capsys)


def test_everything_that_differs_is_said_at_once(tmp_path: Path) -> None:
    stopped(tmp_path, Scenario(callbacks=averaged))
    other = Scenario(data=lambda: loader(batch_size=2))
    (tmp_path / "demo" / "logs" / "metrics.csv").write_bytes(b"step,loss\n" + b"0,1\n" * 100)
    was = files(tmp_path / "demo")
    with pytest.raises(
        IncompatibleError, match=r"(?s)--exact: .*passed over.*\n  and: A step took 4 samples"
    ):
        other.fit(tmp_path, "demo", OnExceptionCheckpoint(), ckpt_path="last", exact=True)
    now = files(tmp_path / "demo")
    assert now.keys() == was.keys()
    changed = {name for name in now if now[name] != was[name]}
    assert changed <= {"lease.json", "registry.json"}, "nothing was started"
