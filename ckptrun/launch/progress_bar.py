"""How does a user see that the run moves? A live bar on a terminal, a plain line now and then in a log file.

Decision: a thread of the supervisor looks at the rank's :class:`Progress` four times a second and draws only
what has changed; the training loop just stores numbers and never waits for a display. Inline, the thread
shares the interpreter with the loop, so drawing is kept to one or two lines of text (well under a
millisecond). Turned down: a callback that draws in the loop, which costs its time in each step, and in a log
file leaves a line for each redraw.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from ckptrun.records import Progress, Stage

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

_REFRESH_EVERY_S = 0.25
_RATE_OVER_S = 15.0
_BAR_WIDTH = 24
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_NESTED = (Stage.VALIDATING, Stage.SANITY_CHECKING)
_BEFORE = (None, Stage.SETUP, Stage.RESTORE)
_WORK = (Stage.TRAINING, Stage.VALIDATING, Stage.TESTING, Stage.PREDICTING)


class ProgressDisplay:
    """Shows one run's progress on a stream.

    Args:
        progress: gives the newest :class:`Progress`; called from the display's thread.
        metrics: gives the values to show; those in the progress when None.
        stream: where to draw; the standard error stream when None.
        run: the run's name.
        every_s: seconds between two lines where the stream is no terminal.

    A stream that breaks ends the display, never the run.
    """

    def __init__(
        self,
        progress: Callable[[], Progress],
        *,
        metrics: Callable[[], Mapping[str, float]] | None = None,
        stream: TextIO | None = None,
        run: str = "",
        every_s: float = 10.0,
    ) -> None:
        self._progress = progress
        self._metrics = metrics if metrics is not None else lambda: progress().metrics
        self._last_metrics: Mapping[str, float] = {}
        self._stream = sys.stderr if stream is None else stream
        self._run = run
        self._every_s = every_s
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._rate = _Rate()
        self._shown: tuple[object, ...] | None = None
        self._stage: Stage | None = None
        self._next_line = 0.0

    # -- for the supervisor ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to draw."""
        if self._thread is not None:
            return
        if self._terminal:
            self._start_live()
        self._next_line = time.monotonic() + self._every_s
        self._wake.clear()
        self._thread = threading.Thread(target=self._loop, name="ckptrun-progress", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Look at the progress now: the stage has changed, or an attempt begins."""
        with self._lock:
            try:
                self._draw()
            except (OSError, ValueError):  # the terminal is gone, or the stream closed
                self._give_up()

    def say(self, text: str) -> None:
        """Print a message, above the bar where there is one."""
        with self._lock:
            try:
                if self._live is not None:
                    self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
                else:
                    self._print(text)
            except (OSError, ValueError):
                self._give_up()

    def stop(self, final_line: str | None = None) -> None:
        """End the drawing, and print a last line."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.set()
            if thread is not threading.current_thread():
                thread.join()
        with self._lock:
            self._give_up()
        if final_line is not None:
            self.say(final_line)

    # -- drawing -----------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._wake.wait(_REFRESH_EVERY_S):
            self.refresh()

    def _draw(self) -> None:
        progress = self._progress()
        now = time.monotonic()
        stage = progress.stage
        left, self._stage = self._stage, stage
        self._rate.see(progress, now)
        key = (
            stage,
            progress.step,
            progress.epoch,
            progress.batch,
            progress.eval_batch,
            progress.message,
        )
        if key == self._shown:
            return
        if self._live is not None:
            self._shown = key
            self._live.update(self._text(progress, self._newest_metrics()), refresh=True)
        elif not self._terminal and self._thread is not None:
            # That the work begins, and that a validation has ended, is worth a line of its own.
            news = (left in _BEFORE and stage in _WORK) or (left in _NESTED and stage not in _NESTED)
            if news or now >= self._next_line:
                self._shown = key
                self._next_line = now + self._every_s
                self._print(self._line(progress, self._newest_metrics()))

    def _newest_metrics(self) -> Mapping[str, float]:
        try:
            self._last_metrics = dict(self._metrics())
        except RuntimeError:  # the loop has just added a name; the values of a moment ago will do
            pass
        return self._last_metrics

    def _line(self, progress: Progress, metrics: Mapping[str, float]) -> str:
        parts = [self._run, *self._position(progress), *_evaluation(progress), *self._pace(progress)]
        parts += [f"{name} {_number(value)}" for name, value in metrics.items()]
        parts += [progress.message] if progress.message else []
        return "  ".join(part for part in parts if part)

    def _text(self, progress: Progress, metrics: Mapping[str, float]) -> Text:
        from rich.text import Text

        text = Text(no_wrap=True, overflow="ellipsis")
        stage, *position = self._position(progress)
        text.append(f"{self._run} ", style="bold")
        text.append(f"{stage}  ", style="cyan")
        share = _share(progress)
        if share is not None:
            _append_bar(text, share)
        text.append("  ".join((*position, *self._pace(progress))))
        for name, value in metrics.items():
            text.append(f"  {name} ", style="dim")
            text.append(_number(value))
        if progress.message:
            text.append(f"  {progress.message}", style="yellow")
        nested = _evaluation(progress)
        if nested:
            text.append(f"\n  {progress.stage}  ", style="cyan")
            if progress.num_eval_batches:
                _append_bar(text, progress.eval_batch / progress.num_eval_batches)
            text.append(nested[-1])
        return text

    def _position(self, progress: Progress) -> list[str]:
        """The stage, and how far it is."""
        nested = progress.fn == "fit" and progress.stage in _NESTED
        parts = [str(Stage.TRAINING if nested else progress.stage)]
        if progress.fn == "fit":
            total = f"/{progress.max_steps}" if progress.max_steps else ""
            parts.append(f"step {progress.step}{total}")
            epochs = f"/{progress.max_epochs}" if progress.max_epochs else ""
            batches = f" batch {progress.batch}/{progress.num_batches}" if progress.num_batches else ""
            parts.append(f"epoch {progress.epoch}{epochs}{batches}")
        elif progress.num_eval_batches or progress.eval_batch:
            total = f"/{progress.num_eval_batches}" if progress.num_eval_batches else ""
            parts.append(f"batch {progress.eval_batch}{total}")
        return parts

    def _pace(self, progress: Progress) -> list[str]:
        """Iterations a second, and how long it will take at this pace."""
        rate = self._rate.value
        if not rate or progress.stage in (Stage.SETUP, Stage.RESTORE, Stage.TEARDOWN):
            return []
        done, total = _done(progress)
        parts = [f"{rate:.3g} it/s" if rate >= 1 else f"{1 / rate:.3g} s/it"]
        if total is not None and total > done:
            parts.append(f"ETA {_duration((total - done) / rate)}")
        return parts

    # -- the stream --------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        clean = text if self._terminal else _CONTROL.sub("", text)
        self._stream.write(clean + "\n")
        self._stream.flush()

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream)
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # Prints go above the bar; those of a stream that leads elsewhere stay where they are.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def _give_up(self) -> None:
        """Take the bar away; also after an error, where only the redirection is left to undo."""
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except (OSError, ValueError):
                pass


