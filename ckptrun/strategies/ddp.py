"""How does a model meet the hardware when several ranks each hold a copy? DistributedDataParallel.

Gradients go over the device's backend (gloo on CPU, nccl on CUDA).

Facts: torch.nn.parallel.DistributedDataParallel; its reducer has to be told before a backward pass that it did not see
a forward for (manual optimization).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ckptrun.strategies.ranks import RanksStrategy
from ckptrun.strategies.strategy import TrainedModule

if TYPE_CHECKING:
    from torch.optim import Optimizer


class _TrainingStep(nn.Module):
    """Makes ``training_step`` the forward that DDP wraps."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)


class DDPStrategy(RanksStrategy):
    """Data parallel training with one full copy of the model a rank.

    Args:
        find_unused_parameters: for models that do not use every parameter in every step; where not given, True with
            manual optimization, where each backward pass may be that of another part of the model.
        bucket_cap_mb: size of the gradient buckets in MiB.
        static_graph: the graph is the same in every step.
        gradient_as_bucket_view: gradients are views of the buckets, which saves a copy of them.
        broadcast_buffers: buffers of rank 0 go to all ranks before each forward.
        process_group_backend: ``gloo`` or ``nccl``; by the device where not given.
        timeout_s: seconds after which a collective that nobody answers is an error.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        find_unused_parameters: bool | None = None,
        bucket_cap_mb: int | None = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool | None = None,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
        )
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            **({} if broadcast_buffers is None else {"broadcast_buffers": broadcast_buffers}),
        }
        self._find_unused = find_unused_parameters
        self._broadcasts_buffers = broadcast_buffers is not False
        self._ddp: DistributedDataParallel | None = None
        self._manual = False

    def setup(
        self,
        module: TrainedModule,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any] = (),  # noqa: ARG002
    ) -> Sequence[Optimizer]:
        """Wrap the training step; from here on weights are those of rank 0 on all ranks."""
        self._manual = not module.automatic_optimization
        if any(parameter.requires_grad for parameter in module.parameters()):
            device_ids = [self.root_device] if self.root_device.type == "cuda" else None
            self._ddp = DistributedDataParallel(
                _TrainingStep(module),
                device_ids=device_ids,
                find_unused_parameters=self._manual if self._find_unused is None else self._find_unused,
                **self._options,
            )
        return optimizers

    def training_step(self, module: TrainedModule, *args: Any) -> Any:
        if self._ddp is None:
            return module.training_step(*args)
        if not self._manual:
            return self._ddp(*args)
        # The backward passes happen inside this forward; each prepares the reducer for itself.
        # Nor does the forward before it say whether this one has buffers to take over from rank 0: each one has.
        self._ddp.require_forward_param_sync = True
        self._ddp.require_backward_grad_sync = False
        try:
            return self._ddp(*args)
        finally:
            self._ddp.require_backward_grad_sync = True

    def backward(self, loss: Tensor, module: TrainedModule, *args: Any, **kwargs: Any) -> None:
        ddp = self._ddp
        if ddp is not None and self._manual:
            ddp.require_backward_grad_sync = True
            ddp.require_forward_param_sync = True
            unused = ddp.find_unused_parameters and not ddp.static_graph
            found = list(_find_tensors(loss)) if unused else []  # type: ignore[no-untyped-call]
            ddp.reducer.prepare_for_backward(found)
            module.backward(loss, *args, **kwargs)
            ddp.require_backward_grad_sync = False
            return
        module.backward(loss, *args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Inside an accumulation window: gradients stay on the rank."""
        return contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync()

    def sync_gradients(self, module: TrainedModule) -> None:
        if self._ddp is None:
            return
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # A parameter may have been used by some ranks only; each collective needs all of them.
        used = self.agree([parameter.grad is not None for parameter in trained])
        for parameter, anywhere in zip(trained, used, strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size

    @property
    def own_buffers(self) -> bool:  # type: ignore[override]
        return not self._broadcasts_buffers

    def sync_buffers(self, module: TrainedModule) -> None:
        if self._ddp is None or self.own_buffers:
            return
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)

    @property
    def in_step(self) -> bool:
        return self._ddp is not None and not self._manual

    @property
    def syncs(self) -> bool:
        return self._ddp is not None and bool(self._ddp.require_backward_grad_sync)

    def let_go(self) -> None:
        self._ddp = None
