# SPDX-License-Identifier: Apache-2.0
"""Which region an address lies in: NIXL names memory by addresses, sluice by regions and offsets.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import Any, Container, Generic, Iterable, Optional, Tuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..transfer import Transfer
from .bindings import Rows, nixl_mem_t, nixlNotFoundError

T = TypeVar("T")
Kind = Tuple[nixl_mem_t, int]  # of memory, and the device


@dataclass
class Range(Generic[T]):
    """A registered range. `what` is a Region of ours or a Remote of a peer's."""

    kind: nixl_mem_t
    address: int
    length: int
    device: int
    name: str
    what: T
    listed: int = -1  # its length as a list says it: 0 of a file stands for all; -1: the same
    writable: bool = True
    used: bool = False  # ours: a peer was told of it, or a transfer lists it


@dataclass
class _Table(Generic[T]):
    """The ranges of one kind by address; of those that begin together the longest is last."""

    starts: Rows
    lengths: Rows
    ranges: list[Range[T]]

    def around(self, address: int, length: int, kind: nixl_mem_t) -> int:
        """Any range that holds all of it."""
        for i, r in enumerate(self.ranges):
            if r.address <= address and address + length <= r.address + r.length:
                return i
        raise nixlNotFoundError(f"{length} bytes at {address:#x} of {kind.name} lie in no "
                                f"registered range, or go past its end")


@dataclass
class Located(Generic[T]):
    """Descriptors by range and offset. Of those that were picked from a pattern the arrays are made
    when they are asked for.
    """

    ranges: list[Range[T]]  # that occur
    which: Optional[npt.NDArray[np.int64]]  # an index into ranges for each; None: there is one
    _offsets: Optional[Rows]
    _lengths: Optional[Rows]
    pattern: Optional[Pattern] = field(default=None)

    @property
    def count(self) -> int:
        return len(self.offsets if self.pattern is None else self.pattern.index)

    @property
    def offsets(self) -> Rows:
        if self._offsets is None:
            assert self.pattern is not None
            self._offsets = self.pattern.offsets()
        return self._offsets

    @property
    def lengths(self) -> Rows:
        if self._lengths is None:
            assert self.pattern is not None
            self._lengths = np.full(self.count, self.pattern.length, np.uint64)
        return self._lengths

    @property
    def total(self) -> int:
        """Bytes."""
        if self.pattern is not None:
            return self.pattern.length * self.count
        return int(self.lengths.sum())

    def matches(self, other: Located[Any]) -> bool:
        """Whether descriptors of a pair have one length. There are as many of the other."""
        if self.pattern is not None and other.pattern is not None:
            return self.pattern.length == other.pattern.length
        return not (self.lengths != other.lengths).any()

    def pick(self, indices: Any) -> Located[T]:
        if self.pattern is not None:
            return Located(self.ranges, None, None, None, self.pattern.pick(indices))
        which = None if self.which is None else self.which[indices]
        return Located(self.ranges, which, self.offsets[indices], self.lengths[indices])

    def at(self, ranges: list[Range[Any]]) -> Located[Any]:
        """The same in other ranges."""
        return Located(ranges, self.which, self._offsets, self._lengths, self.pattern)


@dataclass
class Runs(Generic[T]):
    """Descriptors as runs of blocks, each by its range and first offset: what they take does not
    depend on the blocks.
    """

    first: Located[T]  # the first block of each run
    strides: Rows
    ends: npt.NDArray[np.int64]  # how many blocks there are up to the end of each run

    @property
    def count(self) -> int:
        return int(self.ends[-1])

    def pick(self, indices: Any) -> Located[T]:
        if len(self.ends) == 1:  # a table of blocks
            base, stride, length = (int(a[0]) for a in (self.first.offsets, self.strides,
                                                        self.first.lengths))
            if stride >= length and len(indices) >= PATTERN_LEAST and self.count < _INDICES:
                return Located(self.first.ranges, None, None, None,
                               Pattern(base, stride, length, indices.astype(np.uint32)))
        run = np.searchsorted(self.ends, indices, "right")
        begins = np.where(run > 0, self.ends[run - 1], 0)
        which = None if self.first.which is None else self.first.which[run]
        offsets = self.first.offsets[run] + (indices - begins).astype(np.uint64) * self.strides[run]
        return Located(self.first.ranges, which, offsets, self.first.lengths[run])


