"""Which commands are there?

Decision: static tables, and a command's module is imported when the command is called; ``ckptrun --help``
needs none of them. A test holds that each line of help here is the first line of the command's own docstring.
Turned down: Typer's registration by decorator, which imports every command to list one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
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
    passes_on: str = ""  # what stands behind `--`, where the command takes something there


@dataclass(frozen=True)
class Group:
    """Commands that share a first word."""

    help: str
    panel: str
    commands: dict[str, Entry]


PASSED_ON = "ckptrun.passed_on"  # in a context's ``meta``: the words behind `--`

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

_SBATCH = "SBATCH_OPTIONS"

GROUPS: dict[str, Group] = {
    "slurm": Group(
        "Write sbatch scripts, and hand them in.",
        _BEGIN,
        {
            "script": Entry(
                "slurm_script", "script", "Print an sbatch script that trains to the end.", _BEGIN, _SBATCH
            ),
            "submit": Entry(
                "slurm_submit", "submit", "Hand in a job that trains to the end.", _BEGIN, _SBATCH
            ),
        },
    ),
}


def load(entry: Entry) -> Callable[..., Any]:
    """The function behind a command; this is what imports its module."""
    function: Callable[..., Any] = getattr(import_module(f"ckptrun.cli.{entry.module}"), entry.function)
    return function


class QuickCommand(TyperCommand):
    """A command whose text is taken as it comes; see :func:`_take_as_it_comes`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _take_as_it_comes(super().get_params(ctx))


class PassingCommand(QuickCommand):
    """A command that hands on what stands behind ``--``, as ``ctx.meta[PASSED_ON]``."""

    behind: str = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[PASSED_ON] = args[at + 1 :]
        rest: list[str] = super().parse_args(ctx, args[:at])
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), f"[-- {self.behind}]"]


class LazyGroup(TyperGroup):
    """Lists commands from a table and imports the one that is called."""

    entries: Mapping[str, Entry] = COMMANDS
    groups: Mapping[str, Group] = GROUPS

    def get_params(self, ctx: Any) -> list[Any]:
        return _take_as_it_comes(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(2)  # the help was shown, but a command was needed
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name in self.groups:
            return name, _group_command(name, self.groups[name]), args[1:]
        if name in self.entries:
            return name, _single_command(name, self.entries[name]), args[1:]
        if ctx.resilient_parsing or name.startswith("-"):
            resolved: tuple[str | None, Any, list[str]] = super().resolve_command(ctx, args)
            return resolved
        near = difflib.get_close_matches(name, [*self.entries, *self.groups], n=1, cutoff=0.5)
        path = ctx.command_path
        raise UsageError(
            f"there is no command '{name}'" if path == "ckptrun" else f"{path} has no command '{name}'",
            hint=f"did you mean '{path} {near[0]}'?" if near else f"'{path} --help' lists the commands",
        )


def _single_command(name: str, entry: Entry) -> Any:
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=PassingCommand if entry.passes_on else QuickCommand)(load(entry))
    command: Any = typer.main.get_command(single)
    if entry.passes_on:
        command.behind = entry.passes_on
    return command


def _group_command(name: str, group: Group) -> Any:
    app = typer.Typer(
        cls=LazyGroup,
        name=name,
        help=group.help,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    _add_stand_ins(app, group.commands)
    command: Any = typer.main.get_command(app)
    command.entries, command.groups = group.commands, {}
    return command


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

    _add_stand_ins(app, {**COMMANDS, **GROUPS})
    return app


def _add_stand_ins(app: typer.Typer, entries: Mapping[str, Entry | Group]) -> None:
    def stand_in() -> None:
        pass

    for name, entry in entries.items():
        app.command(name, help=entry.help, rich_help_panel=entry.panel)(stand_in)


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
        args=list(arguments),
        prog_name="ckptrun",
        standalone_mode=False,
        obj=listener,
    )
    return code if isinstance(code, int) else 0
