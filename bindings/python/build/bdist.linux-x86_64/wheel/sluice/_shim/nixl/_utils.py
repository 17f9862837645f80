# SPDX-License-Identifier: Apache-2.0
"""Memory by its address, for programs that have no array at hand."""

import ctypes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = [ctypes.c_void_p], None


def malloc_passthru(size: int) -> int:
    """The address of so many bytes."""
    address = _libc.malloc(size)
    if not address:
        raise MemoryError(f"{size} bytes")
    return int(address)


def free_passthru(address: int) -> None:
    """Gives them back."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills bytes with 0xBA."""
    ctypes.memset(address, 0xBA, size)


def verify_transfer(one: int, other: int, size: int) -> None:
    """Ends with an AssertionError where the bytes of two places differ."""
    if ctypes.string_at(one, size) != ctypes.string_at(other, size):
        raise AssertionError(f"{size} bytes at {one:#x} differ from those at {other:#x}")
