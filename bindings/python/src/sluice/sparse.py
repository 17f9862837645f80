# SPDX-License-Identifier: Apache-2.0
"""Entries of a KV cache that sparse attention asks for, in few slots near the card.
docs/sparse.md has the why.

    pool = Pool(hbm, entry=656, sets=160, slots=6400)  # a set is a sequence and a layer
    step = pool.step(host)  # the remote with all entries; sluice.Engine.self_peer() is this process

    found = step.lookup(topk, blocks)  # arrays: a row for each set
    step.fetch(base_of_this_layer)     # one transfer brings what the lookup missed
    attend(found.slots)                # meanwhile, to what was there
    step.wait()

Times are seconds, None without a limit. The interpreter's lock is released in every call of the
library. A step is one thread's at a time, and a set is in one step at a time: BusyError otherwise.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from . import _library
from ._clock import in_slices
from ._library import lib
from ._region import Closing, Region
from ._words import number, text
from .errors import ArgumentError, BusyError, Error, HandleError, ReadOnlyError, check

if TYPE_CHECKING:
    from .peer import Remote

    Array = np.ndarray[Any, Any]

NONE = _library.SPARSE_NONE  # no entry, as in a list that is not full, and the slot of it


class Found(NamedTuple):
    """What a lookup has found: arrays of the step, which writes them anew in its next lookup."""

    slots: Array  # of each entry, counted over all sets; NONE of NONE
    missed: Array  # indices in slots.reshape(-1): entries that are to be brought, each once
    counts: Array  # how many of missed are of each set


class Pool(Closing):
    """Slots for entries of `entry` bytes, `slots` for each of `sets`, in a region from `base` on,
    `stride` bytes apart. `layers` share a lookup, each with slots of its own. A set has a multiple
    of 16 slots, at least 32: `slots` is rounded up.
    """

    def __init__(self, region: Region, *, entry: int, sets: int, slots: int, stride: int = 0,
                 base: int = 0, layers: int = 1) -> None:
        if not region.writable:
            raise ReadOnlyError(f"{region.name!r} is memory that may only be read")
        self.region, self.sets, self.base, self.stride = region, sets, base, stride or entry
        self._out, have = ctypes.c_uint64(), ctypes.c_uint32()
        config = _library.SparseConfig(
            layers=number(layers, "layers", 31), region=region._handle, base=number(base, "base"),
            entry=number(entry, "entry"), stride=number(stride, "stride"),
            sets=number(sets, "sets", 31), slots=number(slots, "slots", 31))
        config.size = ctypes.sizeof(config)
        check(lib.sparse_open(ctypes.byref(config), ctypes.byref(self._out), ctypes.byref(have)))
        self.slots: int = have.value

    def at(self, slots: Any, layer: int = 0) -> Any:
        """Where slots lie in the region, in bytes: of a number or an array of them."""
        slots = slots.astype(np.uint64) if isinstance(slots, np.ndarray) else int(slots)
        return self.base + (slots + layer * self.sets * self.slots) * self.stride

    def reset(self, set: int) -> None:
        """Empties a set, as when its sequence has ended. BusyError while a step has missed entries
        of it that have not come.
        """
        check(lib.sparse_reset(self._out.value, number(set, "set", 32)))

    def step(self, remote: Remote, stride: int = 0, *, only: Optional[str] = None) -> Step:
        """A step whose entries lie in a remote, stride bytes apart; 0: as long as an entry. By one
        backend alone where `only` names it.
        """
        return Step(self, remote, stride, only)

    def close(self) -> None:
        """BusyError while it has steps."""
        if self._out.value:
            code = lib.sparse_close(self._out.value)
            if code != HandleError.code:  # else its engine has closed it
                check(code)
            self._out.value = 0

    def __del__(self) -> None:
        out = getattr(self, "_out", None)
        if out is not None and out.value:
            lib.sparse_close(out.value)


class Step(Closing):
    """A lookup of some sets, and the transfer of what it missed: `Pool.step` makes one, which is
    used again and again.
    """

    def __init__(self, pool: Pool, remote: Remote, stride: int, only: Optional[str]) -> None:
        self.pool, self.remote = pool, remote
        self._out = ctypes.c_uint64()
        self._found: Optional[Found] = None
        route = _library.Route(only=text(only, "only") if only else None)
        route.size = ctypes.sizeof(route)
        check(lib.sparse_step_new(pool._out.value, remote._handle, number(stride, "stride"),
                                  ctypes.byref(route), ctypes.byref(self._out)))

    def lookup(self, entries: Any, blocks: Any, *, block: int = 64, sets: Any = None,
               starts: Any = None, page: int = 0) -> Found:
        """Finds the slots of entries, a row of numbers for each set, and gives those that are in
        none the slots of others that have not been asked for longest. Until `fetch` or `store`, and
        `wait`, have returned, those that are missed have other bytes. What was not brought by the
        next lookup is missed again.

        Entry e lies at place `e % block` of the block `blocks[set][e // block]` of the remote; a
        block has a power of two of entries, and block 1 begins `page` bytes behind block 0: by
        itself as many as its entries take. Sets are 0, 1, 2 and so on unless named, in ascending
        order. With `starts`, blocks are one list, in which those of row i begin at starts[i], and
        the last ones end.

        Arrays, and tensors of the host, of 32-bit integers are read in place; -1 is NONE.
        BoundsError: an entry behind its set's blocks, or more of them than a set has slots; nothing
        has changed then.
        """
        asked = _words(entries, 2, "entries")
        batch, found, keep = self._batch(asked.shape, blocks, block, sets, starts, page)
        count = ctypes.c_size_t()
        batch.entries, batch.missed = asked.ctypes.data, found.missed.ctypes.data
        check(lib.sparse_lookup(self._out.value, ctypes.byref(batch), ctypes.byref(count)))
        del keep
        return found._replace(missed=found.missed[: count.value])

    def warm(self, windows: Any, blocks: Any, *, block: int = 64, sets: Any = None,
             starts: Any = None, page: int = 0) -> int:
        """Looks up one window behind the other, the top-k of the last queries of a prefill: an
        array of rows as for `lookup` for each window. Returns how many entries `fetch` is to bring,
        so that the first steps of decode miss no more than later ones.
        """
        asked = _words(windows, 3, "windows")
        batch, found, keep = self._batch(asked.shape[1:], blocks, block, sets, starts, page)
        count = ctypes.c_size_t()
        batch.entries = asked.ctypes.data
        check(lib.sparse_warm(self._out.value, ctypes.byref(batch), len(asked),
                              ctypes.byref(count)))
        del found, keep
        return count.value

    def _batch(self, shape: Any, blocks: Any, block: int, sets: Any, starts: Any,
               page: int) -> tuple[_library.SparseBatch, Found, list[Array]]:
        """A batch without entries, and what holds its lists: another thread may have the step make
        others meanwhile.
        """
        count, n = shape
        if block < 1 or block & (block - 1):
            raise ArgumentError(f"a block has {block} entries: want a power of two")
        rows = _words(blocks, 2 if starts is None else 1, "blocks")
        if starts is None:
            if len(rows) != count:
                raise ArgumentError(f"blocks has {len(rows)} rows, entries {count}")
            starts = np.arange(count + 1, dtype=np.uint32) * np.uint32(rows.shape[1])
        begins = _words(starts, 1, "starts")
        named = _words(np.arange(count, dtype=np.uint32) if sets is None else sets, 1, "sets")
        if len(begins) != count + 1 or len(named) != count:
            raise ArgumentError(f"entries has {count} rows, with {len(named)} sets and "
                                f"{len(begins)} starts: want {count} and {count + 1}")
        if begins[-1] > rows.size:
            raise ArgumentError(f"starts ends at {begins[-1]}, of {rows.size} blocks")
        found = self._room(shape)
        batch = _library.SparseBatch(
            sets_count=count, entries_count=n, shift=block.bit_length() - 1,
            sets=named.ctypes.data, blocks=rows.ctypes.data, starts=begins.ctypes.data,
            slots=found.slots.ctypes.data, counts=found.counts.ctypes.data,
            page=number(page, "page"))
        batch.size = ctypes.sizeof(batch)
        return batch, found, [rows, begins, named]

    def _room(self, shape: Any) -> Found:
        found = self._found
        if found is None or found.slots.shape != shape:
            found = self._found = Found(np.empty(shape, np.uint32),
                                        np.empty(shape[0] * shape[1], np.uint32),
                                        np.empty(shape[0], np.uint32))
        return found

    def fetch(self, *bases: int) -> None:
        """Starts to bring what `lookup` or `warm` has missed, for each of the first len(bases)
        layers, all entries of which lie from its base on in the remote. After an error of it or of
        `wait` the pool has none of these entries.
        """
        check(lib.sparse_fetch(self._out.value, *_bases(bases)))

    def store(self, *bases: int) -> None:
        """The other way, for new entries, whose bytes the program has put into their slots."""
        check(lib.sparse_store(self._out.value, *_bases(bases)))

    @property
    def fd(self) -> int:
        """A descriptor that is readable once what `fetch` or `store` has begun has ended, for
        select and loop.add_reader: neither read nor close it. It may be readable for nothing:
        `wait(0)` tells. Ask for it first while nothing is under way.
        """
        fd = ctypes.c_int()
        check(lib.sparse_fd(self._out.value, ctypes.byref(fd)))
        return fd.value

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for the end of `fetch` or `store`. WaitTimeout ends the wait, not the transfer."""
        handle = self._out.value
        check(in_slices(lambda ns: lib.sparse_wait(handle, ns), timeout))

    def abort(self, timeout: Optional[float] = None) -> None:
        """Ends `fetch` or `store`: when this returns, no byte of it lands any more, on either side,
        and the pool has none of its entries.
        """
        handle = self._out.value
        check(in_slices(lambda ns: lib.sparse_abort(handle, ns), timeout))

    def close(self) -> None:
        """Aborts what is under way, and gives the step back."""
        out = getattr(self, "_out", None)  # missing where it was never whole
        if out is None or not out.value:
            return
        code = lib.sparse_step_close(out.value)
        if code == BusyError.code:
            self.abort()
            code = lib.sparse_step_close(out.value)
        if code != HandleError.code:  # else its engine has closed it
            check(code)
        out.value = 0

    def __del__(self) -> None:
        try:
            self.close()
        except Error:
            pass  # the child of a fork, or a peer that proves nothing: the engine keeps it


def _bases(bases: tuple[int, ...]) -> tuple[Any, int]:
    return (ctypes.c_uint64 * len(bases))(*[number(b, "a base") for b in bases]), len(bases)


def _words(of: Any, dimensions: int, what: str) -> Array:
    """A contiguous array of 32-bit integers, in place where it is one."""
    array = np.asarray(of)
    if array.ndim != dimensions or array.dtype not in (np.uint32, np.int32):
        raise TypeError(f"{what}: want {dimensions} dimensions of 32-bit integers, not "
                        f"{array.ndim} of {array.dtype}")
    return np.ascontiguousarray(array).view(np.uint32)