@dataclass
class Pattern:
    """Entries of one length in one range: entry i lies at base + index[i] * stride."""

    base: int
    stride: int
    length: int
    index: npt.NDArray[np.uint32]

    def offsets(self) -> Rows:
        each: Rows = np.uint64(self.base) + self.index.astype(np.uint64) * np.uint64(self.stride)
        return each

    def pick(self, indices: Any) -> Pattern:
        return Pattern(self.base, self.stride, self.length, self.index[indices])


PATTERN_LEAST = 8  # below it a pattern saves nothing
_MANY = 32  # ranges for which a whole list is sorted, or read
_INDICES = (1 << 32) - 1  # of a pattern: the next one is such a number, too


def find_pattern(at: Located[Any]) -> Optional[Pattern]:
    """What a list of blocks of a cache is mostly."""
    if at.which is not None or len(at.offsets) < PATTERN_LEAST or (at.lengths != at.lengths[0]).any(
    ):
        return None
    base = int(at.offsets.min())
    away = at.offsets - np.uint64(base)
    stride = int(np.gcd.reduce(away))
    if stride < max(1, int(at.lengths[0])) or int(away.max()) // stride >= _INDICES:
        return None  # not blocks that lie beside each other
    return Pattern(base, stride, int(at.lengths[0]), (away // np.uint64(stride)).astype(np.uint32))


class Places(Generic[T]):
    """The ranges of one agent. They may overlap, and one memory may be there twice."""

    def __init__(self) -> None:
        self._ranges: dict[str, Range[T]] = {}
        # the same by where they lie: address, length, number of the call of put, name
        self._lists: dict[Kind, list[tuple[int, int, int, str]]] = {}
        self._entries: dict[str, tuple[int, int, int, str]] = {}
        self._longest: dict[Kind, int] = {}  # of each list, ever
        self._numbers = itertools.count()
        self._sorted: dict[Kind, _Table[T]] = {}

    def put(self, *ranges: Range[T]) -> None:
        """Adds ranges, in the place of those of their names. An interrupt may leave some of them,
        which drop takes.
        """
        new = {r.name: r for r in ranges}
        self.drop(*[name for name in new if name in self])
        fresh: dict[Kind, list[tuple[int, int, int, str]]] = {}
        key, mine = None, []
        for name, r in new.items():
            if (r.kind, r.device) != key:
                key = (r.kind, r.device)
                mine = fresh.setdefault(key, [])
            mine.append((r.address, r.length, next(self._numbers), name))
        self._ranges.update(new)
        for key, entries in fresh.items():
            self._entries.update({entry[3]: entry for entry in entries})
            self._longest[key] = max(self._longest.get(key, 0), *[e[1] for e in entries])
            self._sorted.pop(key, None)
            mine = self._lists.setdefault(key, [])
            if len(entries) < _MANY:
                for entry in entries:
                    bisect.insort(mine, entry)
            else:
                self._lists[key] = sorted(mine + entries)

    def drop(self, *names: str) -> None:
        gone: dict[Kind, set[str]] = {}
        for name in names:
            r = self._ranges[name]
            gone.setdefault((r.kind, r.device), set()).add(name)
        for key, those in gone.items():
            mine = self._lists.get(key, [])
            self._sorted.pop(key, None)
            if len(those) < _MANY:
                for entry in [self._entries[name] for name in those if name in self._entries]:
                    at = bisect.bisect_left(mine, entry)
                    if mine[at : at + 1] == [entry]:
                        del mine[at]
            else:
                mine[:] = [entry for entry in mine if entry[3] not in those]
            if not mine:
                self._lists.pop(key, None)
                self._longest.pop(key, None)
        for name in names:  # again after an interrupt: they are not in the lists any more
            self._entries.pop(name, None)
            self._ranges.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._ranges

    def all(self) -> list[Range[T]]:
        entries = sorted(itertools.chain(*self._lists.values()), key=lambda entry: entry[2])
        return [self._ranges[entry[3]] for entry in entries]

    def exactly(self, kind: nixl_mem_t, rows: Rows) -> Optional[list[Range[T]]]:
        """The ranges of rows, where each row is all of just one that begins there; else None."""
        if len(rows) < _MANY or (rows[:, 2] != rows[0, 2]).any():
            return None
        table = self._table((kind, int(rows[0, 2])))
        at = np.searchsorted(table.starts, rows[:, 0])
        ends = np.searchsorted(table.starts, rows[:, 0], "right")
        if (ends - at != 1).any() or (table.lengths[at] != rows[:, 1]).any():
            return None
        return [table.ranges[i] for i in at.tolist()]

    def alike(self, kind: nixl_mem_t, address: int, length: int, device: int) -> list[Range[T]]:
        """Those that are registered as this range, neither more nor less; the latest first."""
        mine, found = self._lists.get((kind, device), []), []
        for i in range(bisect.bisect_left(mine, (address,)), len(mine)):
            at, _, number, name = mine[i]
            if at != address:
                break
            r = self._ranges[name]
            if length == (r.length if r.listed < 0 else r.listed):
                found.append((number, r))
        if len(found) > 1:
            found.sort(key=lambda of: -of[0])
        return [r for _, r in found]

    def covered(self, ranges: Iterable[Range[T]], without: Container[str]) -> list[Range[T]]:
        """Those all bytes of which ranges that are not named hold together, and may be written
        where they may.
        """
        left: dict[Kind, list[tuple[int, int, int, str]]] = {}
        found = []
        for r in ranges:
            key = (r.kind, r.device)
            if key not in left:
                left[key] = [e for e in self._lists.get(key, []) if e[3] not in without]
            if left[key] and self._cover(r, left[key]):
                found.append(r)
        return found

    def _cover(self, r: Range[T], mine: list[tuple[int, int, int, str]]) -> bool:
        at, end = r.address, r.address + r.length
        first = bisect.bisect_left(mine, (at - self._longest[(r.kind, r.device)],))
        for i in range(first, len(mine)):
            address, length, _, name = mine[i]
            if address > at:
                return False  # nothing holds the byte there
            if self._ranges[name].writable >= r.writable:
                at = max(at, address + length)
            if at >= end:
                return True
        return False

    def locate(self, kind: nixl_mem_t, rows: Rows) -> Located[T]:
        """Finds descriptors. nixlNotFoundError for what lies in no range, or goes past its end."""
        if (rows[:, 2] == rows[0, 2]).all():
            return self._locate(kind, int(rows[0, 2]), rows)
        lone = self._locate_lone(kind, rows)
        if lone is not None:
            return lone
        devices, order, ends = by_value(rows[:, 2])
        which, starts = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.uint64)
        ranges: list[Range[T]] = []
        begin = 0
        for device, end in zip(devices.tolist(), ends.tolist()):
            mine = order[begin:end]
            begin = end
            which[mine] = len(ranges)
            part = self._locate(kind, device, rows[mine])
            if part.which is not None:
                which[mine] += part.which
            starts[mine] = rows[mine, 0] - part.offsets
            ranges += part.ranges
        return Located(ranges, which, rows[:, 0] - starts, rows[:, 1])

    def again(self, at: Located[T], without: Container[str] = ()) -> Located[T]:
        """The same by ranges that are there and are not named. nixlNotFoundError where none holds
        a part of it.
        """
        if all(self._ranges.get(r.name) is r and r.name not in without for r in at.ranges):
            return at
        which = np.zeros(at.count, np.int64) if at.which is None else at.which
        rows = np.empty((at.count, 3), np.uint64)
        rows[:, 0] = np.array([r.address for r in at.ranges], np.uint64)[which] + at.offsets
        rows[:, 1] = at.lengths
        rows[:, 2] = np.array([r.device for r in at.ranges], np.uint64)[which]
        if not without:
            return self.locate(at.ranges[0].kind, rows)
        others: Places[T] = Places()
        others.put(*[r for r in self._ranges.values() if r.name not in without])
        return others.locate(at.ranges[0].kind, rows)

    def _locate_lone(self, kind: nixl_mem_t, rows: Rows) -> Optional[Located[T]]:
        """The same where each device has one range, as files mostly have; else None."""
        numbers: dict[int, int] = {}  # of devices, as they come
        ranges: list[Range[T]] = []
        which, starts = [], []
        for address, length, device in rows.tolist():
            number = numbers.setdefault(device, len(ranges))
            if number == len(ranges):
                mine = self._lists.get((kind, device), [])
                if len(mine) != 1:
                    return None
                ranges.append(self._ranges[mine[0][3]])
            r = ranges[number]
            if address < r.address or address + length > r.address + r.length:
                return None
            which.append(number)
            starts.append(r.address)
        return Located(ranges, np.array(which), rows[:, 0] - np.array(starts, np.uint64),
                       rows[:, 1])

    def locate_runs(self, kind: nixl_mem_t, strided: Rows) -> Runs[T]:
        """Finds rows of (address, length, device, stride, count), each in one range:
        nixlNotFoundError else.
        """
        rows = strided[strided[:, 4] > 0]
        counts, strides = rows[:, 4].astype(np.int64), rows[:, 3]
        whole = rows[:, :3].copy()
        reach = (rows[:, 4] - np.uint64(1)) * strides
        if ((rows[:, 4].astype(float) - 1) * strides.astype(float) + whole[:,
            1].astype(float) >= 2.0**63).any():
            raise nixlNotFoundError("a run of strided descriptors goes past the end of all memory")
        whole[:, 1] += reach
        at = self.locate(kind, whole)
        first = Located(at.ranges, at.which, at.offsets, rows[:, 1].copy())
        return Runs(first, strides.copy(), np.cumsum(counts))

    def _locate(self, kind: nixl_mem_t, device: int, rows: Rows) -> Located[T]:
        table = self._table((kind, device))
        addresses, lengths = rows[:, 0], rows[:, 1]
        at = np.searchsorted(table.starts, addresses, "right") - 1
        low = at < 0
        at[low] = 0
        if not table.ranges:
            raise nixlNotFoundError(f"no {kind.name} of device {device} is registered, or its "
                                    f"metadata is not loaded")
        offsets = addresses - table.starts[at]
        room = table.lengths[at]
        bad = low | (offsets > room) | (lengths > room - np.minimum(offsets, room))
        for i in np.flatnonzero(bad).tolist():  # ranges that overlap, or a mistake
            at[i] = table.around(int(addresses[i]), int(lengths[i]), kind)
            offsets[i] = addresses[i] - table.starts[at[i]]
        if (at == at[0]).all():  # as mostly
            return Located([table.ranges[int(at[0])]], None, offsets, lengths)
        used, which = np.unique(at, return_inverse=True)
        ranges = [table.ranges[i] for i in used.tolist()]
        return Located(ranges, which.astype(np.int64), offsets, lengths)

    def _table(self, key: Kind) -> _Table[T]:
        table = self._sorted.get(key)
        if table is None:
            mine = self._lists.get(key, [])
            table = self._sorted[key] = _Table(
                np.array([entry[0] for entry in mine], np.uint64),
                np.array([entry[1] for entry in mine], np.uint64),
                [self._ranges[entry[3]] for entry in mine])
        return table


def by_value(column: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64],
                                                 npt.NDArray[np.int64]]:
    """The values, an order that has those of one value together, and where each value ends."""
    order = np.argsort(column, kind="stable")
    values, counts = np.unique(column, return_counts=True)
    return values, order, np.cumsum(counts)


