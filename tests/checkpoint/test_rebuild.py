"""A registry from the manifests alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.rebuild import catch_up, ignored_by_takeover, rebuild_registry
from ckptrun.run.registry import Registry

MONITOR = {"state_key": "mc", "class": "ModelCheckpoint", "monitor": "loss", "mode": "min", "save_top_k": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def save(folder: Path, sequence: int, loss: float | None = None, **more: Any) -> str:
    name = naming.folder_name(sequence, "a")
    fields: dict[str, Any] = {
        "run_id": "r",
        "epoch": 0,
        "reason": "periodic",
        "line": ((1, sequence),),
        "callbacks": (dict(MONITOR),),
        **more,
    }
    if loss is not None:
        fields |= {"metrics": {"loss": loss}, "saved_for": ("mc",)}
    manifest = Manifest(sequence=sequence, step=sequence, **fields)
    commit(str(folder), name, {"state.ckpt": lambda f: f.write(b"x")}, manifest)
    return name


def test_saves_holds_jobs_and_scores_come_back(folder: Path) -> None:
    first = save(folder, 1, 0.3)
    entry = {**MONITOR, "best_k": {first: 0.3}, "best": first, "best_score": 0.3}
    second = save(folder, 2, 0.1, callbacks=(entry,))
    hpc = save(folder, 3, reason="hpc", job="7", callbacks=({**entry, "best_k": {first: 0.3, second: 0.1}},))
    registry = rebuild_registry(Catalogue(str(folder)))
    assert registry.run_id == "r"
    assert registry.sequence == 3
    assert [entry["name"] for entry in registry.saves] == [first, second, hpc]
    assert registry.holds == {"hpc": hpc}
    assert registry.hpc == {"7": [hpc]}
    assert registry.callbacks[0]["best_k"] == {first: 0.3, second: 0.1}


def test_a_save_counts_among_the_best_though_its_own_manifest_is_from_before(folder: Path) -> None:
    names = [save(folder, number, loss) for number, loss in enumerate((0.3, 0.1, 0.2), 1)]
    (entry,) = rebuild_registry(Catalogue(str(folder))).callbacks
    # Each manifest here carries entries without scores, so the last save alone is known.
    assert entry["best"] == names[2]
    assert entry["best_score"] == 0.2


def test_catching_up_notes_only_what_is_newer(folder: Path) -> None:
    first = save(folder, 1, 0.3)
    registry = rebuild_registry(Catalogue(str(folder)))
    assert catch_up(registry, Catalogue(str(folder))) == []
    second = save(folder, 2, 0.1, callbacks=tuple(registry.callbacks))
    registry.pin = {"reference": "last", "path": "x", "pinned_at": 1.0}
    assert catch_up(registry, Catalogue(str(folder))) == [second]
    assert registry.callbacks[0]["best_k"] == {first: 0.3, second: 0.1}
    assert registry.pin is not None
    assert catch_up(registry, Catalogue(str(folder))) == []


def test_the_limit_of_a_callback_holds(folder: Path) -> None:
    registry = Registry(run_id="r")
    for number, loss in enumerate((0.3, 0.1, 0.2), 1):
        save(folder, number, loss, callbacks=tuple(registry.callbacks) or (dict(MONITOR),))
        catch_up(registry, Catalogue(str(folder)))
    assert sorted(registry.callbacks[0]["best_k"].values()) == [0.1, 0.2]


def test_other_runs_and_damaged_ones_are_left_out(folder: Path) -> None:
    other = save(folder, 1, run_id="other")
    mine = save(folder, 2)
    broken = save(folder, 3)
    (folder / broken / "manifest.json").write_text("{")
    registry = rebuild_registry(Catalogue(str(folder)), run_id="r")
    assert [entry["name"] for entry in registry.saves] == [mine]
    assert registry.sequence == 3
    assert other not in str(registry.to_dict())


def test_what_an_overtaken_writer_left_is_ignored(folder: Path) -> None:
    first = save(folder, 1, lease_epoch=1)
    zombie = save(folder, 3, lease_epoch=1)
    taken = save(folder, 2, lease_epoch=2)
    registry = rebuild_registry(Catalogue(str(folder)))
    assert registry.takeovers == [{"lease_epoch": 2, "sequence": 1}]
    assert [entry["name"] for entry in registry.saves] == [first, taken]
    assert zombie not in str(registry.saves)


def test_only_an_older_epoch_past_the_noted_number_is_ignored() -> None:
    takeovers = [{"lease_epoch": 2, "sequence": 10}]
    assert ignored_by_takeover(takeovers, 1, 11) == 10
    assert ignored_by_takeover(takeovers, 1, 10) is None
    assert ignored_by_takeover(takeovers, 2, 11) is None


def test_an_empty_run_has_an_empty_registry(folder: Path) -> None:
    assert rebuild_registry(Catalogue(str(folder / "none"))) == Registry()


def test_what_was_about_to_be_deleted_is_noted_again_and_nothing_else_of_it(folder: Path) -> None:
    """The process died between the registry's word and the deletion: else nobody would ever look at it again."""
    names = [save(folder, number, loss) for number, loss in enumerate((0.3, 0.2, 0.1), 1)]
    stop = save(folder, 4, reason="stop")
    registry = rebuild_registry(Catalogue(str(folder)))
    registry.callbacks = [{**MONITOR, "best_k": {names[2]: 0.1}, "best": names[2]}]
    save(folder, 5, reason="stop")
    catch_up(registry, Catalogue(str(folder)))
    callbacks, holds = registry.callbacks, dict(registry.holds)
    registry.forget([names[1], stop])
    assert catch_up(registry, Catalogue(str(folder))) == []
    assert [entry["sequence"] for entry in registry.saves] == [1, 2, 3, 4, 5]
    assert (registry.callbacks, registry.holds) == (callbacks, holds)


