"""How is a checkpoint evaluated on the test data? The story is the one of all four fn commands, in
:mod:`ckptrun.cli.fn`."""

from __future__ import annotations

import typer

from ckptrun.cli.fn import run_fn
from ckptrun.cli.options import FnOptions, takes


@takes(FnOptions)
def test(ctx: typer.Context, options: FnOptions) -> int:
    """Evaluate a checkpoint on the test data.

    Uses the best checkpoint and the config that is stored with the run where nothing else is said.
    """
    return run_fn("test", options, ctx.obj)
