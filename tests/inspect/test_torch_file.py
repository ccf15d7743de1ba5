"""Files that torch.save wrote, and what damage and lies do to them."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ckptrun.errors import CkptrunError, DamagedCheckpointError, NoCheckpointError
from ckptrun.inspect.pickle_values import Global, Instance, MalformedPickleError
from ckptrun.inspect.torch_calls import TorchObjects, is_foreign
from ckptrun.inspect.torch_file import TorchFile, read_torch_file
from ckptrun.inspect.torch_objects import DTYPE_BYTES, STORAGE_DTYPES, Storage, Tensor

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def save(path: Path, value: Any, *, legacy: bool = False, protocol: int = 2) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    return str(path)


def described(value: Any, path: Path, **how: Any) -> dict[str, Tensor]:
    return dict(read_torch_file(save(path, value, **how)).tensors)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.pt"


FORMATS = pytest.mark.parametrize(
    ("legacy", "protocol"), [(False, 2), (False, 3), (False, 4), (False, 5), (True, 2), (True, 4), (True, 5)]
)


@FORMATS
def test_a_training_state_in_every_format(file: Path, legacy: bool, protocol: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    # As Adam has it; torch.optim itself imports half of the compiler.
    moments = {
        n: {"step": torch.tensor(1.0), "exp_avg": p} for n, p in enumerate(model.state_dict().values())
    }
    state = {
        "state_dict": model.state_dict(),
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 1e-3, "params": [*moments]}]}],
        "epoch": 3,
        "global_step": 70,
        "hyper_parameters": {"lr": 1e-3, "size": torch.Size([1, 2]), "dtype": torch.bfloat16},
    }
    found = read_torch_file(save(file, state, legacy=legacy, protocol=protocol))
    assert found.format == ("torch-legacy" if legacy else "torch-zip")
    assert found.size_bytes == file.stat().st_size
    assert (found.root["epoch"], found.root["global_step"]) == (3, 70)
    assert found.root["hyper_parameters"]["size"] == (1, 2)
    tensors = dict(found.tensors)
    for name, value in model.state_dict().items():
        tensor = tensors[f"state_dict.{name}"]
        expected = (tuple(value.shape), str(value.dtype), value.nbytes)
        assert (tensor.shape, f"torch.{tensor.dtype}", tensor.size_bytes) == expected
    assert tensors["optimizer_states.0.state.0.exp_avg"].shape == (4, 3)
    shared = sum(value.nbytes for value in model.state_dict().values())
    assert (
        sum(storage.size_bytes for storage in found.storages.values())
        == sum(tensor.size_bytes for tensor in tensors.values()) - shared
    )
    assert not any(map(is_foreign, found.globals))


# Quantized ones have a test of their own; torch cannot save those of less than a byte.
UNSAVED = re.compile(r"torch\.(q.*|u?int[1-7])")


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not UNSAVED.fullmatch(str(dtype))], ids=str)
def test_every_dtype(file: Path, dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, 16, dtype=torch.uint8).view(torch.uint8).flatten()[: 6 * dtype.itemsize]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ComplexHalf is experimental
        value = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, (2, 3))
    save(file, {"a": value})
    found = dict(read_torch_file(str(file)).tensors)["a"]
    assert (found.shape, f"torch.{found.dtype}", found.size_bytes) == ((2, 3), str(dtype), 6 * dtype.itemsize)


def test_the_tables_know_what_torch_knows() -> None:
    assert {str(dtype)[6:]: dtype.itemsize for dtype in DTYPES} == {
        name: size for name, size in DTYPE_BYTES.items() if hasattr(torch, name)
    }
    storages = {name for name in dir(torch) if name.endswith("Storage") and name != "Storage"}
    assert storages <= set(STORAGE_DTYPES)


def test_foreign_is_what_torch_refuses_without_being_told_to_trust() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    assert [name for name in _get_allowed_globals() if is_foreign(Global(*name.rsplit(".", 1)))] == []
    for name in ("os.system", "builtins.eval", "torch.load", "torch.nn.modules.linear.Linear", "numpy.dtype"):
        assert is_foreign(Global(*name.rsplit(".", 1)))


@FORMATS
def test_shared_storages_and_views(file: Path, legacy: bool, protocol: int) -> None:
    base = torch.arange(100, dtype=torch.float32)
    value = {
        "all": base,
        "part": base[10:20],
        "other": base.view(10, 10).t(),
        "wide": torch.ones(1).expand(50),
    }
    found = read_torch_file(save(file, value, legacy=legacy, protocol=protocol))
    tensors = dict(found.tensors)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "all": (100,),
        "part": (10,),
        "other": (10, 10),
        "wide": (50,),
    }
    assert tensors["all"].storage is not None
    assert tensors["all"].storage is tensors["part"].storage
    assert sorted(storage.size_bytes for storage in found.storages.values()) == [4, 400]


def test_kinds_of_tensors(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = {
            "coo": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
            "channels": torch.quantize_per_channel(
                torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8
            ),
            "meta": torch.empty(7, 8, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "parameter": nn.Parameter(torch.ones(5)),
            "buffer": nn.Buffer(torch.ones(5)),
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 3),
        }
    found = read_torch_file(save(file, value))
    kinds = {name: (tensor.shape, tensor.layout, tensor.parameter) for name, tensor in found.tensors}
    assert kinds == {
        "coo": ((3, 3), "sparse_coo", False),
        "csr": ((3, 3), "sparse_csr", False),
        "quantized": ((2, 2), "strided", False),
        "channels": ((2, 2), "strided", False),
        "meta": ((7, 8), "meta", False),
        "nested": ((2, None), "nested", False),
        "parameter": ((5,), "strided", True),
        "buffer": ((5,), "strided", False),
        "scalar": ((), "strided", False),
        "empty": ((0, 3), "strided", False),
    }
    tensors = dict(found.tensors)
    assert tensors["coo"].size_bytes == 3 * 4 + 2 * 3 * 8
    assert tensors["meta"].size_bytes == 0
    assert tensors["nested"].num_elements == 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.register_buffer("count", torch.zeros(1))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_module_pickled_whole_names_its_classes(file: Path, legacy: bool) -> None:
    found = read_torch_file(save(file, Net(), legacy=legacy))
    assert [name for name, _ in found.tensors] == ["count", "layer.weight", "layer.bias"]
    foreign = {name.full_name for name in found.globals if is_foreign(name)}
    assert {"torch.nn.modules.linear.Linear", f"{Net.__module__}.Net"} <= foreign


class Marked(torch.Tensor):
    pass


def test_a_tensor_of_a_class_of_its_own(file: Path) -> None:
    value = torch.ones(2, 2).as_subclass(Marked)
    value.note = "n"  # type: ignore[attr-defined]
    found = read_torch_file(save(file, {"a": value}))
    tensor = dict(found.tensors)["a"]
    assert (tensor.shape, tensor.subclass) == ((2, 2), f"{__name__}.Marked")


def test_numpy_is_named_and_not_made(file: Path) -> None:
    found = read_torch_file(save(file, {"score": np.float64(0.5), "array": np.arange(100_000)}))
    assert type(found.root["score"]) is Instance
    foreign = {name.full_name for name in found.globals if is_foreign(name)}
    assert any(name.endswith("multiarray.scalar") for name in foreign)
    assert found.tensors == []


def test_storages_alone(file: Path) -> None:
    found = read_torch_file(save(file, torch.ones(5).untyped_storage()))
    assert type(found.root) is Storage
    assert found.root.size_bytes == 20


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(2), (torch.ones(1),)], 5, "text", None, {}])
@pytest.mark.parametrize("legacy", [False, True])
def test_any_object_at_the_top(file: Path, value: Any, legacy: bool) -> None:
    found = read_torch_file(save(file, value, legacy=legacy))
    if isinstance(value, list):
        assert [name for name, _ in found.tensors] == ["0", "1.0"]


def test_versions_that_the_file_tells(file: Path) -> None:
    assert read_torch_file(save(file, {})).versions["byteorder"] == sys.byteorder
    assert read_torch_file(save(file, {}, legacy=True)).versions == {"protocol_version": "1001"}


def test_another_zip_program_may_have_packed_it(file: Path, tmp_path: Path) -> None:
    save(file, {"a": torch.ones(100)})
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr("other name/" + name.split("/", 1)[1], old.read(name))
    assert dict(read_torch_file(str(packed)).tensors)["a"].shape == (100,)


def test_checksums_may_be_left_out_of_the_zip(file: Path) -> None:
    old = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        assert described({"a": torch.ones(3)}, file)["a"].shape == (3,)
    finally:
        torch.serialization.set_crc32_options(old)


def test_a_file_of_more_than_four_gigabytes(file: Path) -> None:
    with torch.serialization.skip_data():  # a hole in the file, where the bytes would be
        save(file, {"big": torch.empty(5 << 30, dtype=torch.uint8), "small": torch.ones(2)})
    assert file.stat().st_blocks * 512 < 1 << 20
    found = read_torch_file(str(file))
    assert sorted(storage.size_bytes for storage in found.storages.values()) == [8, 5 << 30]


# Damage.


def summary(found: TorchFile) -> list[tuple[str, Any, str]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in found.tensors]


@FORMATS
def test_a_file_cut_off_anywhere_is_an_error(file: Path, legacy: bool, protocol: int) -> None:
    value = {"a": torch.arange(40), "b": [torch.ones(3, 3)], "text": "x" * 50}
    whole = Path(save(file, value, legacy=legacy, protocol=protocol)).read_bytes()
    short = file.with_name("short.pt")
    last = len(whole) - 200
    for length in (*range(0, last, 7), *range(last, len(whole))):
        short.write_bytes(whole[:length])
        with pytest.raises(NoCheckpointError) as caught:
            read_torch_file(str(short))
        assert caught.value.exit_code == 3
        assert str(short) in caught.value.message
        if length > 64:
            assert isinstance(caught.value, DamagedCheckpointError)


SAMPLES: dict[bool, bytes] = {}


def sample(legacy: bool) -> bytes:
    if legacy not in SAMPLES:
        buffer = io.BytesIO()
        torch.save(
            {"a": torch.arange(4), "b": [torch.ones(3)], "n": np.float32(1), "s": torch.eye(2).to_sparse()},
            buffer,
            _use_new_zipfile_serialization=not legacy,
        )
        SAMPLES[legacy] = buffer.getvalue()
    return SAMPLES[legacy]


@pytest.mark.parametrize("legacy", [False, True])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_end_in_an_answer_or_our_error(file: Path, legacy: bool, data: st.DataObject) -> None:
    content = bytearray(sample(legacy))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        summary(read_torch_file(str(file)))
    except CkptrunError as error:
        assert error.exit_code == 3  # noqa: PT017 - both ends are right


def test_every_flipped_bit_of_the_pickle_is_noticed(file: Path) -> None:
    content = sample(legacy=False)
    begin = content.index(b"PK\x03\x04")
    with zipfile.ZipFile(io.BytesIO(content)) as zipped:
        data = zipped.read("archive/data.pkl")
    begin = content.index(data)
    for place in range(begin, begin + len(data), 5):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match="checksum"):
            read_torch_file(str(file))


def test_a_missing_or_short_storage_is_named_with_both_sizes(file: Path, tmp_path: Path) -> None:
    save(file, {"a": torch.ones(100)})
    for content, why in ((None, "'0' is missing, 400 bytes"), (b"abc", "'0' has 3 bytes, 400 were expected")):
        broken = tmp_path / "broken.pt"
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(broken, "w") as new:
            for name in old.namelist():
                if not name.endswith("data/0"):
                    new.writestr(name, old.read(name))
                elif content is not None:
                    new.writestr(name, content)
        with pytest.raises(DamagedCheckpointError, match=why):
            read_torch_file(str(broken))


def test_a_legacy_file_cut_in_its_tensors_says_both_sizes(file: Path) -> None:
    size = Path(save(file, {"a": torch.ones(100)}, legacy=True)).stat().st_size
    os.truncate(file, size - 10)
    with pytest.raises(DamagedCheckpointError, match=f"{size - 10} bytes, {size} were expected"):
        read_torch_file(str(file))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((0, (11,), (1,)), "needs 11 elements of storage 'k', which has 10"),
        ((5, (3, 2), (2, 1)), "needs 11 elements"),
        ((0, (-1,), (1,)), "a size in it is none"),
        ((0, (1 << 70,), (1,)), "a size in it is none"),
        ((0, (1, 1), (1,)), "different lengths"),
        ((0, [10], (1,)), "a shape in it is none"),
        ((0, (1,) * 100, (1,) * 100), "a shape in it is none"),
        (("0", (10,), (1,)), "a size in it is none"),
    ],
)
def test_tensors_that_do_not_fit_their_storage(args: tuple[Any, ...], why: str) -> None:
    objects = TorchObjects()
    storage = objects.persistent(("storage", Global("torch", "FloatStorage"), "k", "cpu", 10))
    with pytest.raises(MalformedPickleError, match=why):
        objects.rebuild(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *args, False, None))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("torch._utils._rebuild_tensor_v2", ()),
        ("torch._utils._rebuild_tensor_v2", (1, 2, 3, 4, 5, 6)),
        ("torch._utils._rebuild_tensor_v3", (None,) * 7),
        ("torch._utils._rebuild_sparse_tensor", (1, 2)),
        ("torch._utils._rebuild_sparse_tensor", ("torch.sparse_coo", ())),
        ("torch._utils._rebuild_nested_tensor", (1, 2, 3, 4)),
        ("torch._utils._rebuild_meta_tensor_no_storage", (1, 2, 3, 4)),
        ("torch._utils._rebuild_device_tensor_from_numpy", (1, 2, 3, 4)),
        ("torch._tensor._rebuild_from_type_v2", (1, 2, 3, 4)),
        ("torch.Size", (5,)),
        ("torch.Size", ([None],)),
        ("collections.OrderedDict", (5,)),
        ("collections.OrderedDict", ([1],)),
    ],
)
def test_calls_with_wrong_arguments(name: str, args: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedPickleError):
        TorchObjects().rebuild(Global(*name.rsplit(".", 1)), args)


@pytest.mark.parametrize(
    "pid",
    [
        None,
        "text",
        (),
        ("storage",),
        ("storage", "type", "k", "cpu", 1),
        ("storage", Global("torch", "NoStorage"), "k", "cpu", 1),
        ("storage", Global("torch", "FloatStorage"), 5, "cpu", 1),
        ("storage", Global("torch", "FloatStorage"), "k", "cpu", -1),
        ("storage", Global("torch", "FloatStorage"), "k", "cpu", 1, ("v", 0, 2)),
    ],
)
def test_persistent_ids_that_torch_does_not_write(pid: Any) -> None:
    with pytest.raises(MalformedPickleError):
        TorchObjects().persistent(pid)


def test_one_storage_has_one_size() -> None:
    objects = TorchObjects()
    objects.persistent(("storage", Global("torch", "FloatStorage"), "k", "cpu", 1))
    with pytest.raises(MalformedPickleError, match="4 bytes and 8 bytes"):
        objects.persistent(("storage", Global("torch", "FloatStorage"), "k", "cpu", 2))


def test_a_view_in_an_old_file_is_a_part_of_its_storage() -> None:
    objects = TorchObjects()
    pid = ("storage", Global("torch", "FloatStorage"), "k", "cpu", 10, ("v", 2, 8))
    assert objects.persistent(pid).size_bytes == 40


def crafted(path: Path, data: bytes, *, legacy: bool) -> str:
    if legacy:
        numbers = [
            pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        ]
        path.write_bytes(b"".join(numbers) + data + pickle.dumps([], 2))
    else:
        with zipfile.ZipFile(path, "w") as zipped:
            zipped.writestr("archive/data.pkl", data)
    return str(path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"(" * 50_000 + b".",
        b"]" * 200_000 + b"a" * 199_999 + b".",
        b"X\xff\xff\xff\x7fa.",
        b"cos\nsystem\n(V" + b"a" * 10_000 + b"\ntRQ.",
        b"ccollections\nOrderedDict\n" * 100 + b"\x85R.",
        b"\x80\x02ccollections\nOrderedDict\nq\x00]q\x01("
        + b"K\x01K\x01\x86" * 9_000
        + b"e0]("
        # One list of 9,000 pairs given to 9,000 calls.
        + b"h\x00h\x01\x85R" * 9_000
        + b"e.",
    ],
    ids=["marks", "nesting", "length", "persistent", "names", "calls"],
)
def test_crafted_files_end_soon(file: Path, data: bytes, legacy: bool) -> None:
    try:
        assert summary(read_torch_file(crafted(file, data, legacy=legacy))) == []
    except DamagedCheckpointError:
        pass


def test_objects_that_share_everything_are_not_walked_again_and_again(file: Path) -> None:
    many = b"(" + b"N" * 50_000 + b"tq\x00" + b"](" + b"cm\nC\nh\x00\x81" * 50_000 + b"e."
    found = read_torch_file(crafted(file, many, legacy=False))
    with pytest.raises(DamagedCheckpointError, match="more objects than are looked at"):
        found.tensors  # noqa: B018


# What is no file of torch.save.


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _npz(path: Path) -> None:
    with path.open("wb") as stream:
        np.savez(stream, a=np.ones(3))


def _torchscript(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(1, 1)), str(path))


def _safetensors(path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


NO_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (_empty, r"empty \(0 bytes\)"),
    "zeros": (lambda path: path.write_bytes(bytes(9000)), "nothing but zeros"),
    "json": (lambda path: path.write_text('{"a": 1}'), "a JSON file"),
    "yaml": (lambda path: path.write_text("a: 1\nb: 2\n"), "a YAML or text file"),
    "text": (lambda path: path.write_text("hello äöü"), "a text file"),
    "html": (lambda path: path.write_text("<!DOCTYPE html><p>"), "a web page"),
    "git-lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
    "safetensors": (_safetensors, "a safetensors file"),
    "hdf5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50)), "an HDF5 file"),
    "gzip": (lambda path: path.write_bytes(b"\x1f\x8b\x08" + bytes(50)), "a gzip file"),
    "npy": (lambda path: np.save(str(path), np.ones(3)), r"a NumPy array \(.npy\)"),
    "npz": (_npz, r"a NumPy archive \(.npz\)"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "a Python pickle"),
    "torchscript": (_torchscript, "a TorchScript archive"),
    "noise": (lambda path: path.write_bytes(bytes(range(128, 256))), "a file of unknown bytes"),
}


@pytest.mark.parametrize("name", NO_CHECKPOINTS)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    make, what = NO_CHECKPOINTS[name]
    path = tmp_path / ("a.npy" if name == "npy" else "model.pt")
    make(path)
    with pytest.raises(NoCheckpointError, match=what) as caught:
        read_torch_file(str(path))
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_folders_pipes_and_missing_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "pipe"),
        (tmp_path / "no", "there is no file"),
    ):
        with pytest.raises(NoCheckpointError, match=why):
            read_torch_file(str(path))


def test_nothing_heavy_is_imported_for_it(file: Path) -> None:
    save(file, {"a": torch.ones(3)})
    program = (
        "import sys; from ckptrun.inspect.report import inspect_checkpoint; inspect_checkpoint(sys.argv[1]);"
        "print([name for name in ('torch', 'numpy', 'fsspec', 'pickle', 'zipfile') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
