"""Is a path one of ckptrun's checkpoints, another file, or not what was meant?

Decision: a folder is one of ours by its ``manifest.json``, as everywhere; a file in such a folder that is
its state means the folder. A path one level too high, or beside what was meant, is an error that names what
is there. Turned down: looking inside for the newest one, which would answer a question that was not asked.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptrun.errors import DamagedCheckpointError, NoCheckpointError

MANIFEST = "manifest.json"
STATE = "state.ckpt"
MAX_MANIFEST_BYTES = 16 << 20
_NAME = re.compile(r"(\d+)-.+")
_REFERENCE = re.compile(r"best|last|hpc|auto|none|(best|step|epoch|seq|run):.+")
_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".tar")
_MANY = 5


@dataclass(frozen=True)
class Located:
    """``file`` is the torch file to read; ``folder`` and ``manifest`` are those of a ckptrun checkpoint."""

    file: str
    folder: str | None = None
    manifest: dict[str, Any] | None = None

    @property
    def files(self) -> list[dict[str, Any]]:
        """The manifest's files: ``path``, ``size_bytes``."""
        return [] if self.manifest is None else list(self.manifest["files"])


def locate(path: str) -> Located:
    """What to read for a path that a user gave.

    Raises:
        NoCheckpointError: nothing is there, or nothing that is a checkpoint; says what is, and what is near.
        DamagedCheckpointError: it is a checkpoint of ckptrun that lacks a file or has one of a wrong size.
    """
    if re.match(r"[a-z][a-z0-9+.-]+://", path):
        raise NoCheckpointError(f"{path} is a URL; inspect reads local files", hint="copy it here first")
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise _nothing_there(path) from None
    except OSError as error:
        raise NoCheckpointError(f"{path} cannot be reached: {error.strerror or error}") from None
    if is_folder:
        if not os.path.lexists(os.path.join(path, MANIFEST)):
            raise _no_manifest(path)
        return _checkpoint(path)
    folder, name = os.path.split(path)
    if name in (MANIFEST, STATE) and os.path.exists(os.path.join(folder, MANIFEST)):
        return _checkpoint(folder or ".")
    return Located(path)


def _checkpoint(folder: str) -> Located:
    manifest = _read_manifest(os.path.join(folder, MANIFEST))
    wrong = []
    for entry in manifest["files"]:
        expected = entry["size_bytes"]
        try:
            found = os.stat(os.path.join(folder, entry["path"])).st_size
        except FileNotFoundError:
            wrong.append(f"{entry['path']} is missing, {expected} bytes were expected")
            continue
        except OSError as error:
            raise NoCheckpointError(
                f"{folder} is there and cannot be read: {error.strerror or error}"
            ) from None
        if found != expected:
            wrong.append(f"{entry['path']} has {found} bytes, {expected} were expected")
    if not any(entry["path"] == STATE for entry in manifest["files"]):
        wrong.append(f"the manifest lists no {STATE}")
    if wrong:
        raise DamagedCheckpointError(
            f"{folder} is damaged: {'; '.join(wrong)}",
            hint="'ckptrun resolve --ckpt last' names the newest good one",
        )
    return Located(os.path.join(folder, STATE), os.path.abspath(folder), manifest)


