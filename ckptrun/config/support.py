"""Which options of this config are understood but not available yet?

Decision: one list, asked once before anything starts, so that an option is never passed over in silence.
Turned down: leaving unfinished options out of the config's types, where each would be an unknown key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptrun import deepspeed_config
from ckptrun.config.nearest import did_you_mean
from ckptrun.config.run_config import RunConfig
from ckptrun.errors import ConfigError, MisconfigurationException

_AVAILABLE = {
    "strategy.name": ("auto", "single", "ddp", "deepspeed"),
    "launch.launcher": ("auto", "inline", "torchrun", "deepspeed"),
}


STRATEGY_OPTIONS = {
    "ddp": (
        "find_unused_parameters",
        "bucket_cap_mb",
        "static_graph",
        "gradient_as_bucket_view",
        "broadcast_buffers",
        "process_group_backend",
        "timeout_s",
    ),
    "deepspeed": deepspeed_config.OPTIONS,
}


@dataclass(frozen=True)
class Unsupported:
    """One option that asks for something that is not there yet."""

    key: str
    message: str
    place: str


def unsupported(config: RunConfig) -> list[Unsupported]:
    """Return every option that asks for something not available yet, in the config's order."""
    return [Unsupported(key, message, config.source(key).place) for key, message in _found(config)]


def check_supported(config: RunConfig) -> None:
    """Refuse a config that asks for something not available yet.

    Raises:
        ConfigError: naming the first such option, its place and what is available.
    """
    for each in unsupported(config):
        raise ConfigError(each.message, place=each.place)
    if strategy_that_runs(config) == "deepspeed":
        _check_deepspeed(config)


def without_effect(config: RunConfig) -> list[str]:
    """What is to be said of a config that :func:`check_supported` has passed: keys that DeepSpeed does not read.

    No error, for another version of DeepSpeed may read them.
    """
    if strategy_that_runs(config) != "deepspeed":
        return []
    told = []
    for name in deepspeed_config.read_config(config.strategy.options.get("config")):
        if name not in deepspeed_config.KEYS:
            meant = did_you_mean(str(name), deepspeed_config.KEYS)
            told.append(
                f"strategy.config has the key {name!r}, which DeepSpeed is not known to read"
                + (f". {meant}" if meant else "")
            )
    return told


def _check_deepspeed(config: RunConfig) -> None:
    """DeepSpeed is there, and its config says nothing else than ours, as far as that can be told without the data."""
    trainer = config.trainer
    given = deepspeed_config.Given(
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        precision=trainer.precision,
    )
    try:
        deepspeed_config.check_installed()
        whole = dict(deepspeed_config.read_config(config.strategy.options.get("config")))
        whole.pop("train_batch_size", None)  # which needs the number of all ranks
        deepspeed_config.merged({**config.strategy.options, "config": whole}, given)
    except MisconfigurationException as error:
        sources = [config.source(key) for key in ("strategy.config", "strategy.name", "launch.launcher")]
        place = next((source for source in sources if source.kind != "default"), sources[0]).place
        raise ConfigError(error.message, place=place, hint=error.hint) from None


def strategy_that_runs(config: RunConfig) -> str:
    """The strategy that will run: more than one rank runs with ddp where none is chosen."""
    if config.strategy.name != "auto":
        return config.strategy.name
    if config.launch.launcher == "deepspeed":
        return "deepspeed"
    return "single" if config.launch.nproc == 1 and config.launch.nnodes == 1 else "ddp"


def _found(config: RunConfig) -> Iterator[tuple[str, str]]:
    for key, available in _AVAILABLE.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value not in available:
            yield key, f"{key} {value} is not available yet; now: {', '.join(map(str, available))}"
    timeout_s = config.strategy.options.get("timeout_s", 1.0)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        yield (
            "strategy.timeout_s",
            f"strategy.timeout_s is {timeout_s!r}; expected a number of seconds above 0",
        )
    takes = STRATEGY_OPTIONS.get(strategy_that_runs(config), ())
    for name in config.strategy.options:
        if name not in takes:
            known = ", ".join(takes) or "none"
            yield (
                f"strategy.{name}",
                f"the strategy {strategy_that_runs(config)} has no option {name!r}; it has: {known}",
            )
