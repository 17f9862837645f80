# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch as Mooncake's wheel stores them: a description of HEADER bytes, then the bytes.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, Optional

HEADER = 304
DIMENSIONS = 8

# magic, version, length of the header, number of the type, dimensions, layout, flags, where the
# bytes begin, how many there are; the shape of the tensor, and the shape of the whole tensor of
# which this one may be a part
_FORM = struct.Struct("<4sHHIIIIQQ8q8q136x")
_MAGIC, _VERSION = b"NOOM", 1
_TYPES = ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
          "uint64", "bool", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Parts:
    """The runs of a tensor in memory, and what keeps them there."""

    runs: list[tuple[int, int]]
    keep: Any


def parts_of(tensor: Any) -> Optional[Parts]:
    """A header and the bytes of a tensor; None for what cannot be stored."""
    name = str(getattr(tensor, "dtype", "")).replace("torch.", "")
    if name not in _TYPES or not hasattr(tensor, "data_ptr") or tensor.dim() > DIMENSIONS:
        return None
    tensor = tensor.detach().cpu().contiguous()
    length = tensor.numel() * tensor.element_size()
    shape = [*tensor.shape, *[-1] * (DIMENSIONS - tensor.dim())]
    header = ctypes.create_string_buffer(_FORM.pack(
        _MAGIC, _VERSION, HEADER, _TYPES.index(name), tensor.dim(), 0, 0, HEADER, length, *shape,
        *shape), HEADER)
    runs = [(ctypes.addressof(header), HEADER)]
    return Parts(runs + [(tensor.data_ptr(), length)] * bool(length), (header, tensor))


def described(header: bytes, size: int) -> Optional[tuple[str, tuple[int, ...]]]:
    """The type and the shape that the header of an object of this size names; None where it is not
    such a header, or the tensor would not fit in the object.
    """
    if len(header) < HEADER:
        return None
    magic, version, length, kind, n, _, _, at, there, *shape = _FORM.unpack_from(header)
    if (magic, version, length, at) != (_MAGIC, _VERSION, HEADER, HEADER):
        return None
    if kind >= len(_TYPES) or n > DIMENSIONS or there > size - HEADER or min(
            shape[:n], default=0) < 0:
        return None
    return _TYPES[kind], tuple(shape[:n])


def tensor_in(data: Any) -> Any:
    """The tensor that an object has, over the same memory; None where the object has no tensor."""
    import torch

    view = memoryview(data).cast("B")
    said = described(bytes(view[:HEADER]), len(view))
    if said is None:
        return None
    dtype, shape, n = getattr(torch, said[0]), said[1] or (1,), 1
    for dimension in shape:
        n *= dimension
    if n * dtype.itemsize > len(view) - HEADER:
        return None
    if n == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=n, offset=HEADER).reshape(shape)
