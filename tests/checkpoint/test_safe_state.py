"""What users put into a checkpoint comes back as it was from ``weights_only=True``, or is refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import sys
import time
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptrun.checkpoint.safe_state import TAG, decode, encode
from ckptrun.errors import IncompatibleError, MisconfigurationException


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Options:
    rate: Any
    path: pathlib.Path = pathlib.Path("a")
    later: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Step(int):
    pass


def through_a_file(encoded: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(encoded, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def there_and_back(value: Any) -> Any:
    return decode(through_a_file(encode(value)))


def same(a: Any, b: Any) -> bool:
    """Equal with types, bit for bit, the order of dicts included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and a.requires_grad == b.requires_grad
            and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
            and same(a.__dict__, b.__dict__)
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return (
            len(a) == len(b)
            and (
                isinstance(a, Counter) or getattr(a, "default_factory", 0) == getattr(b, "default_factory", 0)
            )
            and all(same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True))
            and same(getattr(a, "__dict__", 0), getattr(b, "__dict__", 0))
        )
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, list | tuple | deque):
        return (
            len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0) and all(map(same, a, b))
        )
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, datetime.datetime | datetime.time):
        return (
            a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold and same(a.tzinfo, b.tzinfo)
        )
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    return bool(a == b)


# --- anything ------------------------------------------------------------------------------------------

NUMPY_DTYPES = "?bBhHiIlLefdFDSU"
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**2030, max_value=2**2100),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.just("\ud800"),
    st.binary(max_size=5),
    st.sampled_from([*Colour, Level.LOW, Word.YES, Right.READ, Right.READ | Right.WRITE, Right(0)]),
    st.sampled_from(
        [torch.float16, torch.int8, torch.device("cuda", 1), torch.Size((2, 3)), torch.sparse_coo]
    ),
    st.sampled_from([torch.channels_last, np.dtype("<f4"), np.dtype([("a", "<i2"), ("b", "U3")])]),
    st.sampled_from([np.float64(0.1), np.float32("nan"), np.longdouble("0.1"), np.str_("ä"), np.bytes_(b"")]),
    st.sampled_from([np.datetime64("2024-01-01T00:00", "m"), np.timedelta64(3, "ns"), np.bool_(True)]),
    st.sampled_from([np.uint64(2**64 - 1), np.complex64(1 + 2j), np.float16(3), np.int8(-4)]),
    st.sampled_from([pathlib.Path("a/b"), pathlib.PurePosixPath("/"), pathlib.PureWindowsPath("c:\\x")]),
    st.sampled_from([range(3), range(9, -2, -3), range(2**3000)]),
    st.datetimes(),
    st.datetimes(timezones=st.sampled_from([datetime.UTC, zoneinfo.ZoneInfo("UTC")])),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.sampled_from([datetime.timezone(datetime.timedelta(hours=2)), zoneinfo.ZoneInfo("UTC")]),
    st.sampled_from([datetime.timezone(datetime.timedelta(hours=2), "CEST"), datetime.UTC]),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
)
hashables = st.one_of(scalars, st.tuples(scalars, scalars), st.frozensets(scalars, max_size=2)).filter(
    lambda value: not isinstance(value, range) and value == value  # no NaN: it is equal to nothing
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape))
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    if dtype.kind in "SU":
        dtype = np.dtype(f"{dtype.kind}{draw(st.integers(1, 3))}")
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8) % 128
    array = data.astype(dtype).reshape(shape)
    if draw(st.booleans()):
        array = array.astype(dtype.newbyteorder())
    for change in draw(
        st.lists(st.sampled_from(["flip", "transpose", "step", "fortran", "read-only"]), max_size=2)
    ):
        if change == "flip" and array.ndim:
            array = array[::-1]
        elif change == "transpose":
            array = array.T
        elif change == "step" and array.ndim:
            array = array[::2]
        elif change == "fortran":
            array = np.asfortranarray(array)
        elif change == "read-only":
            array.flags.writeable = False
    return array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]))
    tensor = torch.ones(draw(st.lists(st.integers(0, 3), max_size=3)), dtype=dtype)
    if dtype.is_floating_point and draw(st.booleans()):
        return draw(st.sampled_from([torch.nn.Parameter(tensor), tensor.requires_grad_()]))
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    dicts = st.dictionaries(st.one_of(st.text(max_size=2), st.just(TAG), hashables), inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda d: defaultdict(list, d)),
        st.sets(hashables, max_size=3),
        st.dictionaries(hashables, st.integers(0, 9), max_size=3).map(Counter),
        st.builds(deque, items, st.sampled_from([None, 5])),
        st.builds(Point, inner, inner),
        st.builds(Options, inner),
        st.builds(Frozen, inner),
        st.builds(argparse.Namespace, a=inner),
        st.builds(types.SimpleNamespace, a=inner, b=inner),
    )


anything = st.recursive(st.one_of(scalars, arrays(), tensors()), grow, max_leaves=8)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(anything)
def test_anything_comes_back(value: Any) -> None:
    assert same(there_and_back(value), value)


