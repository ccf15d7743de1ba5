"""How is a checkpoint of DeepSpeed's turned into its universal format, such that every stage reads it?

DeepSpeed's own tool does it (``deepspeed.checkpoint.ds_to_universal``). What it makes of stage 3 the stages 1 and 2 do
not read, and the other way round: one form has flat tensors and no ``step.pt``, the other has nothing under
``optimizer_state_dict`` in ``zero/optimizer_state.pt``. So the result is put into the form that both read: each tensor
in its shape, in a dict, ``step.pt`` beside it, and both kinds of ``optimizer_state.pt`` in one.

Of a parameter that the optimizer does not hold, a frozen one, the tool knows in the stages 1 and 2 only, and there in
float32. Here it lies in ``zero/NAME/fp32.pt`` for all stages, in its own type; the strategy loads it from there. What
the tool puts beside it under the names of buffers and under second names of tied parameters goes: nothing reads it.

A process of its own: it needs torch, and a stop ends it, as does the end of who has started it.

Facts: deepspeed.checkpoint.ds_to_universal (``exp_avg`` and ``exp_avg_sq`` are all that it takes of an optimizer),
DeepSpeedEngine (param_shapes, frozen_param_fragments, shared_params and buffer_names in the model's file).
"""

from __future__ import annotations

import math
import os
import runpy
import shutil
import sys
from typing import Any

import torch
from torch import Tensor

from ckptrun.inspect.deepspeed_files import DeepSpeedFiles
from ckptrun.launch.parent_death import die_with_parent
from ckptrun.launch.universal import MOMENTS, unsuited
from ckptrun.strategies.deepspeed import classes_in_files

_PARAM, _CAT_DIM = "param", "cat_dim"  # DeepSpeed's names in these files
_GLOBAL = "optimizer_state.pt"
_INNER = ("base_optimizer_state", "optimizer_state_dict")  # the optimizer's own state in a shard, by stage


class UnsuitedError(Exception):
    """The shards hold what the universal format has no place for, or lack something."""


def main() -> int:
    """``SOURCE TARGET PARENT``: the folder with the shards, where what is made goes, and who waits for it.

    What cannot be converted is told in the last line that is printed.
    """
    source, target, parent = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv = [
        "ds_to_universal", "--input_folder", source, "--output_folder", target, "--inject_missing_state",
        "--num_extract_workers", "1", "--num_merge_workers", "1",
    ]  # fmt: skip
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # the tool asks for whatever a pickle does
    torch.serialization.add_safe_globals([*classes_in_files()])
    try:
        _check_optimizer(source)
        runpy.run_module("deepspeed.checkpoint.ds_to_universal", run_name="__main__")
        for_every_stage(source, target)
    except UnsuitedError as error:
        sys.stderr.flush()
        print(error, flush=True)
        return 1
    return 0


def for_every_stage(source: str, target: str) -> None:
    """Put what the tool has made into the form that every stage reads; one parameter in memory at a time."""
    zero = os.path.join(target, "zero")
    path = os.path.join(zero, _GLOBAL)
    state = torch.load(path, weights_only=True)
    inner = (state.get("optimizer_state_dict") or {}).get("state") or {}
    step = next((each["step"] for each in inner.values() if "step" in each), None)
    model = _Model(source)
    for name in os.listdir(zero):
        if name not in model.names and os.path.isdir(os.path.join(zero, name)):
            shutil.rmtree(os.path.join(zero, name))
    for name in model.names:
        folder = os.path.join(zero, name)
        if name in model.trained:
            step = _trained(folder, name, model.trained[name], step)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.mkdir(folder)
            torch.save({_CAT_DIM: 0, _PARAM: model.frozen(name)}, os.path.join(folder, "fp32.pt"))
    groups = state["param_groups"]
    kept = {
        key: value for key, value in state.items() if key not in ("fp32_flat_groups", "optimizer_state_dict")
    }
    kept.setdefault("ds_version", _version())
    # Stage 3 wants a count of steps also where the optimizer keeps none beside its moments.
    kept["optimizer_state_dict"] = {
        "state": {0: {"step": 0 if step is None else step}},
        "param_groups": groups,
    }
    torch.save(kept, path)


def _trained(folder: str, name: str, shape: tuple[int, ...], step: Any) -> Any:
    """The files of a parameter that the optimizer holds; returns its step."""
    missing = [key for key in ("fp32", *MOMENTS) if not os.path.exists(os.path.join(folder, f"{key}.pt"))]
    if missing:
        raise UnsuitedError(f"DeepSpeed's tool has made no {missing[0]} of {name}")
    path = os.path.join(folder, "step.pt")
    if os.path.exists(path):
        step = torch.load(path, weights_only=True)
    elif step is not None:
        torch.save(step, path)
    for file in os.listdir(folder):
        if file == "step.pt":
            continue
        path = os.path.join(folder, file)
        value = torch.load(path, weights_only=True)
        if isinstance(value, Tensor):
            torch.save({_CAT_DIM: 0, _PARAM: value.view(shape)}, path)
    return step


class _Model:
    """What the model's files among the shards say of its parameters.

    Attributes:
        names: of all parameters, each once.
        trained: the shapes of those that the optimizer holds.
    """

    def __init__(self, folder: str) -> None:
        paths = DeepSpeedFiles.of(f"_/{name}" for name in os.listdir(folder)).model_states
        names = [os.path.basename(path) for path in paths]
        self._states = [_mapped(os.path.join(folder, name)) for name in names]
        self._in_parts = names[0].startswith("zero_")  # stage 3
        state = self._states[0]
        self.trained = {n: tuple(shape) for group in state["param_shapes"] for n, shape in group.items()}
        self._frozen = dict(state.get("frozen_param_shapes") or {})
        others = {*(state.get("buffer_names") or ()), *dict(state.get("shared_params") or {})}
        own = [name for name in state["module"] if name not in others]
        self.names = list(dict.fromkeys([*own, *self.trained, *self._frozen]))

    def frozen(self, name: str) -> Tensor:
        """A parameter that the optimizer does not hold.

        Raises:
            UnsuitedError: the shards do not hold it either.
        """
        if not self._in_parts:
            whole: Tensor = self._states[0]["module"][name]
            return whole.clone()
        if name not in self._frozen:
            raise UnsuitedError(
                f"its shards do not hold {name}, which is not frozen and in no group of the optimizer"
            )
        shape = tuple(self._frozen[name])
        parts = [state["frozen_param_fragments"][name].reshape(-1) for state in self._states]
        return torch.cat(parts)[: math.prod(shape)].view(shape).clone()  # the last part may be padded


def _check_optimizer(folder: str) -> None:
    """Whether the format has a place for all that the optimizer keeps.

    Raises:
        UnsuitedError: it has none.
    """
    found = DeepSpeedFiles.of(f"_/{name}" for name in os.listdir(folder)).optimizer_states
    if not found:
        raise UnsuitedError("it has no files of an optimizer")
    state = _mapped(os.path.join(folder, os.path.basename(found[0])))["optimizer_state_dict"]
    inner = next((state[name] for name in _INNER if name in state), None)
    if not isinstance(inner, dict):
        raise UnsuitedError("its shards do not hold the optimizer's state as the tool expects it")
    why = unsuited({key for each in inner["state"].values() for key in each})
    if why is not None:
        raise UnsuitedError(why)


def _mapped(path: str) -> Any:
    """A file's content, its tensors left on disk until they are used."""
    return torch.load(path, weights_only=True, mmap=True)


def _version() -> str:
    from deepspeed import __version__

    return str(__version__)
