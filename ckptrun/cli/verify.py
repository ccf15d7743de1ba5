"""Is a checkpoint, or everything in a run, as it was written?

Decision: what is named is a reference where it is written as one, else a run where there is one of that name, else a
path; `--run` says that it is a checkpoint of that run. Turned down: two commands, or a flag that says which.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption, RunOption
from ckptrun.cli.output import note, print_json, say, size, table
from ckptrun.cli.settle import settle_run
from ckptrun.errors import NoCheckpointError, UnknownRunError
from ckptrun.resolve.pin import checkpoint_path
from ckptrun.resolve.reference import parse
from ckptrun.resolve.verify_run import Report, verify_one, verify_run
from ckptrun.run.folder import RunFolder

_COLOURS = {"good": "green", "damaged": "red", "unreadable": "red", "not committed": "dim", "missing": "dim"}
_SAY_EVERY_S = 2.0
_DAMAGED = NoCheckpointError.exit_code


def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="CKPT|RUN",
            show_default=False,
            help="A checkpoint's folder, a reference (last, best, step:N …) or a run; the config's run where none is "
            "given.",
        ),
    ] = None,
    run: RunOption = None,
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Check every byte of a checkpoint, or of all that a run has.

    Sizes, checksums, the structure of the torch files, ranks, lines, the run's other files; read twice before damage is
    said. A checkpoint in quarantine that is found good is taken out. Exit code 3 where something is damaged, or all
    that the run has saved is gone.
    """
    progress = _Progress()
    report = _verify(target, run, root, config, progress)
    progress.end()
    if json:
        print_json(report.as_dict())
    else:
        for line in _lines(report):
            say(line)
    for text in _problems(report):
        note(f"ckptrun: {text}")
    return 0 if report.good else _DAMAGED


def _verify(
    target: str | None, run: str | None, root: str | None, config: list[str] | None, progress: _Progress
) -> Report:
    if target is None:
        return verify_run(settle_run(run, root, config, os.environ), progress)
    if run is not None:
        return verify_one(checkpoint_path(settle_run(run, root, config, os.environ), target), progress)
    if parse(target).kind != "path":
        return verify_one(checkpoint_path(settle_run(None, root, config, os.environ), target), progress)
    path = os.path.abspath(os.path.expanduser(target))
    if os.path.isfile(path):  # a file of a checkpoint means the checkpoint
        path = os.path.dirname(path)
    if os.path.exists(os.path.join(path, "manifest.json")):
        return verify_one(path, progress)
    if os.path.isdir(path) and RunFolder(path).exists():
        return verify_run(RunFolder(path), progress)
    if "/" in target:
        return verify_one(path, progress)
    try:
        return verify_run(settle_run(target, root, config, os.environ), progress)
    except UnknownRunError as error:
        raise UnknownRunError(
            f"{target!r} is neither a checkpoint nor a run: {error.message}", hint=error.hint
        ) from None


class _Progress:
    """A line on stderr every few seconds: in place on a terminal, a line each elsewhere."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()
        self._in_place = sys.stderr.isatty()
        self._shown = False

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said_at < _SAY_EVERY_S:
            return
        self._said_at, self._shown = now, True
        text = f"verifying {name}: {size(done)} of {size(max(total, done))}"
        if self._in_place:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            note(text)

    def end(self) -> None:
        if self._shown and self._in_place:
            sys.stderr.write("\r\x1b[K")


def _lines(report: Report) -> list[str]:
    rows = [
        [
            each.state,
            each.name,
            "" if each.step is None else str(each.step),
            str(each.num_files),
            size(each.size_bytes),
            "; ".join(
                [
                    *(["in quarantine"] if each.name in report.quarantined else []),
                    *(damage.why for damage in each.damage),
                    *each.notes,
                ]
            ),
        ]
        for each in report.checkpoints
    ]
    header = ["state", "checkpoint", "step", "files", "size", "what"]
    lines = table(header, rows, right=[2, 3, 4], colour=_colour) if rows else ["no checkpoints"]
    files = [
        [each.state, os.path.basename(each.path), each.what]
        for each in report.files
        if each.state != "good" or each.what
    ]
    if files:
        lines += ["", *table(["state", "file", "what"], files, colour=_colour)]
    lines += ["", *(f"left behind: {text}" for text in report.leftovers)] if report.leftovers else []
    return [*lines, "", _verdict(report)]


def _colour(column: int, text: str) -> str | None:
    return _COLOURS.get(text.strip()) if column == 0 else None


def _verdict(report: Report) -> str:
    num = sum(each.state != "not committed" for each in report.checkpoints)
    what = f"{num} checkpoint{'' if num == 1 else 's'}, {size(sum(c.size_bytes for c in report.checkpoints))}"
    if report.all_gone:
        return f"{what}: none of the {len(report.gone)} that the registry knows is there"
    gone = f"; {len(report.gone)} more, known to the registry, gone" if report.gone else ""
    return f"{what}: {'all good' if report.good else 'not all good'}{gone}"


def _problems(report: Report) -> list[str]:
    told = [f"{name} was found good and is out of quarantine" for name in report.lifted]
    told += report.notes
    for each in report.checkpoints:
        if each.state == "damaged":
            told.append(f"damaged, in two reads: {each.path}: {'; '.join(d.why for d in each.damage)}")
        elif each.state == "unreadable":
            told.append(f"cannot be read, and may be whole: {each.path}: {'; '.join(each.notes)}")
    told += [f"{each.state}: {each.path}: {each.what}" for each in report.files if each.state in _BAD]
    for reference, path in report.instead.items():
        asked = "the nearest good one" if reference == "nearest" else f"--ckpt {reference} would use"
        told.append(f"{asked} {path}" if path is not None else f"{asked} nothing: none is good")
    return told


_BAD = ("damaged", "unreadable")
