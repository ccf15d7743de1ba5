"""Which options do the flat sections have, of which type, with which default, and what does each do?

Decision: plain dataclasses whose fields carry their own line of documentation, so that `--print-config`,
the docs and the messages all read the one list here. Names and meanings are Lightning's where Lightning has
the option. Turned down: one table per purpose, which drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptrun.config.coerce import DURATION_FORMS, coerce, duration_s
from ckptrun.config.tree import Node
from ckptrun.records import DEFAULT_ON_SAVE_ERROR


def _option(default: Any, doc: str, *, check: Callable[[Any], str | None] | None = None, **extra: Any) -> Any:
    """A field with its line of documentation.

    ``check`` returns what would have been expected where the value is out of range; ``convert`` replaces
    reading by type; ``aliases`` maps what is written to what is meant; ``forms`` says what is taken where
    the type does not.
    """
    return field(default=default, metadata={"doc": doc, "check": check, **extra})


def _at_least(low: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        return f"{low} or more" if isinstance(value, (int, float)) and value < low else None

    return check


# Those that every process of a run can take: one that a loader worker knows nothing of would end it.
_STOP_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGINT")


def _stop_signals(names: Any) -> str | None:
    known = all(name in _STOP_SIGNALS for name in names)
    return None if known else f"some of {', '.join(_STOP_SIGNALS)}"


def _whole_above_one(node: Node) -> int | float:
    """A whole number of batches, or a fraction of all; ``1e3`` is a thousand batches, ``1.0`` is all."""
    value: int | float = coerce(node, int | float)
    return int(value) if isinstance(value, float) and value > 1 and value.is_integer() else value


def _batches(value: Any) -> str | None:
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        return "a fraction from 0.0 to 1.0, or a whole number of batches"
    return "0 or more" if value < 0 else None


def _some_batches(value: Any) -> str | None:
    return _batches(value) if value else "more than 0"


def _limit(of: str) -> Any:
    return _option(
        1.0,
        f"batches of {of}: a whole number, or a fraction of all",
        check=_batches,
        convert=_whole_above_one,
    )


def _run_name(value: Any) -> str | None:
    return None if value is None else bad_run_name(value)


def bad_run_name(name: str) -> str | None:
    """Return what a run's name has to be where ``name`` cannot be one, else None: it becomes a folder."""
    if name and not name.startswith(".") and "/" not in name and name.isprintable() and name == name.strip():
        return None
    return "a name without '/', not beginning with '.', not empty"


@dataclass(frozen=True)
class RunOptions:
    """Section ``run``: which run this is, and how it is kept."""

    name: str | None = _option(
        None, "the run's name; null takes the config file's stem (--run)", check=_run_name
    )
    root: str = _option("./runs", "folder or URL under which runs lie (--root)")
    save_on_stop: bool = _option(True, "save a checkpoint when a signal or `ckptrun stop` ends the run")
    on_save_error: Literal["retry", "warn", "stop"] = _option(
        DEFAULT_ON_SAVE_ERROR, "when a save fails: try twice more then warn, warn, or stop"
    )
    async_save: bool = _option(
        True, "copy the state and write it while training goes on; false stops training until it is written"
    )


@dataclass(frozen=True)
class TrainerOptions:
    """Section ``trainer``: Lightning's names with Lightning's meanings. ``max_time`` is in seconds."""

    max_epochs: int | None = _option(
        None,
        "stop after this many epochs, -1 for no limit; null is 1000 without max_steps and max_time",
        check=_at_least(-1),
    )
    max_steps: int = _option(-1, "stop after this many optimizer steps, -1 for no limit", check=_at_least(-1))
    max_time: float | None = _option(
        None, "stop after this much time, e.g. 00:12:00:00", convert=duration_s, forms=DURATION_FORMS
    )
    accumulate_grad_batches: int = _option(1, "batches per optimizer step", check=_at_least(1))
    gradient_clip_val: float | None = _option(
        None, "clip gradients at this value, null does not clip", check=_at_least(0)
    )
    gradient_clip_algorithm: Literal["norm", "value"] = _option(
        "norm", "clip the norm of all gradients, or each value"
    )
    precision: Literal["32", "bf16-mixed", "16-mixed"] = _option(
        "32",
        "32, bf16-mixed, or 16-mixed with a scaler of gradients",
        aliases={"32-true": "32", "bf16": "bf16-mixed", "16": "16-mixed"},
    )
    val_check_interval: int | float = _option(
        1.0,
        "validate every so many training batches, or at this fraction of an epoch",
        check=_some_batches,
        convert=_whole_above_one,
    )
    check_val_every_n_epoch: int | None = _option(
        1, "validate every so many epochs; null counts batches across epochs", check=_at_least(1)
    )
    limit_train_batches: int | float = _limit("an epoch of training")
    limit_val_batches: int | float = _limit("a validation")
    limit_test_batches: int | float = _limit("a test")
    limit_predict_batches: int | float = _limit("a prediction")
    num_sanity_val_steps: int = _option(
        2, "validation batches tried before training, -1 for all", check=_at_least(-1)
    )
    log_every_n_steps: int = _option(
        50, "hand metrics to the loggers every so many steps", check=_at_least(0)
    )
    fast_dev_run: bool | int = _option(
        False, "run this many batches (true: 1) of everything and save nothing", check=_at_least(0)
    )
    deterministic: bool | Literal["warn"] = _option(
        False, "use deterministic algorithms only; warn says where there is none"
    )
    compile: bool | str = _option(
        False, "torch.compile the model: true, or a backend's name; its weights keep their names"
    )
    seed: int = _option(0, "seed of Python, NumPy, torch and the order of the data", check=_at_least(0))
    num_threads: int | None = _option(
        None, "threads per rank, null divides the cores among the ranks", check=_at_least(1)
    )
    enable_progress_bar: bool = _option(True, "show a progress bar on a terminal")


