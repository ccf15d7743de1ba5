"""What is in a checkpoint, and how is it put back?

The keys are Lightning's, so that its users find their way; ``ckptrun`` holds what Lightning has no key for.

    state.ckpt      state_dict, optimizer_states, lr_schedulers, loops, callbacks, epoch, global_step,
                    hyper_parameters, MixedPrecision, <DataModule's name>, ckptrun {logs, loggers, seed, threads}
    rank-0000.ckpt  the rank's random state and what its loader needs to go on

Restoring goes in the order that Lightning documents: on_load_checkpoint, weights, datamodule, callbacks, precision,
then loops, optimizers, LR schedulers; the data position and the random state come last, from the loop, which knows
when.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckptrun._version import __version__
from ckptrun.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from ckptrun.checkpoint.safe_state import decode, encode
from ckptrun.checkpoint.state_file import map_state, read_state
from ckptrun.errors import DamagedCheckpointError, IncompatibleError, NoCheckpointError
from ckptrun.fit.configured import check, put_in
from ckptrun.fit.optimizers import scheduler_state
from ckptrun.fit.random_state import RandomState, capture_random_state
from ckptrun.inspect.deepspeed_files import NOTE, Foreign, foreign
from ckptrun.records import CheckpointRecord, Damage, FileRecord
from ckptrun.storage.retry import retried
from ckptrun.strategies.compiled import for_checkpoint, for_module

if TYPE_CHECKING:
    from ckptrun.fit.trainer import Trainer

STATE_FILE = "state.ckpt"


def rank_file(rank: int) -> str:
    """Name of a rank's own file."""
    return f"rank-{rank:04d}.ckpt"


class Boundary:
    """What cannot be read off later: taken at a boundary, used where a save happens after something moved on."""

    def __init__(self, trainer: Trainer, *, with_callbacks: bool) -> None:
        loop = trainer.fit_loop
        assert loop is not None
        self.random: RandomState = capture_random_state()
        self.loop = loop.state_dict()
        self.buffers = _buffers(trainer)
        self.data = loop.data_state()
        self.callbacks = _kept(callback_states(trainer)) if with_callbacks else None
        self.logs = trainer.logs.state_dict() if with_callbacks else None
        self._sample = _sample(trainer) if with_callbacks else None

    def retake_books(self, trainer: Trainer) -> None:
        """A save has failed after this boundary was kept: what checkpoint callbacks had entered for it is gone."""
        if self.callbacks is None:
            return
        for callback in trainer.checkpoint_callbacks:
            if callback.state_key in self.callbacks:
                self.callbacks[callback.state_key] = _kept(callback.state_dict())

    def has_weights_of(self, trainer: Trainer, *, kept_too: bool = True) -> bool:
        """Whether the model's weights still are the boundary's, and not others swapped in for a validation.

        Args:
            kept_too: where a callback swapped them in and keeps the model's own for the checkpoint, those count.
        """
        if self._sample is None:
            return True
        return all(map(torch.equal, self._sample, _sample(trainer, kept_too=kept_too)))


def _buffers(trainer: Trainer) -> dict[str, Tensor]:
    """Under their names in a checkpoint."""
    module = trainer.lightning_module
    return for_checkpoint(module, {name: each.detach().clone() for name, each in module.named_buffers()})


def _sample(trainer: Trainer, *, kept_too: bool = False) -> list[Tensor]:
    """The first numbers of each parameter: enough to tell, too few to cost anything."""
    parameters = list(trainer.lightning_module.parameters())
    if kept_too:
        kept = [cb.unswapped_parameters() for cb in trainer.callbacks if hasattr(cb, "unswapped_parameters")]
        parameters = next((own for own in kept if own is not None), parameters)
    return [parameter.detach().flatten()[:8].clone().cpu() for parameter in parameters]


_KEPT_NUMEL = 1_000_000