# --- what passes as it is ------------------------------------------------------------------------------


def test_plain_state_is_not_copied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 3), "exp_avg_sq": torch.zeros(3, 3)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "amsgrad": False, "maximize": None, "params": [0]}
    state = {
        "state_dict": model.state_dict(),
        "optimizer_states": [{"state": {0: moments}, "param_groups": [group]}],
        "parameters": list(model.parameters()),
        "sizes": torch.Size((1, 2)),
        "set": {1, 2},
        "count": Counter("aab"),
        5: {None: 1, (1, "a"): True, 1.5: b"bytes"},
    }
    assert encode(state) is state
    assert decode(state) is state
    found = there_and_back(state)
    assert same(found["state_dict"]._metadata, state["state_dict"]._metadata)
    assert torch.equal(found["state_dict"]["0.weight"], model[0].weight)


def test_ten_thousand_tensors_take_milliseconds() -> None:
    state = OrderedDict((f"layers.{number}.weight", torch.zeros(1)) for number in range(10_000))
    encode(state)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        assert encode(state) is state
        times.append(time.perf_counter() - started)
    pickled = time.perf_counter()
    torch.save(state, io.BytesIO())
    pickled = time.perf_counter() - pickled
    assert min(times) < 0.2 * pickled


@pytest.mark.parametrize("dtype", sorted(torch.storage._dtype_to_storage_type_map(), key=str))
def test_every_dtype_that_tensors_have(dtype: torch.dtype) -> None:
    assert encode(dtype) is dtype
    assert through_a_file(dtype) is dtype


def test_sparse_and_lazy_tensors() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back([sparse])[0].to_dense(), torch.eye(3))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(there_and_back(conjugate), conjugate)


# --- sharing -------------------------------------------------------------------------------------------


def test_what_is_shared_stays_shared() -> None:
    weight = torch.zeros(4)
    array = np.zeros(3)
    inner = [pathlib.Path("p"), weight]
    found = there_and_back(
        {
            "a": weight,
            "b": weight,
            "view": weight[1:],
            "x": array,
            "y": array,
            "l": inner,
            "m": (inner, inner),
        }
    )
    assert found["a"] is found["b"]
    found["a"][1] = 5
    assert found["view"][0] == 5
    assert found["l"][1] is found["a"]
    assert found["x"] is found["y"]
    assert found["l"] is found["m"][0] is found["m"][1]


def test_sharing_does_not_multiply_the_work() -> None:
    value: Any = [pathlib.Path("x")]
    for _ in range(60):
        value = [value, value]
    found = there_and_back(value)
    for _ in range(60):
        assert found[0] is found[1]
        found = found[0]
    assert found == [pathlib.Path("x")]


def test_nothing_given_is_changed() -> None:
    value = {"p": [pathlib.Path("x")], "o": OrderedDict(a=np.float32(1)), "t": {TAG: 1}}
    before = repr(value)
    encode(value)
    assert repr(value) == before


def test_tensors_and_arrays_are_not_copied() -> None:
    array = np.arange(6.0)
    encoded = encode({"array": array})
    array[0] = 7
    assert encoded["array"]["data"][0] == 7


def test_a_view_does_not_drag_its_base_along() -> None:
    base = np.zeros((1000, 1000))
    assert encode(base[:, :2])["data"].untyped_storage().nbytes() == 1000 * 2 * 8


def test_arrays_come_back_writable_and_in_their_memory_order() -> None:
    original = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    for array in (original, original.astype(">f8")):
        found = there_and_back(array)
        assert found.flags.f_contiguous
        found[0, 0] = 9


def test_attributes_of_tensors_and_dicts() -> None:
    tensor = torch.zeros(2)
    tensor.axis = 3  # type: ignore[attr-defined]
    assert there_and_back([tensor])[0].axis == 3
    ordered = OrderedDict(a=1)
    ordered.origin = pathlib.Path("x")  # type: ignore[attr-defined]
    assert there_and_back(ordered).origin == pathlib.Path("x")
    tensor.origin = pathlib.Path("x")  # type: ignore[attr-defined]
    with pytest.raises(MisconfigurationException, match="attributes that are not plain"):
        encode(tensor)


def test_random_states() -> None:
    import random

    value = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(1).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    assert same(there_and_back(value), value)


# --- what is refused -----------------------------------------------------------------------------------


class SubTensor(torch.Tensor):
    pass


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


with_extra = Options(1)
with_extra.surprise = 1  # type: ignore[attr-defined]