@dataclass(frozen=True)
class StrategyOptions:
    """Section ``strategy``: its name, and beside it the strategy's own options."""

    name: Literal["auto", "single", "ddp", "deepspeed"] = _option(
        "auto", "how the model meets the hardware; auto is single for one rank, ddp for more (--strategy)"
    )
    options: dict[str, Any] = field(default_factory=dict, metadata={"doc": "the strategy's own options"})


@dataclass(frozen=True)
class LaunchOptions:
    """Section ``launch``: how ranks are started and ended. Times are in seconds."""

    launcher: Literal["auto", "inline", "torchrun", "deepspeed", "srun"] = _option(
        "auto", "what starts the ranks; auto is inline for one (--launcher)"
    )
    nproc: int | Literal["auto"] = _option(
        1, "ranks on this host; auto is the number of GPUs, or 1 (--nproc)", check=_at_least(1)
    )
    start_method: Literal["fork", "spawn"] = _option(
        "fork", "fork ranks from a process that has imported torch, or spawn a new interpreter for each"
    )
    nnodes: int = _option(1, "hosts, each with a command of its own (--nnodes)", check=_at_least(1))
    rdzv_endpoint: str | None = _option(
        None, "where several hosts meet: one of them, host:port (--rdzv-endpoint)"
    )
    rdzv_timeout_s: float = _option(
        600.0, "seconds within which all hosts must have come there", check=_at_least(1)
    )
    hostfile: str | None = _option(
        None, "hosts and their slots for the launcher deepspeed; null takes /job/hostfile where there is one"
    )
    include: str | None = _option(
        None, "of the launcher deepspeed: the hosts and slots to use, e.g. host1@host2:0,2"
    )
    exclude: str | None = _option(None, "of the launcher deepspeed: the hosts and slots not to use")
    deepspeed_launcher: Literal["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"] | None = _option(
        None, "by what the launcher deepspeed reaches several hosts; null is pdsh"
    )
    deepspeed_args: str | None = _option(
        None, "further arguments of the command deepspeed, as a shell has them"
    )
    master_addr: str | None = _option(None, "of the launcher deepspeed: the first host's address")
    grace_s: float | None = _option(
        None,
        "seconds that a stop may take before it is forced; null is 30 (--grace-s)",
        check=_at_least(0),
    )
    time_limit: float | None = _option(
        None,
        "time after which the run saves and exits 75 (--time-limit)",
        convert=duration_s,
        forms=DURATION_FORMS,
    )
    max_restarts: int = _option(
        0, "new attempts after a failure of a rank (--max-restarts)", check=_at_least(0)
    )
    hang_timeout_s: float | None = _option(
        None,
        "a rank whose work does not move for so many seconds (a step, a save and the set-up count too) has hung "
        "(--hang-timeout-s)",
        check=_at_least(1),
    )


@dataclass(frozen=True)
class SlurmOptions:
    """Section ``slurm``: what happens in a SLURM job."""

    requeue: Literal["scontrol", "exit-code", "none"] | None = _option(
        None, "who starts the job again; null is scontrol in a batch job, else exit-code"
    )
    max_requeues: int | None = _option(
        None, "requeue at most this often, null as often as it takes", check=_at_least(0)
    )
    hpc_save: bool = _option(
        True,
        "what is saved when the walltime draws near is an hpc checkpoint, which the job's next start takes; "
        "else it is one like that of any other stop",
    )
    signals: tuple[str, ...] = field(
        default=("SIGUSR1",),
        metadata={
            "doc": "signals that announce the end of the walltime",
            "check": _stop_signals,
            "convert": lambda node: tuple(coerce(node, list[str])),
            "forms": "a list of signals' names",
        },
    )


SECTION_TYPES: dict[str, type] = {
    "run": RunOptions,
    "trainer": TrainerOptions,
    "strategy": StrategyOptions,
    "launch": LaunchOptions,
    "slurm": SlurmOptions,
}