def test_what_was_about_to_be_deleted_is_noted_again_where_it_was_the_oldest(folder: Path) -> None:
    """Then nothing in the registry's list leads to it but that it was going."""
    names = [save(folder, number) for number in (1, 2, 3)]
    registry = rebuild_registry(Catalogue(str(folder)))
    registry.forget(names[:2])
    shutil.rmtree(folder / names[1])
    path = str(folder.parent / "registry.json")
    registry.save(path)
    found = Registry.load(path)
    assert found.going == names[:2]
    assert catch_up(found, Catalogue(str(folder))) == []
    assert [entry["name"] for entry in found.saves] == [names[0], names[2]]
    assert found.going == []


def test_what_is_gone_is_not_going(folder: Path) -> None:
    names = [save(folder, number) for number in (1, 2)]
    registry = rebuild_registry(Catalogue(str(folder)))
    known = registry.known()
    registry.forget(names)
    registry.note_gone(names[0])
    assert registry.going == [names[1]]
    registry.put_back(known)
    assert registry.going == []


def test_what_is_older_than_the_registrys_notes_is_not_looked_into(folder: Path) -> None:
    for number in (1, 2, 3):
        save(folder, number)
    registry = rebuild_registry(Catalogue(str(folder)))
    del registry.saves[:2]
    assert catch_up(registry, Catalogue(str(folder))) == []
    assert [entry["sequence"] for entry in registry.saves] == [3]


def test_what_was_noted_later_comes_back(folder: Path) -> None:
    note = {"reason": "hpc", "owner": None, "job": "7"}
    end = {"name": "00000002-a", "sequence": 2, "by": "max_steps", "max_steps": 2}
    first = save(folder, 1, noted=(note, {"reason": "manual", "owner": None, "job": "7"}))
    second = save(folder, 2, 0.5, noted=({"reason": "best", "owner": "mc", "job": None},), finished=end)
    registry = rebuild_registry(Catalogue(str(folder)))
    assert (registry.hpc, registry.holds) == ({"7": [first]}, {"hpc": first})
    assert registry.saves[0]["notes"] == ["hpc", "manual"]
    assert registry.saves[1]["notes"] == ["best"]
    assert registry.callbacks[0]["best"] == second
    assert registry.finished == end
    save(folder, 3)
    assert rebuild_registry(Catalogue(str(folder))).finished is None, "training went on"
