"""A stop in every phase, in every way: a part of the matrix that ``python tests/stop/stop_matrix.py`` plays whole.

Each phase is there with each launcher, and each event with several ranks; some cells also start the same line again and
compare the end with that of a run that was never stopped, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from stop_cells import CELLS, EVENTS, INLINE, LAUNCHERS, PHASES, TORCHRUN, Cell, impossible
from stop_play import Bases, play

pytestmark = pytest.mark.crash

# launcher, phase, event, and whether the run is resumed
PLAYED = (
    ("inline", "import", "ckptrun save", False),
    ("inline", "set-up", "SIGTERM", False),
    ("inline", "restore", "SIGHUP", True),
    ("inline", "sanity check", "exception", False),
    ("inline", "train", "exception, OnExceptionCheckpoint", True),
    ("inline", "train", "command killed", True),
    ("inline", "window", "SIGINT", True),
    ("inline", "validation", "SIGTERM to its group", True),
    ("inline", "save", "SIGUSR1", False),
    ("inline", "teardown", "SIGTERM, and it hangs", False),
    ("inline", "validate", "SIGUSR2", False),
    ("inline", "test", "SIGINT twice", False),
    ("inline", "predict", "SIGINT", False),
    ("torchrun", "import", "SIGTERM to rank 1", False),
    ("torchrun", "import", "exception in rank 1", False),
    ("torchrun", "set-up", "SIGINT", False),
    ("torchrun", "set-up", "rank 1 killed", False),
    ("torchrun", "restore", "SIGINT twice", False),
    ("torchrun", "sanity check", "SIGUSR1", False),
    ("torchrun", "sanity check", "command killed", False),
    ("torchrun", "train", "SIGINT that came in ignored", False),
    ("torchrun", "train", "SIGINT to rank 1", True),
    ("torchrun", "train", "SIGHUP under nohup", False),
    ("torchrun", "window", "SIGTERM", True),
    ("torchrun", "window", "ckptrun stop", False),
    ("torchrun", "validation", "SIGTERM to its group", True),
    ("torchrun", "validation", "ckptrun save", False),
    ("torchrun", "validation", "exception, OnExceptionCheckpoint", True),
    ("torchrun", "save", "SIGINT three times", False),
    ("torchrun", "save", "rank 1 killed", True),
    ("torchrun", "save", "SIGUSR2", False),
    ("torchrun", "teardown", "SIGTERM", False),
    ("torchrun", "teardown", "exception", False),
    ("torchrun", "validate", "SIGINT to its group", False),
    ("torchrun", "test", "SIGTERM, and it hangs", False),
    ("torchrun", "predict", "SIGHUP", False),
    ("deepspeed", "import", "SIGTERM", False),
    ("deepspeed", "train", "SIGTERM to rank 1", True),
    ("deepspeed", "train", "command killed", False),
    ("deepspeed", "window", "rank 1 killed", False),
    ("deepspeed", "validation", "exception in rank 1", False),
    ("torchrun, ZeRO", "save", "rank 1 killed", False),
)
_BY_NAME = {(cell.launcher.name, cell.phase.name, cell.event.name): cell for cell in CELLS}


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the phases start from, by name, once it was made."""
    return {"": tmp_path_factory.mktemp("bases")}


@pytest.mark.parametrize(
    ("cell", "resume"),
    [
        pytest.param(_BY_NAME[tuple(names)], resume, id="-".join(names).replace(" ", "_"))
        for *names, resume in PLAYED
    ],
)
def test_a_stop(
    cell: Cell, resume: bool, start_cli: Callable[..., Any], made_once: dict[str, Path], tmp_path: Path
) -> None:
    bases = Bases(made_once[""], start_cli, made_once)
    played = play(cell, start_cli, bases, tmp_path / "project", resume=resume)
    assert not played.trouble, "\n".join([cell.name, *played.trouble, played.output])


def test_every_phase_and_every_event_is_played_and_none_that_cannot_occur() -> None:
    cells = [_BY_NAME[launcher, phase, event] for launcher, phase, event, _ in PLAYED]
    whole = (INLINE, TORCHRUN)  # the others differ from them in few places
    assert {(c.launcher, c.phase) for c in cells if c.launcher in whole} == set(product(whole, PHASES))
    assert {cell.launcher for cell in cells} == set(LAUNCHERS)
    assert {cell.event for cell in cells if cell.launcher is TORCHRUN} == set(EVENTS)
    assert [cell.name for cell in cells if impossible(cell)] == []