def _kept(state: Any) -> Any:
    """A copy that stays as it is while callbacks go on; of large tensors only a reference."""
    if isinstance(state, Tensor):
        return state.detach().clone() if state.numel() <= _KEPT_NUMEL else state
    if type(state) is dict:
        return {key: _kept(value) for key, value in state.items()}
    if type(state) is list or type(state) is tuple:
        return type(state)(map(_kept, state))
    return copy.copy(state)


def epoch_of(position: dict[str, Any]) -> int:
    """The epoch that a boundary belongs to: that of its last batch."""
    epoch = int(position["epoch"])
    return epoch - 1 if position["point"] == "start" and epoch > 0 else epoch


def callback_states(trainer: Trainer) -> dict[str, Any]:
    """State of each callback that has one, by its ``state_key``."""
    states = {}
    for callback in trainer.callbacks:
        state = callback.state_dict()
        if state:
            states[callback.state_key] = state
    return states


def capture(trainer: Trainer, *, weights_only: bool, boundary: Boundary | None = None) -> dict[str, Any]:
    """The content of ``state.ckpt``, encoded so that ``weights_only=True`` reads it; tensors are not copied.

    Raises:
        MisconfigurationException: something a user put in cannot be stored; the message names its key.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop
    assert loop is not None
    position = loop.state_dict() if boundary is None else boundary.loop
    state: dict[str, Any] = {
        "epoch": epoch_of(position),
        "global_step": position["global_step"],
        "ckptrun_version": __version__,
        **_weights(trainer, boundary),
        "loops": {"fit_loop": position},
        "hyper_parameters": dict(module.hparams),
    }
    if trainer.datamodule is not None and trainer.datamodule.hparams:
        state["datamodule_hyper_parameters"] = dict(trainer.datamodule.hparams)
    if not weights_only:
        state["callbacks"] = (
            boundary.callbacks
            if boundary is not None and boundary.callbacks is not None
            else callback_states(trainer)
        )
        if trainer.strategy.sharded:
            state["optimizer_groups"] = [_group_options(optimizer) for optimizer in trainer.optimizers]
        else:
            state["optimizer_states"] = [trainer.strategy.optimizer_state_dict(o) for o in trainer.optimizers]
        state["lr_schedulers"] = [scheduler_state(config) for config in trainer.lr_scheduler_configs]
        if trainer.precision_plugin.key is not None:
            state[trainer.precision_plugin.key] = trainer.precision_plugin.state_dict()
        if trainer.datamodule is not None:
            state[type(trainer.datamodule).__qualname__] = trainer.datamodule.state_dict()
        state["ckptrun"] = {
            "logs": boundary.logs
            if boundary is not None and boundary.logs is not None
            else trainer.logs.state_dict(),
            "loggers": [[type(logger).__qualname__, logger.state_dict()] for logger in trainer.loggers],
            "seed": trainer.seed,
            "threads": torch.get_num_threads(),
            "configured": trainer.configured,
        }
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, state)
    module.on_save_checkpoint(state)
    encoded: dict[str, Any] = {key: encode(value, key) for key, value in state.items()}
    return encoded


def _weights(trainer: Trainer, boundary: Boundary | None) -> dict[str, Any]:
    """``state_dict``, unless every rank saves its part in files of the strategy's own."""
    if trainer.strategy.sharded:
        return {}
    weights = trainer.strategy.model_state_dict(trainer.lightning_module)
    if boundary is not None:
        weights = {name: boundary.buffers.get(name, value) for name, value in weights.items()}
    return {"state_dict": weights}


def _group_options(optimizer: Any) -> list[dict[str, Any]]:
    """What an optimizer's groups are set to; schedulers go on from it."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def capture_rank(trainer: Trainer, boundary: Boundary | None = None) -> dict[str, Any]:
    """The content of this rank's own file."""
    loop = trainer.fit_loop
    assert loop is not None
    state = {
        "rank": trainer.strategy.rank,
        "world_size": trainer.strategy.world_size,
        "random": capture_random_state() if boundary is None else boundary.random,
        "data": loop.data_state() if boundary is None else boundary.data,
    }
    if trainer.world_size > 1 or trainer.strategy.sharded:
        if trainer.strategy.own_buffers:
            state["buffers"] = _buffers(trainer) if boundary is None else boundary.buffers
        # Each rank has sums of its own over the running epoch.
        kept = boundary.logs if boundary is not None else None
        state["logs"] = trainer.logs.state_dict() if kept is None else kept
    return state


