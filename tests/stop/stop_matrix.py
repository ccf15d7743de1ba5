"""Plays the whole stop matrix and prints it: ``python tests/stop/stop_matrix.py [parts of a cell's name]``.

A cell is called ``torchrun: train: SIGINT``, so ``'torchrun: save'`` plays one launcher's phase. The whole takes three
quarters of an hour on two cores; the tests play a part of it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import pytest  # noqa: E402
from live_cli import Live, child_environment  # noqa: E402
from stop_cells import CELLS, EVENTS, LAUNCHERS, PHASES, Expected, Launcher, impossible  # noqa: E402
from stop_play import Bases, Played, play  # noqa: E402


def main(words: list[str]) -> int:
    """Play and print; returns the number of cells that are not as expected."""
    folder = Path(tempfile.mkdtemp(prefix="stop-matrix-"))
    started: list[Live] = []

    def start(*args: str, cwd: Path, env: dict[str, str] | None = None) -> Live:
        output = Path(tempfile.mkdtemp(dir=folder))
        started.append(Live(tuple(map(str, args)), output, cwd, child_environment(env)))
        return started[-1]

    bases = Bases(folder / "bases", start, {})
    shown: dict[tuple[str, str, str], str] = {}
    wrong, reasons = [], {}
    try:
        for number, cell in enumerate(CELLS):
            key = (cell.launcher.name, cell.event.name, cell.phase.name)
            if words and not any(word in cell.name for word in words):
                continue
            why = impossible(cell)
            if why is not None:
                shown[key] = "-"
                reasons.setdefault(why, []).append(cell.name)
                continue
            project = folder / f"cell-{number}"
            try:
                played = play(cell, start, bases, project, resume=True)
            except pytest.fail.Exception as failure:
                played = Played(
                    cell, Expected(-1, None, None, None, None), str(failure), ["it did not get there"]
                )
            finally:
                for live in started:
                    live.close()
                started.clear()
            kept = "nothing" if played.found.newest is None else "{} {}".format(*played.found.newest)
            shown[key] = f"{played.found.code} {kept}" + ("" if not played.trouble else " WRONG")
            print(f"{cell.name}: {shown[key]}", file=sys.stderr, flush=True)
            if played.trouble:
                wrong.append(played)
                print("\n".join(f"    {line}" for line in played.trouble), file=sys.stderr, flush=True)
                print(played.output, file=sys.stderr, flush=True)
            shutil.rmtree(project)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for launcher in LAUNCHERS:
        _print_table(launcher, shown)
    print("cells that cannot occur:")
    for why, names in reasons.items():
        print(f"- {why}: {'; '.join(names)}")
    played = sum(each != "-" for each in shown.values())
    print(f"\n{played} cells played, {len(wrong)} wrong")
    return len(wrong)


def _print_table(launcher: Launcher, shown: dict[tuple[str, str, str], str]) -> None:
    ranks = "1 rank" if launcher.num_ranks == 1 else f"{launcher.num_ranks} ranks"
    print(f"{launcher.name}, {ranks}: exit code and newest checkpoint\n")
    print("| | " + " | ".join(phase.name for phase in PHASES) + " |")
    print("|---" * (len(PHASES) + 1) + "|")
    for event in EVENTS:
        row = [shown.get((launcher.name, event.name, phase.name), "") for phase in PHASES]
        print(f"| {event.name} | " + " | ".join(row) + " |")
    print()


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
