"""How does an error look to the user?

Decision: one form for all of them, ``ckptrun: error: what was found and expected`` and a line that says what
to do next, whether the arguments, the config or a checkpoint is wrong, so that scripts and people find it in
the same place. Turned down: Typer's boxes for some and plain lines for others; they also wrap paths, which
then cannot be copied.
"""

from __future__ import annotations

import traceback

from ckptrun.cli.output import note, print_json
from ckptrun.errors import CkptrunError


def report_error(error: Exception, *, debug: bool, as_json: bool) -> int:
    """Tell the user about an error that ended a command and return the command's exit code.

    Args:
        debug: show the traceback too.
        as_json: also write ``{"error": {"exit_code", "message", "hint"}}`` to stdout, so that a program which
            asked for JSON gets a document whatever happens.
    """
    message, hint, code = describe(error)
    original = users_own(error)
    if debug or original is not None:
        note("".join(traceback.format_exception(error if debug or original is None else original)).rstrip())
    tell_problem(message, hint)
    if as_json:
        print_json({"error": error_document(message, hint, code)})
    return code


def users_own(error: BaseException) -> BaseException | None:
    """What the user's code raised while it was imported or built, None where it is another error."""
    from ckptrun.config.classes import UserCodeError

    return error.original if isinstance(error, UserCodeError) else None


def tell_problem(message: str, hint: str | None) -> None:
    """The form of every error on stderr."""
    note(f"ckptrun: error: {message}")
    if hint:
        note(f"  hint: {hint}")


def error_document(message: str, hint: str | None, exit_code: int) -> dict[str, object]:
    """An error as every ``--json`` document carries it."""
    return {"exit_code": exit_code, "message": message, "hint": hint}


def describe(error: BaseException) -> tuple[str, str | None, int]:
    """An error's message, hint and exit code."""
    if isinstance(error, CkptrunError):
        return error.message, error.hint, error.exit_code
    if users_own(error) is not None:
        return str(error), None, 1
    # Errors of the argument parser. Its classes are private to Typer in some releases and Click's in others;
    # what they all have is format_message().
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        return _describe_usage(error, str(format_message()))
    if type(error).__name__ == "Abort":
        return "aborted", None, 1
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}", None, 1
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({where[0].filename}:{where[0].lineno})" if where else ""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return f"internal error: {text}{place}", "the same command with --debug shows the traceback", 1


def _describe_usage(error: BaseException, message: str) -> tuple[str, str | None, int]:
    possibilities = getattr(error, "possibilities", None)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ckptrun"
    if possibilities:
        message = str(getattr(error, "message", message))
        near = _nearest(str(getattr(error, "option_name", "")), sorted(possibilities))
        return message, f"did you mean {' or '.join(near)}?", 2
    return message, f"'{command} --help' lists what it takes", 2


def _nearest(given: str, possibilities: list[str]) -> list[str]:
    """Those of the parser's possibilities that are about as near as the nearest."""
    import difflib  # only a mistake pays for it

    near = {name: difflib.SequenceMatcher(None, given, name).ratio() for name in possibilities}
    return [name for name in possibilities if near[name] > max(near.values()) - 0.1]
