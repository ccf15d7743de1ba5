"""Which commands are there?

Decision: a static table, and a command's module is imported when the command is called; ``ckptrun --help``
needs none of them. A test holds that each line of help here is the first line of the command's own docstring.
Turned down: Typer's registration by decorator, which imports every command to list one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ckptrun._version import __version__
from ckptrun.errors import UsageError

if TYPE_CHECKING:
    from ckptrun.stop import StopListener


@dataclass(frozen=True)
class Entry:
    """One command: where its function is and what ``ckptrun --help`` says about it."""

    module: str
    function: str
    help: str
    panel: str


_TRAIN, _LOOK, _STEER, _BEGIN = "Train and evaluate", "Look", "Steer", "Begin"

COMMANDS: dict[str, Entry] = {
    "fit": Entry("fit", "fit", "Train, from the checkpoint that is asked for or from the start.", _TRAIN),
    "validate": Entry("validate", "validate", "Evaluate a checkpoint on the validation data.", _TRAIN),
    "test": Entry("test", "test", "Evaluate a checkpoint on the test data.", _TRAIN),
    "predict": Entry("predict", "predict", "Predict with a checkpoint.", _TRAIN),
    "resolve": Entry(
        "resolve", "resolve", "Explain which checkpoint a command would use; start nothing.", _LOOK
    ),
    "inspect": Entry("inspect", "inspect", "Show what is inside a checkpoint of any format.", _LOOK),
    "verify": Entry("verify", "verify", "Check every byte of a checkpoint, or of all that a run has.", _LOOK),
    "selftest": Entry(
        "selftest", "selftest", "Prove that training resumes exactly, with your own model and data.", _LOOK
    ),
    "status": Entry("status", "status", "Show the state of one run.", _LOOK),
    "runs": Entry("runs", "runs", "List all runs under a root.", _LOOK),
    "save": Entry("save", "save", "Ask a live run to save now, and wait until it has.", _STEER),
    "stop": Entry("stop", "stop", "Ask a live run to save and stop, and wait until it has.", _STEER),
    "pin": Entry("pin", "pin", "Name the checkpoint that commands use where no --ckpt is given.", _STEER),
    "unpin": Entry("unpin", "unpin", "Take a pin away.", _STEER),
    "keep": Entry("keep", "keep", "Protect a checkpoint from deletion.", _STEER),
    "unkeep": Entry("unkeep", "unkeep", "End the protection that `keep` gave.", _STEER),
    "init": Entry("init", "init", "Write a small working project to edit.", _BEGIN),
}


def load(name: str) -> Callable[..., Any]:
    """The function behind a command; this is what imports its module."""
    entry = COMMANDS[name]
    function: Callable[..., Any] = getattr(import_module(f"ckptrun.cli.{entry.module}"), entry.function)
    return function


class QuickCommand(TyperCommand):
    """A command whose text is taken as it comes; see :func:`_take_as_it_comes`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _take_as_it_comes(super().get_params(ctx))


class LazyGroup(TyperGroup):
    """Lists commands from the table and imports the one that is called."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _take_as_it_comes(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name in COMMANDS:
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(name, cls=QuickCommand)(load(name))
            return name, typer.main.get_command(single), args[1:]
        if ctx.resilient_parsing or name.startswith("-"):
            resolved: tuple[str | None, Any, list[str]] = super().resolve_command(ctx, args)
            return resolved
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        raise UsageError(
            f"there is no command '{name}'",
            hint=f"did you mean 'ckptrun {near[0]}'?" if near else "'ckptrun --help' lists the commands",
        )


def _take_as_it_comes(parameters: list[Any]) -> list[Any]:
    """Spare values that need no conversion the conversion: text, and options that are not given.

    Since 0.29 Typer has every value converted by pydantic, also text into text, and importing pydantic takes
    longer than all else that most commands do. Values of any other kind are converted as before.
    """
    for parameter in parameters:
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is not None and "process_value" not in vars(parameter):
            parameter.process_value = _process_value(
                parameter, parameter.process_value, descriptor.annotation
            )
    return parameters


def _process_value(parameter: Any, convert: Callable[..., Any], annotation: Any) -> Callable[..., Any]:
    is_many = parameter.multiple or parameter.nargs == -1

    def process_value(ctx: Any, value: Any) -> Any:
        missing = value is None or value == ()
        if (missing and parameter.required) or not (missing or annotation in (str, list[str])):
            return convert(ctx, value)
        value = tuple(value or ()) if is_many else value
        return value if parameter.callback is None else parameter.callback(ctx, parameter, value)

    return process_value


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ckptrun {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application, with a stand-in for each command that carries its line of help."""
    app = typer.Typer(
        cls=LazyGroup,
        help="Start, stop and resume PyTorch training from the shell, exactly.",
        epilog="'ckptrun COMMAND --help' says what a command takes.",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
        ] = False,
    ) -> None:
        pass

    def stand_in() -> None:
        pass

    for name, entry in COMMANDS.items():
        app.command(name, help=entry.help, rich_help_panel=entry.panel)(stand_in)
    return app


def run(arguments: Sequence[str], listener: StopListener | None) -> int:
    """Run a command line and return its exit code.

    Args:
        listener: the stop listener, installed where the command is one that trains or evaluates.

    Raises:
        CkptrunError: what the command has to tell the user.
        Exception: an error of the argument parser, or an unexpected one.
    """
    command = typer.main.get_command(build_app())
    code = command.main(
        args=list(arguments) or ["--help"],
        prog_name="ckptrun",
        standalone_mode=False,
        obj=listener,
    )
    if not arguments:
        return 2  # the help was shown, but a command was needed
    return code if isinstance(code, int) else 0
