"""Which checkpoint shall never be deleted?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption, RunOption
from ckptrun.cli.output import print_json, say
from ckptrun.cli.settle import settle_run
from ckptrun.resolve.pin import keep as keep_checkpoint


def keep(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="As after --ckpt: best, last, step:N, a path …")
    ],
    run: RunOption = None,
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Protect a checkpoint from deletion.

    The reference is looked up now: `keep best` means the best of this moment, and a live run hears of it too.
    """
    folder = settle_run(run, root, config, os.environ)
    record = keep_checkpoint(folder, reference)
    if json:
        print_json({"run": folder.name, "reference": reference, "path": record.path, "step": record.step})
    else:
        say(f"run {folder.name!r} keeps step {record.step} until `ckptrun unkeep`: {record.path}")
    return 0
