"""Two ranks that were stopped and resumed end with the same bits as two that never were, on a CPU with gloo."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_work import (
    NUM_SAMPLES,
    Event,
    Played,
    Seen,
    SharedServer,
    Work,
    assert_same,
    picture,
    play,
    shared_server,
    with_failing_commit,
)

from ckptrun.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from ckptrun.records import StopReason


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server() as shared:
        yield shared


def stop_and_resume(server: SharedServer, root: Path, work: Work, *moments: Event) -> Played:
    """Stop at the first moment, resume, stop at the next one (counted anew), ..., and go on to the end."""
    for number, moment in enumerate(moments):
        events = tuple(
            Event(moment.hook, moment.nth, moment.what if rank == moment.rank else "wait", rank)
            for rank in (0, 1)
        )
        stopped = play(
            server,
            root,
            "stopped",
            Work(**{**vars(work), "events": events}),
            reference="last" if number else None,
        )
        assert stopped.code in (75, 130, 143), stopped.logs(number + 1)
        assert stopped.outcome.error is None
    done = play(server, root, "stopped", work, reference="last")
    assert done.code == 0, done.logs(len(moments) + 1)
    return done


def assert_exact(server: SharedServer, root: Path, work: Work, *moments: Event) -> None:
    plain = play(server, root, "plain", work)
    assert plain.code == 0, plain.logs()
    resumed = stop_and_resume(server, root, work, *moments)
    assert_same(picture(plain.folder), picture(resumed.folder))


MID_EPOCH = Event("on_train_batch_end", 9, "sigterm", 1)


@pytest.fixture(scope="module")
def plain(server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    played = play(server, tmp_path_factory.mktemp("plain"), "plain", Work())
    assert played.code == 0, played.logs()
    return picture(played.folder)


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param((MID_EPOCH,), id="mid-epoch, SIGTERM to rank 1"),
        pytest.param(
            (Event("on_validation_batch_start", 4, "sigint", 0),), id="in validation, SIGINT to rank 0"
        ),
        pytest.param((Event("on_train_epoch_end", 1, "sigusr1", 1),), id="at an epoch's end, SIGUSR1"),
        pytest.param(
            (
                Event("on_train_batch_end", 2, "sigterm", 0),
                Event("on_train_start", 1, "sigint", 1),
                Event("on_train_batch_end", 8, "sigterm", 1),
            ),
            id="three times",
        ),
    ],
)
def test_stopped_and_resumed(
    server: SharedServer, tmp_path: Path, plain: dict[str, Any], moments: tuple[Event, ...]
) -> None:
    resumed = stop_and_resume(server, tmp_path, Work(), *moments)
    assert_same(plain, picture(resumed.folder))


def test_each_rank_draws_its_own(plain: dict[str, Any]) -> None:
    first, second = plain["ranks"].values()
    assert not (first["random"]["torch"] == second["random"]["torch"]).all()


def averages() -> list[Any]:
    return [EMAWeightAveraging(decay=0.9), ModelCheckpoint()]


@pytest.mark.parametrize(
    ("work", "moment"),
    [
        pytest.param(
            Work(options={"accumulate_grad_batches": 4}),
            Event("on_train_batch_start", 9, "sigterm", 1),
            id="accumulation window",
        ),
        pytest.param(Work(model={"manual": True}), MID_EPOCH, id="manual optimization"),
        pytest.param(
            Work(strategy={"broadcast_buffers": False}), Event("on_validation_batch_start", 4, "sigterm", 0),
            id="buffers of their own",
        ),
        pytest.param(
            Work(model={"scheduler": "plateau"}), MID_EPOCH, id="a scheduler that watches a value that differs"
        ),
        pytest.param(Work(data={"weighted": True}), MID_EPOCH, id="a random sampler"),
        pytest.param(
            Work(data={"augmented": True, "num_workers": 1}, options={"precision": "16-mixed"},
                 model={"overflows": True}),
            MID_EPOCH, id="16-mixed, random augmentation in a worker",
        ),
        pytest.param(
            Work(options={"compile": {"backend": "aot_eager"}, "accumulate_grad_batches": 2}), MID_EPOCH,
            id="compiled, accumulated",
        ),
        pytest.param(
            Work(callbacks=averages), Event("on_validation_batch_start", 4, "sigterm", 1), id="averaged weights"
        ),
        pytest.param(
            Work(callbacks=averages, strategy={"broadcast_buffers": False}), MID_EPOCH,
            id="averaged weights, buffers of their own",
        ),
        pytest.param(
            Work(options={"precision": "16-mixed"}, model={"manual": True, "overflows": True}),
            MID_EPOCH, id="16-mixed, manual optimization",
        ),
    ],
)  # fmt: skip
def test_what_is_trained(server: SharedServer, tmp_path: Path, work: Work, moment: Event) -> None:
    assert_exact(server, tmp_path, work, moment)


# -- decisions -----------------------------------------------------------------------------------------------


def decides_by_a_rank_value() -> list[Any]:
    """A metric that each rank logs for itself: rank 0's counts, on all."""
    return [
        ModelCheckpoint(monitor="rank_loss", save_top_k=2, every_n_train_steps=1),
        EarlyStopping("rank_loss", patience=1, check_on_train_epoch_end=True),
    ]


