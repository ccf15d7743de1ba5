"""A stop in every phase, in every way: a part of the matrix that ``python tests/stop/stop_matrix.py`` plays whole.

Each phase and each event is there; some cells also start the same line again and compare the end with that of a
run that was never stopped, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stop_cells import CELLS, EVENTS, PHASES, Cell, impossible
from stop_play import Bases, play

pytestmark = pytest.mark.crash

# phase, event, and whether the run is resumed
PLAYED = (
    ("import", "SIGINT", False),
    ("import", "ckptrun save", False),
    ("set-up", "SIGTERM", False),
    ("set-up", "SIGINT twice", False),
    ("restore", "SIGHUP", True),
    ("restore", "SIGKILL", False),
    ("sanity check", "SIGUSR1", False),
    ("sanity check", "exception", False),
    ("train", "SIGINT that came in ignored", False),
    ("train", "SIGINT three times", False),
    ("train", "SIGHUP under nohup", False),
    ("train", "exception, OnExceptionCheckpoint", True),
    ("train", "SIGKILL", True),
    ("window", "SIGINT", True),
    ("window", "ckptrun stop", False),
    ("validation", "SIGTERM", True),
    ("validation", "ckptrun save", False),
    ("save", "SIGINT", False),
    ("save", "SIGUSR1", False),
    ("teardown", "SIGTERM, and it hangs", False),
    ("teardown", "SIGINT", False),
    ("validate", "SIGUSR2", False),
    ("test", "SIGTERM", False),
    ("test", "SIGINT twice", False),
    ("predict", "SIGHUP", False),
    ("predict", "exception", False),
    ("predict", "SIGKILL", False),
)
_BY_NAME = {(cell.phase.name, cell.event.name): cell for cell in CELLS}


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the phases start from, by name, once it was made."""
    return {"": tmp_path_factory.mktemp("bases")}


@pytest.mark.parametrize(
    ("cell", "resume"),
    [
        pytest.param(_BY_NAME[phase, event], resume, id=f"{phase}-{event}".replace(" ", "_"))
        for phase, event, resume in PLAYED
    ],
)
def test_a_stop(
    cell: Cell, resume: bool, start_cli: Callable[..., Any], made_once: dict[str, Path], tmp_path: Path
) -> None:
    bases = Bases(made_once[""], start_cli, made_once)
    played = play(cell, start_cli, bases, tmp_path / "project", resume=resume)
    assert not played.trouble, "\n".join([cell.name, *played.trouble, played.output])


def test_every_phase_and_every_event_is_played_and_none_that_cannot_occur() -> None:
    cells = [_BY_NAME[phase, event] for phase, event, _ in PLAYED]
    assert {cell.phase for cell in cells} == set(PHASES)
    assert {cell.event for cell in cells} == set(EVENTS)
    assert [cell.name for cell in cells if impossible(cell)] == []