REFUSED = {
    "function": (lambda: 0, "its type is function", "build it again"),
    "class": (torch.nn.ReLU, "its type is type", "look the class up"),
    "dataclass": (Options, "its type is type", "look the class up"),
    "module": (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", "state_dict()"),
    "int": (Step(3), "a subclass of int", "int(value)"),
    "dict": (collections.UserDict(), "collections.UserDict", "Save numbers"),
    "struct": (time.gmtime(0), "time.struct_time, a subclass of tuple", "tuple(value)"),
    "generator": (torch.Generator(), "torch._C.Generator", "get_state()"),
    "numpy generator": (np.random.default_rng(), "numpy.random", "bit_generator.state"),
    "objects": (np.array([object()]), "Python objects", "list"),
    "masked": (np.ma.masked_array([1.0]), "numpy.ma", "subok=False"),
    "tensor": (torch.zeros(1).as_subclass(SubTensor), "SubTensor", "as_subclass(torch.Tensor)"),
    "factory": (defaultdict(lambda: 1), "makes its values with", "dict(value)"),
    "local": (local_class(), "cannot be found again", "top level"),
    "extra": (with_extra, "more or less than its dataclass fields", "dict"),
    "file": (sys.stdout, "its type is", "Save numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_place_type_and_remedy(name: str) -> None:
    value, why, remedy = REFUSED[name]
    for container, place in (
        ({"EMA": {"decay_fn": value}}, "callbacks['EMA']['decay_fn']"),
        ([0, (1, value)], "callbacks[1][1]"),
        (OrderedDict(a=deque([value])), "callbacks['a'][0]"),
        ({3: Options(value)}, "callbacks[3].rate"),
        (argparse.Namespace(x={TAG: value}), f"callbacks.x['{TAG}']"),
    ):
        with pytest.raises(MisconfigurationException) as raised:
            encode(container, "callbacks")
        assert raised.value.message.startswith(f"{place} cannot be saved: ")
        assert why in raised.value.message
        assert remedy in str(raised.value.hint)


def test_a_key_is_refused_by_name() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"checkpoint\['a'\] with the key <object .* cannot be"
    ):
        encode({"a": {object(): 1}})


def test_a_cycle_is_an_error() -> None:
    cycle: dict[str, Any] = {"a": []}
    cycle["a"].append(cycle)
    with pytest.raises(
        MisconfigurationException, match=r"checkpoint\['a'\]\[0\] cannot be .* contains itself"
    ):
        encode(cycle)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MisconfigurationException, match="nested too deeply"):
        encode(deep)
    while deep:  # taken apart one by one: freeing it at once would recurse as deeply
        deep = deep[0]


# --- what has changed since ------------------------------------------------------------------------------


def test_a_class_that_is_gone_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    values = {"Colour": Colour.RED, "Point": Point(1), "Options": Options(1)}
    loaded = {name: through_a_file(encode(value)) for name, value in values.items()}
    for name in values:
        with monkeypatch.context() as patch:
            patch.delattr(here, name)
            with pytest.raises(IncompatibleError, match=f"{name}; there is no such class"):
                decode(loaded[name])
    changed = {
        "Colour": enum.Enum("Colour", ["GREEN"]),
        "Point": collections.namedtuple("Point", ["x", "z"]),
        "Options": dataclasses.make_dataclass("Options", ["rate"]),
    }
    for name, kind in changed.items():
        with monkeypatch.context() as patch:
            patch.setattr(here, name, kind)
            with pytest.raises(IncompatibleError, match=r"no longer has|with the fields"):
                decode(loaded[name])


def test_nothing_is_imported_on_a_files_word() -> None:
    module = "antigravity"
    assert module not in sys.modules
    with pytest.raises(IncompatibleError, match="no such class"):
        decode({TAG: "enum", "module": module, "class": "x", "name": "y"})
    assert module not in sys.modules


@pytest.mark.parametrize(
    "value", [{TAG: "new-kind"}, {TAG: "path"}, {TAG: 3}, {TAG: "range", "value": [1, "a"]}]
)
def test_an_encoding_that_this_version_does_not_know(value: Any) -> None:
    with pytest.raises(IncompatibleError, match="cannot be read"):
        decode({"a": [value]})


def test_the_encoded_form_is_stable() -> None:
    """Files of today stay readable: what is written here changes only together with a new tag."""
    assert encode(np.float32(1.5)) == {TAG: "numpy.scalar", "dtype": "<f4", "value": 1.5}
    assert encode(pathlib.Path("a")) == {TAG: "path", "class": "PosixPath", "value": "a"}
    assert encode({TAG: 1}) == {TAG: "dict", "items": [(TAG, 1)]}
    assert encode(frozenset({1})) == {TAG: "frozenset", "items": [1]}
    assert encode(decimal.Decimal("1.50")) == {TAG: "Decimal", "value": "1.50"}
    assert encode(fractions.Fraction(1, 3)) == {TAG: "Fraction", "value": [1, 3]}
    assert encode(uuid.UUID(int=1)) == {TAG: "UUID", "value": "00000000-0000-0000-0000-000000000001"}
    assert encode(datetime.date(2024, 1, 2)) == {TAG: "date", "value": "2024-01-02"}
    assert encode(Colour.RED) == {TAG: "enum", "module": __name__, "class": "Colour", "name": "RED"}
    array = encode(np.arange(3, dtype=np.int16))
    assert array.keys() == {TAG, "data"}
    assert torch.equal(array["data"], torch.arange(3, dtype=torch.int16))
