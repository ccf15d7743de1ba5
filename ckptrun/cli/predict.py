"""How are predictions made with a checkpoint? The story is the one of all four fn commands, in
:mod:`ckptrun.cli.fn`."""

from __future__ import annotations

import typer

from ckptrun.cli.fn import run_fn
from ckptrun.cli.options import FnOptions, takes


@takes(FnOptions)
def predict(ctx: typer.Context, options: FnOptions) -> int:
    """Predict with a checkpoint.

    Uses the best checkpoint and the config that is stored with the run where nothing else is said.
    """
    return run_fn("predict", options, ctx.obj)