def saves_by_time() -> list[Any]:
    from datetime import timedelta

    return [ModelCheckpoint(train_time_interval=timedelta(milliseconds=1), save_top_k=-1)]


def test_decisions_by_a_value_that_differs_between_ranks_are_the_same(
    server: SharedServer, tmp_path: Path
) -> None:
    work = Work(callbacks=decides_by_a_rank_value, options={"max_epochs": 30})
    played = play(server, tmp_path, "demo", work)
    assert played.code == 0, played.logs()
    assert played.outcome.finished_by == "early_stopping"


def test_a_save_by_time_comes_at_the_same_step_on_all_ranks(server: SharedServer, tmp_path: Path) -> None:
    played = play(server, tmp_path, "demo", Work(callbacks=saves_by_time))
    assert played.code == 0, played.logs()
    assert len(played.checkpoints()) > 3


def test_time_is_over_for_all_ranks_at_once(server: SharedServer, tmp_path: Path) -> None:
    # Without early stopping, which a quick machine reaches within the second.
    work = Work(
        options={"max_time": "00:00:00:01", "max_epochs": -1}, every_step=False, callbacks=saves_by_time
    )
    played = play(server, tmp_path, "demo", work)
    assert (played.code, played.outcome.finished_by) == (0, "max_time"), played.logs()


def test_stop_training_in_a_hook_of_all_ranks(server: SharedServer, tmp_path: Path) -> None:
    work = Work(events=(Event("on_train_batch_end", 4, "stop training"),))
    played = play(server, tmp_path, "demo", work)
    assert (played.code, played.outcome.finished_by) == (0, "stop_training"), played.logs()
    assert [(c.reason, c.step) for c in played.checkpoints()][:1] == [("final", 4)]


def test_a_save_that_one_rank_is_asked_for(server: SharedServer, tmp_path: Path) -> None:
    events = (Event("on_train_batch_end", 3, "sigusr2", 1),)
    played = play(server, tmp_path, "demo", Work(events=events))
    assert played.code == 0, played.logs()
    assert "manual" in {c.reason for c in played.checkpoints()}


# -- data ----------------------------------------------------------------------------------------------------


