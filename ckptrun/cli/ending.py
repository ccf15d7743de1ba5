"""What is said once the work has ended?

The answer (metrics, predictions) goes to stdout, the story (how it ended, where the checkpoint is, whose
traceback) to stderr.
"""

from __future__ import annotations

import os
import shlex
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ckptrun.cli.output import note, say, table
from ckptrun.cli.report import describe, error_document, tell_problem, users_own
from ckptrun.errors import CkptrunError
from ckptrun.launch.rank_process import StoredPredictions
from ckptrun.records import Fn, Outcome, StopReason
from ckptrun.resolve.explain import to_json
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import read_status
from ckptrun.session.spec import SessionResult

# The examples are the user's, as far as a traceback goes.
_OURS = tuple(
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), part)
    for part in ("fit", "launch", "cli", "strategies", "session", "checkpoint")
)
_ENDED = {
    StopReason.KEYBOARD: "stopped by Ctrl-C",
    StopReason.SIGTERM: "stopped by a signal",
    StopReason.WALLTIME: "stopped before the end of its time",
    StopReason.REQUESTED: "stopped as was asked",
    StopReason.RANK_LOST: "stopped: a rank or the run's lease was lost",
    StopReason.HANG: "stopped: a rank hung",
    StopReason.EXCEPTION: "failed",
}


def tell(
    fn: Fn,
    folder: RunFolder,
    result: SessionResult,
    command: Sequence[str],
    *,
    num_hosts: int,
    debug: bool,
    cancelled: bool = False,
) -> None:
    """Tell on stderr how a command ended that got as far as an answer.

    Args:
        cancelled: SLURM says that the signal came because its job was cancelled.
    """
    if result.resolution is not None and result.resolution.error is not None:
        error = result.resolution.error
        tell_problem(error.message, error.hint)
        return
    outcome = result.outcome
    if outcome is None:
        return
    if outcome.error is not None:
        _tell_error(outcome, debug=debug)
    if not outcome.built or getattr(outcome.error, "none_begun", False):
        return  # the error says it all, and the same command would come to the same
    note(f"ckptrun: {closing_line(fn, folder, outcome, cancelled=cancelled)}")
    if outcome.save_error is not None:
        tell_problem(f"the last save failed, and none after it succeeded: {outcome.save_error}", None)
    if (
        fn == "fit"
        and not result.requeued
        and outcome.stop_reason not in (StopReason.DONE, StopReason.EXCEPTION)
    ):
        where = "" if num_hosts == 1 else ", on every host"
        note(f"  to go on{where}: {shlex.join(_to_go_on(command))}")


def closing_line(fn: Fn, folder: RunFolder, outcome: Outcome, *, cancelled: bool = False) -> str:
    """How it ended and where, in one line."""
    ended = "stopped, as its job was cancelled," if cancelled else _ENDED.get(outcome.stop_reason, "done")
    if fn != "fit":
        how = ended
        return f"{fn} of run {folder.name!r}: {how}"
    if outcome.stop_reason is StopReason.DONE:
        how = f"finished at step {outcome.step}"
        how += f" ({outcome.finished_by})" if outcome.finished_by else ""
    else:
        how = f"{ended} at step {outcome.step}"
    record = read_status(folder)
    where = "no checkpoint was saved" if record is None or not record.checkpoint else record.checkpoint
    return f"run {folder.name!r} {how}; {'last checkpoint: ' if where.startswith('/') else ''}{where}"


def print_results(fn: Fn, outcome: Outcome) -> None:
    """Write what an evaluation measured, or the text that was predicted, to stdout."""
    if outcome.results is None:
        return
    if fn == "predict":
        for text in texts_of(outcome.results) or ():
            say(text.rstrip("\n") + "\n")
        return
    rows = [
        [name, f"{float(value):.6g}", *([str(number)] if len(outcome.results) > 1 else [])]
        for number, metrics in enumerate(outcome.results)
        for name, value in metrics.items()
    ]
    header = ["metric", "value", *(["dataloader"] if len(outcome.results) > 1 else [])]
    for line in table(header, rows, right=[1]):
        say(line)


