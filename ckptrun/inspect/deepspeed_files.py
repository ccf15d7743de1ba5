"""Which of a checkpoint's files are DeepSpeed's, and what does each hold, by its name alone?

latest                                                   the tag, as text
TAG/mp_rank_00_model_states.pt                           the model; stages 0 to 2
TAG/zero_pp_rank_N_mp_rank_00_model_states.pt            rank N's model; stage 3
TAG/[bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt     rank N's part of the optimizer and of the weights
TAG/zero/NAME/fp32.pt                                    a parameter as a whole; the universal format
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

LATEST = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
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

    def missing(self) -> list[str]:
        """Names of parts that have to be there, going by those that are."""
        gone = []
        for files, pattern in ((self.optimizer_states, _OPTIMIZER), (self.model_states, _MODEL)):
            ranks = [
                (int(match[1] or 0), path)
                for path in files
                if (match := pattern.fullmatch(os.path.basename(path)))
            ]
            if not ranks:
                continue
            example = ranks[-1][1]
            present = {rank for rank, _ in ranks}
            gone += [
                re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", example)
                for rank in range(max(present))
                if rank not in present
            ]
        return gone


def is_tag_folder(names: Iterable[str]) -> bool:
    """Whether a folder with these entries is one that DeepSpeed names by a tag: the shards themselves."""
    return any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in names)


def is_shard(name: str) -> bool:
    """Whether a file's name is that of one shard."""
    return bool(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))
