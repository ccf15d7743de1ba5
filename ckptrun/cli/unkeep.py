"""How does the protection of a checkpoint end?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption, RunOption
from ckptrun.cli.output import print_json, say
from ckptrun.cli.settle import settle_run
from ckptrun.resolve.pin import unkeep as unkeep_checkpoint


def unkeep(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="As after --ckpt: best, last, step:N, a path …")
    ],
    run: RunOption = None,
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """End the protection that `keep` gave.

    Nothing is deleted by it: the checkpoint goes with a later save, where no callback wants it.
    """
    folder = settle_run(run, root, config, os.environ)
    path = unkeep_checkpoint(folder, reference)
    if json:
        print_json({"run": folder.name, "reference": reference, "was_kept": path is not None, "path": path})
    elif path is None:
        say(f"run {folder.name!r} did not keep {reference}")
    else:
        say(f"run {folder.name!r} no longer keeps {path}")
    return 0