def document(fn: Fn, folder: RunFolder, result: SessionResult) -> dict[str, Any]:
    """What an fn command writes with ``--json``."""
    outcome, resolution = result.outcome, result.resolution
    error: Mapping[str, object] | None = None
    if outcome is not None and outcome.error is not None:
        told = _told(outcome.error)
        message, hint, _ = describe(told)
        if outcome.user_error and not isinstance(told, CkptrunError):
            message, hint = f"{type(told).__name__}: {told}", None
        error = error_document(message, hint, result.exit_code)
    elif resolution is not None and resolution.error is not None:
        error = to_json(resolution)["error"]
    return {
        "run": folder.name,
        "fn": fn,
        "exit_code": result.exit_code,
        "stop_reason": None if outcome is None else str(outcome.stop_reason),
        "finished_by": None if outcome is None else outcome.finished_by,
        "nothing_left": result.nothing_left,
        "step": None if outcome is None else outcome.step,
        "epoch": None if outcome is None else outcome.epoch,
        "results": None if outcome is None else _plain_results(fn, outcome.results),
        "eval_dir": result.eval_dir,
        "resolution": None if resolution is None else to_json(resolution),
        "error": error,
    }


def save_predictions(result: SessionResult) -> str | None:
    """Write predictions into the evaluation's folder and return the file.

    Text where they are text, else a file of ``torch.save``; None where there is nothing or nowhere to write.

    Raises:
        OSError: the file cannot be written.
    """
    results = None if result.outcome is None else result.outcome.results
    if results is None or result.eval_dir is None:
        return None
    if isinstance(results, StoredPredictions):
        return results.path
    texts = texts_of(results)
    if texts is not None:
        path = os.path.join(result.eval_dir, "predictions.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n\n".join(text.rstrip("\n") for text in texts) + "\n")
        return path
    from ckptrun.checkpoint.safe_state import encode
    from ckptrun.checkpoint.state_file import write_state

    path = os.path.join(result.eval_dir, "predictions.pt")
    encoded = encode(results, "predictions")
    with open(path, "wb") as binary:
        write_state(binary, {"predictions": encoded})
    return path


def texts_of(results: Any) -> list[str] | None:
    """The predictions as texts, where each of them is text or a list of texts."""
    if isinstance(results, str):
        return [results]
    if not isinstance(results, list | tuple) or not results:
        return None
    found: list[str] = []
    for item in results:
        texts = texts_of(item)
        if texts is None:
            return None
        found += texts
    return found


def _plain_results(fn: Fn, results: Any) -> Any:
    if results is None:
        return None
    if fn == "predict":
        return texts_of(results)
    return [{name: float(value) for name, value in metrics.items()} for metrics in results]


def _tell_error(outcome: Outcome, *, debug: bool) -> None:
    error = outcome.error
    assert error is not None
    remote = getattr(error, "traceback_text", None)  # of a rank that was another process
    if remote is not None:
        if outcome.user_error or debug:
            note(remote.rstrip())
    elif outcome.user_error or debug:
        told = _told(error)
        frames = told.__traceback__ if debug else _from_user_code(told.__traceback__)
        note("".join(traceback.format_exception(type(told), told, frames)).rstrip())
    if not outcome.user_error:
        message, hint, _ = describe(error)
        tell_problem(message, hint)


def _told(error: BaseException) -> BaseException:
    """The error that the user's code raised, without the one that carries it through ours."""
    return users_own(error) or error


def _from_user_code(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on: the loop that called it explains nothing."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    return first or frames


def _to_go_on(command: Sequence[str]) -> list[str]:
    """The same command, from the newest save."""
    words = list(command)
    if "--ckpt" in words:
        words[words.index("--ckpt") + 1] = "last"
    else:
        words += ["--ckpt", "last"]
    return words