def trained_tensors(trainer: Trainer) -> Iterator[Tensor]:
    """The tensors that make up nearly all of what :func:`capture` gives: the model's and its optimizers'."""
    if trainer.strategy.sharded:
        return
    states = [trainer.strategy.model_state_dict(trainer.lightning_module)]
    states += [dict(optimizer.state) for optimizer in trainer.optimizers]
    while states:
        value: Any = states.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            states.extend(reversed(value.values()))


def has_nan(trainer: Trainer) -> bool:
    """Whether a weight is not finite, so that training cannot go on from this state."""
    return any(
        value.is_floating_point() and not bool(torch.isfinite(value).all())
        for value in trainer.lightning_module.state_dict().values()
        if isinstance(value, Tensor)
    )


def read_checkpoint(
    record: CheckpointRecord,
    name: str,
    *,
    classes: Sequence[type] = (),
    mapped: bool = False,
    files: Mapping[str, FileRecord] | None = None,
) -> dict[str, Any]:
    """One file of a checkpoint, its size and checksum verified on the way.

    Args:
        mapped: leave the bytes of tensors in the file until they are used.
        classes: plain data classes that a strategy's own file has, besides what an encoded state has.
        files: those of the manifest by their paths, where many are read.

    Raises:
        DamagedCheckpointError: in two reads it is not what the manifest says.
        NoCheckpointError: the disk gives an error that stays, which says nothing about the file.
    """
    if files is None:
        files = {file.path: file for file in manifest_of(record).files}
    if name not in files:
        raise _bad_manifest(record, f"its manifest lists no {name}")
    with torch.serialization.safe_globals(list(classes)):
        state = read_verified(record.path, files[name], mapped=mapped)
    decoded: dict[str, Any] = state if classes else decode(state)
    return decoded


def read_verified(folder: str, file: FileRecord, *, mapped: bool) -> Any:
    """One file of the checkpoint in ``folder``, as it was written; where it is damaged the error names both."""
    try:
        return (map_state if mapped else read_state)(
            os.path.join(folder, file.path), checksum=file.checksum or None, size_bytes=file.size_bytes
        )
    except DamagedCheckpointError as error:
        if error.damage is not None:
            error.damage = replace(error.damage, checkpoint=folder, file=file.path)
        raise


def manifest_of(record: CheckpointRecord) -> Manifest:
    """The manifest, read once more where it is wrong: a cache or the network may have erred."""
    try:
        try:
            return retried(lambda: read_manifest(record.path))
        except (DamagedCheckpointError, FileNotFoundError):
            return retried(lambda: read_manifest(record.path))
    except FileNotFoundError:
        raise _bad_manifest(record, "it is gone: it was there when it was chosen") from None
    except DamagedCheckpointError as error:
        raise _bad_manifest(record, error.message) from None
    except OSError as error:
        raise NoCheckpointError(
            f"{record.path} could not be read: {error.strerror or error}",
            hint="It may be whole. Look at that disk or mount and the file's rights, then try again.",
        ) from error


def _bad_manifest(record: CheckpointRecord, what: str) -> DamagedCheckpointError:
    why = f"{record.path}: {what}"
    damage = Damage(record.path, MANIFEST_NAME, why)
    return DamagedCheckpointError(why, hint="Start the same command again.", damage=damage)


