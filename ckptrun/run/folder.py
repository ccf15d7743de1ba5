"""Where in a run's folder is what?

    runs/<name>/
      run.json  config.yaml  registry.json  attempts.jsonl  status.json  lease.json
      control/      requests of `ckptrun save` and `stop`, and their answers
      logs/  evals/  checkpoints/

Decision: paths are plain strings and nothing is created by looking. Whether a run is there is answered by
what is on disk; an error of the disk is an error and never "not there". Turned down: ``os.path.exists``,
which says False for both.
"""

from __future__ import annotations

import os

from ckptrun.errors import NoCheckpointError, UsageError
from ckptrun.records import JobFacts


class RunFolder:
    """The paths of one run. ``root`` and all paths are absolute."""

    __slots__ = (
        "attempts",
        "checkpoints_dir",
        "config_yaml",
        "control_dir",
        "evals_dir",
        "lease",
        "logs_dir",
        "name",
        "path",
        "registry",
        "root",
        "run_json",
        "status",
    )

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.root, self.name = os.path.split(self.path)
        self.run_json = os.path.join(self.path, "run.json")
        self.config_yaml = os.path.join(self.path, "config.yaml")
        self.registry = os.path.join(self.path, "registry.json")
        self.attempts = os.path.join(self.path, "attempts.jsonl")
        self.status = os.path.join(self.path, "status.json")
        self.lease = os.path.join(self.path, "lease.json")
        self.logs_dir = os.path.join(self.path, "logs")
        self.evals_dir = os.path.join(self.path, "evals")
        self.checkpoints_dir = os.path.join(self.path, "checkpoints")
        self.control_dir = os.path.join(self.path, "control")

    @classmethod
    def at(cls, root: str, name: str) -> RunFolder:
        """The folder of run ``name`` under ``root``.

        Raises:
            UsageError: the name cannot be a folder's, or the root is a URL.
        """
        if "://" in root:
            raise UsageError(
                f"the root {root!r} is a URL, and this version of ckptrun keeps runs in local folders only",
                hint="Give a folder with --root or in run.root.",
            )
        if not name or name.startswith(".") or "/" in name or not name.isprintable():
            raise UsageError(
                f"{name!r} cannot be the name of a run",
                hint="A name is one folder's: no '/', no dot in front, nothing that cannot be printed.",
            )
        return cls(os.path.join(os.path.expanduser(root), name))

    def exists(self) -> bool:
        """Whether there is such a run: ``run.json``, or anything in ``checkpoints/``.

        Raises:
            UsageError: the disk does not say.
        """
        try:
            try:
                os.stat(self.run_json)
                return True
            except (FileNotFoundError, NotADirectoryError):
                pass
            try:
                with os.scandir(self.checkpoints_dir) as entries:
                    return next(entries, None) is not None
            except (FileNotFoundError, NotADirectoryError):
                return False
        except OSError as error:
            raise UsageError(
                f"cannot look into the run's folder {self.path}: {error.strerror}",
                hint="Whether the run exists is not known. Check the folder's permissions and its disk.",
            ) from error

    def create(self) -> None:
        """Make the run's folders; those that stand already are left alone.

        Raises:
            UsageError: a folder cannot be made or not be written.
        """
        try:
            for folder in (self.logs_dir, self.evals_dir, self.checkpoints_dir, self.control_dir):
                os.makedirs(folder, exist_ok=True)
            probe = os.path.join(self.path, f".writable.tmp-{os.getpid()}")
            with open(probe, "xb"):
                pass
            os.unlink(probe)
        except OSError as error:
            raise UsageError(
                f"the run's folder {self.path} cannot be written: {error.strerror}",
                hint="Check its permissions and the space on its disk, or name another place with --root.",
            ) from error

    def __repr__(self) -> str:
        return f"RunFolder({self.path!r})"


def root_state(root: str, job: JobFacts | None = None) -> str:
    """``listed``, ``empty``, ``absent``, or ``unreadable: why``; only "no such file" is absent.

    Args:
        job: where its tasks say in this start of it where they meet is nothing in the root.
    """
    own = None if job is None else meeting_name(job, "")
    try:
        with os.scandir(root) as entries:
            found = any(own is None or own not in entry.name for entry in entries)
    except FileNotFoundError:
        return "absent"
    except OSError as error:
        return f"unreadable: {error.strerror or error}"
    return "listed" if found else "empty"


def meeting_name(job: JobFacts, step: str) -> str:
    """The file in the root that says where the tasks of a step meet; it begins so for all of this start of the job."""
    return f".meet-{job.key}-{job.restart_count}-{step}"


def root_is_gone(which: str, state: str, job: JobFacts) -> NoCheckpointError:
    """A job that came back finds its root ``absent`` or ``empty``: a mount point, and nothing is mounted there.

    Args:
        which: its path, or "of" what it is the root.
    """
    mounted = "Its file system may not be mounted on this node."
    if state == "empty":
        return NoCheckpointError(
            f"The root {which} is empty, though the job {job.came_back} and so was here before.",
            hint=f"{mounted} A requeued job begins nothing in an empty root; where nothing was saved, hand it in anew.",
        )
    return NoCheckpointError(
        f"The root {which} does not exist, though the job {job.came_back} and so was here before.",
        hint=f"{mounted} A requeued job never creates a root.",
    )
