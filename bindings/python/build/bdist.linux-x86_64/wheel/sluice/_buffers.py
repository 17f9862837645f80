# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of an object lie, by the buffer protocol and without a copy."""

from __future__ import annotations

import array
import ctypes
from typing import Any, Optional


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes, _get.restype = [ctypes.py_object, ctypes.POINTER(_PyBuffer),
                               ctypes.c_int], ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes, _release.restype = [ctypes.POINTER(_PyBuffer)], None


class Held:
    """The bytes of an object, which stay in place until this is released."""

    _view: Optional[_PyBuffer] = None

    def __init__(self, of: Any) -> None:
        view = self._view = _PyBuffer()  # from before the call: an interrupt may follow it
        _get(of, ctypes.byref(view), 0)  # PyBUF_SIMPLE: contiguous, or a BufferError
        self.address: int = view.buf or 0
        self.length: int = view.len
        self.writable = not view.readonly

    def release(self) -> None:
        """Lets go of them."""
        view, self._view = self._view, None
        if view is not None:
            _release(ctypes.byref(view))

    def __del__(self) -> None:
        self.release()


Indices = Any  # a buffer of integers, an array, a tensor of the host, or an iterable of int


def hold_indices(indices: Indices, what: str) -> tuple[Held, int]:
    """A list of 32-bit integers in place; all else becomes one. Also its length.

    A negative index reads as one beyond any region, and is refused there.
    """
    if hasattr(indices, "__array__") and not _is_buffer(indices):  # a tensor in host memory
        indices = indices.numpy()
    if _is_buffer(indices):
        view = memoryview(indices)
        if view.ndim != 1 or view.format is None or view.format.lstrip("@=<") not in ("i", "I", "l",
            "L", "q", "Q", "h", "H", "b", "B"):
            raise TypeError(f"{what}: want one dimension of integers, not {view.ndim} of "
                            f"{view.format!r}")
        if view.itemsize == 4 and view.c_contiguous:
            return Held(indices), len(view)
        indices = view.tolist()
    try:
        packed = array.array("I", indices)
    except OverflowError as e:
        raise ValueError(f"{what}: an index is negative, or takes more than 32 bits") from e
    return Held(packed), len(packed)


def _is_buffer(of: Any) -> bool:
    try:
        memoryview(of)
    except TypeError:
        return False
    return True
