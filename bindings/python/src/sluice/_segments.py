# SPDX-License-Identifier: Apache-2.0
"""What can be registered: where the bytes of arrays, tensors and files lie."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from typing import Any, Optional, Union

from . import _library
from ._buffers import Held
from ._words import number
from .errors import ArgumentError


@dataclass(frozen=True)
class File:
    """A range of a file or block device, which must stay open as long as its region.

    `file` is a descriptor, or what has a `fileno()`. A length of None is all from
    the offset on. With `extends` the range may lie past the end of the file: a write makes it
    longer, and a read of what was not written fails. With `buffered` the bytes go through the page
    cache, where others go past it.
    """

    file: Union[int, Any]
    offset: int = 0
    length: Optional[int] = None
    extends: bool = False
    buffered: bool = False


@dataclass(frozen=True)
class HostMemory:
    """Host memory by its address. It stays mapped until its region is closed."""

    address: int
    length: int
    writable: bool = True


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a card by its address, and a dma-buf of it for NICs where there is one."""

    address: int
    length: int
    device: int = 0
    dmabuf: Optional[int] = None
    dmabuf_offset: int = 0


_SIZE = ctypes.sizeof(_library.Segment)


class Located:
    """A segment for the library, and what keeps its bytes in place."""

    def __init__(self, segment: _library.Segment, keep: Any = None, writable: bool = True) -> None:
        segment.size = _SIZE
        if not writable:
            segment.flags |= _library.READ_ONLY
        self.segment, self.keep, self.writable = segment, keep, writable

    def release(self) -> None:
        keep, self.keep = self.keep, None
        if isinstance(keep, Held):
            keep.release()


def locate(source: Any) -> Located:
    """Finds the bytes of an object."""
    if isinstance(source, File):
        return _file(source)
    if isinstance(source, HostMemory):
        return host(number(source.address, "address"), number(source.length, "length"), source,
                     source.writable)
    if isinstance(source, DeviceMemory):
        return _device_memory(source)
    if callable(getattr(source, "data_ptr", None)) and hasattr(source, "element_size"):
        return _tensor(source)
    if hasattr(source, "__cuda_array_interface__"):
        return _cuda_array(source)
    try:
        _check_plain(source)
        held = Held(source)
    except NotPlain:
        raise
    except TypeError:
        if hasattr(source, "__dlpack__"):
            return _dlpack(source)
        raise TypeError(
            f"{type(source).__name__} cannot be registered: want a buffer, an array, a tensor, "
            f"File, HostMemory, DeviceMemory or Memory"
        ) from None
    except (BufferError, ValueError) as e:
        raise ArgumentError(
            f"{e}: register contiguous memory and name parts of it by offsets") from None
    return host(held.address, held.length, held, held.writable)


class NotPlain(TypeError):
    """An array of objects: its bytes are addresses that mean nothing to a peer."""


def _check_plain(source: Any) -> None:
    try:
        view = memoryview(source)
    except ValueError:  # an array of dates, which has no such description
        view = None
    if view is not None and view.format is not None and "O" in re.sub(":[^:]*:", "", view.format):
        raise NotPlain(f"a {type(source).__name__} of objects cannot be registered: their bytes "
                       f"are elsewhere")


def host(address: int, length: int, keep: Any = None, writable: bool = True) -> Located:
    if not length:
        raise ArgumentError("memory of 0 bytes cannot be registered")
    segment = _library.Segment(kind=_library.KIND_HOST, host=address, length=length)
    return Located(segment, keep, writable)


def _device(address: int, length: int, device: int, keep: Any, writable: bool = True) -> Located:
    segment = _library.Segment(kind=_library.KIND_DEVICE, device_address=address, length=length,
                               device=device)
    return Located(segment, keep, writable)


def _device_memory(source: DeviceMemory) -> Located:
    address, length = number(source.address, "address"), number(source.length, "length")
    located = _device(address, length, number(source.device, "device", 31), source)
    if source.dmabuf is not None:
        located.segment.flags = _library.DMABUF
        located.segment.dmabuf = number(source.dmabuf, "dmabuf", 31)
        located.segment.dmabuf_offset = number(source.dmabuf_offset, "dmabuf_offset")
    return located


def _file(source: File) -> Located:
    fd = source.file if isinstance(source.file, int) else source.file.fileno()
    number(fd, "file", 31)
    offset, length = number(source.offset, "offset", 63), source.length
    if length is None:
        length = max(0, os.lseek(fd, 0, os.SEEK_END) - offset)  # of devices, too
    if number(length, "length", 63) == 0:
        raise ArgumentError(
            f"file: nothing of it lies behind offset {offset}: make it longer first")
    return open_file(fd, offset, length, source.extends, source.buffered, source)


def open_file(fd: int, offset: int, length: int, extends: bool, buffered: bool, keep: Any,
              writable: bool = True) -> Located:
    """A range of an open file, which `keep` keeps open."""
    flags = (_library.EXTENDS if extends else 0) | (_library.BUFFERED if buffered else 0)
    segment = _library.Segment(kind=_library.KIND_FILE, file=fd, offset=offset, length=length,
                               flags=flags)
    return Located(segment, keep, writable)


def _tensor(t: Any) -> Located:
    """A tensor of torch, which need not be imported here."""
    if not t.is_contiguous():
        raise ArgumentError("the tensor is not contiguous: register what it is a part of, and name "
                            "the part by offsets")
    length = t.numel() * t.element_size()
    device = t.get_device()
    # shares the memory, which t may be given other of
    t = t.detach() if hasattr(t, "detach") else t
    if device < 0:
        return host(t.data_ptr(), length, t)
    return _device(t.data_ptr(), length, device, t)


def _cuda_array(a: Any) -> Located:
    """Whatever has the CUDA array interface, which does not say on which device."""
    face = a.__cuda_array_interface__
    itemsize = int(face["typestr"][2:])
    _check_dense(face["shape"], face.get("strides"), itemsize)
    length = itemsize
    for n in face["shape"]:
        length *= n
    device = getattr(a, "device", 0)
    ordinal = getattr(device, "id", getattr(device, "index", device))
    address, read_only = face["data"]
    return _device(address, length, ordinal if isinstance(ordinal, int) else 0, a, not read_only)


def _check_dense(shape: Any, strides: Any, unit: int) -> None:
    if strides is None:
        return
    for n, stride in zip(reversed(tuple(shape)), reversed(tuple(strides))):
        if n != 1 and stride != unit:
            raise ArgumentError("the array is not contiguous: register what it is a part of, and "
                                "name the part by offsets")
        unit *= n


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_HOST, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13

_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_capsule.argtypes, _capsule.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _dlpack(source: Any) -> Located:
    """The tensor in a capsule, which gives it back when the capsule is garbage."""
    kind, _ = source.__dlpack_device__()
    if kind not in (_DL_HOST, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED):
        raise ArgumentError(f"memory of DLPack's device type {kind} cannot be registered: host and "
                            f"CUDA memory can")
    capsule = source.__dlpack__()
    t = _DLTensor.from_address(_capsule(capsule, b"dltensor"))
    shape = [t.shape[i] for i in range(t.ndim)]
    _check_dense(shape, [t.strides[i] for i in range(t.ndim)] if t.strides else None, 1)
    length = t.bits * t.lanes // 8
    for n in shape:
        length *= n
    address = (t.data or 0) + t.byte_offset
    if t.device_type in (_DL_CUDA, _DL_CUDA_MANAGED):
        return _device(address, length, t.device_id, capsule)
    return host(address, length, capsule)
