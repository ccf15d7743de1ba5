"""What do the run's files say, for the rules to decide on?

Decision: this is the edge; everything that reads is here, and it ends in the records that `rules.resolve`
takes. Reading changes nothing: a registry that is missing, damaged or behind the disk is completed in memory,
and whoever trains next writes it. Turned down: repairing while looking, as `resolve` also runs beside a live
run.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from ckptrun.checkpoint import catalogue as catalogues
from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.manifest import MANIFEST_NAME
from ckptrun.checkpoint.rebuild import catch_up, rebuild_registry
from ckptrun.environment.process import this_process
from ckptrun.errors import NoCheckpointError
from ckptrun.inspect.deepspeed_files import foreign, is_shard
from ckptrun.records import AttemptRecord, Fn, JobFacts, RejectedRecord, Resolution
from ckptrun.resolve.candidates import screen
from ckptrun.resolve.facts import NUM_LISTED, Examined, OtherFile, ResolveFacts
from ckptrun.resolve.rules import resolve
from ckptrun.run.attempts import read_attempts
from ckptrun.run.folder import RunFolder, root_state
from ckptrun.run.identity import read_identity
from ckptrun.run.lease import LeaseState, read_lease
from ckptrun.run.registry import DamagedRegistryError, Registry
from ckptrun.storage.retry import retried


class DiskView:
    """The run's checkpoints on disk, each examined at most once, with the registry's objections applied."""

    def __init__(
        self, catalogue: Catalogue, registry: Registry, run_id: str, trouble: NoCheckpointError | None = None
    ) -> None:
        self._catalogue = catalogue
        self._trouble = trouble  # why it cannot be said what is there
        self._registry = registry
        self._run_id = run_id
        self._examined: dict[str, Examined] = {}

    def names(self) -> list[str]:
        if self._trouble is not None:
            raise self._trouble
        return self._catalogue.names()

    def path_of(self, name: str) -> str:
        return f"{self._catalogue.path}/{name}"

    def by_name(self, name: str) -> Examined:
        record = self._examined.get(name)
        if record is None:
            record = screen(self._catalogue.examine(name), self._registry, self._run_id)
            self._examined[name] = record
        return record

    def by_path(self, path: str) -> Examined | OtherFile:
        found = look_at(os.path.abspath(os.path.expanduser(path)))
        if isinstance(found, OtherFile):
            return replace(found, near=self._near(found))
        folder, name = os.path.split(found.path)
        # What the registry holds against a checkpoint counts when its path is given too; but another run's
        # checkpoint is welcome then.
        inside = os.path.realpath(folder) == os.path.realpath(self._catalogue.path)
        return self.by_name(name) if inside and _own(found, self._run_id) else found

    def _near(self, found: OtherFile) -> tuple[str, ...]:
        """Existing things that may have been meant by a path that leads to no checkpoint."""
        folder, name = os.path.split(found.path)
        if found.kind == "not-a-checkpoint" and os.path.isdir(found.path):
            folder, name = found.path, ""
            if os.path.isdir(os.path.join(folder, "checkpoints")):
                folder = os.path.join(folder, "checkpoints")
        while folder != "/" and not os.path.isdir(folder):
            folder, name = os.path.split(folder)
        try:
            there = sorted((entry for entry in os.listdir(folder) if not entry.startswith(".")), key=_natural)
        except OSError:
            return ()
        close = difflib.get_close_matches(name, there, n=3, cutoff=0.6) if name else there[:-4:-1]
        near = [os.path.join(folder, entry) for entry in close]
        if self._trouble is None and name in self.names():
            near.insert(0, self.path_of(name))
        return tuple(near)


def _own(record: Examined, run_id: str) -> bool:
    return isinstance(record, RejectedRecord) or not run_id or record.run_id == run_id


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key in which checkpoint_10 comes after checkpoint_9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def look_at(path: str) -> Examined | OtherFile:
    """What the absolute ``path`` is: a checkpoint folder (or a file in one), another file, or nothing."""
    folder = path
    try:
        if os.path.isfile(path) and _in_a_checkpoint(path):
            folder = os.path.dirname(path)
        elif _in_a_checkpoint(os.path.dirname(path)):
            os.stat(path)
            folder = os.path.dirname(os.path.dirname(path))  # one of DeepSpeed's shards
        elif os.path.isdir(path) and _in_a_checkpoint(path):
            folder = os.path.dirname(path)  # the folder with them
        elif os.path.isdir(path):
            if not os.path.lexists(os.path.join(path, MANIFEST_NAME)):
                other = _deepspeed(path)  # a folder that cannot be read is not one without a manifest
                if other is not None:
                    return other
                return OtherFile(
                    path, "not-a-checkpoint", "a folder without manifest.json is no checkpoint of ckptrun"
                )
        elif os.path.isfile(path) and is_shard(os.path.basename(path)):
            return _deepspeed(os.path.dirname(path)) or _look_into(path)
        elif os.path.isfile(path):
            return _look_into(path)
        else:
            os.stat(path)
            return OtherFile(path, "not-a-checkpoint", "neither a folder nor a file")
    except (FileNotFoundError, NotADirectoryError):
        why = "a link that leads nowhere" if os.path.islink(path) else "there is no such file or folder"
        return OtherFile(path, "missing", why)
    except OSError as error:
        return OtherFile(path, "unreadable", f"cannot be read: {error.strerror or error}")
    return catalogues.examine(folder)


def _deepspeed(path: str) -> OtherFile | None:
    """A checkpoint that DeepSpeed wrote without ckptrun: what it is, and what it lacks."""
    found = foreign(path)
    if found is None:
        return None
    missing = found.missing()
    if missing:
        return OtherFile(
            path, "not-a-checkpoint", f"a checkpoint of DeepSpeed that lacks {', '.join(missing)}"
        )
    return OtherFile(path, "deepspeed", "a checkpoint of DeepSpeed without anything of ckptrun's")


def _in_a_checkpoint(path: str) -> bool:
    """Whether the file ``path`` is one of a checkpoint of ours; other tools have a manifest.json too."""
    folder = os.path.dirname(path)
    named = naming.parse(os.path.basename(folder)) is not None
    return named and os.path.isfile(os.path.join(folder, MANIFEST_NAME))


def _look_into(path: str) -> OtherFile:
    """Whether a plain file looks like one of torch.save: a zip, or the older bare pickle."""
    with open(path, "rb", buffering=0) as file:
        start = file.read(4)
    if start == b"PK\x03\x04" or start[:1] == b"\x80":
        return OtherFile(path, "torch-file", "a file of torch.save")
    size_bytes = os.path.getsize(path)
    return OtherFile(
        path, "not-a-checkpoint", f"a file of {size_bytes} bytes that torch.save has not written"
    )


@dataclass
class Gathered:
    """All that the rules need. ``registry`` is complete; ``registry_changed`` says that the file is not."""

    facts: ResolveFacts
    registry: Registry
    view: DiskView
    warnings: tuple[str, ...] = ()
    registry_changed: bool = False


def load_registry(folder: RunFolder, catalogue: Catalogue) -> tuple[Registry, list[str], bool]:
    """The run's registry, completed from the manifests where it is missing, damaged or behind.

    Who holds the lease now has taken the run over, though it may not have come to note it.

    Returns:
        The registry, what to tell the user about it, and whether it differs from the file.

    Raises:
        NoCheckpointError: the file, or the folder of checkpoints, cannot be read.
    """
    try:
        registry = retried(lambda: Registry.load(folder.registry))
    except (FileNotFoundError, NotADirectoryError):
        if not catalogue.names():
            return Registry(run_id=_run_id(folder)), [], False
        why = "is missing"
    except DamagedRegistryError:
        why = "is damaged"
    except OSError as error:
        raise NoCheckpointError(
            f"{folder.registry} cannot be read: {error.strerror or error}",
            hint="What the run has saved is not known, so nothing is started. Mend the access to it first.",
        ) from error
    else:
        registry.run_id = registry.run_id or _run_id(folder)
        _note_holder(registry, folder)
        added = catch_up(registry, catalogue)
        if not added:
            return registry, [], False
        told = f"The registry was behind the disk; {', '.join(added[-3:])} noted from the manifests"
        # A run that is live notes its newest save itself, once that has landed.
        return registry, [] if _another_may_live(folder) else [told], True
    registry = rebuild_registry(catalogue, run_id=_run_id(folder) or None)
    _note_holder(registry, folder)
    number = len(registry.saves)
    told = (
        f"The registry {why}; it was rebuilt from {number} manifest{'' if number == 1 else 's'} "
        "(pins, keeps and quarantine notes are not in them)"
    )
    return registry, [told], True


def _note_holder(registry: Registry, folder: RunFolder) -> None:
    lease = _lease(folder)
    if lease is not None and lease.epoch > 1:
        registry.note_takeover(lease.epoch, lease.sequence_at_takeover)


def _lease(folder: RunFolder) -> LeaseState | None:
    try:
        return read_lease(folder.lease)
    except OSError:
        return None


def _another_may_live(folder: RunFolder) -> bool:
    """Whether a process beside this one holds the lease; one on another host is believed, as watching it takes long."""
    lease = _lease(folder)
    if lease is None or lease.holder is None:
        return False
    process = lease.holder.process
    return process.alive and process != this_process() if process.here else True


def rebuilt_registry(folder: RunFolder) -> Registry:
    """The registry to begin an edit with where the file is missing or damaged; raises as :func:`load_registry`."""
    return load_registry(folder, Catalogue(folder.checkpoints_dir))[0]


def highest_epoch(folder: RunFolder) -> int:
    """The highest epoch of the run's lease that anything but ``lease.json`` tells; 0 where that file is there.

    Without it every manifest is read, as the newest one may be that of a holder who had been overtaken.

    Raises:
        OSError: ``lease.json`` is there and cannot be read.
        NoCheckpointError: the registry, or the folder of checkpoints, cannot be read.
    """
    if read_lease(folder.lease) is not None:
        return 0
    catalogue = Catalogue(folder.checkpoints_dir)
    registry = load_registry(folder, catalogue)[0]
    epochs = [takeover["lease_epoch"] for takeover in registry.takeovers]
    epochs += [manifest.lease_epoch for _, manifest in catalogue.manifests()]
    return max(epochs, default=0)


def _run_id(folder: RunFolder) -> str:
    identity = read_identity(folder)
    return "" if identity is None else identity.id


class Question(TypedDict, total=False):
    """What a command asks; the names and meanings are those of `ResolveFacts`."""

    fn: Fn
    reference: str | None
    init_from: str | None
    allow_fallback: bool
    fast_dev_run: bool
    job: JobFacts | None
    command_key: str | None
    all_candidates: bool  # list every candidate that is not reached, not the first 20


def gather(folder: RunFolder, **question: Unpack[Question]) -> Gathered:
    """Read what the rules need to know about a run; nothing is changed and nothing is loaded.

    What cannot be read is not raised here but when a rule asks for it, so that the answer says which rule
    did, and a checkpoint given by its path elsewhere still works.

    Raises:
        UsageError: ``run.json`` is damaged.
    """
    catalogue = Catalogue(folder.checkpoints_dir)
    registry, warnings, changed = Registry(), list[str](), False
    attempts: tuple[AttemptRecord, ...] = ()
    trouble: NoCheckpointError | None = None
    try:
        registry, warnings, changed = load_registry(folder, catalogue)
        attempts = _attempts(folder)
        state = "listed" if catalogue.names() else root_state(folder.root, question.get("job"))
    except NoCheckpointError as error:
        trouble, state = error, f"unreadable: {error.message}"
    facts = ResolveFacts(
        fn=question.get("fn", "fit"),
        reference=question.get("reference"),
        init_from=question.get("init_from"),
        allow_fallback=question.get("allow_fallback", False),
        fast_dev_run=question.get("fast_dev_run", False),
        job=question.get("job"),
        command_key=question.get("command_key"),
        run_name=folder.name,
        run_dir=folder.path,
        root_state=state,
        attempts=attempts,
        num_listed=None if question.get("all_candidates") else NUM_LISTED,
    )
    view = DiskView(catalogue, registry, registry.run_id, trouble)
    return Gathered(facts, registry, view, tuple(warnings), changed)


def _attempts(folder: RunFolder) -> tuple[AttemptRecord, ...]:
    try:
        return tuple(retried(lambda: read_attempts(folder.attempts)))
    except OSError as error:
        raise NoCheckpointError(
            f"{folder.attempts} cannot be read: {error.strerror or error}",
            hint="Whether the run has checkpoints is not known, so nothing starts. Mend the access first.",
        ) from error


def resolve_gathered(gathered: Gathered) -> Resolution:
    """The answer to what was gathered, with what was said while gathering."""
    resolution = resolve(gathered.facts, gathered.registry, gathered.view)
    return replace(resolution, warnings=(*gathered.warnings, *resolution.warnings))


def resolve_run(folder: RunFolder, **question: Unpack[Question]) -> Resolution:
    """Read the run and answer; takes what :func:`gather` takes, and raises what it raises."""
    return resolve_gathered(gather(folder, **question))
