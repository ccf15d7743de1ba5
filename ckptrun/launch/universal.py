"""Can training go on from a checkpoint with this strategy, stage and number of ranks, and what has to be done?

    the same stage and number of ranks     DeepSpeed's shards are loaded as they are
    another one                            the checkpoint is converted to DeepSpeed's universal format, once; what comes
                                           of it is committed beside it, and goes with all stages and numbers of ranks
    stage 0 on one side, another strategy  refused, with what is left: --init-from
    an optimizer that is not like Adam     refused as well where a conversion would be needed

Asked before a rank is started. The conversion is DeepSpeed's own tool, in a process of its own, which a stop ends.

Decision: what comes of it is a checkpoint of its own with the next save counter, whose parent is the original: every
rule about choosing, damage and retention holds for it. Turned down: a folder inside of the original, which would alter
what is committed; converting at each start, which takes as long as loading several times over.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.commit import Writer, commit, discard_scratch, free_bytes, preflight, scratch_folder
from ckptrun.checkpoint.manifest import Manifest, extend_line, read_manifest
from ckptrun.checkpoint.rebuild import rebuild_registry
from ckptrun.checkpoint.verify import verify_checkpoint
from ckptrun.errors import DamagedCheckpointError, IncompatibleError, SaveError
from ckptrun.inspect.deepspeed_files import NOTE as KEY
from ckptrun.launch.spawned import argv_for
from ckptrun.processes import last_line, run_unless_stopped
from ckptrun.records import CheckpointRecord, FreshStart, Resolution, ResolutionError
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import DamagedRegistryError, Registry, edit

_FULL_BYTES = 1 << 20  # a disk with less left is full, whatever a tool says that met its end


@dataclass(frozen=True)
class Wanted:
    """What the ranks are going to be: ``stage`` is None under another strategy than deepspeed."""

    strategy: str
    num_ranks: int
    stage: int | None = None
    takes_full_weights: bool = False


@dataclass(frozen=True)
class Writing:
    """Who commits what is converted."""

    folder: RunFolder
    run_id: str
    attempt: int
    lease_epoch: int
    say: Callable[[str], None]
    stop_requested: Callable[[], bool]
    may_save: Callable[[], bool]  # the run still is this process's


def problem(resolution: Resolution, wanted: Wanted, *, exact: bool = False) -> ResolutionError | None:
    """Why training cannot go on from the answer, whatever is done; None where it can.

    Args:
        exact: to the same bits, which what was converted does not lead to.
    """
    try:
        differs = needs_conversion(resolution, wanted)
    except IncompatibleError as error:
        return ResolutionError(error.exit_code, error.message, error.hint)
    if differs is None or not exact:
        return None
    return ResolutionError(
        IncompatibleError.exit_code,
        f"--exact: {differs}.",
        "Go on with as many ranks and the stage that it was written with, or leave --exact out.",
    )


def needs_conversion(resolution: Resolution, wanted: Wanted) -> str | None:
    """What is not the same, so that the shards cannot be loaded as they are; None where they can, or there are none.

    Raises:
        IncompatibleError: a conversion would not help.
    """
    answer = resolution.answer
    if answer is None or isinstance(answer, FreshStart | str):
        return None
    note = read_manifest(answer.path).extra.get(KEY)
    if note is None:
        if wanted.stage is not None and not wanted.takes_full_weights:
            raise _refused(
                answer,
                "was not written under the strategy deepspeed: it holds the model and its optimizer as a whole",
            )
        return None
    if wanted.stage is None:
        raise _refused(
            answer, f"was written under the strategy deepspeed, from which {wanted.strategy} cannot go on"
        )
    if note.get("universal"):
        if wanted.stage == 0:
            raise _refused(answer, "is in DeepSpeed's universal format, which stage 0 does not read")
        return None
    stage, ranks = int(note["stage"]), read_manifest(answer.path).world_size
    if stage == wanted.stage and (ranks == wanted.num_ranks or stage == 0):
        return None
    if stage == 0 or wanted.stage == 0:
        raise _refused(
            answer,
            f"was written in ZeRO stage {stage}, and stage {wanted.stage} is asked for: DeepSpeed converts between the "
            "stages 1 to 3 only",
        )
    before = f"{_ranks(ranks)} in ZeRO stage {stage}"
    differs = f"was written by {before}; now there {_are(wanted.num_ranks)} in stage {wanted.stage}"
    kept = note.get("optimizer_state")  # older checkpoints do not tell; the converter looks
    why = None if kept is None else unsuited(kept)
    if why is not None:
        raise _not_converted(answer, f"{differs}. {_NOT_CONVERTED}: {why}")
    return f"{answer.name} {differs}"


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What the universal format takes of an optimizer's state, and wants to be there; the count of steps may be."""
_NOT_CONVERTED = "It cannot be converted to DeepSpeed's universal format"