class Sees:
    """Makes callbacks that note what each rank was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __call__(self) -> list[Any]:
        return [Seen(self.folder), ModelCheckpoint()]


def seen(folder: Path, epoch: int) -> list[list[int]]:
    return [list(map(int, path.read_text().split())) for path in sorted(folder.glob(f"epoch-{epoch}-rank-*"))]


def test_every_sample_once_an_epoch(server: SharedServer, tmp_path: Path) -> None:
    played = play(server, tmp_path, "demo", Work(callbacks=Sees(tmp_path), options={"max_epochs": 2}))
    assert played.code == 0, played.logs()
    orders = [seen(tmp_path, epoch) for epoch in (0, 1)]
    for first, second in orders:
        assert sorted(first + second) == list(range(NUM_SAMPLES))
    assert orders[0] != orders[1]


def test_a_random_sampler_is_shared_out(server: SharedServer, tmp_path: Path) -> None:
    work = Work(callbacks=Sees(tmp_path), options={"max_epochs": 1}, data={"weighted": True})
    two, one = tmp_path / "two", tmp_path / "one"
    for folder, ranks in ((two, 2), (one, 1)):
        folder.mkdir()
        played = play(
            server, folder, "demo", Work(**{**vars(work), "callbacks": Sees(folder)}), num_ranks=ranks
        )
        assert played.code == 0, played.logs()
    first, second = seen(two, 0)
    # 11 batches: each takes every second one, and the last has no partner.
    taken = [tuple(each[i : i + 4]) for i in range(0, 20, 4) for each in (first, second)]
    assert len(first) == len(second) == 20
    assert len(set(taken)) == len(taken)


def test_another_number_of_ranks_goes_on_from_the_same_sample(server: SharedServer, tmp_path: Path) -> None:
    events = (Event("on_train_batch_end", 2, "sigterm", 0), Event("on_train_batch_end", 2, "wait", 1))
    started = Work(callbacks=Sees(tmp_path), events=events)
    stopped = play(server, tmp_path, "demo", started)
    assert stopped.code == 143, stopped.logs()
    assert stopped.outcome.step == 2
    refused = play(server, tmp_path, "demo", Work(), reference="last", num_ranks=1, exact=True)
    assert refused.code == 5
    assert "written by 2 ranks and there is 1 now" in str(refused.outcome.error)
    done = play(
        server, tmp_path, "demo", Work(callbacks=Sees(tmp_path), options={"max_epochs": 1}), reference="last",
        num_ranks=1,
    )  # fmt: skip
    assert done.code == 0, done.logs(2)
    plain = tmp_path / "plain"
    plain.mkdir()
    play(server, plain, "demo", Work(callbacks=Sees(plain), options={"max_epochs": 1}), num_ranks=1)
    (rest,), (whole,) = seen(tmp_path, 0)[:1], seen(plain, 0)
    assert rest == whole[16:]
    assert any("16" not in text and "8 samples of all ranks" in text for text in done.said)


# -- evaluation ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    assert play(server, root, "demo", Work(options={"max_epochs": 1})).code == 0
    return root


@pytest.mark.parametrize("fn", ["validate", "test"])
@pytest.mark.parametrize("evaluated", [21, 3])
def test_two_ranks_measure_what_one_does(
    server: SharedServer, trained: Path, fn: Any, evaluated: int
) -> None:
    work = Work(fn=fn, data={"evaluated": evaluated})
    one, two = (play(server, trained, "demo", work, num_ranks=ranks).outcome for ranks in (1, 2))
    assert (one.stop_reason, two.stop_reason) == (StopReason.DONE, StopReason.DONE)
    assert len(one.results) == len(two.results) == 1
    assert two.results[0] == pytest.approx(one.results[0], rel=1e-6)
    if fn == "test":
        assert two.results[0]["count"] == evaluated


def test_predictions_of_two_ranks_are_those_of_one(server: SharedServer, trained: Path) -> None:
    from ckptrun.checkpoint.safe_state import decode
    from ckptrun.checkpoint.state_file import read_state

    work = Work(fn="predict")
    stored = [play(server, trained, "demo", work, num_ranks=ranks).outcome.results for ranks in (1, 2)]
    one, two = (decode(read_state(each.path))["predictions"] for each in stored)
    assert [batch["which"].tolist() for batch in two] == [
        list(range(i, min(21, i + 4))) for i in range(0, 21, 4)
    ]
    assert_same(one, two)


def test_a_save_that_fails_in_the_background_is_taken_back_in_every_rank(
    server: SharedServer, tmp_path: Path
) -> None:
    """Only the rank that writes sees it fail; all have to go on from the same books."""
    books = tmp_path / "books"
    books.mkdir()
    work = Work(callbacks=functools.partial(with_failing_commit, str(books)))
    played = play(server, tmp_path, "run", work, on_save_error="warn")
    assert played.code == 0, played.logs()
    assert any("the disk is away" in text for text in played.said)
    one, two = [path.read_text() for path in sorted(books.iterdir())]
    assert one == two
    names = [record.name for record in reversed(played.checkpoints())]
    assert [name[:8] for name in names] == ["00000001", "00000003"]
    assert one.splitlines() == [f"0 {[[]]}", f"1 {[names[:1]]}", f"2 {[names[:1]]}"]
