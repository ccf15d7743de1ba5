"""How does a training write down what each of its steps saw and left?

A callback that is added where the environment variable ``CKPTRUN_STEP_TRACE`` asks for it, as ``ckptrun selftest``
does. It hashes and changes nothing: no random number is drawn, no state is kept in a checkpoint. It also asks for the
stop that the variable names, the way that a user would: by a signal.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from ckptrun.fit.callback import Callback
from ckptrun.fit.random_state import capture_random_state
from ckptrun.run.step_trace import VARIABLE, Request

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ckptrun.fit.module import Module
    from ckptrun.fit.trainer import Trainer

_HEARD_S = 60.0  # how long a signal may take to be known; milliseconds, on a machine that is not overloaded


def step_trace_from_environment() -> list[Callback]:
    """The callback that the environment asks for; no callback where it does not."""
    text = os.environ.get(VARIABLE)
    return [] if not text else [StepTrace(Request.from_json(text))]


class StepTrace(Callback):
    """Writes one line a moment; see :mod:`ckptrun.run.step_trace`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._began = False

    @property
    def state_key(self) -> str:
        return "ckptrun.StepTrace"

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._began = True
        self._write(trainer, "begin", {"parameter": _tensors(pl_module.named_parameters())})

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        hashes = {name: digest(leaf) for name, leaf in leaves(batch, "batch")}
        self._write(trainer, "batch", {"batch": hashes, "random state": _random()})
        self._stop(trainer, "batch")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Module, optimizer: Optimizer) -> None:
        rates = {
            f"optimizer {number}, group {index}": repr(float(group["lr"]))
            for number, each in enumerate(trainer.optimizers)
            for index, group in enumerate(each.param_groups)
            if "lr" in group
        }
        self._write(trainer, "update", {"learning rate": rates})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        after = {
            "random state": _random(),
            "parameter": _tensors(pl_module.named_parameters()),
            "buffer": _tensors(pl_module.named_buffers()),
            "optimizer state": dict(_optimizer_states(trainer, pl_module)),
        }
        # The position already is the one after this batch.
        self._write(trainer, "after", after, number=batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: Module) -> None:
        if trainer.fit_loop is not None and not trainer.sanity_checking and self._began:
            self._write(trainer, "validation")
            self._stop(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._write(trainer, "epoch end")
        self._stop(trainer, "epoch end")

    def _write(
        self,
        trainer: Trainer,
        moment: str,
        facts: Mapping[str, dict[str, str]] | None = None,
        *,
        number: int | None = None,
    ) -> None:
        loop = trainer.fit_loop
        assert loop is not None
        at = {
            "step": loop.global_step,
            "epoch": loop.epoch,
            "number": loop.batch if number is None else number,
        }
        line = {"moment": moment, **at, **(facts or {})}
        # Opened for each line: no hook tells of every end that a training can have.
        with open(self._request.path(trainer.global_rank), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _stop(self, trainer: Trainer, moment: str) -> None:
        """Ask for the stop if this is its moment, and go on once every rank knows of it."""
        stop, loop = self._request.stop, trainer.fit_loop
        assert loop is not None
        if stop is None or (stop.moment, stop.epoch, stop.batch) != (moment, loop.epoch, loop.batch):
            return
        source = trainer.context.stop
        if trainer.is_global_zero and source.request is None:
            os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + _HEARD_S
        while source.request is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the stop {stop} was not heard of within {_HEARD_S:g} s")
            time.sleep(0.001)
        if trainer.agreement is not None:
            # Between two times that are due; without it, ranks would ask each other only some steps later.
            trainer.agreement.ask()


# -- hashes ----------------------------------------------------------------------------------------------------


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in a batch that holds no more, with its place in it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from leaves(each, f"{name}[{index}]")
    else:
        yield name, value


def digest(value: Any) -> str:
    """A hash of a leaf: of a tensor's type, shape and bits; of the pickle of anything else."""
    if isinstance(value, Tensor):
        return _digest_tensor(value)
    if value is None or isinstance(value, str | int | float | bytes):
        return xxhash.xxh3_64_hexdigest(f"{type(value).__name__} {value!r}".encode())
    try:
        return xxhash.xxh3_64_hexdigest(pickle.dumps(value))
    except Exception:  # a user's object may raise anything; that there was one is all that can be said
        return type(value).__qualname__


def _digest_tensor(tensor: Tensor) -> str:
    hashed = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.cpu().contiguous().reshape(-1)
    if plain.is_quantized:
        plain = plain.int_repr()
    hashed.update(plain.view(torch.uint8).numpy().data)
    return str(hashed.hexdigest())


def _tensors(named: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: _digest_tensor(tensor) for name, tensor in named}


def _random() -> dict[str, str]:
    state = capture_random_state()
    # Leaf by leaf: the pickle of a tensor names the place where it lies.
    found = {
        name: " ".join(digest(leaf) for _, leaf in leaves(state[name], name))
        for name in ("python", "numpy", "torch")
    }
    for index, device in enumerate(state.get("cuda", ())):
        found[f"cuda:{index}"] = _digest_tensor(device)
    return found


def _optimizer_states(trainer: Trainer, module: Module) -> Iterator[tuple[str, str]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, (parameter, state) in enumerate(optimizer.state.items()):
            owner = names.get(id(parameter), f"parameter {index}")
            entries = state.items() if isinstance(state, Mapping) else ()
            for key, value in entries:
                yield f"{key} of {owner} (optimizer {number})", digest(value)