def unsuited(kept: Collection[str]) -> str | None:
    """Why what an optimizer keeps of each parameter, by its names, has no place in the universal format."""
    if {*MOMENTS} <= {*kept} <= {*MOMENTS, "step"}:
        return None
    return (
        f"its optimizer keeps {', '.join(sorted(kept)) or 'nothing'}, and the format takes {' and '.join(MOMENTS)} "
        "only, which Adam and its like keep"
    )


def _refused(answer: CheckpointRecord, why: str) -> IncompatibleError:
    return IncompatibleError(
        f"{answer.name} {why}.",
        hint=f"Start a run from its weights: --run NAME --ckpt none --init-from {answer.path}",
    )


def _not_converted(answer: CheckpointRecord, why: str) -> IncompatibleError:
    return IncompatibleError(
        f"{answer.name} {why}.",
        hint=f"Go on with as many ranks and the stage that it was written with, or start a run from its weights: "
        f"--run NAME --ckpt none --init-from {answer.path}",
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {_ranks(count)}"


def adapted(resolution: Resolution, wanted: Wanted, by: Writing) -> Resolution | None:
    """The resolution with an answer that the ranks can load; None where a stop came before it was there.

    Raises:
        IncompatibleError: it cannot be made.
        SaveError: it could not be written.
        DamagedCheckpointError: the checkpoint is not whole.
    """
    differs = needs_conversion(resolution, wanted)
    answer = resolution.answer
    if differs is None or not isinstance(answer, CheckpointRecord):
        return resolution
    found = _made_before(by.folder, answer)
    if found is not None:
        by.say(f"{differs}: {found.name} is the same in DeepSpeed's universal format")
        return replace(resolution, answer=found)
    by.say(f"{differs}: it is converted to DeepSpeed's universal format, once")
    made = _convert(answer, by)
    return None if made is None else replace(resolution, answer=made)


def _made_before(folder: RunFolder, answer: CheckpointRecord) -> CheckpointRecord | None:
    catalogue = Catalogue(folder.checkpoints_dir)
    try:
        damaged = Registry.load(folder.registry).quarantine
    except (FileNotFoundError, DamagedRegistryError):
        damaged = {}
    for name, manifest in catalogue.manifests():
        note = manifest.extra.get(KEY) or {}
        if name not in damaged and note.get("of") == [answer.run_id, answer.name]:
            found = catalogue.examine(name)
            if isinstance(found, CheckpointRecord):
                return found
    return None


def _convert(answer: CheckpointRecord, by: Writing) -> CheckpointRecord | None:
    checkpoints_dir = by.folder.checkpoints_dir
    found = verify_checkpoint(answer.path)
    if found.damage:
        raise DamagedCheckpointError(
            found.damage[0].why, hint="Name another checkpoint.", damage=found.damage[0]
        )
    manifest = read_manifest(answer.path)
    note = manifest.extra[KEY]
    sequence = _next_sequence(by.folder, by.run_id)
    name = naming.folder_name(sequence, f"{naming.step_label(manifest.step)}-universal")
    _check_room(checkpoints_dir, manifest, name)
    scratch = scratch_folder(checkpoints_dir, name)
    try:
        target = os.path.join(scratch, note["tag"])
        if not _run_converter(os.path.join(answer.path, note["tag"]), target, answer, by.stop_requested):
            return None
        if not by.may_save():
            return None  # another process has taken the run over meanwhile
        started = time.monotonic()
        files = _files(answer.path, manifest, scratch, note["tag"])
        own = answer.run_id == by.run_id
        written = commit(
            checkpoints_dir,
            name,
            files,
            replace(
                manifest,
                run_id=by.run_id,
                sequence=sequence,
                attempt=by.attempt,
                lease_epoch=by.lease_epoch,
                parent=answer.name if own else None,
                line=extend_line(manifest.line if own else (), sequence),
                files=(),
                saved_at=0.0,
                save_s=0.0,
                noted=(),
                extra={
                    **manifest.extra,
                    KEY: {**note, "universal": True, "of": [answer.run_id, answer.name]},
                },
            ),
        )
    finally:
        discard_scratch(scratch)
    record = written.to_record(os.path.join(checkpoints_dir, name))
    took_s = time.monotonic() - started
    edit(
        by.folder.registry,
        lambda registry: registry.note_saved(record, list(record.saved_for), save_s=took_s),
        otherwise=lambda: rebuild_registry(Catalogue(checkpoints_dir), run_id=by.run_id),
    )
    return record


def _check_room(checkpoints_dir: str, manifest: Manifest, name: str) -> None:
    """What the tool makes is about as large as the original, and is copied once.

    Raises:
        SaveError: it will not fit.
    """
    warning = preflight(checkpoints_dir, 2 * sum(file.size_bytes for file in manifest.files), what=name)
    if warning is not None:
        raise SaveError(warning)


def _next_sequence(folder: RunFolder, run_id: str) -> int:
    catalogue = Catalogue(folder.checkpoints_dir)
    taken: list[int] = []
    edit(
        folder.registry,
        lambda registry: taken.append(registry.reserve_sequence(catalogue.highest_sequence())),
        otherwise=lambda: rebuild_registry(catalogue, run_id=run_id),
    )
    return taken[0]


def _run_converter(
    source: str, target: str, answer: CheckpointRecord, stop_requested: Callable[[], bool]
) -> bool:
    """DeepSpeed's own tool; False where a stop ended it.

    Raises:
        IncompatibleError: it could not.
    """
    done = run_unless_stopped(
        argv_for("ckptrun.launch.universal_convert", source, target, os.getpid()),
        stop_requested,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    if done is None:
        return False
    code, said = done
    if code == 0:
        return True
    if free_bytes(os.path.dirname(target)) < _FULL_BYTES:
        raise SaveError(
            f"{answer.name} could not be converted: the disk of {os.path.dirname(os.path.dirname(target))} is full.",
            hint="Nothing is lost. Free space there and start again.",
        )
    raise _not_converted(
        answer, f"could not be converted to DeepSpeed's universal format: {last_line(said).removesuffix('.')}"
    )


def _files(folder: str, manifest: Manifest, scratch: str, tag: str) -> Mapping[str, Writer]:
    """What the new checkpoint holds: what was converted, and ckptrun's own files of the original."""
    sources = {
        file.path: os.path.join(folder, file.path)
        for file in manifest.files
        if not file.path.startswith(f"{tag}/") and file.path != "latest"
    }
    for place, _, names in os.walk(os.path.join(scratch, tag)):
        for name in names:
            path = os.path.join(place, name)
            sources[os.path.relpath(path, scratch)] = path
    files: dict[str, Writer] = {path: functools.partial(_copy, source) for path, source in sources.items()}
    files["latest_universal"] = lambda f: _text(f, tag)
    return files


def _copy(source: str, f: BinaryIO) -> None:
    with open(source, "rb") as file:
        shutil.copyfileobj(file, f, 1 << 20)


def _text(f: BinaryIO, text: str) -> None:
    f.write(text.encode())
