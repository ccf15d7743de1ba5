"""What does everybody else see of the config?

Decision: typed options for the flat sections, plain entries for classes that are not imported yet, and the
source of every value for those who ask. Turned down: handing the merged dict around, whose keys nobody
checks.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

from ckptrun.config.options import (
    LaunchOptions,
    RunOptions,
    SlurmOptions,
    StrategyOptions,
    TrainerOptions,
    bad_run_name,
)
from ckptrun.config.sections import CLASS_SECTIONS, FLAT_SECTIONS, LIST_SECTIONS, section_tree
from ckptrun.config.source_defaults import default_in_source
from ckptrun.config.tree import DEFAULT, INIT_ARGS, INIT_ARGS_IF_FIT, Node, Source, lookup, plain
from ckptrun.deepspeed_config import read_config
from ckptrun.errors import ConfigError, MisconfigurationException


@dataclass(frozen=True)
class ClassSpec:
    """An entry that names a class, as the config has it; nothing is imported.

    ``key`` is where it stands (``model``, ``callbacks.0``) and ``source`` who gave its class path.
    ``init_args_if_fit`` were given for a class that a later source replaced.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    source: Source = DEFAULT
    key: str = "model"
    init_args_if_fit: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """The config of one command; see ``load_config``."""

    run: RunOptions
    trainer: TrainerOptions
    strategy: StrategyOptions
    launch: LaunchOptions
    slurm: SlurmOptions
    model: ClassSpec | None
    data: ClassSpec | None
    callbacks: list[ClassSpec]
    loggers: list[ClassSpec]
    files: tuple[str, ...]
    nodes: Node = field(repr=False)
    notices: tuple[str, ...] = ()  # what the user should know

    @property
    def root(self) -> str:
        """Folder or URL under which runs lie."""
        return self.run.root

    @property
    def num_loader_workers(self) -> int:
        """Loader workers of each rank, as far as the data's arguments, or their defaults, say (``num_workers``)."""
        if self.data is None:
            return 0
        given = self.data.init_args.get("num_workers")
        if given is None:
            given = default_in_source(self.data.class_path, "num_workers")
        return max(0, given) if isinstance(given, int) else 0

    @property
    def tree(self) -> dict[str, Any]:
        """What was given, merged, as plain values and without defaults."""
        tree: dict[str, Any] = plain(self.nodes)
        return {name: value for name, value in tree.items() if name not in LIST_SECTIONS or value}

    def resolved_tree(self) -> dict[str, Any]:
        """The whole config as plain values, defaults of the flat sections included; stored with the run.

        Reading it again gives the same config.
        """
        tree: dict[str, Any] = {name: section_tree(getattr(self, name)) for name in FLAT_SECTIONS}
        if isinstance(tree["strategy"].get("config"), str):
            # What a file of DeepSpeed's says counts, wherever that lies and whatever becomes of it.
            with contextlib.suppress(MisconfigurationException):
                tree["strategy"]["config"] = read_config(tree["strategy"]["config"])
        for name in CLASS_SECTIONS:
            spec: ClassSpec | None = getattr(self, name)
            if spec is not None:
                tree[name] = _entry_tree(spec)
        for name in LIST_SECTIONS:
            tree[name] = [_entry_tree(spec) for spec in getattr(self, name)]
        return tree

    def source(self, key: str) -> Source:
        """Return who gave the value at a dotted key; its default where nobody did."""
        node = lookup(self.nodes, key)
        return DEFAULT if node is None else node.source

    @property
    def name_was_given(self) -> bool:
        """Whether ``--run`` or ``run.name`` names the run, rather than the config file's stem."""
        return self.run.name is not None

    def run_name(self, job_array_task: str | None) -> str:
        """Return the run's name: the one given, else the config file's stem (of several, the last one's).

        Args:
            job_array_task: id of the task in a job array; added where the name was not given, so that each
                task is a run of its own and finds it again after a requeue.

        Raises:
            ConfigError: no name was given and there is no config file.
        """
        if self.run.name is not None:
            return self.run.name
        if not self.files:
            raise ConfigError("no run is named", hint="Name it with --run NAME, or give its config with -c.")
        stem = os.path.splitext(os.path.basename(self.files[-1]))[0]
        name = re.sub(r"[^\w.+-]+", "-", stem).lstrip(".")
        expected = bad_run_name(name)
        if expected is not None:
            raise ConfigError(
                f"the file's name makes no run's name, expected {expected}",
                place=self.files[-1],
                hint="Name the run with --run NAME or run.name.",
            )
        return name if job_array_task is None else f"{name}-a{job_array_task}"


def _entry_tree(spec: ClassSpec) -> dict[str, Any]:
    tree: dict[str, Any] = {"class_path": spec.class_path}
    if spec.init_args:
        tree[INIT_ARGS] = spec.init_args
    if spec.init_args_if_fit:
        tree[INIT_ARGS_IF_FIT] = spec.init_args_if_fit
    return tree
