"""What must a strategy be able to do? The seam between the loops and the hardware.

The loops call nothing else to place a model, to compute gradients, to exchange values between ranks or to get at
state. Siblings (``ddp``, ``deepspeed``) override what differs; the loops do not know which one runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ckptrun.deepspeed_config import Given
from ckptrun.errors import IncompatibleError
from ckptrun.strategies.compiled import for_checkpoint, for_module, plain_names

if TYPE_CHECKING:
    from torch.optim import Optimizer


class TrainedModule(Protocol):
    """What a strategy needs of a user's module."""

    automatic_optimization: bool

    def training_step(self, *args: Any) -> Any: ...
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def buffers(self) -> Iterator[Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...
    def to(self, device: torch.device) -> Any: ...


class Strategy:
    """One process; also the base of all others."""

    name = "single"
    restore_checkpoint_after_setup = False
    """Whether weights are restored after :meth:`setup` (a strategy that shards them) or before."""

    own_buffers = False
    """Whether each rank has buffers of its own, which a checkpoint has to keep besides those of rank 0."""

    takes_compiled = True
    """Whether a model that is compiled, wholly or in part, can be trained."""

    updates_itself = False
    """Whether the strategy scales, accumulates, clips and steps, in place of the loop."""

    sharded = False
    """Whether every rank saves a part of weights and optimizer state, in files of the strategy's own."""

    collective_forward = False
    """Whether no rank can finish a forward pass that another has not begun."""

    casts = False
    """Whether :meth:`cast` changes anything."""

    load_full_weights = False
    """Whether training may go on from a checkpoint whose weights are whole, where this strategy saves parts."""

    def __init__(self, *, rank: int = 0, local_rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0

    @property
    def root_device(self) -> torch.device:
        """Where this rank's model is: the GPU of its local number, else the CPU.

        Where each task of SLURM's sees only its own GPUs there are fewer than ranks: any of them is nobody else's.
        """
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    def setup_environment(self) -> None:
        """Join the other ranks; nothing for one."""
        if self.root_device.type == "cuda":
            torch.cuda.set_device(self.root_device)

    def place(self, module: TrainedModule) -> None:
        """Move the module to its device, before optimizers are built."""
        module.to(self.root_device)

    def prepare(self, say: Callable[[str], None], stop_requested: Callable[[], bool]) -> None:
        """Make what has to be made once on a machine; comes back at once where a stop is requested meanwhile."""

    def connect(self, given: Given) -> None:
        """Take what the options say of updates, before :meth:`setup`."""

    def setup(
        self,
        module: TrainedModule,  # noqa: ARG002
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any] = (),  # noqa: ARG002
    ) -> Sequence[Optimizer]:
        """Wrap the module for training; called once optimizers exist. Returns those that are stepped."""
        return optimizers

    def training_step(self, module: TrainedModule, *args: Any) -> Any:
        return module.training_step(*args)

    def evaluation_step(self, module: TrainedModule, step: Callable[..., Any], *args: Any) -> Any:  # noqa: ARG002
        """One of the module's other steps."""
        return step(*args)

    def cast(self, batch: Any) -> Any:
        """The batch in the precision that the model takes."""
        return batch

    def begin_batch(self, *, ends_window: bool) -> None:
        """Before the forward pass of a batch; for a strategy that makes the updates itself."""

    def step(self) -> None:
        """After each batch; for a strategy that makes the updates itself."""

    def backward(self, loss: Tensor, module: TrainedModule, *args: Any, **kwargs: Any) -> None:
        """Compute gradients through the module's own ``backward``."""
        module.backward(loss, *args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Around the backward passes of an accumulation window but the last."""
        return contextlib.nullcontext()

    @property
    def in_step(self) -> bool:
        """Whether no rank can finish a step of training that another has not begun (automatic optimization)."""
        return False

    @property
    def syncs(self) -> bool:
        """Whether the next backward pass waits for those of the other ranks."""
        return False

    def sync_buffers(self, module: TrainedModule) -> None:
        """Before an evaluation: every rank evaluates with the buffers that a checkpoint would hold."""

    def sync_gradients(self, module: TrainedModule) -> None:
        """Average gradients that were computed inside :meth:`no_sync` only."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        return value

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value in order, on rank 0; None elsewhere."""
        return [value]

    def gather_all(self, value: Any) -> list[Any]:
        """Every rank's value in order, on all ranks."""
        return [value]

    def all_here(self, point: str, patience_s: float) -> bool:  # noqa: ARG002
        """Whether all ranks are at ``point``, where this one is and the others may not be.

        The same answer on every rank that asks: False on all of them where some do not come within ``patience_s``
        seconds. No collective, so whoever does not come is not disturbed.

        Args:
            point: a name that was not asked for before.
        """
        return True

    def agree(self, words: Sequence[int]) -> list[int]:
        """The maximum over ranks of each of a few small numbers, over a CPU channel."""
        return list(words)

    def model_state_dict(self, module: TrainedModule) -> dict[str, Any]:
        """Weights and buffers, without any wrapper's prefix."""
        return for_checkpoint(module, module.state_dict())  # type: ignore[arg-type]

    def load_model_state_dict(self, module: TrainedModule, state: Mapping[str, Any]) -> None:
        """Load weights strictly.

        Raises:
            IncompatibleError: names or shapes differ; the message names them.
        """
        if not isinstance(state, dict):
            self._load_one_by_one(module, state)
            return
        state = for_module(module, state)  # type: ignore[arg-type]
        _check_fit(state, module.state_dict())
        module.load_state_dict(state)

    def _load_one_by_one(self, module: TrainedModule, state: Mapping[str, Any]) -> None:
        """From a mapping that makes each value when it is asked for it: never all of them at once."""
        own = {**module.state_dict()}
        names = plain_names(module)  # type: ignore[arg-type]
        own = {names.get(name, name): value for name, value in own.items()}
        _check_fit(state, own)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(state[name])

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def collect(self, *, tag: str, weights_only: bool) -> dict[str, Any]:  # noqa: ARG002
        """This rank's part of a checkpoint, where it is sharded: the content of each file by its path."""
        return {}

    def classes(self) -> list[type]:
        """Plain data classes that occur in what :meth:`collect` gives."""
        return []

    def shards_note(self, tag: str) -> dict[str, Any]:  # noqa: ARG002
        """What the manifest says of a sharded checkpoint, for readers that have only that."""
        return {}

    def load_sharded(
        self, folder: str, *, tag: str, read: Callable[[str], Any], universal: bool = False
    ) -> None:
        """Put back what :meth:`collect` gave."""
        raise NotImplementedError

    def post(self, key: str, value: bytes) -> None:
        """Lay ``value`` down where every rank can :meth:`look` for it."""

    def look(self, key: str) -> bytes | None:  # noqa: ARG002
        """What a rank has laid down under ``key``; None as long as there is nothing."""
        return None

    def forget(self, key: str) -> None:
        """Take away what was laid down."""

    def teardown(self, *, failed: bool = False) -> None:
        """Leave the other ranks. ``failed``: this rank or another has failed, so nobody is waited for."""


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, without making one where the mapping knows them."""
    known: dict[str, tuple[int, ...]] | None = getattr(state, "shapes", None)
    if known is not None:
        return known
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def _check_fit(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises: IncompatibleError: names or shapes differ."""
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    given, wanted = shapes_of(state), shapes_of(own)
    shapes = [
        f"{name}: saved {given[name]}, model {shape}"
        for name, shape in wanted.items()
        if name in given and given[name] != shape
    ]
    if not (missing or unexpected or shapes):
        return
    parts = [
        f"{what} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape:", shapes))
        if names
    ]
    raise IncompatibleError(
        f"The checkpoint's weights do not fit the model: {'; '.join(parts)}.",
        hint="Use the model it was trained with, or start another run (--run NAME) of this one.",
    )
