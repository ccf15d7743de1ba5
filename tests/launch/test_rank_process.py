"""What a rank tells the supervisor, where one process can tell it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.errors import MisconfigurationException
from ckptrun.launch.rank_output import RankOutput
from ckptrun.launch.rank_process import RemoteStop, _plain, _progress, take
from ckptrun.launch.wire import Channel
from ckptrun.records import Outcome, Progress, Stage, StopReason


def told(outcome: Outcome, rank: int = 0, folder: Path | None = None) -> dict[str, Any]:
    """As it arrives."""
    ours, theirs = Channel.pair()
    ours.send("outcome", **_plain(outcome, rank, None if folder is None else str(folder)))
    (message,) = Channel(theirs).receive()
    ours.close()
    theirs.close()
    return message


def test_a_good_end() -> None:
    message = told(Outcome(StopReason.DONE, 5, 1, finished_by="max_steps", results=[{"loss": 0.5}]))
    assert (message["stop_reason"], message["step"], message["error"]) == ("done", 5, None)
    assert message["results"] == [{"loss": 0.5}]


def test_only_rank_0_tells_results() -> None:
    assert told(Outcome(StopReason.DONE, results=[{"loss": 0.5}]), rank=1)["results"] is None


def test_texts_are_told_and_tensors_are_stored(tmp_path: Path) -> None:
    assert told(Outcome(StopReason.DONE, results=[["a", "b"], ["c"]]))["results"] == [["a", "b"], ["c"]]
    message = told(Outcome(StopReason.DONE, results=[torch.arange(3)]), folder=tmp_path)
    assert message["results"] is None
    assert torch.load(message["results_path"], weights_only=True)["predictions"][0].tolist() == [0, 1, 2]
    assert told(Outcome(StopReason.DONE, results=[torch.arange(3)]))["results_path"] is None


def test_an_error_of_the_users() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        message = told(Outcome(StopReason.EXCEPTION, error=error, user_error=True))["error"]
    assert (message["type"], message["message"], message["exit_code"]) == ("ValueError", "wrong", 1)
    assert "test_rank_process.py" in message["traceback"]
    assert not message["collective"]


def test_an_error_of_ours_keeps_its_hint_and_exit_code() -> None:
    error = MisconfigurationException("no", hint="do this")
    message = told(Outcome(StopReason.EXCEPTION, error=error))["error"]
    assert (message["message"], message["hint"], message["exit_code"]) == ("no", "do this", 2)


def test_one_that_only_follows() -> None:
    error = RuntimeError("[gloo] Connection closed by peer")
    assert told(Outcome(StopReason.EXCEPTION, error=error))["error"]["collective"]


def test_requests() -> None:
    stop = RemoteStop()
    take({"op": "save", "count": 2}, stop)
    take({"op": "stop", "reason": "sigterm", "signum": 15, "no_save": True}, stop)
    take({"op": "stop", "reason": "keyboard", "signum": 2, "no_save": False}, stop)
    assert stop.save_requested == 2
    assert stop.request is not None
    assert (stop.request.reason, stop.request.signum) == (StopReason.SIGTERM, 15)


def test_progress_leaves_the_supervisors_message_alone() -> None:
    fields = _progress(Progress(stage=Stage.TRAINING, step=3, message="saving"))
    assert (fields["stage"], fields["step"]) == ("train", 3)
    assert "message" not in fields


# -- output ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shown() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def output(tmp_path: Path, shown: list[tuple[str, bool]]) -> Any:
    made = RankOutput(str(tmp_path / "log"), lambda line, is_error: shown.append((line, is_error)))
    yield made
    made.close()


def test_lines_are_shown_whole_and_logged_as_they_come(
    output: RankOutput, shown: list[tuple[str, bool]], tmp_path: Path
) -> None:
    import os

    out, err, _ = output.give()
    os.write(out, b"one\ntw")
    output.drain()
    assert shown == [("one", False)]
    os.write(err, b"error\n")
    os.write(out, b"o\nthree")
    output.drain()
    assert sorted(shown) == [("error", True), ("one", False), ("two", False)]
    output.close()
    assert shown[-1] == ("three", False)
    assert (tmp_path / "log").read_text() in (
        "one\ntwo\nthreeerror\n",
        "one\ntwerror\no\nthree",
        "one\ntwo\nerror\nthree",
    )


def test_a_bar_without_line_ends_comes_out(output: RankOutput, shown: list[tuple[str, bool]]) -> None:
    import os

    out = output.give()[0]
    for _ in range(4):
        os.write(out, b"\r" + b"#" * 4000)
        output.drain()
    assert shown


def test_after_the_last_word_errors_are_only_logged(
    output: RankOutput, shown: list[tuple[str, bool]], tmp_path: Path
) -> None:
    import os

    out, err, _ = output.give()
    output.quiet = True
    os.write(err, b"a library's last warning\n")
    os.write(out, b"printed at exit\n")
    output.drain()
    assert shown == [("printed at exit", False)]
    assert "a library's last warning" in (tmp_path / "log").read_text()


def test_a_log_that_is_no_file(shown: list[tuple[str, bool]]) -> None:
    made = RankOutput("/dev/null", None)
    made.log(b"gone")
    made.close()
    made.close()


def test_a_channel_of_json_takes_no_object() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TypeError):
        Channel(ours).send("bad", value=object())
