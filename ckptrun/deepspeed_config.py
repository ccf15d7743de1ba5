"""What does DeepSpeed's config say where options of ours say something too?

One value for each thing: what the trainer's options, the strategy's options and the data loader say is put in where the
config leaves it out or says ``auto``; where it says the same nothing happens; where it says something else it is an
error that shows both.

    gradient_accumulation_steps               trainer.accumulate_grad_batches
    gradient_clipping                         trainer.gradient_clip_val
    bf16.enabled, fp16.enabled, and others    trainer.precision
    zero_optimization.stage                   strategy.stage
    zero_optimization.offload_..., buckets    strategy.offload_..., strategy.allgather_bucket_size, ...
    train_micro_batch_size_per_gpu            the data loader's batch size
    train_batch_size                          the three above, and the number of ranks

Decision: pure functions over plain values, so that the supervisor can ask before a rank is started. Turned down:
letting the config win, or the options: either way a number that somebody wrote does nothing.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ckptrun.errors import MisconfigurationException

DEFAULT_STAGE: Final = 2
STAGES: Final = (0, 1, 2, 3)
OPTIONS: Final[tuple[str, ...]] = (
    "config",
    "stage",
    "offload_optimizer",
    "offload_parameters",
    "allgather_bucket_size",
    "reduce_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "load_full_weights",
    "process_group_backend",
    "timeout_s",
)
"""Options of the strategy, which stand beside its name."""

KEYS: Final = frozenset(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "bfloat16",
        "torch_autocast",
        "data_types",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "disable_allgather",
        "allgather_size",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "activation_checkpointing",
        "aio",
        "autotuning",
        "checkpoint",
        "comet",
        "comms_logger",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_parallel_size",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "hybrid_engine",
        "log_level",
        "memory_breakdown",
        "pipeline",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        # What it read once, and refuses now by itself.
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    )
)
"""What DeepSpeed 0.19.8 reads at the top of its config (``deepspeed/runtime/config.py`` and what that calls). It passes
over everything else without a word, and the package is too slow to import for a question."""

_IN_ZERO = ("allgather_bucket_size", "reduce_bucket_size", "overlap_comm", "contiguous_gradients")
_OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
_AUTO = "auto"
_MICRO = "train_micro_batch_size_per_gpu"
_ABSENT: Any = object()


@dataclass(frozen=True)
class Given:
    """What is said outside of DeepSpeed's config; None for what is not known yet (``micro_batch_size``)."""

    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    precision: str = "32"
    world_size: int = 1
    micro_batch_size: int | None = None


