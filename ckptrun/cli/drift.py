"""May this config, this code and these versions go on from the run's checkpoint?

Decision: asked by the supervisor, once the checkpoint is known and before anything starts, of what is stored
with the run; what changes the result is refused with the difference and the two ways on. Turned down: taking
the stored values silently, or the given ones, as each surprises somebody hours later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.config.diff import CHANGES_RESULT, config_diff
from ckptrun.config.load import read_tree
from ckptrun.config.run_config import RunConfig
from ckptrun.errors import IncompatibleError, UsageError
from ckptrun.records import CheckpointRecord, Resolution, ResolutionError
from ckptrun.run.folder import RunFolder
from ckptrun.run.identity import read_identity

WAYS_ON = "--override goes on with what is given now; --run NAME starts another run."
_EARLY_STOPPING = "EarlyStopping"


def config_check(
    config: RunConfig, *, override: bool, exact: bool, look_at_code: bool
) -> Callable[[RunFolder, Resolution], tuple[ResolutionError | None, Sequence[str]]]:
    """What a session asks of a fit once it has resolved.

    Args:
        override: go on although the config changes the result, with a warning.
        exact: other versions or another commit are an error.
        look_at_code: compare versions and commit, which takes some hundredths of a second.
    """

    def check(folder: RunFolder, resolution: Resolution) -> tuple[ResolutionError | None, Sequence[str]]:
        if not isinstance(resolution.answer, CheckpointRecord):
            return None, ()
        warnings: list[str] = []
        changed = changes(folder, config)
        if changed:
            told = told_of_changes(folder, changed)
            if not override:
                return _refusal(told, WAYS_ON), ()
            warnings.append(f"--override: {told}")
        if exact or look_at_code:
            moved, unknown = _code_changes(folder, resolution.answer)
            if moved and exact:
                return _refusal(
                    "\n  ".join(["--exact: this is not what the checkpoint was written with:", *moved]),
                    "Install the same versions and check the same commit out, or leave --exact out.",
                ), ()
            warnings += moved
            if unknown is not None and exact:
                warnings.append(f"--exact: whether the code is the same cannot be told: {unknown}")
        return None, warnings

    return check


def told_of_changes(folder: RunFolder, changed: Sequence[str]) -> str:
    """What is said where :func:`changes` has found some."""
    told = f"the config differs from that of run {folder.name!r} in what changes the result:"
    return "\n  ".join([told, *changed])


def changes(folder: RunFolder, config: RunConfig) -> list[str]:
    """How the config differs from the run's own in what changes the result; empty where the run has none."""
    stored = _stored(folder)
    if stored is None:
        return []
    return [
        str(difference)
        for difference in config_diff(stored, config.resolved_tree())
        if difference.kind == CHANGES_RESULT
    ]


def early_stopping_changed(config: RunConfig) -> Callable[[RunFolder], bool]:
    """Whether the config's early stopping is another one than the run's own, so that training may go on."""

    def changed(folder: RunFolder) -> bool:
        stored = _stored(folder)
        return stored is not None and _early_stopping(stored) != _early_stopping(config.resolved_tree())

    return changed


def _stored(folder: RunFolder) -> dict[str, Any] | None:
    if not os.path.exists(folder.config_yaml):
        return None
    try:
        return read_tree(folder.config_yaml)
    except UsageError as error:
        raise UsageError(
            error.message,
            hint="The run keeps it to compare with what is given. Delete it, and what is given now is taken as it is.",
        ) from error


def _early_stopping(tree: Mapping[str, Any]) -> list[Any]:
    entries = tree.get("callbacks") or []
    return [e for e in entries if str(e.get("class_path", "")).rpartition(".")[2] == _EARLY_STOPPING]


def _code_changes(folder: RunFolder, checkpoint: CheckpointRecord) -> tuple[list[str], str | None]:
    """What is otherwise now, and why the code could not be compared; None where it could."""
    from ckptrun.environment.git import git_state
    from ckptrun.environment.versions import versions

    then, now = read_manifest(checkpoint.path).versions, versions()
    moved = [
        f"{name} is {now.get(name, 'not installed')}; the checkpoint was written with {version}"
        for name, version in then.items()
        if now.get(name) != version
    ]
    identity = read_identity(folder)
    git_then = identity.git if identity is not None and identity.git else {}
    commit_then = git_then.get("commit")
    if commit_then is None:
        return moved, "the run began where there was no git repository"
    state = git_state(os.getcwd())
    if state is None:
        return moved, f"there is no git repository with a commit at {os.getcwd()}, or no git"
    if state.commit != commit_then:
        moved.append(f"the code is at commit {state.commit[:10]}; the run began at {commit_then[:10]}")
    elif not git_then.get("clean"):
        return moved, "the run began with changes that were not committed"
    elif not state.clean:
        moved.append("the code has changes that are not committed; the run began without")
    return moved, None


def _refusal(message: str, hint: str) -> ResolutionError:
    return ResolutionError(IncompatibleError.exit_code, message, hint)
