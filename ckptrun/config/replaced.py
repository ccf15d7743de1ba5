"""Which options of the config's strategy go, where the command line names another one?

Decision: those that the new one does not have, and it is said; what the command line itself gives stays, and is an
error where it does not fit. Turned down: an error for the config's own too, which nobody can take out of a run's stored
config.
"""

from __future__ import annotations

from dataclasses import replace

from ckptrun.config.run_config import RunConfig
from ckptrun.config.support import STRATEGY_OPTIONS, strategy_that_runs
from ckptrun.config.tree import Node, lookup


def without_replaced_options(config: RunConfig, before: Node) -> RunConfig:
    """The config without options that only the replaced strategy has.

    Args:
        before: the config as it was without the command line.
    """
    node, named = lookup(before, "strategy.name"), config.source("strategy.name").kind
    old = str(node.value) if node is not None and node.value is not None else "auto"
    if named not in ("override", "flag") or old == config.strategy.name:
        return config
    new = strategy_that_runs(config)
    # Where none was named, they may be those of any.
    of_old = STRATEGY_OPTIONS.get(old, tuple(name for names in STRATEGY_OPTIONS.values() for name in names))
    gone = [
        name
        for name in config.strategy.options
        if name in of_old
        and name not in STRATEGY_OPTIONS.get(new, ())
        and config.source(f"strategy.{name}").kind in ("file", "environment")
    ]
    if not gone:
        return config
    section = config.nodes.value["strategy"]
    left = {name: value for name, value in section.value.items() if name not in gone}
    whose = "" if old == "auto" else f" of the strategy {old}"
    told = f"the config's options{whose} are left out, for {new} runs: " + ", ".join(
        f"strategy.{name}" for name in gone
    )
    return replace(
        config,
        strategy=replace(
            config.strategy,
            options={name: value for name, value in config.strategy.options.items() if name not in gone},
        ),
        nodes=Node({**config.nodes.value, "strategy": Node(left, section.source)}, config.nodes.source),
        notices=(*config.notices, told),
    )
