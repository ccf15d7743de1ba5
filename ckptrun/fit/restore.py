"""Where does a fn begin? From the checkpoint that was resolved, from given weights, or fresh.

In two parts, because a strategy may have to be set up in between: weights first, then what belongs to training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptrun.errors import IncompatibleError
from ckptrun.fit.capture import (
    STATE_FILE,
    check_groups,
    manifest_of,
    rank_file,
    read_checkpoint,
    read_init_weights,
    restore_training,
    restore_weights,
    zero_weights,
)
from ckptrun.fit.clearing import freed
from ckptrun.fit.random_state import capture_random_state, seed_everything
from ckptrun.fit.sample_order import epoch_seed
from ckptrun.inspect.deepspeed_files import NOTE
from ckptrun.records import CheckpointRecord, FreshStart, Stage

if TYPE_CHECKING:
    from ckptrun.fit.trainer import Trainer


def begin_restore(trainer: Trainer) -> dict[str, Any] | None:
    """Weights and what goes with them, from where the resolution says; None where training starts fresh."""
    answer = trainer.context.resolution.answer
    if isinstance(answer, FreshStart):
        if answer.init_from is not None:
            trainer.enter(Stage.RESTORE)
            weights = read_init_weights(answer.init_from, mapped=trainer.strategy.sharded)
            trainer.strategy.load_model_state_dict(trainer.lightning_module, weights)
            trainer.context.say(f"weights from {answer.init_from}; training starts at step 0")
        return None
    if not isinstance(answer, CheckpointRecord):
        if answer is None:
            return None
        raise IncompatibleError(
            f"{answer} was not written by ckptrun, and this version resumes only from its own checkpoints.",
            hint="Start a run from its weights: --ckpt none --init-from PATH.",
        )
    trainer.enter(Stage.RESTORE)
    started = time.monotonic()
    state = read_checkpoint(answer, STATE_FILE)
    restore_weights(trainer, state, _load_shards(trainer, answer, state))
    trainer.context.restore_s += time.monotonic() - started
    return state


def _load_shards(
    trainer: Trainer, answer: CheckpointRecord, state: dict[str, Any]
) -> Callable[[], None] | None:
    """What puts the weights in where they lie in a strategy's own files; None where they lie in ``state.ckpt``.

    Raises:
        IncompatibleError: training cannot go on from these files, or from weights in one piece, with this strategy.
    """
    strategy = trainer.strategy
    note = manifest_of(answer).extra.get(NOTE)
    trains = trainer.state.fn == "fit"
    if note is None:
        if trains and strategy.sharded and not strategy.load_full_weights:
            raise IncompatibleError(
                f"{answer.name} was not written under the strategy {strategy.name}: it holds the model as a whole.",
                hint=f"Start a run from its weights: --run NAME --ckpt none --init-from {answer.path}",
            )
        return None
    if trains and not strategy.sharded:
        raise IncompatibleError(
            f"{answer.name} was written under the strategy deepspeed; {strategy.name} cannot go on from its files.",
            hint=f"Start a run from its weights: --run NAME --ckpt none --init-from {answer.path}",
        )
    if trains:
        check_groups(trainer, state.get("optimizer_groups", []))
        classes, files = strategy.classes(), {file.path: file for file in manifest_of(answer).files}
        return lambda: strategy.load_sharded(
            answer.path,
            tag=note["tag"],
            read=lambda path: read_checkpoint(answer, path, classes=classes, files=files),
            universal=note.get("universal", False),
        )
    return lambda: strategy.load_model_state_dict(
        trainer.lightning_module, zero_weights(answer.path, manifest_of(answer))
    )


def finish_restore(trainer: Trainer, state: dict[str, Any] | None) -> None:
    """The rest, once optimizers exist: callbacks, position, optimizers, schedulers, this rank's own state."""
    answer = trainer.context.resolution.answer
    if state is None or not isinstance(answer, CheckpointRecord):
        return
    if not answer.exact and trainer.context.exact:  # the resolution has warned of it
        trainer.context.not_exact(
            f"{answer.name} was saved where no boundary was left (exact: false): some of what it holds is of a step "
            "that was not complete."
        )
    started = time.monotonic()
    rank_state = _rank_state(trainer, answer)
    restore_training(trainer, state, rank_state)
    trainer.checkpoints.begin_from(answer)
    _adopt(trainer, answer)
    loop = trainer.fit_loop
    assert loop is not None
    progress = trainer.progress
    progress.step = progress.start_step = loop.global_step
    progress.epoch, progress.batch = loop.epoch, loop.batch
    trainer.context.restore_s += time.monotonic() - started


def _rank_state(trainer: Trainer, answer: CheckpointRecord) -> dict[str, Any]:
    """What this rank saved; where there were fewer ranks then, a state of its own made from the seed."""
    names = {file.path for file in manifest_of(answer).files}
    saved = sum(rank_file(rank) in names for rank in range(len(names)))
    if answer.weights_only or saved == 0:
        return {}
    if saved != trainer.world_size:
        trainer.context.not_exact(
            f"The checkpoint was written by {saved} {'rank' if saved == 1 else 'ranks'} and there "
            f"{'is' if trainer.world_size == 1 else 'are'} {trainer.world_size} now: the order of the "
            "samples is kept; sums over ranks are made in another order, so the last bits can differ.",
            tell=trainer.is_global_zero,
        )
    if trainer.strategy.rank < saved:
        return read_checkpoint(answer, rank_file(trainer.strategy.rank))
    state = read_checkpoint(answer, rank_file(0))
    seed_everything(epoch_seed(trainer.seed, answer.step) % 2**31 + trainer.strategy.rank)
    state["random"] = capture_random_state()
    return state


def _adopt(trainer: Trainer, resumed: CheckpointRecord) -> None:
    """Tell checkpoint callbacks of the checkpoint resumed from what only the registry knows: who else wanted it."""
    if resumed.run_id != trainer.context.run_id:
        return
    entries = {entry["state_key"]: entry for entry in trainer.checkpoints.registry.callbacks}
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "adopt") and callback.state_key in entries:
            callback.adopt(resumed.path, entries[callback.state_key], step=resumed.step)
    if trainer.is_global_zero:
        _tell_what_goes(trainer, resumed)


def _tell_what_goes(trainer: Trainer, resumed: CheckpointRecord) -> None:
    """Say it where a callback's limit is a smaller one now: the next save deletes what is over it."""
    service = trainer.checkpoints
    now = {cb.state_key: cb.registry_entry() for cb in trainer.callbacks if hasattr(cb, "registry_entry")}
    gone = freed(service.catalogue, service.registry, service.registry.callbacks, list(now.values()), resumed)
    for key, names in gone.items():
        what = "1 checkpoint" if len(names) == 1 else f"{len(names)} checkpoints"
        trainer.context.say(
            f"save_top_k is {now[key]['save_top_k']} now: {what} that {'is' if len(names) == 1 else 'are'} no longer "
            f"wanted by any callback {'is' if len(names) == 1 else 'are'} deleted with the next save (`ckptrun keep` "
            "protects one)."
        )
