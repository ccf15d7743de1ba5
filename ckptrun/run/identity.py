"""Which run is this, and how did it begin?

Decision: the id is made once, by whoever links ``run.json`` into place first, so that two that start together
agree on it. Turned down: deriving the id from the folder's path, which changes when a run is moved.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptrun.environment.git import git_state
from ckptrun.environment.versions import versions
from ckptrun.errors import UsageError
from ckptrun.run.folder import RunFolder
from ckptrun.storage.files import create_exclusive


@dataclass(frozen=True)
class RunIdentity:
    """What ``run.json`` says. ``created`` is local time with its offset, ISO 8601."""

    id: str
    name: str
    created: str
    command: tuple[str, ...]
    cwd: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] | None = None  # {"commit", "clean"}


def ensure_identity(folder: RunFolder, command: Sequence[str]) -> RunIdentity:
    """The run's identity; where it has none yet, it is made and written, and survives a crash.

    Args:
        command: the command line that started the run, kept for the user to read.

    Raises:
        UsageError: ``run.json`` is damaged.
        OSError: it cannot be written.
    """
    known = read_identity(folder)
    if known is not None:
        return known
    found = versions()
    git = git_state(os.getcwd())
    value = {
        "id": uuid.uuid4().hex,
        "name": folder.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(command),
        "cwd": os.getcwd(),
        "python": found["python"],
        "versions": found,
        "git": None if git is None else git._asdict(),
    }
    create_exclusive(folder.run_json, json.dumps(value, indent=1).encode() + b"\n", point="identity")
    identity = read_identity(folder)
    assert identity is not None
    return identity


def read_identity(folder: RunFolder) -> RunIdentity | None:
    """What ``run.json`` says, None where there is none.

    Raises:
        UsageError: it cannot be read, or it does not say which run this is.
    """
    try:
        with open(folder.run_json, encoding="utf-8") as file:
            value = json.load(file)
        return RunIdentity(
            id=str(value["id"]),
            name=str(value.get("name", folder.name)),
            created=str(value.get("created", "")),
            command=tuple(value.get("command", ())),
            cwd=str(value.get("cwd", "")),
            python=str(value.get("python", "")),
            versions=dict(value.get("versions", {})),
            git=value.get("git"),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {folder.run_json}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder.run_json} is damaged: expected JSON with the run's id, found something else ({error})",
            hint="Every manifest.json under checkpoints/ has the id as run_id; put it back from there.",
        ) from error
