# SPDX-License-Identifier: Apache-2.0
"""Nests of loops from the shape and the strides of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Union

from . import _library
from ._buffers import Indices, hold_indices
from ._words import number
from .errors import ArgumentError, BoundsError

LOOPS_MAX = 3


class Slots(NamedTuple):
    """Entries in slots, such as blocks of a cache: entry i is (first + i) % per of the slot
    list[(first + i) // per].
    """

    per: int  # entries of a slot
    step: int  # bytes from one to the next
    first: int = 0  # entries of the first slot that are left out
    list: Optional[Indices] = None  # None: the slots follow each other


Side = Union[Slots, Indices, None]


def nest(shape: Sequence[int], itemsize: int, strides: Sequence[int],
         remote_strides: Sequence[int]) -> _library.Pattern:
    """The pattern of arrays whose first dimension is the entries."""
    if not len(shape) == len(strides) == len(remote_strides) or not len(shape):
        raise ArgumentError(f"pattern: {len(shape)} dimensions, {len(strides)} strides here and "
                            f"{len(remote_strides)} at the peer")
    dims = [
        (number(n, "a dimension", 31), number(here, "a stride"), number(there, "a remote stride"))
        for n, here, there in zip(shape, strides, remote_strides)
    ]
    if any(n == 0 for n, _, _ in dims):
        raise BoundsError(f"pattern: the shape {tuple(shape)} is empty")
    run = number(itemsize, "itemsize")
    loops: list[tuple[int, int, int]] = []  # from the innermost on
    for n, here, there in reversed(dims[1:]):
        if n == 1:
            continue
        if not loops and here == there == run:
            run *= n
        elif loops and here == loops[-1][0] * loops[-1][1] and there == loops[-1][0] * loops[-1][2]:
            loops[-1] = (loops[-1][0] * n, loops[-1][1], loops[-1][2])
        else:
            loops.append((n, here, there))
    if len(loops) > LOOPS_MAX:
        raise ArgumentError(f"pattern: {len(loops)} loops remain of the shape {tuple(shape)}, at "
                            f"most {LOOPS_MAX}: add it in parts")
    pattern = _library.Pattern(count=dims[0][0], run=number(run, "run"), loops_count=len(loops))
    for place, (n, here, there) in zip(pattern.loops, reversed(loops)):
        place.n, place.local, place.remote = number(n, "a loop", 32), here, there
    pattern.local.stride, pattern.remote.stride = dims[0][1], dims[0][2]
    return pattern


def side(of: _library.Side, given: Side, count: int, base: int, name: str) -> list[Any]:
    """Fills one side in, and returns what it refers to."""
    of.base = number(base, f"the offset of {name}")
    indices: Optional[Indices] = given
    slots = count
    if isinstance(given, Slots):
        of.per, of.step, of.first = number(given.per, "per", 32), number(given.step,
            "step"), number(given.first, "first", 32)
        indices, slots = given.list, -(-(given.first + count) // max(1, given.per))
    if indices is None:
        return []
    held, n = hold_indices(indices, name)
    if n != slots:
        held.release()
        raise ValueError(f"{name} has {n} entries, and {slots} are wanted")
    of.list = held.address
    return [held]
