"""What does a checkpoint hold, and can training go on from it?

Decision: one report for every format, whose keys are those of ``inspect --json``. What is missing for
resuming is named by the keys that restoring asks for, so that the answer is the same as that of ``fit``.
Turned down: guessing that a file of another tool might do.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from ckptrun.inspect.checkpoint_folder import MANIFEST, Located, locate
from ckptrun.inspect.deepspeed_files import NOTE, summary
from ckptrun.inspect.pickle_values import SCALARS, Instance
from ckptrun.inspect.torch_calls import is_foreign
from ckptrun.inspect.torch_file import TorchFile, read_torch_file
from ckptrun.inspect.torch_objects import Storage, Tensor
from ckptrun.inspect.walk import key_text
from ckptrun.inspect.wrappers import Wrapper, find_wrappers

# What restoring a fit reads. The data position and the random state are in each rank's own file.
REQUIRED = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "epoch", "global_step")
DATA_POSITION, RANDOM_STATE = "data_position", "random_state"
_STEP_KEYS = ("global_step", "step", "iteration", "iter", "num_steps", "steps")
_EPOCH_KEYS = ("epoch", "epochs_run", "num_epochs")
_WEIGHTS_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "weights",
    "net",
    "params",
)


@dataclass
class Report:
    """The answer of ``inspect``; sizes in bytes.

    ``num_parameters`` are the elements of all tensors in the state dict (parameters and buffers: a file does
    not tell them apart; tied weights count under each name), 0 where there is none.
    ``size_bytes`` are those of the tensors in the file, where several share bytes counted once; the sizes in
    ``tensors`` are each tensor's own. ``tensors`` are largest first. ``foreign_globals`` are the names that
    ``torch.load(weights_only=True)`` refuses; that there are none does not make a file safe.
    """

    path: str
    format: str
    container: str
    step: int | None
    epoch: int | None
    metrics: dict[str, float | None]
    parts: dict[str, dict[str, int]]
    missing: list[str]
    num_parameters: int
    size_bytes: int
    file_size_bytes: int
    tensors: list[tuple[str, Tensor]]
    foreign_globals: list[str]
    writer: dict[str, str]
    wrappers: list[Wrapper]
    saved: dict[str, Any] = field(default_factory=dict)  # what the manifest says about the save
    notices: list[str] = field(default_factory=list)
    deepspeed: dict[str, Any] | None = None  # stage, ranks and shards, where DeepSpeed's strategy wrote it

    @property
    def resumable(self) -> bool:
        """Whether ``ckptrun fit`` can go on from it."""
        return not self.missing

    def as_dict(self) -> dict[str, Any]:
        """The document of ``inspect --json``."""
        return {
            "path": self.path,
            "format": self.format,
            "step": self.step,
            "epoch": self.epoch,
            "metrics": self.metrics,
            "parts": self.parts,
            "resumable": self.resumable,
            "missing": self.missing,
            "num_tensors": len(self.tensors),
            "num_parameters": self.num_parameters,
            "size_bytes": self.size_bytes,
            "tensors": [
                {"name": name, "shape": list(t.shape), "dtype": t.dtype, "size_bytes": t.size_bytes}
                for name, t in self.tensors
            ],
            "container": self.container,
            "file_size_bytes": self.file_size_bytes,
            "foreign_globals": self.foreign_globals,
            "writer": self.writer,
            "wrappers": [{"prefix": w.prefix, "by": w.by, "num_names": w.num_names} for w in self.wrappers],
            "saved": self.saved,
            "notices": self.notices,
            "deepspeed": self.deepspeed,
        }


def inspect_checkpoint(path: str) -> Report:
    """Describe a checkpoint of ckptrun (its folder, or its ``state.ckpt``) or a file of ``torch.save``.

    Raises:
        NoCheckpointError: there is no checkpoint at ``path``.
        DamagedCheckpointError: there is one, and it is cut off, altered or lacks a file.
    """
    located = locate(path)
    contents = read_torch_file(located.file)
    parts, tensors = _parts(contents)
    weights = _weights(contents.root)
    below_weights = [] if weights is None else _tensors(contents, weights)
    manifest = located.manifest or {}
    shards = _shards(located)
    missing = _missing(contents.root)
    if located.manifest is not None:
        parts[RANDOM_STATE] = _rank_part(located)
        missing = [name for name in missing if name not in (DATA_POSITION, RANDOM_STATE)]
        if shards is not None:
            parts["shards"] = {
                "num_entries": shards["num_shards"],
                "num_tensors": 0,
                "size_bytes": shards["size_bytes"],
            }
            whole = () if manifest.get("weights_only") else ("optimizer_states",)
            missing = [name for name in missing if name not in ("state_dict", *whole)]
        missing += _ranks_without_file(located)
    return Report(
        path=located.folder or os.path.abspath(path),
        format=_format(contents),
        container=contents.format,
        step=manifest["step"] if "step" in manifest else _number(contents.root, _STEP_KEYS),
        epoch=_as_int(manifest.get("epoch")) if located.manifest else _number(contents.root, _EPOCH_KEYS),
        metrics=_finite(manifest.get("metrics")) if located.manifest else _metrics(contents.root),
        parts=parts,
        missing=missing,
        num_parameters=sum(tensor.num_elements for _, tensor in below_weights),
        size_bytes=_stored_bytes([*contents.storages.values(), *(tensor for _, tensor in tensors)]),
        file_size_bytes=sum(entry["size_bytes"] for entry in located.files) or contents.size_bytes,
        tensors=sorted(tensors, key=lambda named: -named[1].size_bytes),
        foreign_globals=sorted(found.full_name for found in contents.globals if is_foreign(found)),
        writer=_writer(contents, manifest),
        wrappers=find_wrappers([name for name, _ in below_weights]),
        saved={key: manifest[key] for key in _SAVED_KEYS if key in manifest},
        notices=_notices(contents, manifest, path),
        deepspeed=shards,
    )


_SAVED_KEYS = (
    "run_id",
    "attempt",
    "sequence",
    "parent",
    "reason",
    "exact",
    "weights_only",
    "strategy",
    "world_size",
    "saved_at",
)


def _shards(located: Located) -> dict[str, Any] | None:
    """What the manifest says of DeepSpeed's files."""
    manifest = located.manifest or {}
    note = manifest.get(NOTE)
    if not isinstance(note, dict):
        return None
    files = [(entry["path"], entry["size_bytes"]) for entry in located.files]
    return summary(note, _as_int(manifest.get("world_size")) or 1, files)


