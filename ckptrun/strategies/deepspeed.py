"""How does a model meet the hardware when DeepSpeed trains it? Its engine shards what ZeRO says, and makes the updates.

    training_step   through engine(...), so that stage 3 gathers what a forward pass needs
    backward, step  engine.backward, engine.step: it scales, accumulates, clips and steps
    save            the engine's own files, taken from it as they would be written (:meth:`collect`)
    restore         engine.load_checkpoint, which is handed those files as they are read (:meth:`load_sharded`)

The engine wraps the user's module itself, so that weights keep their names; for the length of one call the module's
``forward`` is ``training_step``. Reading and writing go through a checkpoint engine of ours in place of DeepSpeed's, so
that a save can be copied first and written in the background, is hashed on its way, and is read as everything else:
verified, and with ``weights_only=True``. What DeepSpeed reads past that engine, the universal format's files, is read
the same way (:func:`loading_through`).

Facts: deepspeed.initialize, DeepSpeedEngine (set_gradient_accumulation_boundary, save_checkpoint, load_checkpoint),
deepspeed.runtime.checkpoint_engine (save and load are all that touch files).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckptrun.deepspeed_config import OPTIONS, Given, check_installed, merged
from ckptrun.environment.process import host_name
from ckptrun.errors import IncompatibleError, MisconfigurationException
from ckptrun.inspect.deepspeed_files import DeepSpeedFiles
from ckptrun.strategies.deepspeed_ops import compile_op, find_ninja, forget_shared_memory, not_compiled
from ckptrun.strategies.ranks import RanksStrategy
from ckptrun.strategies.strategy import TrainedModule, shapes_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NOWHERE = "/ckptrun"  # what the engine believes to write to
_LOOK_EVERY_S = 0.02


class DeepSpeedStrategy(RanksStrategy):
    """Training with DeepSpeed's engine, ZeRO stages 0 to 3.

    Args:
        config: DeepSpeed's own config, a mapping or the name of a JSON file.
        stage: the ZeRO stage; 2 where neither this nor the config says.
        options: the others of :data:`ckptrun.deepspeed_config.OPTIONS`.

    Raises:
        MisconfigurationException: deepspeed is not installed, or the options cannot be served.
    """

    name = "deepspeed"
    restore_checkpoint_after_setup = True
    own_buffers = True
    takes_compiled = False
    updates_itself = True
    sharded = True

    def __init__(
        self,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        super().__init__(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
        )
        check_installed()
        self.load_full_weights = bool(options.pop("load_full_weights", False))
        self._options = {name: options[name] for name in OPTIONS if name in options}
        self._options |= options  # an unknown one is told of by ``merged``
        self._config = merged(self._options, None)
        self.stage = int(self._config["zero_optimization"]["stage"])
        self._half: torch.dtype | None = None
        self._engine: Any = None

    # -- set-up --------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        find_ninja()
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # About calls between torch and DeepSpeed, which no user can change.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

    def prepare(self, say: Callable[[str], None], stop_requested: Callable[[], bool]) -> None:
        """Have DeepSpeed's operations compiled, by the first rank of each host, while the others wait."""
        import deepspeed  # noqa: F401  # by all ranks at once, not by the others after the first has looked

        # By their hosts' names alone: what launchers number is a node, a task or an agent, each as it likes.
        first = self.gather_all(host_name()).index(host_name())
        done = f"ops/{first}"
        if self.rank != first:
            while self.look(done) is None and not stop_requested():
                time.sleep(_LOOK_EVERY_S)
            return
        for name in not_compiled(self._config):
            say(
                f"DeepSpeed compiles its operation {name.removesuffix('Builder')}, once on this machine: half a minute "
                "or more"
            )
            if not compile_op(name, stop_requested):
                return
        self.post(done, b"1")

    def connect(self, given: Given) -> None:
        """Take what the trainer's options and the data loader say of updates.

        Raises:
            MisconfigurationException: DeepSpeed's config says something else.
        """
        self._config = merged(self._options, given)
        if given.micro_batch_size is None:
            # A loader that does not tell; DeepSpeed wants a number, and only counts samples with it.
            self._config.setdefault("train_micro_batch_size_per_gpu", 1)
        self._half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(given.precision)

    def setup(
        self, module: TrainedModule, optimizers: Sequence[Optimizer], schedulers: Sequence[Any] = ()
    ) -> Sequence[Optimizer]:
        """Make the engine; weights are those of rank 0 from here on, and with stage 3 in parts on all ranks."""
        import deepspeed
        from deepspeed.runtime.config import DeepSpeedConfigError
        from deepspeed.runtime.zero.utils import ZeRORuntimeException

        self._check_optimizers(optimizers, schedulers)
        if self.stage == 3 and optimizers:
            _check_held(module, optimizers[0])
        arguments: dict[str, Any] = {"model": module, "config": self._config, "dist_init_required": False}
        if optimizers:
            arguments["optimizer"] = optimizers[0]
        else:
            arguments["model_parameters"] = [p for p in module.parameters() if p.requires_grad]
        self._name_device()
        with _in_silence():
            backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
            deepspeed.init_distributed(
                backend, auto_mpi_discovery=False, timeout=self._timeout, verbose=False
            )
            self.barrier()
            forget_shared_memory(self.rank)
            try:
                self._engine, *_ = deepspeed.initialize(**arguments)
            except (ValueError, AssertionError, DeepSpeedConfigError, ZeRORuntimeException) as error:
                raise MisconfigurationException(f"DeepSpeed refuses this set-up: {error}") from error
        return optimizers or [_innermost(self._engine.optimizer)]

    def _name_device(self) -> None:
        """DeepSpeed takes LOCAL_RANK for the device's number; where a rank sees only its own GPUs it is another."""
        if self.root_device.type == "cuda":
            os.environ["LOCAL_RANK"] = str(self.root_device.index)

    def _check_optimizers(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        for name, own in (("optimizer", optimizers), ("scheduler", schedulers)):
            inner = self._config.get(name)
            if inner is not None and own:
                kind = type(getattr(own[0], "scheduler", own[0])).__name__
                raise MisconfigurationException(
                    f"configure_optimizers returned {kind}, and strategy.config has {name}: "
                    f"{inner.get('type', inner)!r}.",
                    hint="Leave one of them out.",
                )
        if len(optimizers) > 1:
            raise MisconfigurationException(
                f"configure_optimizers returned {len(optimizers)} optimizers; DeepSpeed trains with one.",
                hint="Return one, or use another strategy.",
            )
        if not optimizers and "optimizer" not in self._config:
            raise MisconfigurationException(
                "There is no optimizer: configure_optimizers returned none, and strategy.config has none.",
                hint="Return one from configure_optimizers, or set strategy.config.optimizer.",
            )

    # -- steps ---------------------------------------------------------------------------------------------

    def training_step(self, module: TrainedModule, *args: Any) -> Any:
        return self._through_engine(module, module.training_step, args)

    def evaluation_step(self, module: Any, step: Callable[..., Any], *args: Any) -> Any:
        if self._engine is None:
            return step(*args)
        return self._through_engine(module, step, args)

    def _through_engine(self, module: Any, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """``step`` as the module's ``forward`` for one call, around which the engine does what it has to."""
        own = module.__dict__
        before = own.get("forward")

        def forward(*inner: Any) -> Any:
            put_back()
            return step(*inner)

        def put_back() -> None:
            own.pop("forward", None)
            if before is not None:
                own["forward"] = before

        own["forward"] = forward
        try:
            return self._engine(*args)
        finally:
            put_back()

    @property
    def collective_forward(self) -> bool:  # type: ignore[override]
        return self._engine is not None and self.stage == 3

    def begin_batch(self, *, ends_window: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(ends_window)

    def backward(self, loss: Tensor, module: TrainedModule, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._engine.backward(loss, *args, **kwargs)

    def step(self) -> None:
        self._engine.step()

    @property
    def in_step(self) -> bool:
        return True

    @property
    def casts(self) -> bool:  # type: ignore[override]
        return self._half is not None

    def cast(self, batch: Any) -> Any:
        """The batch's floating point tensors in the precision of the engine's weights."""
        if self._half is None or self._engine is None:
            return batch
        return _cast(batch, self._half)

    # -- state -----------------------------------------------------------------------------------------------

    def model_state_dict(self, module: TrainedModule) -> dict[str, Any]:
        if self._engine is None:
            return super().model_state_dict(module)
        raise MisconfigurationException(
            "Under the strategy deepspeed all ranks save weights, in DeepSpeed's files; they cannot be had as one "
            "state_dict."
        )

    def collect(self, *, tag: str, weights_only: bool) -> dict[str, Any]:
        """What the engine would write now on this rank: each file's path inside the checkpoint and its content. Tensors
        are not copied. All ranks have to call it."""
        engine = self._engine
        collector = _collector(weights_only=weights_only)
        before, engine.checkpoint_engine = engine.checkpoint_engine, collector
        engine._copy_recovery_script = lambda _: None
        try:
            with torch.no_grad():
                engine.save_checkpoint(_NOWHERE, tag=tag, save_latest=False)
        finally:
            engine.checkpoint_engine = before
            del engine._copy_recovery_script
        return {os.path.relpath(path, _NOWHERE): state for path, state in collector.files.items()}

    def shards_note(self, tag: str) -> dict[str, Any]:
        from deepspeed import __version__

        states = _innermost(self._engine.optimizer).state.values()
        return {
            "stage": self.stage,
            "tag": tag,
            "universal": False,
            "version": __version__,
            "optimizer_state": sorted({key for state in states for key in state}),
        }

    def load_sharded(
        self, folder: str, *, tag: str, read: Callable[[str], Any], universal: bool = False
    ) -> None:
        """Put back what :meth:`collect` gave, or what DeepSpeed's converter made of it.

        Args:
            folder: the checkpoint.
            read: gives the verified content of a file, by its path inside the checkpoint.

        Raises:
            IncompatibleError: the weights do not fit the model, or the optimizer's state the optimizer.
        """
        from deepspeed.runtime.zero.utils import ZeRORuntimeException

        engine = self._engine

        def read_shard(path: str) -> Any:
            content = read(os.path.relpath(path, folder))
            if not universal and isinstance(content, dict):
                self._check_parameters(content.get("param_shapes") or [])
            return content

        engine.checkpoint_engine = _reader(read_shard)
        engine._config.load_universal_checkpoint = universal
        if universal:
            # All ranks find the model's file under one name, however many there were and are.
            engine._get_all_ckpt_names = lambda folder, tag: [_model_states(os.path.join(folder, tag))]
        try:
            with _in_silence(), loading_through(folder, read), _parts_of_padding(engine.optimizer):
                path, _ = engine.load_checkpoint(folder, tag=tag)
            if universal:
                self._finish_universal(lambda name: read(f"{tag}/zero/{name}/fp32.pt")["param"])
        except (
            RuntimeError, LookupError, AssertionError, ValueError, TypeError, AttributeError, ZeRORuntimeException
        ) as error:  # fmt: skip
            first = str(error).strip().replace("\n\t", " ").split("\n", 1)[0]
            raise IncompatibleError(
                f"DeepSpeed cannot load {folder}: {type(error).__name__}: {first}",
                hint="Use the model and the optimizer it was trained with, or start another run from its weights "
                "(--run NAME --init-from PATH).",
            ) from error
        finally:
            engine._config.load_universal_checkpoint = False
            engine.__dict__.pop("_get_all_ckpt_names", None)
        if path is None:
            raise IncompatibleError(f"DeepSpeed finds no checkpoint of its own in {folder}.")

    def _check_parameters(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Whether the parameters lie in their groups as they did: DeepSpeed's flat tensors have no names.

        Raises:
            IncompatibleError: the same parameters lie in others, or in another order.
        """
        own = self._engine._get_zero_param_shapes() if saved else []
        then, now = (
            [(number, name) for number, group in enumerate(groups) for name in group]
            for groups in (saved, own)
        )
        if then == now or {name for _, name in then} != {name for _, name in now}:
            return  # other parameters than before are told of by DeepSpeed
        moved = next(before[1] for before, after in zip(then, now, strict=True) if before != after)
        raise IncompatibleError(
            f"The parameters lie in other groups or in another order than when the checkpoint was written; {moved} is "
            "where the difference begins.",
            hint="Group them as before (sub_group_size and round_robin_gradients too), or start another run from its "
            "weights (--run NAME --init-from PATH).",
        )

    def load_model_state_dict(self, module: TrainedModule, state: Mapping[str, Any]) -> None:
        """Weights from a plain checkpoint, each parameter as a whole only while it is put in."""
        if self._engine is None:
            super().load_model_state_dict(module, dict(state))
            return
        self._check_names(module, state)
        for name, parameter in module.named_parameters():  # type: ignore[attr-defined]
            with self._whole(parameter), torch.no_grad():
                if self.rank == 0 or not hasattr(parameter, "ds_id"):
                    parameter.copy_(state[name])
        for name, buffer in module.named_buffers():  # type: ignore[attr-defined]
            if name in state:
                buffer.copy_(state[name])
        self._renew_masters()

    def _check_names(self, module: Any, state: Mapping[str, Any]) -> None:
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
        given = shapes_of(state)
        wrong = [name for name in shapes if given.get(name) != shapes[name]]
        known = {*shapes, *module.state_dict()}
        wrong += [name for name in state if name not in known]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise IncompatibleError(
                f"The weights do not fit the model: {', '.join(wrong[:5])}{more} are missing, of another shape, or not "
                "the model's.",
                hint="Use the model they were trained with.",
            )

    def _whole(self, parameter: Any) -> contextlib.AbstractContextManager[Any]:
        """The parameter as a whole on every rank; what rank 0 makes of it counts."""
        if not hasattr(parameter, "ds_id"):
            return contextlib.nullcontext()
        import deepspeed

        gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            [parameter], modifier_rank=0
        )
        return gathered

    def _renew_masters(self) -> None:
        """What the optimizer keeps of the weights in full precision follows from them."""
        optimizer = self._engine.optimizer
        for name in ("refresh_fp32_params", "_restore_from_bit16_weights"):
            if hasattr(optimizer, name):
                getattr(optimizer, name)()
                return

    def _finish_universal(self, read: Callable[[str], Tensor]) -> None:
        """What DeepSpeed leaves out of the universal format, or does wrong.

        Args:
            read: gives a parameter as a whole.

        Raises:
            RuntimeError: one does not fit.
        """
        engine = self._engine
        # Stage 3 puts one tensor into the state of each group of parameters, and each would count it up.
        for state in _innermost(engine.optimizer).state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()
        # Parameters that the optimizer does not hold are not loaded.
        loaded = {name for group in engine._get_zero_param_shapes() for name in group}
        for name, parameter in engine.module.named_parameters():
            if name in loaded:
                continue
            value = read(name)
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if tuple(value.shape) != shape:
                raise RuntimeError(f"{name} is {list(value.shape)}, and the model's is {list(shape)}")
            with self._whole(parameter), torch.no_grad():
                if self.rank == 0 or not hasattr(parameter, "ds_id"):
                    parameter.copy_(value)

    # -- end -------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            with _in_silence():
                engine.destroy()

    def classes(self) -> list[type]:
        return classes_in_files()


def _check_held(module: Any, optimizer: Optimizer) -> None:
    """In stage 3 DeepSpeed saves of the trained parameters those that the optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise MisconfigurationException(
            f"{', '.join(lost[:3])}{more}: trained, and in no group of the optimizer. In ZeRO stage 3 DeepSpeed "
            "does not save such a parameter.",
            hint="Give it to the optimizer, or freeze it with requires_grad_(False).",
        )


def classes_in_files() -> list[type]:
    """What occurs in the engine's files besides tensors and plain values; plain data all of them."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _collector(*, weights_only: bool) -> Any:
    """In place of DeepSpeed's checkpoint engine: keeps what is to be saved."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class Collector(CheckpointEngine):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.files: dict[str, Any] = {}

        def create(self, info: Any) -> None: ...
        def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

        def commit(self, info: Any) -> bool:  # noqa: ARG002
            return True

        def save(self, state_dict: Any, path: str) -> None:
            self.files[path] = _weights_of(state_dict) if weights_only else state_dict

        def load(self, path: str, map_location: Any = None) -> Any:
            raise NotImplementedError

    return Collector()


def _reader(read: Callable[[str], Any]) -> Any:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class Reader(CheckpointEngine):  # type: ignore[misc]
        def create(self, info: Any) -> None: ...

        def commit(self, info: Any) -> bool:  # noqa: ARG002
            return True

        def save(self, state_dict: Any, path: str) -> None:
            raise NotImplementedError

        def load(self, path: str, map_location: Any = None) -> Any:  # noqa: ARG002
            return read(path)

    return Reader()


@contextlib.contextmanager
def loading_through(folder: str, read: Callable[[str], Any]) -> Iterator[None]:
    """For a while ``torch.load`` gives what ``read`` makes of a file below ``folder``, and of others weights only.

    The files of the universal format DeepSpeed reads by itself, past its checkpoint engine, and with
    ``weights_only=False``.
    """
    real = torch.load

    def load(f: Any, *args: Any, **options: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            path = os.path.relpath(f, folder)
            if not path.startswith(os.pardir):
                return read(path)
        return real(f, *args, **{**options, "weights_only": True})

    torch.load = load
    try:
        yield
    finally:
        torch.load = real


def _model_states(folder: str) -> str:
    """The file with what every rank's part has in common."""
    found = DeepSpeedFiles.of(f"{os.path.basename(folder)}/{name}" for name in os.listdir(folder))
    return os.path.join(os.path.dirname(folder), found.model_states[0])


_MOMENTS = ("base_optimizer_state", "optimizer_state_dict")


def _weights_of(state: dict[str, Any]) -> dict[str, Any]:
    """A file of the engine without what only an optimizer needs; weights in full precision stay."""
    inner = state.get("optimizer_state_dict")
    if isinstance(inner, dict):
        return {**state, "optimizer_state_dict": {k: v for k, v in inner.items() if k not in _MOMENTS}}
    return {**state, "optimizer": None, "lr_scheduler": None}


def _innermost(optimizer: Any) -> Any:
    """The optimizer of torch's kind inside of the engine's wrappers."""
    while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


class _NoFragment:
    """In place of where in a rank's part a parameter lies."""

    def get_optim_state_keys(self) -> list[str]:
        return []


@contextlib.contextmanager
def _parts_of_padding(optimizer: Any) -> Iterator[None]:
    """Where a rank's part of a small group of parameters is padding alone, DeepSpeed takes the first of no parameters
    when it loads the universal format. It is given one that has nothing to load."""
    groups = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", None) or ()
    given = [
        group[0] for group in groups if group and all(getattr(p, "_hp_mapping", 0) is None for p in group)
    ]
    before = [parameter.load_hp_checkpoint_state for parameter in given]
    for parameter in given:
        parameter._hp_mapping = _NoFragment()
        parameter.load_hp_checkpoint_state = lambda *_, **__: None
    try:
        yield
    finally:
        for parameter, own in zip(given, before, strict=True):
            parameter._hp_mapping = None
            parameter.load_hp_checkpoint_state = own


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """What DeepSpeed prints while it is set up is of no use to anybody."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