def check_installed() -> None:
    """Look for the package, without importing it.

    Raises:
        MisconfigurationException: it is not there.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise MisconfigurationException(
            "The strategy deepspeed needs the package deepspeed, which is not installed: "
            "pip install 'ckptrun[deepspeed]'."
        )


def stage_of(options: Mapping[str, Any]) -> int:
    """The ZeRO stage that a strategy's options ask for, in either place.

    Raises:
        MisconfigurationException: it is no stage, or both places say something and not the same.
    """
    return int(merged(options, None)["zero_optimization"]["stage"])


def merged(options: Mapping[str, Any], given: Given | None) -> dict[str, Any]:
    """DeepSpeed's config with everything in its place; ``options`` are the strategy's own.

    Args:
        given: None leaves out what the trainer and the data loader say.

    Raises:
        MisconfigurationException: something is said twice and not the same, is wrong, or cannot be served.
    """
    config = copy.deepcopy(read_config(options.get("config")))
    _refuse_auto(config)
    _zero(config, options)
    _refuse(config)
    _check_offloaded_parameters(config["zero_optimization"], options)
    if given is None:
        return config
    if given.gradient_clip_algorithm == "value" and given.gradient_clip_val is not None:
        raise MisconfigurationException(
            "trainer.gradient_clip_algorithm is 'value'; DeepSpeed clips the norm of all gradients.",
            hint="Leave it out, or use another strategy.",
        )
    accumulate = given.accumulate_grad_batches
    _settle(config, "gradient_accumulation_steps", accumulate, "trainer.accumulate_grad_batches")
    clip = 0.0 if given.gradient_clip_val is None else float(given.gradient_clip_val)
    _settle(config, "gradient_clipping", clip, "trainer.gradient_clip_val", shown=given.gradient_clip_val)
    _settle_precision(config, given.precision)
    _default(config, "zero_allow_untested_optimizer", True)
    _default(config, "steps_per_print", 2**31)  # ckptrun has a bar and loggers of its own
    micro = _micro_batch_size(config, given, accumulate * given.world_size)
    if micro is not None:
        whole = micro * accumulate * given.world_size
        what = f"{micro} samples a rank and batch x {accumulate} batches x {given.world_size} ranks"
        _settle(config, "train_batch_size", whole, what)
    return config


def read_config(config: Any) -> dict[str, Any]:
    """DeepSpeed's own config: a dict as it is, a JSON file's content, nothing for None.

    Raises:
        MisconfigurationException: it cannot be read, or is no object.
    """
    if config is None:
        return {}
    if isinstance(config, str):
        try:
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        except OSError as error:
            raise MisconfigurationException(
                f"strategy.config: {error.filename} cannot be read: {error.strerror}.",
                hint="Write DeepSpeed's config there as JSON, or as a mapping under strategy.config.",
            ) from error
        except ValueError as error:
            raise MisconfigurationException(f"strategy.config: {config} is no JSON: {error}.") from error
    if not isinstance(config, Mapping):
        raise MisconfigurationException(
            f"strategy.config is {config!r}; expected a mapping, or the name of a JSON file with one."
        )
    return dict(config)


def _zero(config: dict[str, Any], options: Mapping[str, Any]) -> None:
    """The options that belong into ``zero_optimization``."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise MisconfigurationException(
            f"the strategy deepspeed has no option {unknown[0]!r}; it has: {', '.join(OPTIONS)}",
            hint="What DeepSpeed calls otherwise goes under strategy.config.",
        )
    stage = options.get("stage")
    if stage is None:
        inner = _get(config, "zero_optimization.stage")
        stage = DEFAULT_STAGE if inner in (_ABSENT, _AUTO) else inner
    if isinstance(stage, bool) or stage not in STAGES:
        raise MisconfigurationException(f"strategy.stage is {stage!r}; expected 0, 1, 2 or 3.")
    _settle(config, "zero_optimization.stage", stage, "strategy.stage")
    for name in _IN_ZERO:
        if options.get(name) is not None:
            _settle(config, f"zero_optimization.{name}", options[name], f"strategy.{name}")
    for name, inner_name in _OFFLOADS.items():
        given = options.get(name)
        if given is None or given is False:
            continue
        if given not in (True, "cpu") and not isinstance(given, Mapping):
            raise MisconfigurationException(
                f"strategy.{name} is {given!r}; expected true, cpu, or DeepSpeed's mapping."
            )
        wanted = dict(given) if isinstance(given, Mapping) else {"device": "cpu"}
        _settle(config, f"zero_optimization.{inner_name}", wanted, f"strategy.{name}")
    if "offload_optimizer" in config["zero_optimization"]:
        # An optimizer of torch's, stepped on the CPU, is slower there than DeepSpeed's and not wrong.
        _default(config, "zero_force_ds_cpu_optimizer", False)


def _check_offloaded_parameters(zero: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """DeepSpeed passes over it in the other stages."""
    offloaded = zero.get("offload_param")
    device = offloaded.get("device") if isinstance(offloaded, Mapping) else None
    if zero["stage"] != 3 and device not in (None, "none", _AUTO):
        by_option = options.get("offload_parameters") not in (None, False)
        where = (
            "strategy.offload_parameters"
            if by_option
            else "strategy.config's zero_optimization.offload_param"
        )
        raise MisconfigurationException(
            f"{where} is for stage 3, where parameters are in parts; the stage is {zero['stage']}.",
            hint="Leave it out, or set strategy.stage=3.",
        )


_REFUSED = (
    ("checkpoint.use_node_local_storage", True, "a checkpoint's shards have to lie in the run's folder"),
    ("elasticity.enabled", True, "ckptrun decides which ranks take part"),
    ("managed_gradient_accumulation", False, "trainer.accumulate_grad_batches says how batches accumulate"),
    ("checkpoint.load_universal", True, "ckptrun says when a checkpoint is one"),
)


def _refuse(config: Mapping[str, Any]) -> None:
    for path, value, why in _REFUSED:
        if _get(config, path) == value:
            raise MisconfigurationException(
                f"strategy.config has {path}: {value!r}; {why}.", hint="Leave it out."
            )
    for name in ("offload_optimizer", "offload_param"):
        if _get(config, f"zero_optimization.{name}.device") == "nvme":
            raise MisconfigurationException(
                f"strategy.config has zero_optimization.{name}.device: 'nvme', which is not available yet: a save "
                "would have to copy what lies on that disk.",
                hint="Use cpu.",
            )


_FILLED = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    _MICRO,
    "train_batch_size",
    "bf16",
    "bfloat16",
    "fp16",
    "torch_autocast.enabled",
    "amp.enabled",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
)
"""Where ``auto`` is filled in: here, or, further down in a section, by DeepSpeed with its own default."""