def restore_weights(trainer: Trainer, state: dict[str, Any], load: Callable[[], None] | None = None) -> None:
    """What evaluation needs: hooks, weights, datamodule.

    Args:
        load: where the weights are not in ``state``, what puts them in.
    """
    module = trainer.lightning_module
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, state)
    module.on_load_checkpoint(state)
    trained = state.pop("current_model_state", None)
    if trained is not None and trainer.state.fn == "fit":
        # Nobody asked for the average, so it is not what is trained.
        trainer.context.not_exact(
            "The checkpoint's averaged weights are passed over: no WeightAveraging is set.",
            tell=trainer.is_global_zero,
        )
        state["state_dict"] = trained
    if load is not None:
        load()
    elif not isinstance(state.get("state_dict"), dict):
        raise IncompatibleError("The checkpoint has no weights (key 'state_dict').")
    else:
        trainer.strategy.load_model_state_dict(module, state["state_dict"])
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in state:
        datamodule.load_state_dict(state[type(datamodule).__qualname__])


def restore_training(trainer: Trainer, state: dict[str, Any], rank_state: dict[str, Any]) -> None:
    """What training needs beyond :func:`restore_weights`."""
    loop = trainer.fit_loop
    assert loop is not None
    missing = [key for key in ("callbacks", "loops", "lr_schedulers", "ckptrun") if key not in state]
    if "optimizer_states" not in state and "optimizer_groups" not in state:
        missing.append("optimizer_states")
    if missing:
        raise IncompatibleError(
            f"Training cannot go on from this checkpoint: it has no {', '.join(missing)}; it holds weights only.",
            hint="Start a new run from its weights: --run NAME --init-from PATH.",
        )
    own = state["ckptrun"]
    _restore_callbacks(trainer, state["callbacks"])
    _restore_precision(trainer, state)
    loop.load_state_dict(state["loops"]["fit_loop"])
    if not trainer.strategy.sharded:
        _restore_optimizers(trainer, state["optimizer_states"])
    elif "optimizer_groups" in state:  # all else has come with the weights
        _restore_groups(trainer, state["optimizer_groups"])
    else:
        trainer.context.not_exact(
            "load_full_weights: the checkpoint is a plain one, of which the optimizer's state cannot be taken over; it "
            "starts anew.",
            tell=trainer.is_global_zero,
        )
    _restore_schedulers(trainer, state["lr_schedulers"])
    changed = check(own.get("configured"), trainer.configured, override=trainer.context.override)
    if changed:
        put_in(own["configured"], trainer.configured, trainer.optimizers, trainer.lr_scheduler_configs)
        trainer.context.say(f"--override: {'; '.join(changed)}")
    trainer.logs.load_state_dict(rank_state.get("logs", own["logs"]))
    data = rank_state["data"]
    if data["kind"] != loop.source.kind:
        trainer.context.not_exact(
            f"The kind of the training data was {data['kind']!r} when the checkpoint was written and is "
            f"{loop.source.kind!r} now; its order may differ."
        )
    loop.resume_data = data
    loop.samples_a_batch = data.get("samples_a_batch")
    loop.batch = loop.source.rebase(data, loop.batch)
    sizes = loop.source.global_batches(data)
    if sizes is not None:
        trainer.context.not_exact(
            f"A step took {sizes[0]} samples of all ranks together when the checkpoint was written, and takes "
            f"{sizes[1]} now: training goes on from the same place in the order of the samples."
        )
    loop.resume_random = rank_state["random"]
    if trainer.strategy.own_buffers:
        saved_buffers = for_module(trainer.lightning_module, rank_state.get("buffers", {}))
        for name, buffer in trainer.lightning_module.named_buffers():
            if name in saved_buffers:
                buffer.copy_(saved_buffers[name])
    if loop.source.kind == "iterable" and trainer.context.exact and 0 < loop.batch < loop.epoch_batches:
        trainer.context.not_exact(loop.to_read_again(data))
    now = torch.get_num_threads()
    if own["threads"] != now:
        trainer.context.not_exact(
            f"The checkpoint was written with {own['threads']} {'thread' if own['threads'] == 1 else 'threads'} per "
            f"rank and there {'is' if now == 1 else 'are'} {now} now: sums may be made in another order, so the last "
            f"bits can differ. trainer.num_threads={own['threads']} keeps them."
        )
    trainer.context.refuse_what_is_not_exact()
    _restore_loggers(trainer, own["loggers"])  # last: it cuts tables, which a refusal must leave alone


