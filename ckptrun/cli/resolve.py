"""Which checkpoint would a command use, and why not the others? Starts and writes nothing."""

from __future__ import annotations

import os
from dataclasses import replace

import typer

from ckptrun.cli.fn import make_spec, show_preview
from ckptrun.cli.options import ResolveOptions, takes
from ckptrun.cli.output import note, print_json
from ckptrun.cli.report import describe, error_document, tell_problem
from ckptrun.cli.resolution import without_resolution
from ckptrun.cli.settle import settle_fn
from ckptrun.errors import CkptrunError, UsageError
from ckptrun.records import FNS
from ckptrun.resolve.explain import to_json
from ckptrun.session.story import preview
from ckptrun.stop import StopListener


@takes(ResolveOptions)
def resolve(ctx: typer.Context, options: ResolveOptions) -> int:  # noqa: ARG001 - Typer passes it
    """Explain which checkpoint a command would use; start nothing.

    Takes every option of `fit` and exits with the code that the command would exit with.
    """
    try:
        return _explain(options)
    except CkptrunError as error:
        if not options.json:
            raise
        message, hint, code = describe(error)
        tell_problem(message, hint)
        print_json(without_resolution(options.ckpt, error_document(message, hint, code)))
        return code


def _explain(options: ResolveOptions) -> int:
    fn = next((fn for fn in FNS if fn == options.fn), None)
    if fn is None:
        raise UsageError(f"--fn is {options.fn!r}", hint=f"It is one of {', '.join(FNS)}.")
    settled = settle_fn(fn, options, os.environ)
    spec = make_spec(settled, replace(options, dry_run=True), StopListener())
    spec.all_candidates = options.all
    resolution, code, nothing_left = preview(spec)
    if options.json:
        for text in (*resolution.warnings, *resolution.notices):
            note(f"ckptrun: {text}")
        print_json(to_json(resolution, all_candidates=options.all))
    else:
        show_preview(resolution, nothing_left, all_candidates=options.all)
    return code
