"""Which of a checkpoint's files are DeepSpeed's, what does each hold by its name, and which are missing?

latest                                                   the tag, as text
TAG/mp_rank_00_model_states.pt                           the model; stages 0 to 2
TAG/zero_pp_rank_N_mp_rank_00_model_states.pt            rank N's model; stage 3
TAG/[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt     rank N's part of the optimizer and of the weights
TAG/zero/NAME/fp32.pt                                    a parameter as a whole; the universal format
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptrun.errors import NoCheckpointError

LATEST = "latest"
NOTE = "deepspeed"  # the manifest's key under which stage, tag and format of such files stand
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_PART = "zero_pp_rank_"
_ENDS = re.compile(r"_(?:optim|model)_states\.pt$")
_PARAMETER = re.compile(r"zero/(.+)/fp32\.pt")


@dataclass
class DeepSpeedFiles:
    """Paths as they were given, each list in the order of ranks."""

    model_states: list[str] = field(default_factory=list)
    optimizer_states: list[str] = field(default_factory=list)
    universal: dict[str, str] = field(default_factory=dict)  # by the parameter's name

    @classmethod
    def of(cls, paths: Iterable[str]) -> DeepSpeedFiles:
        """Those of DeepSpeed's among ``paths``, which are relative to the checkpoint's folder."""
        models: list[tuple[int, str]] = []
        optimizers: list[tuple[int, str]] = []
        found = cls()
        for path in paths:
            name = os.path.basename(path)
            inner = path.partition("/")[2]
            if match := _MODEL.fullmatch(name):
                models.append((int(match[1] or 0), path))
            elif match := _OPTIMIZER.fullmatch(name):
                optimizers.append((int(match[1]), path))
            elif match := _PARAMETER.fullmatch(inner):
                found.universal[match[1]] = path
        found.model_states = [path for _, path in sorted(models)]
        found.optimizer_states = [path for _, path in sorted(optimizers)]
        return found

    @property
    def num_ranks(self) -> int:
        """Ranks that wrote a part; 1 where one rank wrote all."""
        return max(len(self.optimizer_states), len(self.model_states), 1)

    @property
    def model_in_parts(self) -> bool:
        """Whether each rank wrote its part of the model too: stage 3."""
        return any(_PART in os.path.basename(path) for path in self.model_states)

    def missing(self, num_ranks: int = 0) -> list[str]:
        """Names of parts that have to be there.

        Args:
            num_ranks: that wrote them, where that is known; each that has a part here did.
        """
        parts = {"_optim_states.pt": self.optimizer_states}
        if self.model_in_parts:
            parts["_model_states.pt"] = self.model_states
        given = [path for paths in parts.values() for path in paths]
        count = max([num_ranks, *(_rank(path) + 1 for path in given)])
        gone = []
        for end, paths in parts.items():
            present = set(map(_rank, paths))
            example = next((p for p in (*paths, *given)), None)  # stage 0 has none
            gone += [
                _ENDS.sub(end, re.sub(rf"{_PART}\d+", f"{_PART}{rank}", example))
                for rank in range(count)
                if example is not None and rank not in present
            ]
        if not self.model_states:
            folder = os.path.dirname(self.optimizer_states[0]) if self.optimizer_states else ""
            gone.append(os.path.join(folder, "*mp_rank_00_model_states.pt"))
        return gone


def _rank(path: str) -> int:
    match = re.search(rf"{_PART}(\d+)", os.path.basename(path))
    return int(match[1]) if match else 0


def summary(note: Mapping[str, Any], world_size: int, files: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """What a manifest says of such a checkpoint, for people and programs.

    Args:
        note: the manifest's own, under :data:`NOTE`.
        files: path and size of each file.
    """
    tag = str(note.get("tag"))
    sizes = [size for path, size in files if path.startswith(f"{tag}/")]
    return {
        "stage": note.get("stage"),
        "world_size": world_size,
        "universal": bool(note.get("universal")),
        "tag": tag,
        "num_shards": len(sizes),
        "size_bytes": sum(sizes),
    }


def in_words(told: Mapping[str, Any]) -> str:
    """:func:`summary` as half a sentence."""
    ranks = "1 rank" if told["world_size"] == 1 else f"{told['world_size']} ranks"
    kind = ", universal format" if told["universal"] else ""
    return f"ZeRO stage {told['stage']}, {ranks}, {told['num_shards']} files in {told['tag']}{kind}"


@dataclass(frozen=True)
class Foreign:
    """A checkpoint that DeepSpeed wrote by itself: its folder, the tag in it, and its files relative to the folder."""

    folder: str
    tag: str
    files: DeepSpeedFiles

    @property
    def stage(self) -> int:
        """3, or 1 for the stages 1 and 2 (whose files look alike), or 0."""
        if self.files.model_in_parts:
            return 3
        return 1 if self.files.optimizer_states else 0

    def missing(self) -> list[str]:
        """Names of parts that have to be there, by the names of the others and by what one of them says."""
        return self.files.missing(self._num_ranks())

    def _num_ranks(self) -> int:
        """Ranks that wrote it, as a file of it says; 0 where none does."""
        from ckptrun.inspect.torch_file import read_torch_file  # which most commands do without

        for path in (*self.files.model_states[:1], *self.files.optimizer_states[:1]):
            try:
                state = read_torch_file(os.path.join(self.folder, path)).root
            except NoCheckpointError:
                continue  # whoever reads it says so
            counts = _counts(state) if isinstance(state, dict) else []
            if counts:
                return max(counts)
        return 0


def _counts(state: Mapping[str, Any]) -> list[int]:
    inner = state.get("optimizer_state_dict")
    given = inner.get("partition_count") if isinstance(inner, Mapping) else None
    found = [state.get("dp_world_size"), *(given if isinstance(given, list) else [given])]
    return [each for each in found if type(each) is int]


def foreign(path: str) -> Foreign | None:
    """The checkpoint of DeepSpeed that a folder is: with ``latest`` and tags in it, or a tag's own folder.

    Raises:
        OSError: it cannot be read.
    """
    names = os.listdir(path)
    if is_tag_folder(names):
        folder, tag = os.path.split(os.path.abspath(path))
    else:
        folder = os.path.abspath(path)
        tags = [name for name in names if re.fullmatch(r"global_step\d+", name)]
        tag = max(tags, key=lambda name: int(name.removeprefix("global_step")), default="")
        if LATEST in names:
            with open(os.path.join(path, LATEST), encoding="utf-8", errors="replace") as file:
                tag = file.read(256).strip()
        if not tag or "/" in tag or not os.path.isdir(os.path.join(folder, tag)):
            return None
        names = os.listdir(os.path.join(folder, tag))
    files = DeepSpeedFiles.of(f"{tag}/{name}" for name in names)
    return Foreign(folder, tag, files) if files.model_states or files.optimizer_states else None


def is_tag_folder(names: Iterable[str]) -> bool:
    """Whether a folder with these entries is one that DeepSpeed names by a tag: the shards themselves."""
    return any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in names)


def is_shard(name: str) -> bool:
    """Whether a file's name is that of one shard."""
    return bool(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))
