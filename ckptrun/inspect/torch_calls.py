"""Which tensors and storages does torch mean by the calls in its pickles?

Decision: the handful of functions that torch's own pickles call are known by name, and what they would make
is described. Everything else stays a recorded call. A view that reaches beyond its storage is damage, as it
is for torch. Turned down: matching names loosely, which gives wrong answers once a later torch takes other
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptrun.inspect.pickle_values import Global, Instance, MalformedPickleError, Ordered, as_key
from ckptrun.inspect.torch_objects import (
    DTYPE_BYTES,
    MAX_DIMENSIONS,
    PER_BYTE,
    STORAGE_DTYPES,
    Shape,
    Storage,
    Tensor,
    product,
)

_LAYOUTS = {
    "torch.sparse_coo": "sparse_coo",
    "torch.sparse_csr": "sparse_csr",
    "torch.sparse_csc": "sparse_csc",
    "torch.sparse_bsr": "sparse_bsr",
    "torch.sparse_bsc": "sparse_bsc",
}


MAX_WORK = 3_000_000  # elements of arguments in all calls of a file
_MAX_PARTS = 1_000  # that a tensor is made of


class TorchObjects:
    """Gives meaning to the persistent ids and calls of one file; ``storages`` are those met so far."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}
        self._work_left = MAX_WORK

    def persistent(self, pid: Any) -> Any:
        """What ``("storage", type, key, location, numel[, view])`` or ``("module", class, …)`` means.

        Raises:
            MalformedPickleError: it is neither.
        """
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
            return pid[1]
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise MalformedPickleError("it refers to something outside of itself that is no storage")
        kind, key, location, count = pid[1:5]
        dtype = STORAGE_DTYPES.get(kind.name) if type(kind) is Global else None
        if dtype is None or type(key) is not str or type(location) is not str:
            raise MalformedPickleError("a storage in it is described in a way that torch does not write")
        storage = Storage(key, dtype, _size(count), location)
        first = self.storages.setdefault(key, storage)
        if first.size_bytes != storage.size_bytes:
            raise MalformedPickleError(
                f"storage {key!r} is said to have {first.size_bytes} bytes and {storage.size_bytes} bytes"
            )
        if len(pid) == 6 and pid[5] is not None:
            _check_view(storage, pid[5])
        return first if first.dtype == dtype else storage

    def rebuild(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What ``function(*args)`` would make; a recorded call where it is not one of torch's own.

        Raises:
            MalformedPickleError: it is one of torch's own and the arguments do not fit it.
        """
        if type(function) is Global:
            known = _REBUILDERS.get((function.module, function.name))
            if known is not None:
                # A file can hand the same long list to as many calls as it likes.
                self._work_left -= sum(len(arg) for arg in args if type(arg) in (list, tuple))
                if self._work_left < 0:
                    raise MalformedPickleError("its calls take more arguments than are looked at")
                try:
                    return known(*args)
                except TypeError:
                    name = function.full_name
                    raise MalformedPickleError(
                        f"it calls {name} with arguments that it does not take"
                    ) from None
        return Instance(function, args)


def _check_view(root: Storage, view: Any) -> None:
    """A part of a storage, as files written before torch 1.0 have it; its root stands for it."""
    if type(view) is not tuple or len(view) != 3 or _size(view[1]) + _size(view[2]) > root.num_elements:
        raise MalformedPickleError("a view of a storage in it reaches beyond that storage")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise MalformedPickleError("a size in it is none")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        raise MalformedPickleError("a shape in it is none")
    return tuple(map(_size, value))


def _dtype(value: Any) -> str:
    if type(value) is not Global or value.module != "torch" or value.name not in DTYPE_BYTES:
        raise MalformedPickleError("a dtype in it is none that is known")
    return value.name


def _dense(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None) -> Tensor:
    if type(storage) is not Storage:
        raise MalformedPickleError("a tensor in it has no storage")
    dtype = storage.dtype if dtype is None else dtype
    shape, strides = _shape(size), _shape(stride)
    count, first = product(shape), _size(offset)
    if len(shape) != len(strides):
        raise MalformedPickleError("a tensor in it has a shape and strides of different lengths")
    last = first + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    item = DTYPE_BYTES[dtype]
    room = storage.size_bytes // item * PER_BYTE.get(dtype, 1)
    if count and last >= room:
        raise MalformedPickleError(
            f"a tensor of shape {list(shape)} in it needs {last + 1} elements of storage {storage.key!r}, "
            f"which has {room}"
        )
    per_byte = PER_BYTE.get(dtype, 1)
    return Tensor(shape, dtype, (count * item + per_byte - 1) // per_byte, storage)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
    return _dense(storage, offset, size, stride)


def _tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, _requires_grad: Any, _hooks: Any, _metadata: Any = None
) -> Tensor:
    return _dense(storage, offset, size, stride)


def _tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _requires_grad: Any,
    _hooks: Any,
    dtype: Any,
    _metadata: Any = None,
) -> Tensor:
    return _dense(storage, offset, size, stride, _dtype(dtype))


def _quantized(
    storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, _requires_grad: Any, _hooks: Any
) -> Tensor:
    tensor = _dense(storage, offset, size, stride)
    scales = quantizer if type(quantizer) is tuple else ()
    tensor.components = _dense_parts(scales)
    return tensor


def _dense_parts(values: Any) -> tuple[Tensor, ...]:
    """The tensors among the values that have no parts of their own, so that parts never nest."""
    if len(values) > _MAX_PARTS:
        raise MalformedPickleError("a tensor in it is made of more parts than tensors have")
    return tuple(value for value in values if type(value) is Tensor and not value.components)


def _parameter(data: Any, _requires_grad: Any, _hooks: Any, state: Any = None) -> Any:
    if type(data) is not Tensor:
        return Instance("parameter", (data,), state=state)
    return replace(data, parameter=True, state=state)


def _layout_name(name: Any) -> str:
    return _LAYOUTS.get(name, "sparse") if type(name) is str else "sparse"


def _sparse(layout: Any, data: Any) -> Tensor:
    # COO: indices, values, size[, coalesced]; compressed: pointers, indices, values, size.
    if type(data) is not tuple:
        raise MalformedPickleError("a sparse tensor in it has no parts")
    parts = _dense_parts(data)
    sizes = [part for part in data[:_MAX_PARTS] if type(part) is tuple]
    if len(parts) < 2 or len(sizes) != 1:
        raise MalformedPickleError("a sparse tensor in it lacks its values or its shape")
    name = layout if type(layout) is str else "sparse"
    taken = sum(part.size_bytes for part in parts)
    return Tensor(_shape(sizes[0]), parts[-1].dtype, taken, layout=name, components=parts)


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> Tensor:
    parts = (buffer, sizes, strides, offsets)
    if len(_dense_parts(parts)) != 4 or len(sizes.shape) != 2 or sizes.shape[1] > MAX_DIMENSIONS:
        raise MalformedPickleError("a nested tensor in it lacks a part")
    shape: Shape = (sizes.shape[0],) + (None,) * sizes.shape[1]
    return Tensor(shape, buffer.dtype, buffer.size_bytes, layout="nested", components=parts)


def _meta(dtype: Any, size: Any, _stride: Any, _requires_grad: Any) -> Tensor:
    return Tensor(_shape(size), _dtype(dtype), 0, layout="meta")


def _wrapper(
    _cls: Any,
    dtype: Any,
    size: Any,
    _stride: Any,
    _offset: Any,
    _layout: Any,
    _device: Any,
    _requires_grad: Any,
) -> Tensor:
    return Tensor(_shape(size), _dtype(dtype), 0, layout="wrapper")


def _from_cpu(data: Any, _dtype: Any, _device: Any, _requires_grad: Any) -> Any:
    if type(data) is not Tensor:
        return Instance("tensor", (data,))
    return data


def _from_numpy(array: Any, dtype: Any, _device: Any, _requires_grad: Any) -> Tensor:
    # An ndarray's state is (version, shape, dtype, is_fortran, bytes).
    state = array.state if type(array) is Instance else None
    if type(state) is not tuple or len(state) != 5:
        raise MalformedPickleError("a tensor in it was to be made of an array that is none")
    name, shape = _dtype(dtype), _shape(state[1])
    return Tensor(shape, name, product(shape) * DTYPE_BYTES[name], layout="numpy")


def _from_type(function: Any, cls: Any, args: Any, state: Any) -> Any:
    if type(args) is not tuple:
        raise MalformedPickleError("a tensor of a class of its own has no arguments")
    made = _REBUILDERS[function.module, function.name](*args) if _known(function) else None
    if type(made) is not Tensor:
        return Instance(cls, args, state=state)
    subclass = cls.full_name if type(cls) is Global else None
    if made.layout != "wrapper":
        return replace(made, state=state, subclass=subclass)
    # A wrapper's bytes are in the tensors that are its attributes.
    attributes = state[0] if type(state) is tuple and state else state
    parts = _dense_parts(attributes.values()) if type(attributes) is dict else ()
    taken = sum(part.size_bytes for part in parts)
    return replace(made, state=state, subclass=subclass, components=parts, size_bytes=taken)


def _known(function: Any) -> bool:
    # Not itself: a file could nest it as deep as it likes.
    if type(function) is not Global or function.name.startswith("_rebuild_from_type"):
        return False
    return (function.module, function.name) in _REBUILDERS


def _torch_size(sizes: Any = ()) -> tuple[int, ...]:
    return _shape(tuple(sizes) if type(sizes) is list else sizes)


def _ordered_dict(pairs: Any = ()) -> Ordered:
    made = Ordered()
    if type(pairs) not in (list, tuple):
        raise MalformedPickleError("an OrderedDict in it is made of what are no pairs")
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise MalformedPickleError("an OrderedDict in it is made of what are no pairs")
        made[as_key(pair[0])] = pair[1]
    return made


def _reconstructor(cls: Any, _base: Any, state: Any) -> Instance:
    """How protocols 0 and 1 write any object."""
    return Instance(cls, () if state is None else (state,))


_REBUILDERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_qtensor"): _quantized,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_sparse_tensor"): _sparse,
    ("torch._utils", "_rebuild_nested_tensor"): _nested,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapper,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _from_cpu,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _from_numpy,
    ("torch._utils", "_rebuild_xla_tensor"): _from_numpy,
    ("torch._tensor", "_rebuild_from_type"): _from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch.tensor", "_rebuild_from_type"): _from_type,
    ("torch.serialization", "_get_layout"): _layout_name,
    ("torch", "Size"): _torch_size,
    ("collections", "OrderedDict"): _ordered_dict,
    ("copyreg", "_reconstructor"): _reconstructor,
}

# What torch.load(weights_only=True) reads without being asked to trust anything, beside the names above.
_PLAIN_GLOBALS = frozenset(
    {
        "collections.Counter",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
        "torch.per_tensor_affine",
        "torch.per_tensor_symmetric",
        "torch.per_channel_affine",
        "torch.per_channel_symmetric",
        "torch.per_channel_affine_float_qparams",
    }
)
_TENSOR_CLASSES = frozenset(name.replace("Storage", "Tensor") for name in STORAGE_DTYPES)
_UNSAFE_REBUILDERS = frozenset(
    {
        "torch._utils._rebuild_xla_tensor",
        "torch._tensor._rebuild_from_type",
        "torch.tensor._rebuild_from_type",
    }
) | {"copyreg._reconstructor"}


_TORCH_MODULES = frozenset({"torch", "torch.cuda", "torch.storage", "torch.sparse", "torch.cuda.sparse"})


def is_foreign(found: Global) -> bool:
    """Whether ``torch.load(weights_only=True)`` refuses the name unless the user allows it.

    That a file names none says nothing about the file being safe.
    """
    name = found.full_name
    if name in _PLAIN_GLOBALS:
        return False
    if (found.module, found.name) in _REBUILDERS:
        return name in _UNSAFE_REBUILDERS
    if found.module in _TORCH_MODULES:
        return not (
            found.name in DTYPE_BYTES or found.name in STORAGE_DTYPES or found.name in _TENSOR_CLASSES
        )
    return True
