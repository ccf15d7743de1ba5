"""Where does ``ckptrun`` begin, and how do its errors reach the user?

Decision: the signal handlers are in place before anything else is imported, which takes a peek at the
arguments here, before Typer has read them; a signal in the first second of a job is then recorded and not
lost. Turned down: installing them when the command runs, which leaves a gap as long as the imports.

Every error ends here as one message on stderr and an exit code; a traceback is only shown with ``--debug``,
or where it is the user's own code that failed, and then by the part that ran it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptrun.records import Fn
    from ckptrun.stop import StopListener

_FNS: tuple[Fn, ...] = ("fit", "validate", "test", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        argv: the arguments after the program's name; those of the process where None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    listener = None
    command = next((word for word in arguments if not word.startswith("-")), None)
    fn = next((fn for fn in _FNS if fn == command), None)
    if fn is not None:
        from ckptrun.stop import StopListener

        listener = StopListener()
        warning = listener.install()
        if warning is not None:
            print(f"ckptrun: warning: {warning}", file=sys.stderr)
        if argv is None:
            listener.outlast_the_interpreter()
    try:
        if fn is not None and any(word.startswith(("--nproc", "--nnodes")) for word in arguments):
            from ckptrun.launch.early import start_early

            start_early(fn, arguments)
        return _run(arguments, listener)
    finally:
        _end_early_server()
        # A process of its own keeps them to its very end, so that a late Ctrl-C cannot change its exit code.
        if listener is not None and argv is not None:
            listener.restore()


def _end_early_server() -> None:
    early = sys.modules.get("ckptrun.launch.early")
    if early is not None:
        early.discard()


def _run(arguments: list[str], listener: StopListener | None) -> int:
    try:
        from ckptrun.cli.app import run

        code = run(arguments, listener)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough; the interpreter's own flush at exit must find an open file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error, arguments)
    return code


def _report(error: Exception, arguments: Sequence[str]) -> int:
    """Say what went wrong, on stderr and, where JSON was asked for, in the document on stdout."""
    from ckptrun.cli.report import report_error

    before_values = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return report_error(error, debug="--debug" in before_values, as_json="--json" in before_values)


if __name__ == "__main__":
    sys.exit(main())
