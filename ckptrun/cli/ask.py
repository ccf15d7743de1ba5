"""How do ``save`` and ``stop`` reach a live run, and when are they done?

Decision: they wait until the run has committed or ended, so that a script can go on with what was saved; a
run that is not live is wrong usage and is answered with its state. Turned down: returning once the request is
written, which says nothing about whether it was heard.
"""

from __future__ import annotations

import os

from ckptrun.cli.output import note, print_json, say
from ckptrun.cli.settle import settle_run
from ckptrun.cli.status import state
from ckptrun.errors import UsageError
from ckptrun.records import Status
from ckptrun.run.control import Answer, Kind, ask, wait_answer
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import StatusRecord, read_status

_LIVE = (Status.INITIALIZING, Status.RUNNING)


def ask_run(
    kind: Kind,
    run: str | None,
    root: str | None,
    config: list[str] | None,
    timeout: str | None,
    *,
    json: bool,
) -> int:
    """Put a request to a run, wait for what comes of it and tell it.

    Args:
        timeout: seconds to wait at most, as given; None waits as long as the run lives.

    Returns:
        0 once the run has committed, or ended; 1 where it could not save, or did not answer in time.

    Raises:
        UnknownRunError: there is no such run.
        UsageError: the run is not live, or the timeout is no number of seconds.
    """
    timeout_s = _seconds(timeout)
    folder = settle_run(run, root, config, os.environ)
    record = read_status(folder)
    if record is None or record.status not in _LIVE:
        raise _not_live(folder, record)
    request = ask(folder, kind)
    try:
        answer = wait_answer(folder, request, lambda: _is_live(folder), timeout_s)
    except KeyboardInterrupt:
        note(f"no longer waiting; run {folder.name!r} has been asked and will {kind} all the same")
        raise
    code = 1 if answer.state in ("failed", "timeout") else 0
    if json:
        print_json(
            {
                "run": folder.name,
                "asked": kind,
                "state": answer.state,
                "checkpoint": answer.checkpoint,
                "message": answer.message,
            }
        )
    else:
        (say if code == 0 else note)(_sentence(kind, folder, answer, timeout_s))
    return code


def _seconds(text: str | None) -> float | None:
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if seconds is not None and not seconds >= 0:
        raise UsageError(f"--timeout-s is {text!r}, expected a number of seconds")
    return seconds


def _sentence(kind: Kind, folder: RunFolder, answer: Answer, timeout_s: float | None) -> str:
    name = folder.name
    if answer.state == "timeout":
        return f"run {name!r} has not answered within {timeout_s:g} s; the request was withdrawn"
    if answer.state == "failed":
        return f"run {name!r} could not {kind}: {answer.message or 'it did not say why'}"
    if answer.state == "ended":
        record = read_status(folder)
        return f"run {name!r} has ended: {state(record) if record is not None else 'it left no status'}"
    done = "saved" if kind == "save" else "stopped"
    where = f": {answer.checkpoint}" if answer.checkpoint else ""
    return f"run {name!r} has {done}{where}" + (f" ({answer.message})" if answer.message else "")


def _is_live(folder: RunFolder) -> bool:
    record = read_status(folder)
    return record is not None and record.status in _LIVE


def _not_live(folder: RunFolder, record: StatusRecord | None) -> UsageError:
    found = "has never been started" if record is None else f"is {state(record)}"
    return UsageError(
        f"run {folder.name!r} is not live: it {found}",
        hint=f"'ckptrun status {folder.name}' tells more; only a run that is running can be asked.",
    )
