"""What the report says about checkpoints of each kind, and about paths that are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptrun.errors import DamagedCheckpointError, NoCheckpointError
from ckptrun.inspect.report import REQUIRED, Report, inspect_checkpoint
from ckptrun.inspect.wrappers import Wrapper, find_wrappers

KEYS = [
    *("path", "format", "step", "epoch", "metrics", "parts", "resumable", "missing"),
    *("num_tensors", "num_parameters", "size_bytes", "tensors"),
]


def training_state(**more: Any) -> dict[str, Any]:
    """With the keys of ``state.ckpt``."""
    model = nn.Linear(3, 2)
    moments = {
        n: {"step": torch.tensor(5.0), "exp_avg": torch.zeros_like(p)}
        for n, p in enumerate(model.parameters())
    }
    return {
        "epoch": 2,
        "global_step": 1200,
        "ckptrun_version": "0.1.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"global_step": 1200}},
        "hyper_parameters": {"lr": 0.1},
        "callbacks": {"ModelCheckpoint": {"best": 1.0}},
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}],
        "lr_schedulers": [],
        "ckptrun": {"seed": 1, "logs": {}},
        **more,
    }


def commit(folder: Path, state: dict[str, Any], **manifest: Any) -> Path:
    """A committed checkpoint of ckptrun."""
    folder.mkdir(parents=True)
    torch.save(state, folder / "state.ckpt")
    torch.save({"rank": 0, "random": {"torch": torch.get_rng_state()}}, folder / "rank-0000.ckpt")
    files = [
        {"path": path.name, "size_bytes": path.stat().st_size, "checksum": "xxh3_64:0"}
        for path in folder.iterdir()
    ]
    content = {
        "format": 1,
        "run_id": "r",
        "sequence": 42,
        "step": 1200,
        "epoch": 2,
        "reason": "periodic",
        "exact": True,
        "weights_only": False,
        "world_size": 1,
        "metrics": {"val_loss": 0.5, "bad": float("nan")},
        "versions": {"ckptrun": "0.1.0", "torch": "2.13"},
        "files": files,
        **manifest,
    }
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return commit(tmp_path / "demo" / "checkpoints" / "00000042-step-00001200", training_state())


def test_a_checkpoint_of_ckptrun(checkpoint: Path) -> None:
    report = inspect_checkpoint(str(checkpoint))
    document = report.as_dict()
    assert list(document)[: len(KEYS)] == KEYS
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["path"] == str(checkpoint)
    assert (document["format"], document["step"], document["epoch"]) == ("ckptrun", 1200, 2)
    assert document["metrics"] == {"val_loss": 0.5, "bad": None}
    assert (document["resumable"], document["missing"]) == (True, [])
    assert document["num_parameters"] == 8
    assert document["num_tensors"] == len(document["tensors"]) == 6
    assert document["size_bytes"] == 8 * 4 * 2 + 2 * 4
    first = document["tensors"][0]
    assert first == {"name": "state_dict.weight", "shape": [2, 3], "dtype": "float32", "size_bytes": 24}
    sizes = [tensor["size_bytes"] for tensor in document["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    assert {"state_dict", "optimizer_states", "callbacks", "loops", "random_state"} <= set(document["parts"])
    assert document["parts"]["state_dict"] == {"num_entries": 2, "num_tensors": 2, "size_bytes": 32}
    assert document["writer"]["torch"] == "2.13"
    assert document["saved"]["sequence"] == 42
    assert document["foreign_globals"] == []


@pytest.mark.parametrize("name", ["state.ckpt", "manifest.json"])
def test_a_file_of_a_checkpoint_means_the_checkpoint(checkpoint: Path, name: str) -> None:
    assert (
        inspect_checkpoint(str(checkpoint / name)).as_dict() == inspect_checkpoint(str(checkpoint)).as_dict()
    )


def test_a_state_without_its_folder_lacks_what_the_ranks_hold(checkpoint: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.ckpt"
    (checkpoint / "state.ckpt").rename(moved)
    report = inspect_checkpoint(str(moved))
    assert (report.format, report.missing) == ("ckptrun", ["data_position", "random_state"])
    assert (report.step, report.epoch) == (1200, 2)


def test_a_file_of_one_rank_says_so(checkpoint: Path) -> None:
    report = inspect_checkpoint(str(checkpoint / "rank-0000.ckpt"))
    assert report.notices == [f"it is one rank's part of the checkpoint {checkpoint}"]
    assert (report.num_parameters, len(report.tensors), report.resumable) == (0, 1, False)


def test_weights_only_names_what_is_missing(tmp_path: Path) -> None:
    state = training_state()
    for key in ("callbacks", "optimizer_states", "lr_schedulers", "ckptrun"):
        del state[key]
    report = inspect_checkpoint(str(commit(tmp_path / "00000001-a", state, weights_only=True)))
    assert not report.resumable
    assert report.missing == ["optimizer_states", "lr_schedulers", "callbacks"]


def test_a_rank_without_its_file_is_named(tmp_path: Path) -> None:
    report = inspect_checkpoint(str(commit(tmp_path / "00000001-a", training_state(), world_size=3)))
    assert report.missing == [
        f"{part} (rank-000{rank}.ckpt)" for rank in (1, 2) for part in ("data_position", "random_state")
    ]


def test_a_checkpoint_beside_a_boundary_is_noted(tmp_path: Path) -> None:
    report = inspect_checkpoint(str(commit(tmp_path / "00000001-a", training_state(), exact=False)))
    assert "exact: false" in report.notices[0]


def test_a_file_of_lightning(tmp_path: Path) -> None:
    state = training_state()
    for key in ("ckptrun", "ckptrun_version"):
        del state[key]
    state["pytorch-lightning_version"] = "2.5.0"
    torch.save(state, tmp_path / "l.ckpt")
    report = inspect_checkpoint(str(tmp_path / "l.ckpt"))
    assert (report.format, report.container, report.step, report.epoch) == ("lightning", "torch-zip", 1200, 2)
    assert report.missing == ["data_position", "random_state"]
    assert report.writer["pytorch-lightning_version"] == "2.5.0"


@pytest.mark.parametrize("legacy", [False, True])
def test_a_state_dict_alone(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "w.pt"
    torch.save(nn.Linear(3, 2).state_dict(), path, _use_new_zipfile_serialization=not legacy)
    report = inspect_checkpoint(str(path))
    assert report.format == ("torch-legacy" if legacy else "torch-zip")
    assert (report.step, report.epoch, report.metrics, report.resumable) == (None, None, {}, False)
    assert report.parts == {"state_dict": {"num_entries": 2, "num_tensors": 2, "size_bytes": 32}}
    assert report.num_parameters == 8
    assert report.missing == [*REQUIRED[1:], "data_position", "random_state"]


def test_a_hand_written_loop_under_its_own_keys(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    value = {
        "model_state_dict": model.state_dict(),
        "optimizer": {"state": {}},
        "epoch": 4,
        "loss": 0.25,
        "lr": 1,
    }
    torch.save(value, tmp_path / "c.pt")
    report = inspect_checkpoint(str(tmp_path / "c.pt"))
    assert (report.epoch, report.metrics, report.num_parameters) == (4, {"loss": 0.25}, 8)
    assert list(report.parts) == ["model_state_dict", "optimizer"]
    assert "state_dict" in report.missing


def test_shared_bytes_count_once(tmp_path: Path) -> None:
    weight = torch.ones(10, 10)
    torch.save({"state_dict": {"a": weight, "b": weight, "part": weight[:2]}}, tmp_path / "t.pt")
    report = inspect_checkpoint(str(tmp_path / "t.pt"))
    assert (report.size_bytes, report.num_parameters) == (400, 220)
    assert [tensor.size_bytes for _, tensor in report.tensors] == [400, 400, 80]


def test_a_module_pickled_whole(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 2)), tmp_path / "m.pt")
    report = inspect_checkpoint(str(tmp_path / "m.pt"))
    assert report.num_parameters == 8
    assert [name for name, _ in report.tensors] == ["0.weight", "0.bias"]
    assert "torch.nn.modules.linear.Linear" in report.foreign_globals
    assert not report.resumable


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(2)], 5, None, "text", {1: 2}])
def test_anything_that_torch_saves_has_a_report(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "x.pt")
    report = inspect_checkpoint(str(tmp_path / "x.pt"))
    json.dumps(report.as_dict(), allow_nan=False)
    assert not report.resumable


def test_a_dict_that_was_stored_as_pairs(tmp_path: Path) -> None:
    value = {"s": {"__ckptrun__": "dict", "items": [((1, 2), torch.ones(3))]}}
    torch.save(value, tmp_path / "x.pt")
    assert [name for name, _ in inspect_checkpoint(str(tmp_path / "x.pt")).tensors] == ["s.(1, 2)"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a.weight", "module.b"], []),
        (["module.a.weight", "module.b"], ["module."]),
        (["module._orig_mod.a", "module._orig_mod.b"], ["module.", "_orig_mod."]),
        (["_orig_mod.module.a"], ["module.", "_orig_mod."]),
        (["enc._orig_mod.a", "b"], ["_orig_mod."]),
        (
            ["_fsdp_wrapped_module.a._checkpoint_wrapped_module.b"],
            ["_fsdp_wrapped_module.", "_checkpoint_wrapped_module."],
        ),
        ([], []),
    ],
)
def test_wrappers_show_in_names(names: list[str], found: list[str]) -> None:
    assert [wrapper.prefix for wrapper in find_wrappers(names)] == found


def test_a_model_saved_inside_ddp_says_so(tmp_path: Path) -> None:
    state = {f"module.{name}": value for name, value in nn.Linear(1, 1).state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "d.pt")
    report: Report = inspect_checkpoint(str(tmp_path / "d.pt"))
    assert report.wrappers == [Wrapper("module.", "DistributedDataParallel or DataParallel", 2)]


# Damage and wrong paths.


def test_files_of_a_wrong_size_or_missing_are_named(checkpoint: Path) -> None:
    size = (checkpoint / "state.ckpt").stat().st_size
    os.truncate(checkpoint / "state.ckpt", 100)
    (checkpoint / "rank-0000.ckpt").unlink()
    with pytest.raises(DamagedCheckpointError) as caught:
        inspect_checkpoint(str(checkpoint))
    assert f"state.ckpt has 100 bytes, {size} were expected" in caught.value.message
    assert "rank-0000.ckpt is missing" in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"files": [{}]}',
        '{"files": [{"path": "a\\u0000", "size_bytes": 1}]}',
        '{"files": 5}',
    ],
)
def test_a_manifest_that_is_none(checkpoint: Path, content: str) -> None:
    (checkpoint / "manifest.json").write_text(content)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is damaged"):
        inspect_checkpoint(str(checkpoint))


def test_a_manifest_without_the_state(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": []}')
    with pytest.raises(DamagedCheckpointError, match=r"lists no state\.ckpt"):
        inspect_checkpoint(str(checkpoint))


def test_one_level_too_high_names_the_newest_by_number(checkpoint: Path) -> None:
    newest = commit(checkpoint.parent / "100000001-step-00009900", training_state())
    (checkpoint.parent / "100000002-step-00009950").mkdir()  # not committed
    for path in (checkpoint.parent, checkpoint.parent.parent):
        with pytest.raises(NoCheckpointError, match="one level too high: 2 checkpoints") as caught:
            inspect_checkpoint(str(path))
        assert caught.value.hint == f"ckptrun inspect {newest}"


def test_a_root_of_runs(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"a root of runs \(demo\)") as caught:
        inspect_checkpoint(str(tmp_path))
    assert "--run demo" in str(caught.value.hint)


def test_a_checkpoint_that_was_never_finished(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(NoCheckpointError, match="never finished"):
        inspect_checkpoint(str(checkpoint))
    assert inspect_checkpoint(str(checkpoint / "state.ckpt")).step == 1200


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["latest", "global_step5"], "DeepSpeed"),
        (["mp_rank_00_model_states.pt"], "DeepSpeed"),
        ([".metadata", "__0_0.distcp"], r"torch\.distributed\.checkpoint"),
        (["config.json", "model.safetensors"], "Hugging Face"),
        (["a.ckpt", "b.txt"], r"it holds a\.ckpt"),
        (["b.txt"], r"it holds b\.txt"),
        ([], "it is empty"),
    ],
)
def test_folders_of_others(tmp_path: Path, names: list[str], what: str) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(NoCheckpointError, match=what):
        inspect_checkpoint(str(tmp_path))


def test_a_missing_path_says_what_is_near(checkpoint: Path, tmp_path: Path) -> None:
    for path, near in (
        (checkpoint.parent / "00000042-step-0001200", checkpoint.name),
        (checkpoint / "state.cpkt", "state.ckpt"),
        (tmp_path / "zzz" / "deep", "demo"),
    ):
        with pytest.raises(NoCheckpointError, match="there is no file or folder") as caught:
            inspect_checkpoint(str(path))
        assert near in str(caught.value.hint)


def test_dangling_links_references_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    with pytest.raises(NoCheckpointError, match=r"a link to gone\.ckpt, which is not there"):
        inspect_checkpoint("last.ckpt")
    with pytest.raises(NoCheckpointError, match="not a reference"):
        inspect_checkpoint("step:100")
    with pytest.raises(NoCheckpointError, match="is a URL"):
        inspect_checkpoint("s3://bucket/x")


def test_a_path_that_cannot_be_looked_up_is_not_called_absent(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / ("x" * 300)):
        with pytest.raises(NoCheckpointError, match="cannot be reached"):
            inspect_checkpoint(str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_cannot_be_read_is_not_called_absent(checkpoint: Path) -> None:
    (checkpoint / "state.ckpt").chmod(0)
    with pytest.raises(NoCheckpointError, match="is there and cannot be read"):
        inspect_checkpoint(str(checkpoint))