def _read_manifest(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: no JSON ({error})") from None
    except OSError as error:
        raise NoCheckpointError(f"{path} is there and cannot be read: {error.strerror or error}") from None
    files = value.get("files") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(files, list) or not all(map(_is_file_entry, files)):
        raise DamagedCheckpointError(f"{path} is damaged: a JSON object with a list 'files' was expected")
    for name in ("step", "format"):
        if type(value.get(name, 1)) is not int:
            raise DamagedCheckpointError(
                f"{path} is damaged: its {name!r} is {value[name]!r}, no whole number"
            )
    return value


def _is_file_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    name = entry.get("path")
    return isinstance(name, str) and "\0" not in name and type(entry.get("size_bytes")) is int


def _no_manifest(path: str) -> NoCheckpointError:
    """A folder that is no checkpoint: which level is it, or whose?"""
    names = _listed(path)
    inner = os.path.join(path, "checkpoints")
    if "checkpoints" in names and (found := _checkpoints_in(inner)):
        return _too_high(f"{path} is the folder of a run", inner, found)
    if found := _checkpoints_in(path):
        return _too_high(f"{path} holds checkpoints and is none itself", path, found)
    runs = sorted(name for name in names if os.path.isdir(os.path.join(path, name, "checkpoints")))
    if runs:
        return NoCheckpointError(
            f"{path} is a root of runs ({_some(runs)}), two levels above a checkpoint",
            hint=f"'ckptrun resolve --root {path} --run {runs[0]} --ckpt last' names a checkpoint of one",
        )
    if STATE in names:
        return NoCheckpointError(
            f"{path} has no {MANIFEST}: the writing of this checkpoint was never finished",
            hint=f"ckptrun inspect {os.path.join(path, STATE)} shows what came that far",
        )
    if (other := _other_tool(names)) is not None:
        return NoCheckpointError(f"{path} is {other}; ckptrun's checkpoints have a {MANIFEST}")
    files = sorted(name for name in names if name.endswith(_SUFFIXES))
    if files:
        return NoCheckpointError(
            f"{path} is a folder without {MANIFEST}, and no checkpoint; it holds {_some(files)}",
            hint=f"ckptrun inspect {os.path.join(path, files[0])}",
        )
    holds = f"it holds {_some(sorted(names))}" if names else "it is empty"
    return NoCheckpointError(f"{path} is a folder without {MANIFEST}, and no checkpoint; {holds}")


def _too_high(what: str, folder: str, found: Sequence[str]) -> NoCheckpointError:
    return NoCheckpointError(
        f"{what}, one level too high: {len(found)} checkpoints are in {folder}, {found[0]} is the newest",
        hint=f"ckptrun inspect {os.path.join(folder, found[0])}",
    )


def _checkpoints_in(path: str) -> list[str]:
    """Committed checkpoints, newest first by the save counter in front of the name."""
    numbered = [(int(match[1]), name) for name in _listed(path) if (match := _NAME.fullmatch(name))]
    numbered.sort(reverse=True)
    return [name for _, name in numbered if os.path.exists(os.path.join(path, name, MANIFEST))]


def _other_tool(names: Sequence[str]) -> str | None:
    if "latest" in names or any(re.match(r"(bf16_)?(zero_pp|mp)_rank_", name) for name in names):
        return "a checkpoint of DeepSpeed"
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return "a checkpoint of torch.distributed.checkpoint"
    if {"trainer_state.json", "config.json"} & set(names) or "model.safetensors" in names:
        return "a folder of Hugging Face's transformers"
    if "saved_model.pb" in names:
        return "a SavedModel of TensorFlow"
    return None


def _nothing_there(path: str) -> NoCheckpointError:
    if os.path.islink(path):
        return NoCheckpointError(f"{path} is a link to {os.readlink(path)}, which is not there")
    if _REFERENCE.fullmatch(path):
        return NoCheckpointError(
            f"there is no file or folder {path}; inspect takes a path, not a reference",
            hint=f"'ckptrun resolve --ckpt {path}' tells its path",
        )
    parent, wanted = os.path.split(os.path.abspath(path))
    while not os.path.isdir(parent):
        parent, wanted = os.path.split(parent)
    names = sorted(_listed(parent))
    from difflib import get_close_matches

    near = get_close_matches(wanted, names, n=_MANY, cutoff=0.6)
    if near:
        hint = f"near it: {', '.join(os.path.join(parent, name) for name in near)}"
    else:
        hint = f"{parent} holds {_some(names)}" if names else f"{parent} is empty"
        if os.sep not in path:
            hint = f"inspect takes a path; 'ckptrun resolve --run NAME --ckpt last' tells one. {hint}"
    return NoCheckpointError(f"there is no file or folder {path}", hint=hint)


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except NotADirectoryError:
        return []
    except OSError as error:
        raise NoCheckpointError(f"{path} is there and cannot be read: {error.strerror or error}") from None


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MANY
    return ", ".join(names[:_MANY]) + (f" and {more} more" if more > 0 else "")