def _restore_precision(trainer: Trainer, state: dict[str, Any]) -> None:
    precision = trainer.precision_plugin
    if precision.key is None:
        return
    if precision.key in state:
        precision.load_state_dict(state[precision.key])
    else:
        trainer.context.not_exact(
            f"The checkpoint was not written under precision {precision.name}: its scaler starts anew."
        )


def _restore_callbacks(trainer: Trainer, states: dict[str, Any]) -> None:
    known = {callback.state_key: callback for callback in trainer.callbacks}
    left = []
    for key, state in states.items():
        if key in known:
            known[key].load_state_dict(state)
        else:
            left.append(key)
    if left:
        trainer.context.say(
            f"The checkpoint has state of callbacks that are not set now, which is passed over: {', '.join(left)}."
        )


def _restore_loggers(trainer: Trainer, saved: list[list[Any]]) -> None:
    """Each logger's state by its class, in order, so that one that was added or left out moves no other's."""
    left = list(saved)
    for logger in trainer.loggers:
        match = next((entry for entry in left if entry[0] == type(logger).__qualname__), None)
        if match is not None:
            left.remove(match)
            logger.load_state_dict(match[1])


def _names_of(trainer: Trainer, parameters: list[Any]) -> str:
    names = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
    shown = [names.get(id(parameter), "?") for parameter in parameters[:5]]
    return ", ".join(shown) + (f" and {len(parameters) - 5} more" if len(parameters) > 5 else "")


def _restore_optimizers(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    if len(states) != len(trainer.optimizers):
        raise IncompatibleError(
            f"The checkpoint has the state of {len(states)} optimizers; configure_optimizers returned "
            f"{len(trainer.optimizers)}.",
            hint="Use the optimizers it was trained with, or start another run from its weights (--init-from).",
        )
    for optimizer, state in zip(trainer.optimizers, states, strict=True):
        saved, own = state["param_groups"], optimizer.param_groups
        if len(saved) != len(own):
            raise IncompatibleError(
                f"The checkpoint's {type(optimizer).__name__} has {len(saved)} parameter groups, this one has "
                f"{len(own)}."
            )
        for index, (old, new) in enumerate(zip(saved, own, strict=True)):
            if len(old["params"]) != len(new["params"]):
                raise IncompatibleError(
                    f"Parameter group {index} of {type(optimizer).__name__} had {len(old['params'])} parameters and "
                    f"has {len(new['params'])} now: {_names_of(trainer, new['params'])}.",
                    hint="Freeze and group the parameters as before, or start another run from its weights "
                    "(--init-from).",
                )
        trainer.strategy.load_optimizer_state_dict(optimizer, state)


def check_groups(trainer: Trainer, states: list[list[dict[str, Any]]]) -> None:
    """Whether the optimizers go with a sharded checkpoint, by what was set for their groups. Before it is loaded.

    Raises:
        IncompatibleError: they are others.
    """
    hint = "Use the optimizer it was trained with, or start another run from its weights (--run NAME --init-from PATH)."
    for optimizer, groups in zip(trainer.optimizers, states, strict=True):
        kind = type(optimizer).__name__
        if len(groups) != len(optimizer.param_groups):
            raise IncompatibleError(
                f"The checkpoint's optimizer has {_counted(len(groups), 'parameter group')}, this {kind} has "
                f"{len(optimizer.param_groups)}.",
                hint=hint,
            )
        for saved, own in zip(groups, optimizer.param_groups, strict=True):
            gone = sorted(saved.keys() - own.keys() - optimizer.defaults.keys() - _OF_SCHEDULERS)
            new = sorted(optimizer.defaults.keys() - saved.keys())
            if gone and new:  # on one side only, they may have come or gone with a version
                raise IncompatibleError(
                    f"The checkpoint was written with another optimizer than {kind}: its parameter groups have "
                    f"{', '.join(gone)}, and not {', '.join(new)}.",
                    hint=hint,
                )


_OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)  # what they note in a group


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _restore_groups(trainer: Trainer, states: list[list[dict[str, Any]]]) -> None:
    for optimizer, groups in zip(trainer.optimizers, states, strict=True):
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)