def _tensors(contents: TorchFile, value: Any) -> list[tuple[str, Tensor]]:
    return [(name, leaf) for name, leaf in contents.leaves(value) if isinstance(leaf, Tensor)]


def _stored_bytes(leaves: list[Tensor | Storage]) -> int:
    """Bytes of the leaves' storages, each counted once, and of NumPy data in the pickle."""
    storages: dict[str, int] = {}
    loose: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Storage):
            storages[leaf.key] = leaf.size_bytes
            continue
        for tensor in (leaf, *leaf.components):
            if tensor.storage is not None:
                storages[tensor.storage.key] = tensor.storage.size_bytes
            elif tensor.layout == "numpy":
                loose[id(tensor)] = tensor.size_bytes
    return sum(storages.values()) + sum(loose.values())


def _parts(contents: TorchFile) -> tuple[dict[str, dict[str, int]], list[tuple[str, Tensor]]]:
    """What a part is made of, by its key; and all tensors, each with its part's key in front of its name."""
    root = contents.root
    if not isinstance(root, dict) or _weights(root) is root:
        name = "state_dict" if _weights(root) is root else type(root).__name__
        if isinstance(root, Instance):
            name = key_text(root.cls)
        leaves = list(contents.leaves(root))
        return {name: _part(root, leaves)}, [(n, leaf) for n, leaf in leaves if isinstance(leaf, Tensor)]
    parts: dict[str, dict[str, int]] = {}
    tensors: list[tuple[str, Tensor]] = []
    for key, value in root.items():
        if type(value) in SCALARS:
            continue
        name = key_text(key)
        leaves = list(contents.leaves(value, name))
        tensors += [(n, leaf) for n, leaf in leaves if isinstance(leaf, Tensor)]
        if key == "ckptrun" and isinstance(value, dict):
            for own, inner in value.items():
                if type(inner) not in SCALARS:
                    parts[key_text(own)] = _part(inner, list(contents.leaves(inner)))
        else:
            parts[name] = _part(value, leaves)
    return parts, tensors


def _part(value: Any, leaves: list[tuple[str, Tensor | Storage]]) -> dict[str, int]:
    return {
        "num_entries": len(value) if isinstance(value, (dict, list, tuple)) else 1,
        "num_tensors": sum(isinstance(leaf, Tensor) for _, leaf in leaves),
        "size_bytes": _stored_bytes([leaf for _, leaf in leaves]),
    }


def _weights(root: Any) -> Any:
    """The state dict, or what stands for it; None where there is none."""
    if isinstance(root, dict):
        for key in _WEIGHTS_KEYS:
            value = root.get(key)
            if isinstance(value, dict) and (key == "state_dict" or _is_state_dict(value)):
                return value
            if _is_module(value):
                return value
        return root if _is_state_dict(root) else None
    return root if isinstance(root, Tensor) or _is_module(root) else None


