"""How is a checkpoint of DeepSpeed's turned into its universal format, such that every stage reads it?

DeepSpeed's own tool does it (``deepspeed.checkpoint.ds_to_universal``). What it makes of stage 3 the stages 1 and 2 do
not read, and the other way round: one form has flat tensors and no ``step.pt``, the other has nothing under
``optimizer_state_dict`` in ``zero/optimizer_state.pt``. So the result is put into the form that both read: each tensor
in its shape, in a dict, ``step.pt`` beside it, and both kinds of ``optimizer_state.pt`` in one.

A process of its own: it needs torch, a stop ends it, and it ends with who started it. The tool would unpickle whatever
is in the shards; here it gets no more than plain data and the classes that DeepSpeed's own files have.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

import torch

from ckptrun.launch.parent_death import die_with_parent

_PARAM, _CAT_DIM = "param", "cat_dim"  # DeepSpeed's names in these files
_GLOBAL = "optimizer_state.pt"


def main() -> int:
    """``SOURCE TARGET PARENT``: the folder with the shards, where what is made goes, and the process that waits."""
    source, target, parent = sys.argv[1:]
    die_with_parent(int(parent))
    _load_plain_data_only()
    sys.argv = [
        "ds_to_universal", "--input_folder", source, "--output_folder", target, "--inject_missing_state",
        "--num_extract_workers", "1", "--num_merge_workers", "1",
    ]  # fmt: skip
    runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
    for_every_stage(target)
    return 0


def _load_plain_data_only() -> None:
    from ckptrun.strategies.deepspeed import classes_in_files

    torch.serialization.add_safe_globals([*classes_in_files()])
    load = torch.load

    @functools.wraps(load)
    def safe(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "weights_only": True})

    torch.load = safe


def for_every_stage(folder: str) -> None:
    """Put what the tool has made into the form that every stage reads; one file in memory at a time."""
    zero = os.path.join(folder, "zero")
    path = os.path.join(zero, _GLOBAL)
    state = torch.load(path, weights_only=False)
    names = sorted(name for name in os.listdir(zero) if os.path.isdir(os.path.join(zero, name)))
    inner = (state.get("optimizer_state_dict") or {}).get("state") or {}
    step = next((each["step"] for each in inner.values() if "step" in each), None)
    shapes = _shapes(folder)
    for name in names:
        step = _one_parameter(os.path.join(zero, name), shapes[name], step)
    groups = state["param_groups"]
    kept = {
        key: value for key, value in state.items() if key not in ("fp32_flat_groups", "optimizer_state_dict")
    }
    kept.setdefault("ds_version", _version())
    kept["optimizer_state_dict"] = {
        "state": {0: {} if step is None else {"step": step}},
        "param_groups": groups,
    }
    torch.save(kept, path)


def _one_parameter(folder: str, shape: tuple[int, ...], step: Any) -> Any:
    """One parameter's files; returns its step."""
    path = os.path.join(folder, "step.pt")
    if os.path.exists(path):
        step = torch.load(path, weights_only=True)
    elif step is not None:
        torch.save(step, path)
    for name in os.listdir(folder):
        if name == "step.pt":
            continue
        path = os.path.join(folder, name)
        value = torch.load(path, weights_only=True)
        if isinstance(value, torch.Tensor):
            torch.save({_CAT_DIM: 0, _PARAM: value.view(shape)}, path)
    return step


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    name = min(each for each in os.listdir(folder) if each.endswith("_model_states.pt"))
    state = torch.load(os.path.join(folder, name), weights_only=True)
    return {name: tuple(shape) for group in state["param_shapes"] for name, shape in group.items()}


def _version() -> str:
    from deepspeed import __version__

    return str(__version__)
