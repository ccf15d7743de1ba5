"""How is an attempt told to another host, and does that host see the same files? Plain data and pure checks.

Decision: the leader sends what it has decided (the checkpoint's path and its manifest's hash, the attempt, the lease's
epoch), and a follower looks only whether it sees the same. Turned down: a resolution on each host, which may differ
where a disk lags behind.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ckptrun.checkpoint.manifest import MANIFEST_NAME
from ckptrun.records import CheckpointRecord, FreshStart, Resolution
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import read_lease


def resolution_to_plain(resolution: Resolution) -> dict[str, Any]:
    """What a rank needs of it, without the candidates."""
    answer = resolution.answer
    plain: Any = answer
    if isinstance(answer, CheckpointRecord):
        plain = {"checkpoint": asdict(answer)}
    elif isinstance(answer, FreshStart):
        start = answer.init_from
        # Relative to the leader's working folder, which need not be the follower's.
        plain = {"fresh": os.path.abspath(start) if start is not None and "://" not in start else start}
    return {
        "ref": resolution.ref,
        "rule": resolution.rule,
        "answer": plain,
        "removes_pin": resolution.removes_pin,
    }


def resolution_from_plain(value: Mapping[str, Any]) -> Resolution:
    """The other side of :func:`resolution_to_plain`."""
    answer = value["answer"]
    if isinstance(answer, dict) and "checkpoint" in answer:
        fields = dict(answer["checkpoint"])
        fields["line"] = tuple((int(first), int(last)) for first, last in fields["line"])
        fields["saved_for"] = tuple(fields["saved_for"])
        fields["noted"] = tuple(fields["noted"])
        answer = CheckpointRecord(**fields)
    elif isinstance(answer, dict):
        answer = FreshStart(answer["fresh"])
    return Resolution(value["ref"], int(value["rule"]), answer, removes_pin=bool(value["removes_pin"]))


def fingerprint(path: str | None) -> str | None:
    """What names the checkpoint at ``path``: its manifest's hash, or a foreign file's size; None for a fresh start.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    if path is None:
        return None
    manifest = os.path.join(path, MANIFEST_NAME)
    if not os.path.isdir(path):
        return f"size:{os.stat(path).st_size}"
    with open(manifest, "rb") as file:
        return "sha256:" + hashlib.sha256(file.read()).hexdigest()


def seen_otherwise(
    run_path: str | None, lease_epoch: int, checkpoint: str | None, expected: str | None
) -> str | None:
    """What this host sees otherwise than the leader; None where it sees the same.

    Args:
        lease_epoch: the leader's; 0 where it holds none.
        checkpoint: the path that ranks will read.
        expected: the leader's :func:`fingerprint` of it.
    """
    if run_path is not None:
        folder = RunFolder(run_path)
        if not os.path.isdir(folder.path):
            return f"the run's folder {run_path} is not there"
        if lease_epoch:
            try:
                lease = read_lease(folder.lease)
            except OSError as error:
                return f"{folder.lease} cannot be read: {error.strerror or error}"
            if lease is None or lease.epoch != lease_epoch or lease.holder is None:
                here = "none" if lease is None else f"epoch {lease.epoch}"
                return f"the lease in {run_path} is {here}, and the leader's is epoch {lease_epoch}"
    try:
        found = fingerprint(checkpoint)
    except OSError as error:
        return f"the checkpoint {checkpoint} cannot be read: {error.strerror or error}"
    return None if found == expected else f"the checkpoint {checkpoint} is another one than the leader's"


def first_difference(ours: str, theirs: str) -> str | None:
    """The first line in which two configs differ, as ``ours, not theirs``; how ranks are launched may differ."""
    one, other = _lines(ours), _lines(theirs)
    if one == other:
        return None
    length = max(len(one), len(other))
    for a, b in zip(one + [""] * (length - len(one)), other + [""] * (length - len(other)), strict=True):
        if a != b:
            return f"{_shown(a)}, not {_shown(b)}"
    return None


def _lines(config: str) -> list[str]:
    kept, section = [], ""
    for line in config.splitlines():
        if line and not line[0].isspace():
            section = line
        if not section.startswith("launch:"):
            kept.append(line)
    return kept


def _shown(line: str) -> str:
    return repr(line.strip()) if line.strip() else "nothing"