def make_display(
    progress: Progress,
    metrics: Callable[[], Mapping[str, float]],
    *,
    run: str,
    stream: TextIO | None = None,
    every_s: float = 10.0,
) -> ProgressDisplay:
    """The display of a rank in this process, whose ``progress`` is one object that changes."""
    return ProgressDisplay(lambda: progress, metrics=metrics, stream=stream, run=run, every_s=every_s)


class _Rate:
    """Iterations a second over the last few seconds of one stage."""

    def __init__(self) -> None:
        self.value = 0.0
        self._stage: Stage | None = None
        self._samples: deque[tuple[float, int]] = deque()

    def see(self, progress: Progress, now: float) -> None:
        done, _ = _done(progress)
        if progress.fn == "fit" and progress.stage is not Stage.TRAINING:
            self._stage = progress.stage  # time in a validation is no time of training
            return
        samples = self._samples
        if progress.stage is not self._stage or (samples and done < samples[-1][1]):
            samples.clear()
            self._stage = progress.stage
        samples.append((now, done))
        while now - samples[0][0] > _RATE_OVER_S and len(samples) > 2:
            samples.popleft()
        (first_at, first), (last_at, last) = samples[0], samples[-1]
        if last > first and last_at - first_at >= _REFRESH_EVERY_S:
            self.value = (last - first) / (last_at - first_at)


def _done(progress: Progress) -> tuple[int, int | None]:
    """Iterations that are done and that there are in all: steps where their number is set, else batches."""
    if progress.fn != "fit":
        return progress.eval_batch, progress.num_eval_batches
    if progress.max_steps is not None or not progress.num_batches:
        return progress.step, progress.max_steps
    total = None if progress.max_epochs is None else progress.max_epochs * progress.num_batches
    return progress.epoch * progress.num_batches + progress.batch, total


def _share(progress: Progress) -> float | None:
    done, total = _done(progress)
    if total is None and progress.fn == "fit" and progress.num_batches:
        done, total = progress.batch, progress.num_batches
    return min(1.0, done / total) if total else None


def _evaluation(progress: Progress) -> list[str]:
    """The validation that runs inside a fit, if one does."""
    if progress.fn != "fit" or progress.stage not in _NESTED:
        return []
    total = f"/{progress.num_eval_batches}" if progress.num_eval_batches else ""
    return [str(progress.stage), f"batch {progress.eval_batch}{total}"]


def _append_bar(text: Text, share: float) -> None:
    full = round(share * _BAR_WIDTH)
    text.append("━" * full, style="green")
    text.append("━" * (_BAR_WIDTH - full), style="bright_black")
    text.append(f" {math.floor(share * 100):3d}%  ")


def _number(value: float) -> str:
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24} d"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
