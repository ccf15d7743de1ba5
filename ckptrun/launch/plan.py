"""Which processes will run, and by which command?

A pure function from options to a plan, so that ``--dry-run`` prints exactly what would be started.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptrun.environment.process import host_name
from ckptrun.errors import UsageError
from ckptrun.launch.deepspeed_command import DeepSpeedOptions, slots_of_hosts
from ckptrun.launch.deepspeed_command import command as deepspeed_command
from ckptrun.records import TaskFacts

_OF_RANKS = ("ddp", "deepspeed")  # strategies whose ranks are always processes of their own
TAKE_TURNS = "they will take turns"
ALSO_IMPORTED = "CKPTRUN_ALSO_IMPORTED"
"""Names the strategy whose library the process that ranks are forked from imports too."""


@dataclass(frozen=True)
class LaunchPlan:
    """What is started: ``inline`` is this very process, so ``argv`` is the command that was given.

    ``num_ranks`` are those of this host; ``env`` stands in the ranks' environment before torch is imported. Several
    hosts meet at ``rdzv_endpoint`` within ``rdzv_timeout_s`` seconds; where each is a ``task`` of SLURM's, they find
    each other without one.
    """

    launcher: str
    strategy: str
    num_ranks: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    num_hosts: int = 1
    rdzv_endpoint: str | None = None
    rdzv_timeout_s: float = 600.0
    task: TaskFacts | None = None
    control: str | None = None  # under DeepSpeed's launcher: the file in which the ranks find the supervisor
    everywhere: bool = False  # ... which may be on other hosts

    @property
    def local(self) -> tuple[int, int] | None:
        """Local rank and how many there are, where each of SLURM's tasks is a rank."""
        return (self.task.local, self.task.num_local) if self.task is not None and self.task.is_rank else None

    def __str__(self) -> str:
        if self.task is not None:
            what = "task" if self.task.is_rank else "node"
            return (
                f"{shlex.join(self.argv)}\n  {self._ranks()} in this {what}, one of {self.num_hosts} on "
                f"{', '.join(self.task.nodes)}, by {self.launcher}, strategy {self.strategy}"
            )
        if self.num_hosts > 1:
            return (
                f"{shlex.join(self.argv)}\n  {self._ranks()} on this host, one of {self.num_hosts} that meet at "
                f"{self.rdzv_endpoint}, by {self.launcher}, strategy {self.strategy}"
            )
        where = "in this process" if self.launcher == "inline" else f"by {self.launcher}"
        return f"{shlex.join(self.argv)}\n  {self._ranks()} {where}, strategy {self.strategy}"

    def _ranks(self) -> str:
        return _ranks(self.num_ranks)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def make_plan(
    *,
    launcher: str,
    strategy: str,
    num_ranks: int,
    command: Sequence[str],
    num_cores: int = 1,
    num_gpus: int = 0,
    num_threads: int | None = None,
    supervised: bool = False,
    watched: bool = False,
    num_hosts: int = 1,
    rdzv_endpoint: str | None = None,
    rdzv_timeout_s: float = 600.0,
    task: TaskFacts | None = None,
    deepspeed: DeepSpeedOptions | None = None,
    control: str = "",
    counted: bool = False,
) -> LaunchPlan:
    """The plan for one attempt.

    Args:
        strategy: ``auto`` is ddp for several ranks and single for one.
        num_threads: threads per rank; the cores divided among the ranks where None.
        supervised: restarts are asked for, which are better made with ranks in processes of their own.
        watched: hang detection is asked for, which needs ranks in processes of their own.
        num_hosts: each with a command of its own, which all meet at ``rdzv_endpoint``.
        task: which of SLURM's tasks runs this command, where there are several.
        deepspeed: options of DeepSpeed's launcher.
        control: the file for its ranks.
        counted: ``num_ranks`` is what this host has room for, and nobody's wish.

    Raises:
        UsageError: launcher, strategy and number of ranks do not go together, or several hosts have no endpoint.
    """
    if task is not None:
        num_hosts = _hosts_of_tasks(task, num_hosts, num_ranks)
        if task.is_rank:
            num_cores = min(num_cores, task.cpus) if task.cpus else max(1, num_cores // task.num_local)
            num_ranks = 1
    several = num_hosts > 1
    if launcher == "deepspeed":
        return _plan_for_deepspeed(
            deepspeed or DeepSpeedOptions(),
            strategy=strategy,
            nproc=num_ranks,
            control=control,
            num_cores=num_cores,
            num_gpus=num_gpus,
            num_threads=num_threads,
            several=several,
            counted=counted,
        )
    if several and task is None and not rdzv_endpoint:
        raise UsageError(
            f"{num_hosts} hosts are asked for, and no place where they meet.",
            hint="Name one of them, the same in each command: --rdzv-endpoint HOST:PORT.",
        )
    if several and launcher == "inline":
        raise UsageError(
            f"the inline launcher runs one rank on one host; asked for are {num_hosts} hosts.",
            hint="Use --launcher torchrun.",
        )
    if several and strategy == "single":
        raise UsageError(
            f"the strategy single is for one rank, and {num_hosts} hosts are asked for.",
            hint="Several ranks run with ddp: use --strategy ddp, or --nnodes 1.",
        )
    if num_ranks > 1 and strategy == "single":
        raise UsageError(
            f"the strategy single is for one rank, and {num_ranks} are asked for.",
            hint="Several ranks run with ddp: use --strategy ddp, or --nproc 1.",
        )
    if strategy == "auto":
        strategy = "ddp" if num_ranks > 1 or several else "single"
    if launcher == "auto":
        apart = num_ranks > 1 or supervised or watched or strategy in _OF_RANKS
        launcher = "torchrun" if apart else "inline"
    if launcher not in ("inline", "torchrun"):
        raise UsageError(
            f"launcher is {launcher!r}; this version has inline, torchrun and deepspeed.",
            hint="Use --launcher torchrun.",
        )
    if launcher == "inline" and (num_ranks > 1 or strategy in _OF_RANKS):
        raise UsageError(
            f"the inline launcher runs one rank with the strategy single; asked for are {num_ranks} with {strategy}.",
            hint="Use --launcher torchrun.",
        )
    if launcher == "inline" and watched:
        raise UsageError(
            "the inline launcher cannot tell a rank that hangs: it is this process.",
            hint="Use --launcher torchrun.",
        )
    warnings = _unused(deepspeed or DeepSpeedOptions(), launcher)
    if launcher == "inline":
        return LaunchPlan("inline", "single", 1, tuple(command), warnings=tuple(warnings))
    if rdzv_endpoint and not several:
        warnings.append("--rdzv-endpoint is for several hosts (--nnodes); this one meets nobody")
    warnings += _check_room(num_ranks, num_cores, num_gpus, hint=f"Use --nproc {num_gpus}.")
    return LaunchPlan(
        "torchrun",
        strategy,
        num_ranks,
        tuple(command),
        environment_of_ranks(
            num_ranks, num_cores=num_cores, num_threads=num_threads, strategy=strategy, num_gpus=num_gpus
        ),
        tuple(warnings),
        num_hosts,
        rdzv_endpoint if several else None,
        rdzv_timeout_s,
        task,
    )


def _hosts_of_tasks(task: TaskFacts, num_hosts: int, num_ranks: int) -> int:
    """How many commands take part: one for each task.

    Raises:
        UsageError: what is asked for is not what SLURM has started.
    """
    nodes = len(task.nodes)
    if num_hosts not in (1, nodes):
        raise UsageError(
            f"{num_hosts} hosts are asked for, and this step runs on {nodes}: {', '.join(task.nodes)}.",
            hint="Leave --nnodes out: SLURM says how many there are.",
        )
    if task.is_rank and num_ranks > 1:
        raise UsageError(
            f"SLURM has started {task.num_local} tasks on this node, and each is asked for {num_ranks} ranks.",
            hint=f"Either each task is a rank (leave --nproc out), or start one a node: srun --ntasks-per-node=1 with "
            f"--nproc {num_ranks}.",
        )
    return task.num_tasks


def _plan_for_deepspeed(
    options: DeepSpeedOptions,
    *,
    strategy: str,
    nproc: int,
    control: str,
    num_cores: int,
    num_gpus: int,
    num_threads: int | None,
    several: bool,
    counted: bool,
) -> LaunchPlan:
    if strategy not in ("auto", "deepspeed"):
        raise UsageError(
            f"DeepSpeed's launcher starts ranks for the strategy deepspeed; asked for is {strategy}.",
            hint="Use --strategy deepspeed, or --launcher torchrun.",
        )
    if several:
        raise UsageError(
            "--nnodes is for the same command on each host; DeepSpeed's launcher is started on one host only.",
            hint="Name them in a hostfile: launch.hostfile=FILE.",
        )
    slots = slots_of_hosts(options, nproc=nproc, num_gpus=num_gpus)
    me = host_name()
    here = {"localhost", "127.0.0.1", me, me.partition(".")[0]}
    num_here = sum(len(numbers) for host, numbers in slots.items() if host in here)
    fits = "Use --nproc {}." if options.hosts_file is None else "Let this host have slots={}."
    warnings = _check_room(num_here, num_cores, num_gpus, hint=fits.format(num_gpus))
    if nproc != 1 and not counted and {len(numbers) for numbers in slots.values()} != {nproc}:
        file = options.settled().hosts_file
        whose = (
            "what launch.include, exclude or deepspeed_args says" if file is None else f"the hostfile {file}"
        )
        in_all = _ranks(sum(map(len, slots.values())))
        warnings.insert(0, f"launch.nproc is {nproc} (--nproc), and {whose} counts: {in_all} in all")
    env = environment_of_ranks(
        max(1, num_here),
        num_cores=num_cores,
        num_threads=num_threads,
        strategy="deepspeed",
        num_gpus=num_gpus,
    )
    env.pop(ALSO_IMPORTED)  # its ranks are no forks
    everywhere = not here.issuperset(slots)
    if everywhere:
        # Some back ends take it to the other hosts; each rank finds out itself what is right where it is.
        env = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    return LaunchPlan(
        "deepspeed",
        "deepspeed",
        sum(map(len, slots.values())),
        deepspeed_command(options, num_ranks=nproc, control=control),
        env,
        tuple(warnings),
        control=control,
        everywhere=everywhere,
    )


def _unused(options: DeepSpeedOptions, launcher: str) -> list[str]:
    """What is to be said of options that only DeepSpeed's launcher has."""
    keys = {
        "hostfile": options.hostfile,
        "include": options.include,
        "exclude": options.exclude,
        "deepspeed_launcher": options.backend,
        "deepspeed_args": options.further,
        "master_addr": options.master_addr,
    }
    given = [f"launch.{key}" for key, value in keys.items() if value is not None]
    if not given:
        return []
    have = "has" if len(given) == 1 else "have"
    return [f"{', '.join(given)} {have} no effect with the launcher {launcher}: use --launcher deepspeed"]


def _check_room(num_ranks: int, num_cores: int, num_gpus: int, *, hint: str) -> list[str]:
    """What is to be said of so many ranks on this host.

    Raises:
        UsageError: there is no GPU for each of them.
    """
    if num_gpus and num_ranks > num_gpus:
        raise UsageError(f"{num_ranks} ranks are asked for, and this host has {num_gpus} GPUs.", hint=hint)
    if not num_gpus and num_ranks > num_cores:
        cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
        return [f"{num_ranks} ranks share {cores}; {TAKE_TURNS}"]
    return []


def environment_of_ranks(
    num_ranks: int,
    *,
    num_cores: int,
    num_threads: int | None = None,
    strategy: str | None = None,
    num_gpus: int = 0,
) -> dict[str, str]:
    """What must stand in the environment before torch is imported; arguments as for :func:`make_plan`."""
    env = {"OMP_NUM_THREADS": str(num_threads or max(1, num_cores // num_ranks))}
    if strategy == "deepspeed":
        env[ALSO_IMPORTED] = "deepspeed"
        if num_gpus == 0:
            env["DS_ACCELERATOR"] = "cpu"  # or it looks for a GPU, and warns that there is none
    return env
