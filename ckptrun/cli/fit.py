"""How is training started from the shell? The story is the one of all four fn commands, in
:mod:`ckptrun.cli.fn`."""

from __future__ import annotations

import typer

from ckptrun.cli.fn import run_fn
from ckptrun.cli.options import FnOptions, takes


@takes(FnOptions)
def fit(ctx: typer.Context, options: FnOptions) -> int:
    """Train, from the checkpoint that is asked for or from the start.

    Run the same line again after a stop, whatever stopped it: `ckptrun fit --ckpt last`.
    """
    return run_fn("fit", options, ctx.obj)
