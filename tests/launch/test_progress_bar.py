"""A bar on a terminal, plain lines elsewhere, and never a run that dies of its display."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from ckptrun.launch.progress_bar import ProgressDisplay, make_display
from ckptrun.records import Progress, Stage

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Clock:
    """The display's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("ckptrun.launch.progress_bar.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Terminal:
    """A terminal whose other end is read all the time."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.stream: TextIO = os.fdopen(slave, "w")
        self._read = bytearray()
        self._reader = threading.Thread(target=self._drain)
        self._reader.start()

    def _drain(self) -> None:
        while True:
            try:
                self._read += os.read(self._master, 65536)
            except OSError:
                return

    @property
    def raw(self) -> str:
        return bytes(self._read).decode(errors="replace")

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.raw)

    def close(self) -> None:
        if not self.stream.closed:
            self.stream.close()
        self._reader.join()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    found = Terminal()
    yield found
    found.close()


class Plain:
    """A display on a stream that is no terminal."""

    def __init__(self, clock: Clock, every_s: float = 10.0) -> None:
        self.clock = clock
        self.progress = Progress(max_steps=100, stage=Stage.TRAINING)
        self.stream = io.StringIO()
        self.display = ProgressDisplay(lambda: self.progress, stream=self.stream, run="demo", every_s=every_s)

    def later(self, seconds: float, **changes: Any) -> list[str]:
        """Let time pass, change the progress, look at it; all lines until now."""
        self.clock.now += seconds
        for name, value in changes.items():
            setattr(self.progress, name, value)
        self.display.refresh()
        return self.lines

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def plain(clock: Clock) -> Iterator[Plain]:
    found = Plain(clock)
    found.display.start()
    found.later(0)
    yield found
    found.display.stop()


# -- no terminal -----------------------------------------------------------------------------------


def test_a_line_now_and_then(plain: Plain) -> None:
    assert plain.lines == ["demo  train  step 0/100  epoch 0"]
    assert len(plain.later(4, step=10)) == 1
    assert len(plain.later(4, step=20)) == 1
    lines = plain.later(4, step=30, metrics={"loss": 1.23456, "val_loss": 2.0})
    assert lines[1:] == ["demo  train  step 30/100  epoch 0  2.5 it/s  ETA 0:28  loss 1.235  val_loss 2"]


def test_no_line_where_nothing_has_changed(plain: Plain) -> None:
    plain.later(11, step=5)
    assert len(plain.later(30)) == 2
    assert len(plain.later(30)) == 2


def test_the_end_of_a_validation_is_told_and_its_beginning_is_not(plain: Plain) -> None:
    assert len(plain.later(1, step=5, stage=Stage.VALIDATING)) == 1
    lines = plain.later(1, stage=Stage.TRAINING, metrics={"val_loss": 0.5})
    assert lines[1:] == ["demo  train  step 5/100  epoch 0  val_loss 0.5"]


def test_a_long_validation_is_told_too(plain: Plain) -> None:
    lines = plain.later(11, stage=Stage.VALIDATING, eval_batch=3, num_eval_batches=40)
    assert lines[1:] == ["demo  train  step 0/100  epoch 0  validate  batch 3/40"]


def test_time_in_a_validation_does_not_slow_the_pace(plain: Plain) -> None:
    plain.later(5, step=10)
    plain.later(1, stage=Stage.VALIDATING)
    plain.later(50, stage=Stage.TRAINING)
    assert plain.later(5, step=20)[-1].count("2 it/s") == 1


def test_an_evaluation_and_a_message(clock: Clock) -> None:
    plain = Plain(clock)
    plain.progress = Progress(fn="test", stage=Stage.TESTING, num_eval_batches=7, message="loading")
    plain.display.start()
    plain.later(0)
    plain.later(11, eval_batch=2)
    plain.display.stop("ends")
    assert plain.lines == [
        "demo  test  batch 0/7  loading",
        "demo  test  batch 2/7  5.5 s/it  ETA 0:28  loading",
        "ends",
    ]


def test_epochs_and_batches_give_the_way_to_go_where_no_steps_are_set(clock: Clock) -> None:
    plain = Plain(clock)
    plain.progress = Progress(stage=Stage.TRAINING, max_epochs=3, num_batches=50)
    plain.display.start()
    plain.later(0)
    plain.later(10, step=40, batch=40)
    plain.display.stop()
    assert plain.lines[-1] == "demo  train  step 40  epoch 0/3 batch 40/50  4 it/s  ETA 0:28"


def test_no_control_characters_reach_a_log(plain: Plain) -> None:
    plain.display.say("\x1b[31mred\x1b[0m and a bell\x07 and\ttwo\nlines\r")
    assert plain.lines[1:] == ["red and a bell and\ttwo", "lines"]


def test_stop_ends_the_thread_and_may_come_twice(clock: Clock) -> None:
    plain = Plain(clock)
    plain.display.start()
    plain.display.start()
    plain.display.stop("the end")
    plain.display.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptrun-progress"]
    assert plain.later(100, step=9) == ["the end"]


def test_messages_before_the_start_and_after_the_end_are_printed(clock: Clock) -> None:
    plain = Plain(clock)
    plain.display.say("before")
    plain.display.start()
    plain.display.stop()
    plain.display.say("after")
    assert plain.lines == ["before", "after"]


def test_the_thread_looks_by_itself(wait_until: Callable[..., Any]) -> None:
    progress, stream = Progress(stage=Stage.TRAINING, step=7), io.StringIO()
    display = make_display(progress, dict, run="demo", stream=stream, every_s=0.0)
    display.start()
    try:
        wait_until(lambda: "step 7" in stream.getvalue())
        progress.step = 8
        wait_until(lambda: "step 8" in stream.getvalue())
    finally:
        display.stop()


def test_a_metric_that_comes_up_at_this_moment_does_no_harm(clock: Clock) -> None:
    def metrics() -> dict[str, float]:
        raise RuntimeError("dictionary changed size during iteration")

    stream = io.StringIO()
    display = make_display(Progress(stage=Stage.TRAINING), metrics, run="demo", stream=stream)
    display.start()
    display.refresh()
    display.stop()
    assert stream.getvalue() == "demo  train  step 0  epoch 0\n"


def test_a_stream_that_breaks_does_not_end_the_run(clock: Clock) -> None:
    plain = Plain(clock)
    plain.display.start()
    plain.stream.close()
    plain.display.say("lost")
    plain.clock.now += 100
    plain.display.refresh()
    plain.display.stop("lost too")


@pytest.mark.parametrize(
    ("seconds", "words"), [(59, "0:59"), (3599, "59:59"), (4000, "1:06:40"), (4e5, "4 d")]
)
def test_the_time_left(plain: Plain, seconds: float, words: str) -> None:
    plain.progress.max_steps = 10 + round(seconds)
    plain.later(10, step=10)
    assert f"ETA {words}" in plain.lines[-1]


# -- a terminal ------------------------------------------------------------------------------------


def test_a_bar_with_its_nested_validation(terminal: Terminal, wait_until: Callable[..., Any]) -> None:
    progress = Progress(stage=Stage.TRAINING, max_steps=200, step=50, epoch=1, max_epochs=4, num_batches=100)
    display = ProgressDisplay(
        lambda: progress, metrics=lambda: {"loss": 0.5}, stream=terminal.stream, run="demo"
    )
    display.start()
    try:
        wait_until(lambda: "step 50/200" in terminal.text)
        assert "25%" in terminal.text
        assert "epoch 1/4" in terminal.text
        assert "loss 0.5" in terminal.text
        progress.num_eval_batches, progress.eval_batch, progress.stage = 8, 2, Stage.VALIDATING
        wait_until(lambda: "batch 2/8" in terminal.text)
        display.say("a [bold]message[/bold]")
        wait_until(lambda: "a [bold]message[/bold]" in terminal.text)
    finally:
        display.stop("the end")
    wait_until(lambda: "the end" in terminal.text)
    assert terminal.raw.count("\x1b[?25l") == terminal.raw.count("\x1b[?25h")  # the cursor is back


def test_prints_go_above_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    progress = Progress(stage=Stage.TRAINING, step=3)
    display = ProgressDisplay(lambda: progress, stream=terminal.stream, run="demo")
    display.start()
    try:
        wait_until(lambda: "step 3" in terminal.text)
        print("from the user")
        wait_until(lambda: re.search(r"from the user *\r\n *(.*)demo train", terminal.text))
    finally:
        display.stop()
    assert sys.stdout is terminal.stream


def test_an_output_that_is_no_terminal_is_left_alone(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout
    display = ProgressDisplay(Progress, stream=terminal.stream, run="demo")
    display.start()
    try:
        assert sys.stdout is before
        print("a document")
    finally:
        display.stop()
    assert capsys.readouterr().out == "a document\n"


def test_no_color(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    display = ProgressDisplay(
        lambda: Progress(stage=Stage.TRAINING, step=3, max_steps=4), stream=terminal.stream, run="demo"
    )
    display.start()
    wait_until(lambda: "step 3" in terminal.text)
    display.stop()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.raw)


def test_a_dumb_terminal_gets_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., Any]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    display = ProgressDisplay(lambda: Progress(stage=Stage.TRAINING), stream=terminal.stream, run="demo")
    display.start()
    wait_until(lambda: "demo  train  step 0" in terminal.text)
    display.stop()
    assert "\x1b" not in terminal.raw


def test_a_terminal_that_is_gone_does_not_end_the_run(terminal: Terminal) -> None:
    out = sys.stdout
    display = ProgressDisplay(Progress, stream=terminal.stream, run="demo")
    display.start()
    terminal.stream.close()
    display.say("lost")
    display.stop("lost too")
    assert sys.stdout is out


def test_drawing_costs_little(terminal: Terminal) -> None:
    """At four draws a second, two milliseconds each would be under one hundredth of a core."""
    progress = Progress(stage=Stage.TRAINING, max_steps=10_000, num_batches=100, metrics={"loss": 1.0})
    display = ProgressDisplay(lambda: progress, stream=terminal.stream, run="demo")
    display.start()
    display.refresh()
    started = time.thread_time()
    for _ in range(50):
        progress.step += 1
        display.refresh()
    spent = time.thread_time() - started
    display.stop()
    assert spent / 50 < 0.002
