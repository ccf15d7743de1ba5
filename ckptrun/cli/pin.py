"""Which checkpoint shall commands use from now on, where no ``--ckpt`` says otherwise?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption, RunOption
from ckptrun.cli.output import print_json, say
from ckptrun.cli.settle import settle_run
from ckptrun.resolve.pin import pin as pin_checkpoint


def pin(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="As after --ckpt: best, last, step:N, a path …")
    ],
    run: RunOption = None,
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Name the checkpoint that commands use where no --ckpt is given.

    The reference is looked up now: `pin best` means the best of this moment, and stays when a better one
    comes.
    """
    folder = settle_run(run, root, config, os.environ)
    record = pin_checkpoint(folder, reference)
    if json:
        print_json({"run": folder.name, "reference": reference, "path": record.path, "step": record.step})
    else:
        say(f"run {folder.name!r} is pinned to step {record.step}: {record.path}")
    return 0
