"""Every error a user can meet, as one tree.

    CkptrunError                    what all of ours have in common: found, expected, what to do next
    ├── UsageError             2    wrong usage; nothing was started
    │   ├── ConfigError        2    ... in a config file or override, with its place
    │   ├── UnknownRunError    2    no such run under this root
    │   └── MisconfigurationException  2   Lightning's name, for a Trainer or Module set up wrongly
    ├── NoCheckpointError      3    no usable checkpoint where one is required
    │   └── DamagedCheckpointError 3   a file of it is missing, has the wrong size or the wrong checksum
    ├── RunInUseError          4    somebody else holds the run
    ├── IncompatibleError      5    the checkpoint cannot be resumed with this set-up
    ├── SaveError              1    a checkpoint could not be written
    └── RanksDisagreeError     1    one rank does what the others do not, so they cannot go on together

The exit code belongs to the class, so that whoever raises decides it and the command line only passes it on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptrun.records import Damage


class CkptrunError(Exception):
    """An error that is told to the user in one message, without a traceback.

    Args:
        message: what was found and what was expected instead, as one or two sentences.
        hint: what to do next; shown on a line of its own.
    """

    exit_code: int = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class UsageError(CkptrunError):
    """The command was used wrongly; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A config file, an override or a flag is wrong.

    Args:
        place: where, as ``file:line`` or ``override 'a.b=1'``.
    """

    def __init__(self, message: str, *, place: str | None = None, hint: str | None = None) -> None:
        super().__init__(message if place is None else f"{place}: {message}", hint=hint)
        self.place = place


class UnknownRunError(UsageError):
    """There is no run of that name under the root."""


class MisconfigurationException(UsageError):  # noqa: N818 - Lightning's name, which its users catch
    """A Trainer, Module or DataModule is set up in a way that cannot work."""


class NoCheckpointError(CkptrunError):
    """A checkpoint is required and there is no usable one."""

    exit_code = 3


class DamagedCheckpointError(NoCheckpointError):
    """A file of a checkpoint is missing, has the wrong size or the wrong checksum.

    Args:
        damage: which file, and what was found in it; None where it was not read to the end.
    """

    def __init__(self, message: str, *, hint: str | None = None, damage: Damage | None = None) -> None:
        super().__init__(message, hint=hint)
        self.damage = damage


class RunInUseError(CkptrunError):
    """Another process holds the run's lease."""

    exit_code = 4


class IncompatibleError(CkptrunError):
    """The checkpoint cannot be resumed with the set-up that is asked for."""

    exit_code = 5


class SaveError(CkptrunError):
    """A checkpoint could not be written; the earlier ones are untouched."""

    exit_code = 1


class RanksDisagreeError(CkptrunError):
    """User code decided for one rank what all have to do together; they cannot go on.

    Args:
        what: what this rank did, as a sentence without its end.
        rank: this rank.
        step: the step that it had done.
    """

    exit_code = 1

    def __init__(self, what: str, *, rank: int, step: int, waited_s: float) -> None:
        super().__init__(
            f"{what} on rank {rank} after step {step}, and not on every rank: the others did not do so within "
            f"{waited_s:g} s.",
            hint="Let every rank decide alike (by a value that is the same on all of them), or set "
            "trainer.should_stop, which the ranks agree on.",
        )
