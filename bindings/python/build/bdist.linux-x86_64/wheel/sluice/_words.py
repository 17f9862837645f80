# SPDX-License-Identifier: Apache-2.0
"""Names and numbers as C takes them, which cuts the one and wraps the other."""

from __future__ import annotations

from .errors import ArgumentError, BoundsError


def text(name: str, what: str) -> bytes:
    """A name, which C would end at a NUL."""
    if "\0" in name:
        raise ArgumentError(f"{what} {name!r} has a NUL in it")
    return name.encode()


def number(n: int, what: str, bits: int = 64) -> int:
    """A number, which C would wrap around."""
    if not 0 <= n < 1 << bits:
        raise BoundsError(f"{what} is {n}: want 0 or more, below 2^{bits}")
    return n


def octets(data: bytes, what: str) -> bytes:
    """Bytes, of which C would say only that an argument has the wrong type."""
    if not isinstance(data, bytes):
        raise TypeError(f"{what} is of type {type(data).__name__}: want bytes")
    return data
