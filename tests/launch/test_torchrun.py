"""Several ranks that fail, hang, are killed, print, or are stopped where nobody likes it: real processes each time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_work import (
    Event,
    SharedServer,
    Work,
    alive,
    assert_same,
    picture,
    play,
    shared_server,
    with_exception_checkpoint,
)

from ckptrun import stop
from ckptrun.launch import torchrun
from ckptrun.records import StopReason
from ckptrun.run.attempts import read_attempts
from ckptrun.stop import StopListener


@pytest.fixture(scope="module")
def server() -> Iterator[SharedServer]:
    with shared_server() as shared:
        yield shared


@pytest.fixture(scope="module")
def plain(server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    played = play(server, tmp_path_factory.mktemp("plain"), "plain", Work())
    assert played.code == 0, played.logs()
    return picture(played.folder)


@pytest.fixture(autouse=True)
def other_servers_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server is gone all that is below the supervisor is killed: here the other tests' server too."""
    monkeypatch.setattr(torchrun, "kill_descendants", lambda: None)


def in_rank_1(what: str, *, hook: str = "on_train_batch_end", nth: int = 8, once: Path | None = None) -> Work:
    return Work(events=(Event(hook, nth, what, 1, None if once is None else str(once)),))


# -- failures ------------------------------------------------------------------------------------------------


def test_an_exception_in_one_rank_is_told_once_and_ends_all(server: SharedServer, tmp_path: Path) -> None:
    played = play(server, tmp_path, "demo", in_rank_1("raise"))
    assert (played.code, played.outcome.stop_reason) == (1, StopReason.EXCEPTION)
    assert played.outcome.user_error
    told = played.outcome.error.traceback_text
    assert told.startswith("Rank 1 on ")
    assert told.count("RuntimeError: the user's own error in rank 1") == 1
    assert told.splitlines()[2].startswith('  File "') and "rank_work.py" in told.splitlines()[2]
    assert "fit_loop.py" in played.logs()[1]  # the log has all of it
    assert "the user's own error" not in played.logs()[0]
    assert played.printed == []


def test_what_can_be_saved_without_the_failed_rank_is_saved(server: SharedServer, tmp_path: Path) -> None:
    work = Work(events=in_rank_1("raise").events, callbacks=with_exception_checkpoint)
    played = play(server, tmp_path, "demo", work)
    assert played.code == 1
    newest = played.checkpoints()[0]
    assert (newest.reason, newest.exact) == ("exception", False)
    assert newest.step >= 7


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sigkill", "rank 1 on .* was killed by SIGKILL"),
        ("exit", "rank 1 on .* ended with exit code 3 and without a word"),
        ("kill the fork server", "the process that ranks are forked from is gone"),
        ("kill the agent", "the process that keeps the ranks together"),
    ],
)
def test_a_process_that_is_gone(tmp_path: Path, server: SharedServer, what: str, message: str) -> None:
    with shared_server() if "fork server" in what else _same(server) as used:
        played = play(used, tmp_path, "demo", in_rank_1(what))
    assert (played.code, played.outcome.stop_reason) == (70, StopReason.RANK_LOST)
    with pytest.raises(Exception, match=message):
        raise played.outcome.error
    assert read_attempts(played.folder.attempts)[-1].exit_code == 70


class _same:  # noqa: N801 - reads like a function
    def __init__(self, server: SharedServer) -> None:
        self.server = server

    def __enter__(self) -> SharedServer:
        return self.server

    def __exit__(self, *_: object) -> None: ...


def test_a_rank_that_hangs(server: SharedServer, tmp_path: Path) -> None:
    played = play(server, tmp_path, "demo", in_rank_1("hang"), hang_timeout_s=3.0)
    assert (played.code, played.outcome.stop_reason) == (70, StopReason.HANG)
    assert "stood still for" in str(played.outcome.error)
    assert "in act" in played.logs()[1] and "rank_work.py" in played.logs()[1]
    assert "most recent call first" in played.logs()[0]


def test_grandchildren_end_with_the_ranks(server: SharedServer, tmp_path: Path) -> None:
    work = Work(events=(Event("on_train_batch_end", 2, "leave grandchildren"),), options={"max_epochs": 1})
    played = play(server, tmp_path, "demo", work)
    assert played.code == 0, played.logs()
    assert alive(played.folder) == []


