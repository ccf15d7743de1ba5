"""How is a live run asked to save and stop? The asking itself is in :mod:`ckptrun.cli.ask`."""

from __future__ import annotations

from ckptrun.cli.ask import ask_run
from ckptrun.cli.options import (
    ConfigOption,
    DebugOption,
    JsonOption,
    RootOption,
    RunArgument,
    RunOption,
    TimeoutOption,
)
from ckptrun.cli.settle import named_once


def stop(
    run_argument: RunArgument = None,
    run: RunOption = None,
    root: RootOption = None,
    config: ConfigOption = None,
    timeout_s: TimeoutOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Ask a live run to save and stop, and wait until it has.

    Works from any machine that sees the run's folder. The run ends as after Ctrl-C.
    """
    return ask_run("stop", named_once(run_argument, run), root, config, timeout_s, json=json)
