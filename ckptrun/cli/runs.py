"""Which runs are there under a root, and what is each doing?"""

from __future__ import annotations

import os

from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption
from ckptrun.cli.output import age, metrics_text, print_json, say, table
from ckptrun.cli.settle import settle_root
from ckptrun.cli.status import document, position, state
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import RunSummary, list_runs

_COLOURS = {"RUNNING": "green", "LOST": "red", "INTERRUPTED": "yellow"}


def runs(
    root: RootOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """List all runs under a root."""
    folder = settle_root(root, config, os.environ)
    found = list_runs(folder)
    if json:
        print_json(
            {
                "root": os.path.abspath(os.path.expanduser(folder)),
                "runs": [{**document(RunFolder(run.path), run.status), "path": run.path} for run in found],
            }
        )
    elif not found:
        say(f"there are no runs under {folder}")
    else:
        header = ["run", "status", "step", "epoch", "attempt", "last sign", "metrics"]
        for line in table(header, [_row(run) for run in found], right=[2, 3, 4, 5], colour=_colour):
            say(line)
    return 0


def _row(run: RunSummary) -> list[str]:
    record = run.status
    if record is None:
        return [run.name, "-", "-", "-", "-", "-", ""]
    metrics = {name: value for name, value in record.metrics.items() if value is not None}
    return [
        run.name,
        state(record),
        position(record),
        str(record.epoch),
        str(record.attempt),
        age(record.heartbeat_age_s),
        metrics_text(metrics, most=3),
    ]


def _colour(column: int, text: str) -> str | None:
    return _COLOURS.get(text.split(" ")[0]) if column == 1 else None