@pytest.mark.parametrize("what", ["abort at exit", "sleep at exit"])
def test_what_happens_after_the_last_word_is_a_warning(
    server: SharedServer, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "_AFTER_OUTCOME_S", 0.5)
    work = Work(events=in_rank_1(what).events, may_end_badly=True)
    played = play(server, tmp_path, "demo", work)
    assert (played.code, played.outcome.stop_reason) == (0, StopReason.DONE)
    (said,) = [text for text in played.said if "after its work was done" in text]
    assert said.startswith("rank 1")


# -- restarts ------------------------------------------------------------------------------------------------


def test_a_restart_goes_on_from_the_newest_save_and_ends_with_the_same_bits(
    server: SharedServer, tmp_path: Path, plain: dict[str, Any]
) -> None:
    work = in_rank_1("sigkill", nth=14, once=tmp_path / "once")
    played = play(server, tmp_path, "demo", work, max_restarts=1)
    assert played.code == 0, played.said
    assert any("killed by SIGKILL; restart 1 of 1" in text for text in played.said)
    first, second = read_attempts(played.folder.attempts)
    assert (first.attempt, first.stop_reason, first.exit_code) == (1, "rank-lost", 70)
    assert (second.attempt, second.stop_reason, second.exit_code) == (2, "done", 0)
    assert second.resolved is not None and second.start_step == 12
    assert_same(plain, picture(played.folder))


def test_a_restart_before_anything_was_saved_starts_as_the_first(
    server: SharedServer, tmp_path: Path
) -> None:
    work = in_rank_1("sigkill", nth=2, once=tmp_path / "once")
    work = Work(**{**vars(work), "options": {"max_epochs": 1}})
    played = play(server, tmp_path, "demo", work, max_restarts=1)
    assert played.code == 0, played.said
    assert [a.resolved for a in read_attempts(played.folder.attempts)] == [None, None]


def test_a_restart_after_the_fork_server_was_killed(tmp_path: Path) -> None:
    work = in_rank_1("kill the fork server", nth=2, once=tmp_path / "once")
    work = Work(**{**vars(work), "options": {"max_epochs": 1}})
    with shared_server() as used:
        played = play(used, tmp_path, "demo", work, max_restarts=1)
    assert played.code == 0, played.said


def test_two_failures_at_one_step_from_one_checkpoint_are_enough(
    server: SharedServer, tmp_path: Path
) -> None:
    work = Work(events=(Event("on_train_batch_start", 1, "raise", 1, step=8),))
    played = play(server, tmp_path, "demo", work, max_restarts=9)
    assert played.code == 1
    first, second, third = read_attempts(played.folder.attempts)
    assert (first.resolved, first.end_step) == (None, 8)
    assert second.resolved == third.resolved is not None
    assert f"two attempts from {third.resolved} failed at step {third.end_step}" in played.said[-1]


def test_an_error_that_no_restart_helps(server: SharedServer, tmp_path: Path) -> None:
    work = Work(model={"manual": True}, options={"accumulate_grad_batches": 2})
    played = play(server, tmp_path, "demo", work, max_restarts=3)
    assert played.code == 2
    assert len(read_attempts(played.folder.attempts)) == 1


def test_one_press_that_comes_to_each_rank_is_one_however_late_it_is_told(
    server: SharedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "SAME_PRESS_S", 0.0)  # as if each word came later than that
    listener = StopListener()
    played = play(
        server, tmp_path, "demo", Work(events=(Event("on_train_batch_end", 3, "sigint"),)), listener=listener
    )
    assert played.code == 130, played.logs()
    assert {origin: presses for origin, (presses, _) in listener._presses.items()} == {
        "rank 0": 1,
        "rank 1": 1,
    }
    assert not listener.forced
    assert played.checkpoints()[0].reason == "stop"


# -- stopping where there is nothing to save -----------------------------------------------------------------


def test_a_stop_before_any_rank_has_started(tmp_path: Path) -> None:
    listener = StopListener()
    listener.request_stop(StopReason.SIGTERM, signum=signal.SIGTERM)
    with shared_server() as importing:
        played = play(importing, tmp_path, "demo", Work(), listener=listener)
        assert not importing.ready, "nobody waits for its imports"
        assert (played.code, played.outcome.stop_reason) == (143, StopReason.SIGTERM)
    assert read_attempts(played.folder.attempts)[-1].exit_code == 143


