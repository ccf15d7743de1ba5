"""What are the weights in DeepSpeed's files, one parameter after the other?

    stage 0     mp_rank_00_model_states.pt            module: everything
    stage 1, 2  zero_pp_rank_N_mp_rank_00_optim_...   each group's flat part in full precision, and where in it each
                                                      parameter's piece lies; buffers and what is frozen as in stage 0
    stage 3     the same                              each parameter in as many equal pieces as there were ranks, one
                                                      after the other; buffers in the model's file of rank 0
    universal   zero/NAME/fp32.pt                     each parameter as a whole

Files are verified, then memory-mapped, so that what is in memory at a time is one parameter and not the model.

Decision: the layout is read here, with ``weights_only=True``. Turned down: DeepSpeed's ``zero_to_fp32``, which puts all
parts together in memory and unpickles what it reads.

Facts: deepspeed.utils.zero_to_fp32, which holds the layout of stage 3; ``param_slice_mappings`` of the stages 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptrun.checkpoint.manifest import Manifest
from ckptrun.errors import DamagedCheckpointError
from ckptrun.fit.capture import read_verified
from ckptrun.inspect.deepspeed_files import DeepSpeedFiles

Piece = tuple[Tensor, int, int]  # a flat tensor, where in it, how many numbers


class ZeroWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint under their names; each is put together when it is asked for.

    Attributes:
        shapes: of each.
    """

    def __init__(
        self, folder: str, manifest: Manifest, note: Mapping[str, Any], classes: Sequence[type]
    ) -> None:
        self._folder = folder
        self._records = {file.path: file for file in manifest.files}
        self._classes: list[Any] = list(classes)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self._whole: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        found = DeepSpeedFiles.of(file.path for file in manifest.files)
        if note.get("universal"):
            self._read_universal(found)
        elif note["stage"] == 3:
            self._read_stage_3(found)
        else:
            self._read_replicated(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._whole:
            return self._whole[name]
        if name in self._files:
            content = self._mapped(self._files[name])
            value: Tensor = content["param"] if isinstance(content, dict) else content
            return value.view(self.shapes[name])
        pieces = self._pieces[name]
        dtype = pieces[0][0].dtype if pieces else None
        result = torch.empty(math.prod(self.shapes[name]), dtype=dtype)
        done = 0
        for flat, start, count in pieces:
            taken = min(count, result.numel() - done)  # the last piece may be padded
            result[done : done + taken] = flat[start : start + taken]
            done += taken
        if done != result.numel():
            raise DamagedCheckpointError(
                f"{self._folder}: the parts of {name} do not make up its {result.numel()} numbers"
            )
        return result.view(self.shapes[name])

    # -- the layouts -----------------------------------------------------------------------------------------

    def _read_replicated(self, found: DeepSpeedFiles) -> None:
        state = self._mapped(found.model_states[0])
        for name, value in state["module"].items():
            self.shapes[name], self._whole[name] = tuple(value.shape), value
        parts = [self._mapped(path)["optimizer_state_dict"] for path in found.optimizer_states]
        if not parts or "param_slice_mappings" not in parts[0]:
            return  # stage 0, or weights alone: there is nothing more exact
        pieces: dict[str, list[Piece]] = {}
        for part in parts:
            for flat, places in zip(
                part["single_partition_of_fp32_groups"], part["param_slice_mappings"], strict=True
            ):
                for name, place in places.items():
                    pieces.setdefault(name, []).append((flat, place.start, place.numel))
        for name, own in pieces.items():
            if name in self.shapes:
                self._pieces[name] = own
                del self._whole[name]
        self._follow_shared(state)

    def _read_stage_3(self, found: DeepSpeedFiles) -> None:
        state = self._mapped(found.model_states[0])
        flats = [
            [flat.reshape(-1) for flat in self._mapped(path)["optimizer_state_dict"]["fp32_flat_groups"]]
            for path in found.optimizer_states
        ]
        offset = 0
        for name, shape in (item for group in state["param_shapes"] for item in group.items()):
            count = math.ceil(math.prod(shape) / len(flats))
            self.shapes[name] = tuple(shape)
            self._pieces[name] = [piece for flat in flats for piece in _cut(flat, offset, count)]
            offset += count
        for name in state["buffer_names"]:
            value = state["module"][name]
            self.shapes[name], self._whole[name] = tuple(value.shape), value
        self._read_frozen(found, state)
        self._follow_shared(state)

    def _read_frozen(self, found: DeepSpeedFiles, state: Mapping[str, Any]) -> None:
        shapes = state.get("frozen_param_shapes") or {}
        if not shapes:
            return
        fragments = [self._mapped(path)["frozen_param_fragments"] for path in found.model_states]
        for name, shape in shapes.items():
            self.shapes[name] = tuple(shape)
            self._pieces[name] = [(each[name].reshape(-1), 0, each[name].numel()) for each in fragments]

    def _read_universal(self, found: DeepSpeedFiles) -> None:
        state = self._mapped(found.model_states[0])
        for name, value in state["module"].items():
            if value.numel():  # of stage 3 only buffers are here
                self.shapes[name], self._whole[name] = tuple(value.shape), value
        groups = (*(state["param_shapes"] or ()), state.get("frozen_param_shapes") or {})
        shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
        for name, path in found.universal.items():
            self.shapes[name] = shapes.get(name, self.shapes.get(name, ()))
            self._files[name] = path
            self._whole.pop(name, None)
        self._follow_shared(state)

    def _follow_shared(self, state: Mapping[str, Any]) -> None:
        """Parameters that are others under a second name."""
        for alias, name in dict(state.get("shared_params") or {}).items():
            if name not in self.shapes:
                continue
            self.shapes[alias] = self.shapes[name]
            tables: tuple[dict[str, Any], ...] = (self._pieces, self._whole, self._files)
            for table in tables:
                table.pop(alias, None)
                if name in table:
                    table[alias] = table[name]

    def _mapped(self, path: str) -> Any:
        with torch.serialization.safe_globals(self._classes):
            return read_verified(self._folder, self._records[path], mapped=True)


def _cut(flats: Sequence[Tensor], start: int, count: int) -> Iterator[Piece]:
    """``count`` numbers from ``start`` on of tensors that lie one behind the other."""
    for flat in flats:
        if count <= 0:
            return
        if start < flat.numel():
            taken = min(count, flat.numel() - start)
            yield flat, start, taken
            start, count = 0, count - taken
        else:
            start -= flat.numel()
