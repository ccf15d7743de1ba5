"""Which difference between two trainings is the first, and where one is stopped; from lines written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptrun.run.step_trace import Line, Request, Stop, compare, plan_stops, read_trace


def training(num_epochs: int = 2, num_batches: int = 5, first: int = 0) -> list[Line]:
    """A trace in which nothing is drawn and nothing moves, but for the numbers of steps; from step ``first`` on."""
    lines: list[Line] = [{"moment": "begin", "step": first, "epoch": 0, "number": 0, "parameter": {"w": "0"}}]
    for epoch in range(num_epochs):
        for number in range(num_batches):
            step = epoch * num_batches + number
            if step < first:
                continue
            at = {"epoch": epoch, "number": number}
            lines += [
                {"moment": "batch", "step": step, **at, "batch": {"batch": f"b{step}"}, "random state": {"torch": "r"}},
                {"moment": "update", "step": step, **at, "learning rate": {"optimizer 0, group 0": "0.1"}},
                {
                    "moment": "after", "step": step + 1, **at, "random state": {"torch": "r"},
                    "parameter": {"w": f"w{step}", "v": "v"}, "buffer": {}, "optimizer state": {"m of w": "m"},
                },
            ]  # fmt: skip
        at = {"step": (epoch + 1) * num_batches, "epoch": epoch, "number": num_batches}
        lines += [{"moment": "validation", **at}, {"moment": "epoch end", **at}]
    return lines


def changed(lines: list[Line], moment: str, nth: int, kind: str, name: str) -> list[Line]:
    copied: list[Line] = json.loads(json.dumps(lines))
    [line for line in copied if line["moment"] == moment][nth][kind][name] = "other"
    return copied


def test_alike_in_one_start_and_in_several() -> None:
    whole = training()
    assert compare(whole, [whole]) is None
    assert compare(whole, [training()[:11], training(first=2), training(first=5)]) is None


@pytest.mark.parametrize(
    ("moment", "kind", "name"),
    [
        ("batch", "batch", "batch"),
        ("batch", "random state", "torch"),
        ("update", "learning rate", "optimizer 0, group 0"),
        ("after", "random state", "torch"),
        ("after", "parameter", "v"),
        ("after", "optimizer state", "m of w"),
    ],
)
def test_the_first_difference_has_a_name(moment: str, kind: str, name: str) -> None:
    whole = training()
    later = changed(changed(whole, moment, 3, kind, name), "after", 3, "optimizer state", "m of w")
    found = compare(whole, [whole[:5], changed(later, "batch", 4, "batch", "batch")], rank=1)
    assert found is not None
    assert (found.kind, found.what, found.batch, found.epoch) == (kind, name, 3, 0)
    assert (found.rank, found.start, found.found) == (1, 2, "other")
    assert found.expected not in (None, "other")
    assert str(found).startswith(f"{kind} of rank 1: {name} (epoch 0, batch 3, step ")


def test_steps_that_one_of_them_did_not_make() -> None:
    whole = training()
    found = compare(whole, [training(num_epochs=1)])
    assert found is not None
    assert (found.kind, found.epoch, found.batch, found.found) == ("steps", 1, 0, None)
    assert compare(whole, [training(num_epochs=1)], complete=False) is None, "there is more to come"
    found = compare(training(num_epochs=1), [whole])
    assert found is not None
    assert (found.kind, found.epoch, found.expected) == ("steps", 1, None)


def test_how_it_began() -> None:
    whole = training()
    found = compare(whole, [changed(whole, "begin", 0, "parameter", "w")])
    assert found is not None
    assert (found.kind, found.what) == ("initial parameter", "w")
    resumed = changed(training(first=2), "begin", 0, "parameter", "w")
    assert compare(whole, [whole[:8], resumed]) is None, "a resumed one does not begin there"


@pytest.mark.parametrize(
    ("lines", "moments"),
    [
        (training(3, 10), ["batch", "epoch end", "validation"]),
        (training(1, 30), ["batch", "batch"]),
        (training(8, 1), ["epoch end", "validation"]),
        (training(2, 4), ["batch", "epoch end"]),
        (training(1, 2), []),
    ],
    ids=["long epochs", "one epoch", "epochs of one batch", "short", "too short"],
)
def test_where_it_is_stopped(lines: list[Line], moments: list[str]) -> None:
    stops = plan_stops(lines)
    assert [stop.moment for stop in stops] == moments
    steps = [stop.step for stop in stops]
    assert steps == sorted(set(steps)), "each start makes steps"
    for stop in stops:
        assert any(
            (line["moment"], line["epoch"], line["number"]) == (stop.moment, stop.epoch, stop.batch)
            for line in lines
        )


def test_what_is_asked_survives_the_environment(tmp_path: Path) -> None:
    for stop in (None, Stop("validation", 2, 5, 25)):
        request = Request(str(tmp_path), 3, stop)
        assert Request.from_json(request.to_json()) == request
    assert str(Stop("epoch end", 0, 5, 5)) == "at an epoch's end (step 5)"
    assert request.path(1) == f"{tmp_path}/start-0003-rank-0001.jsonl"


def test_a_torn_line_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"moment": "begin"}\n{"mom')
    assert read_trace(str(path)) == [{"moment": "begin"}]
    assert read_trace(str(tmp_path / "none")) == []