_AUTO_OF_DEEPSPEED = (
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
    "expert_parallel",
    "hybrid_engine",
    "comms_logger",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "compile",
    "tensor_parallel",
)
"""Where DeepSpeed itself reads ``auto``, or leaves it out."""


def _refuse_auto(config: Mapping[str, Any]) -> None:
    for path in _autos(config):
        known = path.partition(".")[0] in KEYS  # a warning tells of others
        taken = any(path == each or path.startswith(f"{each}.") for each in (*_FILLED, *_AUTO_OF_DEEPSPEED))
        if known and not taken:
            raise MisconfigurationException(
                f"strategy.config has {path}: 'auto', and there is nothing to fill in.",
                hint="Write a value, or leave it out. auto is for batch sizes, gradient_accumulation_steps, "
                "gradient_clipping, bf16, fp16 and zero_optimization.",
            )


def _autos(value: Any, path: str = "") -> Iterator[str]:
    """The dotted key of every ``auto``."""
    if value == _AUTO:
        yield path
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for name, inner in items:
        yield from _autos(inner, f"{path}.{name}" if path else str(name))


def _default(config: dict[str, Any], name: str, value: Any) -> None:
    if config.get(name, _AUTO) == _AUTO:
        config[name] = value


def _settle_precision(config: dict[str, Any], precision: str) -> None:
    old = "bfloat16" in config  # what DeepSpeed called it once, and still reads
    if old and "bf16" in config:
        raise MisconfigurationException(
            "strategy.config has both bf16 and bfloat16, which are the same.", hint="Leave one of them out."
        )
    for name, its_own in (("bfloat16" if old else "bf16", "bf16-mixed"), ("fp16", "16-mixed")):
        wanted = precision == its_own
        if wanted or name in config:
            _settle(config, f"{name}.enabled", wanted, "trainer.precision", shown=precision)
    for name in ("torch_autocast", "amp"):  # ways of DeepSpeed's that no precision of the trainer's means
        if _get(config, f"{name}.enabled") is not _ABSENT:
            _settle(config, f"{name}.enabled", False, "trainer.precision", shown=precision)


def _micro_batch_size(config: dict[str, Any], given: Given, shares: int) -> int | None:
    """Samples a rank and batch, where anybody says; ``shares`` are the batches of one update."""
    if given.micro_batch_size is not None:
        _settle(config, _MICRO, given.micro_batch_size, "the data loader's batch size")
        return given.micro_batch_size
    micro, whole = (_samples(config, key) for key in (_MICRO, "train_batch_size"))
    if micro is None and whole is not None:
        if whole % shares:
            raise MisconfigurationException(
                f"strategy.config has train_batch_size: {whole}, and {given.accumulate_grad_batches} batches x "
                f"{given.world_size} ranks cannot share that.",
                hint="Leave it out: the data loader says how large a batch is.",
            )
        micro = config[_MICRO] = whole // shares
    return micro


def _samples(config: dict[str, Any], key: str) -> int | None:
    """A number of samples; None where the config leaves it open."""
    found = _get(config, key)
    if found in (_ABSENT, _AUTO):
        config.pop(key, None)
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise MisconfigurationException(
            f"strategy.config has {key}: {found!r}; expected a number of samples, or auto."
        )
    return found


def _settle(config: dict[str, Any], path: str, value: Any, whose: str, *, shown: Any = _ABSENT) -> None:
    """Put ``value`` in its place, unless the config has it there already.

    Raises:
        MisconfigurationException: the config has something else there.
    """
    found = _get(config, path)
    if found is _ABSENT or found == _AUTO:
        *outer, name = path.split(".")
        inner = config
        for part in outer:
            below = inner.get(part)
            if not isinstance(below, dict):
                if below not in (None, _AUTO):
                    raise MisconfigurationException(
                        f"strategy.config has {part}: {below!r}; expected a mapping."
                    )
                below = inner[part] = {}
            inner = below
        inner[name] = value
    elif found != value or isinstance(found, bool) != isinstance(value, bool):
        given = value if shown is _ABSENT else shown
        raise MisconfigurationException(
            f"strategy.config has {path}: {found!r}, and {whose} is {given!r}.",
            hint=f"Make them the same, or leave {path} out of strategy.config.",
        )


def _get(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _ABSENT
        found = found[part]
    return found
