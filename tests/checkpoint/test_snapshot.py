"""A snapshot holds the values of one moment in buffers that it keeps; no save in the background is lost."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.safe_state import encode
from ckptrun.checkpoint.snapshot import AsyncSaver, Snapshot
from ckptrun.checkpoint.state_file import read_state, write_state
from ckptrun.errors import SaveError
from ckptrun.records import CheckpointRecord


def make_state() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "state_dict": OrderedDict(weight=weight, tied=weight, transposed=weight.t(), row=weight[1]),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen": torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "bits": torch.ones(4, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "lists": [1, "a", None, (torch.zeros(()), b"x"), {2, 3}, bytearray(b"old"), Counter("aa")],
    }


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_of(item)] if isinstance(value, list | tuple) else []


def test_the_copy_is_like_the_state_and_shares_nothing_with_it() -> None:
    state = make_state()
    copy = Snapshot().take(state)
    assert list(copy) == list(state)
    for found, original in zip(tensors_of(copy), tensors_of(state), strict=True):
        assert type(found) is type(original)
        assert found.dtype == original.dtype
        assert found.stride() == original.stride()
        assert found.requires_grad == original.requires_grad
        assert torch.equal(found, original)
        assert storage_of(found) != storage_of(original)
    assert [type(item) for item in copy["lists"]] == [type(item) for item in state["lists"]]
    assert copy["lists"][4:] == state["lists"][4:]


def test_what_is_shared_stays_shared() -> None:
    state = make_state()
    inner = [torch.ones(1)]
    copy = Snapshot().take({**state, "a": inner, "b": inner})
    weights = copy["state_dict"]
    assert weights["weight"] is weights["tied"]
    assert len({storage_of(tensor) for tensor in weights.values()}) == 1
    assert copy["a"] is copy["b"]


def test_later_changes_do_not_reach_it() -> None:
    state = make_state()
    state["state_dict"]._metadata = OrderedDict({"": {"version": 1}})
    copy = Snapshot().take(state)
    for tensor in tensors_of(state):
        with torch.no_grad():
            tensor.fill_(99)
    state["lists"][5][:] = b"new"
    state["lists"].append("more")
    state["state_dict"]["more"] = 1
    state["state_dict"]._metadata[""]["version"] = 2
    expected = make_state()
    for found, original in zip(tensors_of(copy), tensors_of(expected), strict=True):
        assert torch.equal(found, original)
    assert copy["lists"][5] == b"old"
    assert len(copy["lists"]) == len(expected["lists"])
    assert list(copy["state_dict"]) == list(expected["state_dict"])
    assert copy["state_dict"]._metadata == {"": {"version": 1}}


def test_buffers_are_used_again() -> None:
    snapshot = Snapshot()
    state = make_state()
    first = [tensor.data_ptr() for tensor in tensors_of(snapshot.take(state))]
    size_bytes = snapshot.size_bytes
    for _ in range(3):
        assert [tensor.data_ptr() for tensor in tensors_of(snapshot.take(state))] == first
        assert snapshot.size_bytes == size_bytes
    assert size_bytes == sum(
        storage.nbytes()
        for storage in {storage_of(t): t.untyped_storage() for t in tensors_of(state)}.values()
    )


def test_buffers_follow_a_state_that_changes() -> None:
    snapshot = Snapshot()
    snapshot.take({"w": torch.zeros(1000)})
    with_optimizer = {"w": torch.ones(1000), "m": torch.full((1000,), 2.0), "v": torch.full((1000,), 3.0)}
    copy = snapshot.take(with_optimizer)
    assert [tensor[0].item() for tensor in tensors_of(copy)] == [1, 2, 3]
    assert snapshot.size_bytes == 3 * 4000
    snapshot.take({"small": torch.zeros(10)})
    assert snapshot.size_bytes == 40


def test_tensors_without_a_plain_storage() -> None:
    state = {
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "meta": torch.empty(3, device="meta"),
    }
    copy = Snapshot().take(state)
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(copy["conjugate"], state["conjugate"])
    assert copy["meta"].shape == (3,)
    state["sparse"].values().fill_(7)
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))


def test_only_encoded_values_are_taken() -> None:
    snapshot = Snapshot()
    with pytest.raises(TypeError, match=r"pathlib\.PosixPath"):
        snapshot.take({"w": torch.ones(2), "p": Path("x")})
    assert snapshot.take(encode({"w": torch.ones(2), "p": Path("x")}))["p"]["value"] == "x"


# --- saving in the background --------------------------------------------------------------------------


class Gate:
    """A job that ends when it is told to."""

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self.started, self.open = threading.Event(), threading.Event()
        self.result, self.error = result, error

    def __call__(self) -> Any:
        self.started.set()
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return self.result


def test_one_save_at_a_time() -> None:
    saver: AsyncSaver[str] = AsyncSaver()
    first, second = Gate("first"), Gate("second")
    assert saver.wait() is None
    assert saver.submit(first) is None
    assert first.started.wait(60)
    threading.Timer(0.05, first.open.set).start()
    assert saver.submit(second) == "first"
    assert second.started.wait(60)
    second.open.set()
    assert saver.wait() == "second"
    assert saver.wait() is None


@pytest.mark.parametrize("call", ["wait", "submit"])
def test_a_failure_surfaces_once_with_its_cause(call: str) -> None:
    saver: AsyncSaver[str] = AsyncSaver()
    error = SaveError("full")
    error.__cause__ = OSError(28, "No space left on device")
    gate = Gate(error=error)
    saver.submit(gate)
    gate.open.set()
    assert saver._job is not None
    assert saver._job.done.wait(60)
    started = []
    with pytest.raises(SaveError) as raised:
        saver.submit(lambda: started.append(1) or "") if call == "submit" else saver.wait()
    assert raised.value is error
    assert isinstance(raised.value.__cause__, OSError)
    assert started == []
    assert saver.wait() is None
    saver.submit(lambda: "next")
    assert saver.wait() == "next"


def test_whatever_ends_the_thread_reaches_the_caller() -> None:
    saver: AsyncSaver[str] = AsyncSaver()
    gate = Gate(error=SystemExit(3))
    saver.submit(gate)
    gate.open.set()
    with pytest.raises(SystemExit):
        saver.wait()


def test_an_ended_save_lets_go_of_its_state() -> None:
    class State:
        pass

    state = State()
    gone = weakref.ref(state)
    saver: AsyncSaver[None] = AsyncSaver()
    saver.submit(lambda state=state: None)  # type: ignore[misc]
    assert saver._job is not None
    assert saver._job.done.wait(60)
    del state
    gc.collect()
    assert gone() is None
    saver.wait()


def test_values_of_the_call_are_saved_though_training_goes_on(tmp_path: Path) -> None:
    snapshot: Snapshot = Snapshot()
    saver: AsyncSaver[Manifest] = AsyncSaver()
    model = torch.nn.Linear(50, 50)
    expected: dict[str, float] = {}
    announced = []
    for step in range(1, 6):
        with torch.no_grad():
            model.weight.fill_(step)
        before = saver.wait()  # the buffers are its own until it has ended
        if before is not None:
            announced.append(before.step)
        copy = snapshot.take(encode({"weight": model.weight.detach(), "step": step}))
        name = f"{step:08d}-step-{step:08d}"
        expected[name] = float(step)
        manifest = Manifest(run_id="r", sequence=step, step=step, epoch=0, reason="periodic")

        def save(copy: Any = copy, name: str = name, manifest: Manifest = manifest) -> Manifest:
            return commit(str(tmp_path), name, {"state.ckpt": lambda f: write_state(f, copy)}, manifest)

        saver.submit(save)
        with torch.no_grad():
            model.weight.fill_(-1)  # the next update comes at once
    last = saver.wait()
    assert last is not None
    assert [*announced, last.step] == [1, 2, 3, 4, 5]
    records = list(Catalogue(str(tmp_path)).newest_first())
    assert len(records) == 5
    for record in records:
        assert isinstance(record, CheckpointRecord)
        state = read_state(os.path.join(record.path, "state.ckpt"))
        assert state["step"] == record.step
        assert (state["weight"] == expected[record.name]).all()
