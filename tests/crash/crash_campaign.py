"""Kills training again and again and prints what came of it.

    python tests/crash/crash_campaign.py --kills 1000 --seed 1

Chains of up to six kills, the set-ups in turn; docs/crash_campaign.md says what is checked. Chain number N of a seed is
always made of the same kills (``--chain N`` plays that one alone), though where a random instant falls differs a little
from one time to the next. The Markdown goes to stdout, progress and failures to stderr as they come.
"""

from __future__ import annotations

import argparse
import collections
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import pytest  # noqa: E402
from crash_play import SETUPS, Chain, Kill, Setup, Undisturbed, draw, play_chain, play_undisturbed  # noqa: E402
from live_cli import Live, child_environment  # noqa: E402

LONGEST_CHAIN = 6


class Commands:
    """Starts commands, with their output in a folder of their own, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Live] = []

    def __call__(self, *args: str, cwd: Path, env: dict[str, str] | None = None) -> Live:
        output = Path(tempfile.mkdtemp(dir=self._folder))
        self._started.append(Live(tuple(map(str, args)), output, cwd, child_environment(env)))
        return self._started[-1]

    def close(self) -> None:
        for live in self._started:
            live.close()


def kills_of(seed: int, number: int, setup: Setup) -> list[Kill]:
    """The kills of a chain, in the order in which they come."""
    rng = random.Random(f"{seed} {number}")
    return [draw(rng, setup) for _ in range(rng.randint(2, LONGEST_CHAIN))]


def setup_of(number: int) -> Setup:
    return SETUPS[number % len(SETUPS)]


def play(seed: int, number: int, undisturbed: Undisturbed, folder: Path) -> Chain:
    """Play one chain; its folder is removed where it ended as it should."""
    setup, project = setup_of(number), folder / f"chain-{number}"
    output = folder / f"output-{number}"
    output.mkdir()
    start = Commands(output)
    try:
        chain = play_chain(setup, kills_of(seed, number, setup), start, undisturbed, project)
    except (pytest.fail.Exception, Exception) as failure:
        chain = Chain(setup, trouble=[f"{type(failure).__name__}: {failure}"])
    finally:
        start.close()
    if not chain.all_trouble:
        shutil.rmtree(project, ignore_errors=True)
        shutil.rmtree(output)
    return chain


def run_campaign(seed: int, num_kills: int, jobs: int, folder: Path, only: int | None) -> dict[int, Chain]:
    """Play chains until so many kills have hit, or Ctrl-C; those under way are played to their end."""
    undisturbed = {}
    for setup in SETUPS:
        start = Commands(folder)
        undisturbed[setup.name] = play_undisturbed(start, setup, folder / f"undisturbed-{setup.name}")
        start.close()
    chains: dict[int, Chain] = {}
    if only is not None:
        return {only: _shown(seed, only, play(seed, only, undisturbed[setup_of(only).name], folder))}
    pending: dict[Future[Chain], int] = {}
    hits, number = 0, 0
    try:
        with ThreadPoolExecutor(jobs) as pool:
            while hits < num_kills or pending:
                while hits < num_kills and len(pending) < jobs:
                    future = pool.submit(play, seed, number, undisturbed[setup_of(number).name], folder)
                    pending[future] = number
                    number += 1
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    played = pending.pop(future)
                    chains[played] = _shown(seed, played, future.result())
                    hits += len(_hits([chains[played]]))
                print(f"{hits} kills, {len(chains)} chains", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("ended early; what was played so far:", file=sys.stderr)
    return chains


def _shown(seed: int, number: int, chain: Chain) -> Chain:
    if chain.all_trouble:
        print(f"--- seed {seed}, chain {number} ({chain.setup.name})", file=sys.stderr)
        for struck in chain.struck:
            print(f"    {struck.kill}: killed {struck.victim}", file=sys.stderr)
        print(*chain.all_trouble, sep="\n", file=sys.stderr)
        print(chain.output or (chain.struck[-1].output if chain.struck else ""), file=sys.stderr, flush=True)
    return chain


def _hits(chains: Iterable[Chain]) -> list[tuple[Setup, str, str]]:
    """(set-up, victim, moment) of every kill that hit."""
    return [
        (chain.setup, struck.victim, struck.kill.when)
        for chain in chains
        for struck in chain.struck
        if struck.victim is not None
    ]


def report(seed: int, chains: dict[int, Chain], wall_s: float, folder: Path) -> str:
    """The result as Markdown."""
    hits = _hits(chains.values())
    exact = [chain for chain in chains.values() if not chain.all_trouble]
    lines = [
        f"{len(hits)} kills in {len(chains)} chains, seed {seed}, {wall_s / 60:.0f} minutes. "
        f"{len(exact)} chains ended with the same bits as the undisturbed run, {len(chains) - len(exact)} did not.",
        "",
        f"ckptrun {_version('ckptrun')}, torch {_version('torch')}, NumPy {_version('numpy')}, Python "
        f"{platform.python_version()}, Linux {platform.release().split('-')[0]}, {platform.machine()}, file system "
        f"{_file_system(folder)}.",
        "",
        "| set-up | kills | chains | ended exactly |",
        "|---|--:|--:|--:|",
    ]
    for setup in SETUPS:
        own = [chain for chain in chains.values() if chain.setup is setup]
        good = sum(not chain.all_trouble for chain in own)
        lines.append(f"| {setup.name} | {len(_hits(own))} | {len(own)} | {good} |")
    names = [setup.name for setup in SETUPS]
    for title, column in (("victim", 1), ("moment", 2)):
        counts = collections.Counter((hit[column], hit[0].name) for hit in hits)
        lines += ["", f"| {title} | " + " | ".join(names) + " |", "|---" + "|--:" * len(names) + "|"]
        for key in sorted({hit[column] for hit in hits}):
            lines.append(f"| {key} | " + " | ".join(str(counts[key, name] or "") for name in names) + " |")
    for number, chain in sorted(chains.items()):
        if chain.all_trouble:
            lines += ["", f"Chain {number} ({chain.setup.name}): `--seed {seed} --chain {number}`", ""]
            lines += [f"- {line.splitlines()[0]}" for line in chain.all_trouble]
    return "\n".join(lines)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    if package == "ckptrun":
        from ckptrun._version import __version__

        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _file_system(folder: Path) -> str:
    """The kind of the file system that ``folder`` is on, as the kernel calls it."""
    kinds = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.is_relative_to(point):
            kinds[point] = kind
    return kinds[max(kinds, key=len)]


def main() -> int:
    """Play and print; returns 1 where a chain did not end as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="end once so many kills have hit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="chains at a time")
    parser.add_argument("--chain", type=int, help="play this chain of the seed alone")
    parser.add_argument("--folder", type=Path, help="where to run; a temporary folder by default")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=given.folder)).resolve()
    began = time.monotonic()
    chains = run_campaign(given.seed, given.kills, given.jobs, folder, given.chain)
    print(report(given.seed, chains, time.monotonic() - began, folder))
    if any(chain.all_trouble for chain in chains.values()):
        print(f"what the failed chains left: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