def _is_module(value: Any) -> bool:
    return isinstance(value, Instance) and isinstance(value.state, dict) and "_parameters" in value.state


def _is_state_dict(value: dict[Any, Any]) -> bool:
    """Names and tensors, with at most a few other things (``_extra_state``)."""
    count = sum(isinstance(item, Tensor) for item in value.values())
    return count > 0 and 2 * count >= len(value) and all(isinstance(key, str) for key in value)


def _missing(root: Any) -> list[str]:
    keys = root if isinstance(root, dict) else {}
    missing = [key for key in REQUIRED if key not in keys]
    if "state_dict" in missing and root is _weights(root) and isinstance(root, dict):
        missing.remove("state_dict")
    return [*missing, DATA_POSITION, RANDOM_STATE]


def _rank_part(located: Located) -> dict[str, int]:
    sizes = [entry["size_bytes"] for entry in located.files if _is_rank_file(entry["path"])]
    return {"num_entries": len(sizes), "num_tensors": 0, "size_bytes": sum(sizes)}


def _is_rank_file(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".ckpt")


def _ranks_without_file(located: Located) -> list[str]:
    present = {entry["path"] for entry in located.files}
    world_size = _as_int((located.manifest or {}).get("world_size")) or 1
    expected = [f"rank-{rank:04d}.ckpt" for rank in range(min(world_size, 100_000))]
    lacking = [name for name in expected if name not in present]
    if len(lacking) == len(expected):
        return [DATA_POSITION, RANDOM_STATE]
    return [f"{part} ({name})" for name in lacking for part in (DATA_POSITION, RANDOM_STATE)]


def _format(contents: TorchFile) -> str:
    root = contents.root
    if isinstance(root, dict):
        if "ckptrun" in root or "ckptrun_version" in root:
            return "ckptrun"
        if "pytorch-lightning_version" in root:
            return "lightning"
    return contents.format


def _writer(contents: TorchFile, manifest: dict[str, Any]) -> dict[str, str]:
    """What the file says about the programs that wrote it."""
    versions = dict(contents.versions)
    root = contents.root
    if isinstance(root, dict):
        for key, value in root.items():
            if (
                isinstance(key, str)
                and key.endswith(("_version", "version"))
                and type(value) in (str, int, float)
            ):
                versions[key] = str(value)[:100]
    stored = manifest.get("versions")
    if isinstance(stored, dict):
        versions.update({str(name): str(value) for name, value in stored.items()})
    return versions


def _notices(contents: TorchFile, manifest: dict[str, Any], path: str) -> list[str]:
    notices = []
    folder, name = os.path.split(os.path.abspath(path))
    if not manifest and _is_rank_file(name) and os.path.exists(os.path.join(folder, MANIFEST)):
        notices.append(f"it is one rank's part of the checkpoint {folder}")
    if manifest.get("exact") is False:
        notices.append("it does not stand at a boundary (exact: false): a failure left none")
    if manifest.get("format", 1) > 1:
        notices.append(f"its manifest has format {manifest['format']}, written by a newer ckptrun")
    if contents.walker.num_too_deep:
        notices.append(
            f"{contents.walker.num_too_deep} containers are nested too deep and were not looked into"
        )
    if contents.num_dropped:
        notices.append(f"{contents.num_dropped} plain values of very long lists were counted and not kept")
    if manifest and not isinstance(contents.root, dict):
        notices.append("its state is no dict")
    return notices


def _number(root: Any, keys: tuple[str, ...]) -> int | None:
    if isinstance(root, dict):
        for key in keys:
            found = _as_int(root.get(key))
            if found is not None:
                return found
    return None


def _as_int(value: Any) -> int | None:
    return value if type(value) is int else None


def _metrics(root: Any) -> dict[str, float | None]:
    """A dict ``metrics``, and else the numbers with a fraction at the top (``loss``, ``best_acc`` …)."""
    if not isinstance(root, dict):
        return {}
    stored = root.get("metrics")
    if isinstance(stored, dict):
        return _finite(stored)
    return _finite({key: value for key, value in root.items() if type(value) is float})


def _finite(metrics: Any) -> dict[str, float | None]:
    """Numbers by name; JSON has none for infinity and NaN, which become None."""
    if not isinstance(metrics, dict):
        return {}
    return {
        key_text(key): float(value) if abs(value) < 1e300 and math.isfinite(value) else None
        for key, value in metrics.items()
        if type(value) in (int, float)
    }