def _restore_schedulers(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    if len(states) != len(trainer.lr_scheduler_configs):
        raise IncompatibleError(
            f"The checkpoint has the state of {len(states)} LR schedulers; configure_optimizers returned "
            f"{len(trainer.lr_scheduler_configs)}."
        )
    for config, state in zip(trainer.lr_scheduler_configs, states, strict=True):
        with warnings.catch_warnings():
            # torch warns that the optimizer should step first; here its state has just been restored.
            warnings.simplefilter("ignore")
            config.scheduler.load_state_dict(state)


def zero_weights(folder: str, manifest: Manifest) -> Mapping[str, Tensor]:
    """The weights of a checkpoint that DeepSpeed wrote, each put together when it is asked for.

    Raises:
        MisconfigurationException: deepspeed, whose classes are in its files, is not installed.
    """
    from ckptrun.deepspeed_config import check_installed
    from ckptrun.fit.zero_weights import ZeroWeights
    from ckptrun.strategies.deepspeed import classes_in_files

    check_installed()
    return ZeroWeights(folder, manifest, manifest.extra[NOTE], classes_in_files())


def _foreign_weights(found: Foreign) -> Mapping[str, Tensor]:
    """The weights of what DeepSpeed wrote without ckptrun; nothing tells the checksums of its files.

    Raises:
        DamagedCheckpointError: not all of its files are there.
    """
    missing = found.missing()
    if missing:
        raise DamagedCheckpointError(
            f"{found.folder}: a checkpoint of DeepSpeed that lacks {', '.join(missing)}"
        )
    paths = [*found.files.model_states, *found.files.optimizer_states]
    files = tuple(FileRecord(p, os.path.getsize(os.path.join(found.folder, p)), "") for p in paths)
    note = {"stage": found.stage, "tag": found.tag}
    ranks = found.files.num_ranks
    manifest = Manifest("", 0, 0, 0, "", files, world_size=ranks, extra={NOTE: note})
    return zero_weights(found.folder, manifest)


def read_init_weights(path: str, *, mapped: bool = False) -> Mapping[str, Tensor]:
    """Weights to begin a fresh start from: a checkpoint's folder, or a file of ``torch.save``.

    Args:
        mapped: leave their bytes in the file until they are used.

    Raises:
        NoCheckpointError: there is nothing at ``path``.
        DamagedCheckpointError: it cannot be read, or holds no weights.
    """
    if os.path.isdir(path):
        try:
            manifest = read_manifest(path)
        except FileNotFoundError:
            found = foreign(path)
            if found is not None:
                return _foreign_weights(found)
            raise NoCheckpointError(
                f"--init-from {path}: a folder without manifest.json, which is no checkpoint.",
                hint="Name a checkpoint's folder, such as runs/NAME/checkpoints/00000042-step-00001200, or a file.",
            ) from None
        if NOTE in manifest.extra:
            return zero_weights(os.path.abspath(path), manifest)
        record = manifest.to_record(os.path.abspath(path))
        loaded: Any = read_checkpoint(record, STATE_FILE, mapped=mapped)
    elif os.path.exists(path):
        loaded = map_state(path) if mapped else read_state(path)
    else:
        raise NoCheckpointError(f"--init-from {path}: there is no such file or folder.")
    weights = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
    if not isinstance(weights, dict) or not any(isinstance(value, Tensor) for value in weights.values()):
        raise DamagedCheckpointError(
            f"--init-from {path}: found no weights; expected a dict of tensors, or one under the key 'state_dict'."
        )
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}
