"""Does a config differ from the run's own in what changes the result, or only in what steers it?

Decision: a pure function over two plain trees that knows one list; a key that is on neither side of
the list is put where a wrong answer is noticed. Turned down: comparing the files, where a comment or
another order of keys would be a difference.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ckptrun.config.sections import all_options

CHANGES_RESULT: Final = "changes result"
STEERS: Final = "steers"


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()
"""In place of a value: this side has none."""

# Options of the trainer that decide which numbers come out; what limits an epoch decides what a stored
# position in it means. The rest of the trainer only says how long, how often and how loudly.
_TRAINER_CHANGES = frozenset(
    {
        "seed",
        "precision",
        "gradient_clip_val",
        "gradient_clip_algorithm",
        "accumulate_grad_batches",
        "deterministic",
        "compile",
        "limit_train_batches",
    }
)
# In DeepSpeed's config they repeat the data loader's batch size, which is compared where it stands, times the ranks.
_DEEPSPEED_BATCH_SIZES = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu"})
_INTERCHANGEABLE_STRATEGIES = frozenset({"auto", "single", "ddp"})


@dataclass(frozen=True)
class ConfigDifference:
    """One value that is not the same; ``ABSENT`` where a side has none."""

    key: str
    stored: Any
    given: Any
    kind: Literal["changes result", "steers"]

    def __str__(self) -> str:
        return f"{self.key}: {self.stored!r} in the run, {self.given!r} given"


def config_diff(stored_tree: Mapping[str, Any], given_tree: Mapping[str, Any]) -> list[ConfigDifference]:
    """Return how the given config differs from the run's own, what changes the result first.

    Both are resolved trees; an option that one of them lacks, because another version wrote it, has its
    default.
    """
    found: list[ConfigDifference] = []
    _compare((), _with_defaults(stored_tree), _with_defaults(given_tree), found)
    return sorted(found, key=lambda difference: difference.kind != CHANGES_RESULT)


def _with_defaults(tree: Mapping[str, Any]) -> dict[str, Any]:
    whole = copy.deepcopy(dict(tree))
    for option in all_options():
        section, name = option.key.split(".")
        options = whole.get(section)
        if not isinstance(options, dict):
            options = whole[section] = {}
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        options.setdefault(name, default)
    return whole


def _compare(path: tuple[str, ...], stored: Any, given: Any, found: list[ConfigDifference]) -> None:
    if isinstance(stored, dict) or isinstance(given, dict):
        # One side lacking the mapping is compared key by key too: each key has its own kind.
        left = {} if stored is ABSENT else stored
        right = {} if given is ABSENT else given
        if isinstance(left, dict) and isinstance(right, dict):
            for name in [*left, *(name for name in right if name not in left)]:
                _compare((*path, str(name)), left.get(name, ABSENT), right.get(name, ABSENT), found)
            return
    if isinstance(stored, list) and isinstance(given, list) and _are_entries(stored) and _are_entries(given):
        for index in range(max(len(stored), len(given))):
            left = stored[index] if index < len(stored) else ABSENT
            right = given[index] if index < len(given) else ABSENT
            _compare((*path, str(index)), left, right, found)
        return
    if not _same(stored, given):
        kind: Literal["changes result", "steers"] = STEERS if _steers(path, stored, given) else CHANGES_RESULT
        found.append(ConfigDifference(".".join(path), stored, given, kind))


def _are_entries(items: list[Any]) -> bool:
    return all(isinstance(item, dict) for item in items)


def _same(stored: Any, given: Any) -> bool:
    if isinstance(stored, list) and isinstance(given, list):
        return len(stored) == len(given) and all(map(_same, stored, given))
    if isinstance(stored, bool) != isinstance(given, bool):
        return False
    return bool(stored == given) or (stored != stored and given != given)  # a NaN is the same as a NaN


def _steers(path: tuple[str, ...], stored: Any, given: Any) -> bool:
    section, rest = path[0], path[1:]
    if section == "model":
        return False
    if section == "data":
        return "num_workers" in rest
    if section == "trainer":
        return rest[0] not in _TRAINER_CHANGES
    if section == "strategy":
        if rest == ("name",):
            return {stored, given} <= _INTERCHANGEABLE_STRATEGIES
        if rest == ("load_full_weights",) or rest[0] in ("process_group_backend", "timeout_s"):
            return True
        if rest[0] == "config" and rest[1] in _DEEPSPEED_BATCH_SIZES:
            return True
        # DeepSpeed's stage and offloading, beside the name or in its own config's zero_optimization.
        return rest[-1] == "stage" or any(part.startswith("offload_") for part in rest)
    return True