def fill(t: Transfer, local: Located[Any], remote: Located[Any]) -> None:
    """Lists pairs of descriptors, as a pattern where they are one, and as the runs that they make
    where most continue the one before at both sides.
    """
    n = local.count
    here = local.pattern or find_pattern(local)
    there = remote.pattern or find_pattern(remote)
    if here is not None and there is not None and n >= PATTERN_LEAST:
        runs = _find_runs(here, there)
        if runs is not None:
            begins, lengths = runs
            _list(t, *(Located(side.ranges, None, p.pick(begins).offsets(), lengths)
                       for side, p in ((local, here), (remote, there))))
            return
        t.add_pages(
            local.ranges[0].what,
            remote.ranges[0].what,
            here.length,
            here.index,
            there.index,
            base=here.base,
            stride=here.stride,
            remote_base=there.base,
            remote_stride=there.stride,
        )
        return
    _list(t, local, remote)


def _find_runs(here: Pattern, there: Pattern) -> Optional[tuple[npt.NDArray[np.int64], Rows]]:
    """Which pairs begin a run, and how many bytes each run has. None where most runs are one pair.
    """
    if here.stride != here.length or there.stride != there.length:
        return None
    a, b = here.index, there.index
    breaks = np.flatnonzero((a[1:] != a[:-1] + 1) | (b[1:] != b[:-1] + 1))
    if 2 * (len(breaks) + 1) > len(a):
        return None
    begins = np.concatenate(([0], breaks + 1))
    return begins, np.diff(begins, append=len(a)).astype(np.uint64) * np.uint64(here.length)


def _list(t: Transfer, local: Located[Any], remote: Located[Any]) -> None:
    """Lists pairs of descriptors one by one."""
    copies = np.empty((local.count, 5), np.uint64)  # of sluice_copy
    for column, side in enumerate((local, remote)):
        handles = np.array([r.what._handle for r in side.ranges], np.uint64)
        copies[:, column] = handles if side.which is None else handles[side.which]
    copies[:, 2], copies[:, 3], copies[:, 4] = local.offsets, remote.offsets, local.lengths
    if local.which is not None or remote.which is not None:  # neighbours of one pair are merged
        copies = copies[np.lexsort((copies[:, 1], copies[:, 0]))]
    t._add_copies([r.what for r in local.ranges], [r.what for r in remote.ranges], copies)
