"""How is a pin taken away?"""

from __future__ import annotations

import os

from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption, RunArgument, RunOption
from ckptrun.cli.output import print_json, say
from ckptrun.cli.settle import named_once, settle_run
from ckptrun.resolve.pin import unpin as unpin_checkpoint


def unpin(
    run_argument: RunArgument = None,
    run: RunOption = None,
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Take a pin away."""
    folder = settle_run(named_once(run_argument, run), root, config, os.environ)
    was = unpin_checkpoint(folder)
    if json:
        print_json({"run": folder.name, "was": was})
    elif was is None:
        say(f"run {folder.name!r} had no pin")
    else:
        say(f"run {folder.name!r} is no longer pinned to {was['path']}")
    return 0
