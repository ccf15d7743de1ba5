"""Which options do commands share, and what are they called?

Decision: the options of the four fn commands are the fields of one dataclass, and :func:`takes` turns its
fields into the parameters that Typer reads; each option is written once and ``resolve`` takes the same ones
by being a subclass. Turned down: the same two dozen parameters in five function signatures, which drift
apart.
"""

# No `from __future__ import annotations`: Typer and takes() need the annotations themselves, and evaluating
# two dozen strings takes longer than making them here.

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar

import typer

_CONFIG, _CHECKPOINT, _LAUNCH, _OUTPUT = "Config and run", "Checkpoint", "Launch and stop", "Output"

ConfigOption = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="A config file; may be given several times, later ones win.",
        rich_help_panel=_CONFIG,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Config values, e.g. trainer.max_steps=100."),
]
RunOption = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="The run's name.", rich_help_panel=_CONFIG),
]
RootOption = Annotated[
    str | None,
    typer.Option("--root", metavar="DIR", help="The folder that holds runs.", rich_help_panel=_CONFIG),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Write one JSON document to stdout.", rich_help_panel=_OUTPUT),
]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT),
]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", show_default=False, help="The run's name; that of the config where none is given."
    ),
]
TimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--timeout-s",
        metavar="SECONDS",
        help="Wait at most so long; without it, as long as the run lives.",
    ),
]


@dataclass(frozen=True, eq=False, repr=False)
class FnOptions:
    """What ``fit``, ``validate``, ``test`` and ``predict`` take."""

    overrides: Overrides = None
    config: ConfigOption = None
    run: RunOption = None
    root: RootOption = None
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the config with the source of each value; start nothing.",
            rich_help_panel=_CONFIG,
        ),
    ] = False
    ckpt: Annotated[
        str | None,
        typer.Option(
            "--ckpt",
            metavar="REF",
            help="best, best:METRIC, last, hpc, auto, none, step:N, epoch:N, seq:N or a path.",
            rich_help_panel=_CHECKPOINT,
        ),
    ] = None
    init_from: Annotated[
        str | None,
        typer.Option(
            "--init-from",
            metavar="PATH",
            help="Weights that a fresh start begins from.",
            rich_help_panel=_CHECKPOINT,
        ),
    ] = None
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Refuse to resume where it would not be exact.", rich_help_panel=_CHECKPOINT
        ),
    ] = False
    override: Annotated[
        bool,
        typer.Option(
            "--override",
            help="Go on although the config differs from the run's own.",
            rich_help_panel=_CHECKPOINT,
        ),
    ] = False
    allow_fallback: Annotated[
        bool,
        typer.Option(
            "--allow-fallback",
            help="Let 'best' fall to the next best where the best is gone or damaged.",
            rich_help_panel=_CHECKPOINT,
        ),
    ] = False
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Not available yet: nothing is loaded that could run code.",
            rich_help_panel=_CHECKPOINT,
        ),
    ] = False
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", metavar="NAME", help="auto, single, ddp or deepspeed.", rich_help_panel=_LAUNCH
        ),
    ] = None
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help="auto, inline, torchrun or deepspeed.",
            rich_help_panel=_LAUNCH,
        ),
    ] = None
    nproc: Annotated[
        str | None,
        typer.Option("--nproc", metavar="N|auto", help="Ranks on this host.", rich_help_panel=_LAUNCH),
    ] = None
    nnodes: Annotated[
        str | None,
        typer.Option(
            "--nnodes",
            metavar="N",
            help="Number of hosts; the same command is started on each.",
            rich_help_panel=_LAUNCH,
        ),
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            help="Where several hosts meet: one of them and a free port there.",
            rich_help_panel=_LAUNCH,
        ),
    ] = None
    grace_s: Annotated[
        str | None,
        typer.Option(
            "--grace-s",
            metavar="SECONDS",
            help="How long a stop may take before it is forced.",
            rich_help_panel=_LAUNCH,
        ),
    ] = None
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time-limit",
            metavar="TIME",
            help="Save and stop before it.",
            rich_help_panel=_LAUNCH,
        ),
    ] = None
    max_restarts: Annotated[
        str | None,
        typer.Option(
            "--max-restarts",
            metavar="N",
            help="New attempts after failures of a rank.",
            rich_help_panel=_LAUNCH,
        ),
    ] = None
    hang_timeout_s: Annotated[
        str | None,
        typer.Option(
            "--hang-timeout-s",
            metavar="SECONDS",
            help="A rank whose work does not move for so long has hung.",
            rich_help_panel=_LAUNCH,
        ),
    ] = None
    no_slurm: Annotated[
        bool,
        typer.Option(
            "--no-slurm", help="Pass over what SLURM says in the environment.", rich_help_panel=_LAUNCH
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the resolution and the launch command; start and write nothing.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False
    json: JsonOption = False
    debug: DebugOption = False


@dataclass(frozen=True, eq=False, repr=False)
class ResolveOptions(FnOptions):
    """What ``resolve`` takes: every option of ``fit``, and two of its own."""

    fn: Annotated[
        str,
        typer.Option(
            "--fn",
            metavar="FN",
            help="The command that asks: fit, validate, test or predict.",
            rich_help_panel=_CHECKPOINT,
        ),
    ] = "fit"
    all: Annotated[
        bool,
        typer.Option("--all", help="List every candidate, however many there are.", rich_help_panel=_OUTPUT),
    ] = False


_ONLY_SHOWN = frozenset({"print_config", "dry_run", "json", "debug", "fn", "all"})


def command_line(fn: str, options: FnOptions) -> list[str]:
    """The command that does what is asked, without the options that only show something."""
    words = ["ckptrun", fn, *(options.overrides or ())]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name == "overrides" or field.name in _ONLY_SHOWN or value in (None, False):
            continue
        flag = "--" + field.name.replace("_", "-")
        if value is True:
            words.append(flag)
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [flag, item]
    return words


OptionsT = TypeVar("OptionsT", bound=FnOptions)


def takes(
    options: type[OptionsT], *, without: frozenset[str] = frozenset(), own_first: bool = False
) -> Callable[[Callable[[typer.Context, OptionsT], int]], Callable[..., int]]:
    """Make a command out of a function of the context and one options object.

    Args:
        options: the dataclass whose fields become the command's options and arguments.
        without: fields that do not, and keep their defaults.
        own_first: the fields of the class itself come before those that it inherits, in ``--help`` too.
    """

    def decorate(function: Callable[[typer.Context, OptionsT], int]) -> Callable[..., int]:
        def command(ctx: typer.Context, **values: Any) -> int:
            return function(ctx, options(**values))

        parameters = [
            inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        ]
        own = options.__annotations__ if own_first else {}
        for field in sorted(fields(options), key=lambda field: field.name not in own):
            if field.name in without:
                continue
            assert field.default is not MISSING  # every option has one; Typer would make it required
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=field.default,
                    annotation=field.type,
                )
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {}
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        return command

    return decorate
