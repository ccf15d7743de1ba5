"""Training that is killed again and again ends like training that never was, and nothing committed is ever lost.

``python tests/crash/crash_campaign.py`` kills at random and for longer; here every named point comes once at least, and
each kind of victim.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_play import AT_THE_POINT, SETUPS, Kill, Setup, Undisturbed, draw, play_chain, play_undisturbed

from ckptrun import faults

pytestmark = pytest.mark.crash

_SINGLE, _SINGLE_2_WORKERS, _DDP, _DDP_2_WORKERS, _ZERO_1, _ZERO_3 = SETUPS


def at(point: str, nth: int = 1, victim: str = AT_THE_POINT) -> Kill:
    return Kill(point, victim, nth=nth)


# What some points need is made by the kill before them: a sweep finds something, rows lie past the checkpoint.
CHAINS: dict[str, tuple[Setup, list[Kill]]] = {
    "set-up": (
        _SINGLE,
        [
            at("lease-acquire:written"),
            at("identity:written"),
            at("identity:renamed"),
            at("sweep:file"),
            at("lease-acquire:renamed"),
            at("config:written"),
            at("config:renamed"),
            at("ledger:opened"),
            at("ledger:written"),
            at("status:written"),
            at("status:renamed"),
            at("registry:written", 2),
        ],
    ),
    "single": (
        _SINGLE,
        [
            at("commit:start", 3),
            at("commit:temp-synced", 2, "group"),
            at("registry:renamed", 5, "all"),
            Kill("save", "supervisor", nth=4, share=0.5),
            Kill("run", "all", share=0.4),
            Kill("start-up", "supervisor", share=0.7),
        ],
    ),
    "single, 2 workers": (
        _SINGLE_2_WORKERS,
        [
            at("commit:temp-made", 3),
            at("sweep:folder"),
            at("metrics:set-aside"),
            at("commit:file-half", 4, "loader worker"),
            at("metrics:written", 2),
            at("delete:start", 3, "all"),
            at("lease-renew:written"),
            at("lease-release:written"),
        ],
    ),
    "ddp": (
        _DDP,
        [
            at("ranks:written"),
            at("ranks:renamed", 1, "agent"),
            at("commit:renamed", 3, "rank 1"),
            at("state:read"),
            at("commit:manifest-written", 2, "fork server"),
            at("commit:rename-synced", 2),
            at("delete:renamed", 1, "all"),
            at("lease-renew:renamed", 1, "group"),
        ],
    ),
    "ddp, 2 workers": (
        _DDP_2_WORKERS,
        [
            at("commit:file-written", 4, "loader worker"),
            at("commit:file-synced", 3, "rank 0"),
            at("commit:manifest-renamed", 2, "supervisor"),
            at("commit:done", 2, "all"),
            at("delete:half", 2),
            Kill("run", "rank 1", share=0.2),
        ],
    ),
    # Every rank writes files of its own, rank 1 too.
    "ZeRO 1": (
        _ZERO_1,
        [
            at("commit:file-half", 8, "rank 1"),
            at("commit:manifest-written", 2),
            Kill("save", "all", nth=3, share=0.5),
        ],
    ),
    "ZeRO 3": (_ZERO_3, [at("commit:file-synced", 9, "rank 0"), at("commit:renamed", 2, "all")]),
    "ddp, the end": (_DDP, [at("ledger:written", 2), at("lease-release:renamed", 1, "group")]),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """How each set-up ends that nobody kills, once it was played."""
    return {}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_kills(
    name: str,
    undisturbed: dict[str, Undisturbed],
    start_cli: Callable[..., Any],
    tmp_path: Path,
) -> None:
    setup, kills = CHAINS[name]
    if setup.name not in undisturbed:
        undisturbed[setup.name] = play_undisturbed(start_cli, setup, tmp_path / "undisturbed")
    chain = play_chain(setup, kills, start_cli, undisturbed[setup.name], tmp_path / "project")
    output = chain.output or chain.struck[-1].output
    assert not chain.all_trouble, "\n".join([*chain.all_trouble, output])
    struck = [(each.kill, each.victim) for each in chain.struck]
    assert [kill for kill, victim in struck if victim is not None] == kills, (
        f"not all struck: {struck}\n{output}"
    )
    others = [f"{kill}: {victim}" for kill, victim in struck if kill.victim not in (AT_THE_POINT, victim)]
    assert not others, f"another one was killed: {others}\n{output}"
    at_the_point = {victim for kill, victim in struck if kill.victim == AT_THE_POINT}
    assert at_the_point <= {"supervisor", "rank 0", "rank 1"}, at_the_point


def test_every_point_is_there_and_every_victim() -> None:
    kills = [kill for _, chain in CHAINS.values() for kill in chain]
    assert len(kills) >= 40
    assert {kill.when for kill in kills} == {*faults.POINTS, "start-up", "run", "save"}
    assert {kill.victim for kill in kills} == {
        AT_THE_POINT,
        *(name for setup in SETUPS for name in setup.victims),
    }


def test_a_seed_names_the_same_kills_each_time() -> None:
    drawn = [[draw(random.Random("1 7"), setup) for _ in range(50)] for setup in SETUPS for _ in "12"]
    assert drawn[::2] == drawn[1::2]
    assert all(kill.victim in (*SETUPS[0].victims, AT_THE_POINT) for kill in drawn[0])
