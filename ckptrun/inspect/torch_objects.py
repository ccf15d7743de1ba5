"""What is a tensor, and what is a storage, without torch?

Decision: shape, dtype and the storage that the bytes are in; no strides, which nobody here asks for, and no
bytes. Turned down: importing torch for its meta tensors, which takes a hundred times longer than the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ITEM_BYTES = {
    1: "uint8 int8 bool qint8 quint8 quint4x2 quint2x4 bits8 bits1x8 bits2x4 bits4x2 float8_e5m2"
    " float8_e4m3fn"
    " float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2 int1 int2 int3 int4 int5 int6 int7"
    " uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 qint32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
DTYPE_BYTES = {name: size for size, names in _ITEM_BYTES.items() for name in names.split()}
MAX_DIMENSIONS = 64
PER_BYTE = {"quint4x2": 2, "quint2x4": 4}  # elements that share a byte

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    # Bytes of no dtype: the tensor says what they are.
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
    "TypedStorage": "uint8",
}
Shape = tuple[int | None, ...]


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes in the file that tensors share; ``key`` names them there."""

    key: str
    dtype: str
    num_elements: int
    location: str

    @property
    def size_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor as the file describes it.

    ``shape`` has None where only the bytes would tell (nested tensors). ``components`` are the tensors that a
    sparse, nested or quantized one consists of beside or instead of ``storage``; they have none themselves.
    ``size_bytes`` is what its elements take.
    """

    shape: Shape
    dtype: str
    size_bytes: int
    storage: Storage | None = None
    layout: str = "strided"
    components: tuple[Tensor, ...] = ()
    parameter: bool = False
    subclass: str | None = None
    state: Any = None

    @property
    def num_elements(self) -> int:
        """Elements by its shape; those of its buffer where the shape is not known."""
        if None in self.shape:
            return self.components[0].num_elements if self.components else 0
        return product(self.shape)


def product(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size or 0
    return count
