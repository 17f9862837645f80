# SPDX-License-Identifier: Apache-2.0
"""Which region an address lies in: Mooncake names memory by addresses, sluice by regions and
offsets.
"""

from __future__ import annotations

import bisect
from typing import Generic, Iterator, Optional, TypeVar

T = TypeVar("T")


class Ranges(Generic[T]):
    """Ranges of addresses that do not overlap, each with what it stands for."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._entries: list[tuple[int, int, T]] = []  # address, length, what it stands for

    def check(self, address: int, length: int) -> None:
        """KeyError where a range lies already. ValueError for what no memory has."""
        if address < 0 or length < 0:
            raise ValueError(f"{length} bytes at {address} are no memory")
        at = bisect.bisect_left(self._starts, address)
        before = at and self._starts[at - 1] + self._entries[at - 1][1] > address
        if before or (at < len(self._starts) and address + length > self._starts[at]):
            raise KeyError(f"{length} bytes at {address:#x} overlap a range that is registered")

    def add(self, address: int, length: int, what: T) -> None:
        """Adds a range that was checked."""
        at = bisect.bisect_left(self._starts, address)
        self._starts.insert(at, address)
        self._entries.insert(at, (address, length, what))

    def at(self, address: int) -> Optional[T]:
        """What the range that begins there stands for."""
        at = bisect.bisect_left(self._starts, address)
        return self._entries[at][2] if at < len(self._starts) and self._starts[
            at] == address else None

    def whole(self, address: int) -> tuple[int, int]:
        """The range that begins there; without bytes, where none does."""
        at = bisect.bisect_left(self._starts, address)
        there = at < len(self._starts) and self._starts[at] == address
        return address, self._entries[at][1] if there else 0

    def drop(self, address: int) -> None:
        """Removes the range that begins there."""
        at = bisect.bisect_left(self._starts, address)
        del self._starts[at], self._entries[at]

    def find(self, address: int, length: int) -> tuple[int, T]:
        """The start of the range that holds all of it, and what that stands for. KeyError where
        none does.
        """
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or length < 0 or address + length > self._starts[at] + self._entries[at][1]:
            raise KeyError(f"{length} bytes at {address:#x} lie in no registered range, or go "
                           f"past its end")
        return self._starts[at], self._entries[at][2]

    def __iter__(self) -> Iterator[tuple[int, int, T]]:
        return iter(list(self._entries))