@pytest.mark.parametrize(
    "events",
    [
        pytest.param((Event("build", 1, "sigterm", 1),), id="one rank builds, the other waits for it"),
        pytest.param((Event("setup", 1, "sigterm", 1), Event("setup", 1, "wait", 0)), id="set-up"),
        pytest.param(
            (Event("on_sanity_check_start", 1, "sigterm", 1), Event("on_sanity_check_start", 1, "wait", 0)),
            id="sanity check",
        ),
    ],
)
def test_a_stop_before_training(server: SharedServer, tmp_path: Path, events: tuple[Event, ...]) -> None:
    played = play(server, tmp_path, "demo", Work(events=events))
    assert (played.code, played.outcome.error) == (143, None), played.logs()
    assert played.outcome.stop_reason is StopReason.SIGTERM
    assert played.checkpoints() == []


def test_a_stop_while_restoring(server: SharedServer, tmp_path: Path) -> None:
    stop = (Event("on_train_batch_end", 3, "sigterm", 1), Event("on_train_batch_end", 3, "wait", 0))
    assert play(server, tmp_path, "demo", Work(events=stop)).code == 143
    events = (Event("on_load_checkpoint", 1, "sigterm", 1), Event("on_load_checkpoint", 1, "wait", 0))
    played = play(server, tmp_path, "demo", Work(events=events), reference="last")
    assert (played.code, played.outcome.stop_reason) == (143, StopReason.SIGTERM), played.logs(2)
    assert [(c.reason, c.step) for c in played.checkpoints()] == [("stop", 3)]


def test_an_evaluation_is_stopped(server: SharedServer, tmp_path: Path) -> None:
    assert play(server, tmp_path, "demo", Work(options={"max_epochs": 1})).code == 0
    events = (Event("on_test_batch_start", 1, "sigterm", 1), Event("on_test_batch_start", 1, "wait", 0))
    played = play(server, tmp_path, "demo", Work(fn="test", events=events))
    assert (played.code, played.outcome.stop_reason) == (143, StopReason.SIGTERM)


# -- output --------------------------------------------------------------------------------------------------


def test_rank_0_is_shown_and_each_has_its_log(server: SharedServer, tmp_path: Path) -> None:
    work = Work(events=(Event("on_train_start", 1, "print"),), options={"max_epochs": 1})
    played = play(server, tmp_path, "demo", work)
    assert sorted(played.printed) == [("err of rank 0", True), ("out of rank 0", False)]
    assert [text for text in played.said if text.startswith("said by")] == ["said by rank 0"]
    for rank, log in enumerate(played.logs()):
        for word in ("out of", "err of", "said by"):
            assert f"{word} rank {rank}\n" in log
            assert f"{word} rank {1 - rank}" not in log
    assert "Warning" not in "".join(played.logs())


# -- how ranks begin -----------------------------------------------------------------------------------------


@pytest.fixture
def refusing_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedServer]:
    """One that says that it has touched CUDA."""
    boot = (
        f"import sys; sys.path[:] = {sys.path!r}; import ckptrun.launch.fork_server as server; "
        "server._cuda_was_touched = lambda: True; server.main()"
    )
    from ckptrun.launch import fork_client

    monkeypatch.setattr(
        fork_client, "argv_for", lambda _, *args: [sys.executable, "-c", boot, *map(str, args)]
    )
    with shared_server() as shared:
        monkeypatch.undo()
        yield shared


def test_where_ranks_cannot_be_forked_they_are_spawned(
    refusing_server: SharedServer, server: SharedServer, tmp_path: Path
) -> None:
    work = Work(options={"max_epochs": 1})
    spawned = play(refusing_server, tmp_path, "spawned", work)
    assert spawned.code == 0, spawned.logs()
    assert [text for text in spawned.said if "CUDA is initialized" in text]
    forked = play(server, tmp_path, "forked", work)
    assert_same(picture(forked.folder), picture(spawned.folder))


def test_spawning_imports_nothing_in_the_server(tmp_path: Path) -> None:
    with shared_server("spawn") as spawning:
        played = play(spawning, tmp_path, "demo", in_rank_1("raise", nth=1), start_method="spawn")
        assert played.code == 1, played.logs()
        assert "rank 1" in str(played.outcome.error)
        maps = Path(f"/proc/{spawning.pid}/maps").read_text()
        assert "libtorch" not in maps
