"""Which SLURM job was handed in for a run that may not have begun?

    runs/.submitted-demo.json       {"run": "demo", "job": "26", "cluster": null, "log": ...}
    runs/.submitted-demo-a*.json    the same for all tasks of an array

Decision: a note beside the run, so that no run is there before one has begun. Nothing but what is shown depends on
it: it is not written where it cannot be, and stays when it is out of date. Turned down: searching the queue by the
job's name, which the user chooses.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from dataclasses import asdict, dataclass, replace

from ckptrun.run.folder import RunFolder
from ckptrun.storage.files import write_json_atomic

_ANY_TASK = "*"


@dataclass(frozen=True)
class SubmittedJob:
    """The job that was handed in last; ``job`` is its id, or that of an array's task (``57_2``)."""

    run: str
    job: str
    cluster: str | None = None
    log: str | None = None


def note_submitted(root: str, submitted: SubmittedJob) -> None:
    """Note it; in the name of an array's runs ``*`` stands for the task's number."""
    root = os.path.abspath(os.path.expanduser(root))
    with contextlib.suppress(OSError):
        os.makedirs(root, exist_ok=True)
        write_json_atomic(_path(root, submitted.run), asdict(submitted), durable=False)


def read_submitted(folder: RunFolder) -> SubmittedJob | None:
    """The job that was handed in last for the run; None where none is known."""
    own = _read(_path(folder.root, folder.name))
    if own is not None and own.run == folder.name:
        return own
    for path in glob.glob(_path(glob.escape(folder.root), "*[*]*")):
        of_array = _read(path)
        if of_array is None:
            continue
        name = r"(\d+)".join(map(re.escape, of_array.run.split(_ANY_TASK)))
        found = re.fullmatch(name, folder.name)
        if found is not None and len(set(found.groups())) == 1:
            return replace(of_array, run=folder.name, job=f"{of_array.job}_{found[1]}")
    return None


def _path(root: str, run: str) -> str:
    return os.path.join(root, f".submitted-{run}.json")


def _read(path: str) -> SubmittedJob | None:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        return SubmittedJob(str(value["run"]), str(value["job"]), value.get("cluster"), value.get("log"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
