# SPDX-License-Identifier: Apache-2.0
"""A batch of copies with one completion, filled once and posted many times."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from typing import TYPE_CHECKING, Any, Generator, Iterable, Literal, Optional, Sequence, Union

from . import _library
from ._buffers import Held, Indices, hold_indices
from ._clock import SLICE_NS, in_slices, nanoseconds
from ._library import lib
from ._pattern import Side, nest, side
from ._region import Closing, Region
from ._words import number, octets
from .errors import BusyError, Error, HandleError, ReadOnlyError, check, failure

if TYPE_CHECKING:
    from .peer import Peer, Remote

_PENDING = _library.PENDING
Op = Literal["read", "write"]
SLICE = SLICE_NS / 1e9


class Transfer(Closing):
    """Reads from a peer or writes to it. One thread at a time fills and posts it.

    `await transfer` waits in an asyncio loop, `wait` on a thread; both end with the
    outcome, as an exception where it is not success.
    """

    def __init__(self, peer: Peer, op: Op) -> None:
        self.peer, self.op, self._handle = peer, op, 0
        self._keep: list[Any] = []  # lists, regions and remotes that the library refers to
        # the library writes the handle here: no interrupt comes between
        self._out = ctypes.c_uint64()

    def _watch(self) -> None:
        self._handle = self._out.value
        check(lib.transfer_watch(self._handle, self._handle))  # for await: not once it is posted

    def add(self, region: Region, offset: int, remote: Remote, remote_offset: int,
            length: int) -> None:
        """Lists one contiguous copy, in bytes. BoundsError for what lies outside, and nothing is
        listed then.
        """
        desc = _library.Desc(number(offset, "offset"), number(remote_offset, "remote_offset"),
                             number(length, "length"))
        self._add(region, remote, ctypes.addressof(desc), 1)

    def add_many(self, region: Region, remote: Remote,
                 descs: Union[Any, Iterable[tuple[int, int, int]]]) -> None:
        """Lists copies of (offset, remote offset, length): an array of shape (n, 3) of 64-bit
        integers is read in place.
        """
        try:
            view = memoryview(descs)  # type: ignore[arg-type]
        except TypeError:
            flat = [int(v) for desc in descs for v in desc]
            if len(flat) % 3:
                raise ValueError(
                    "descs: want three numbers each: offset, remote offset, length") from None
            packed = (ctypes.c_uint64 * len(flat))(*[number(n, "a number of descs") for n in flat])
            self._add(region, remote, ctypes.addressof(packed), len(flat) // 3)
            return
        if view.ndim != 2 or view.shape is None or view.shape[
            1] != 3 or view.itemsize != 8 or view.format not in ("L", "l", "Q", "q"):
            raise TypeError(f"descs: want 64-bit integers of shape (n, 3), not {view.format!r} of "
                            f"{view.shape}")
        held = Held(descs)
        self._add(region, remote, held.address, view.shape[0])
        held.release()

    def _add(self, region: Region, remote: Remote, address: int, count: int) -> None:
        self._check_writable(region)
        self._keep.append((region, remote))  # before the call: an interrupt may follow it
        check(lib.transfer_add(self._handle, region._handle, remote._handle, address, count))

    def _add_copies(self, regions: list[Region], remotes: list[Remote], copies: Any) -> None:
        """Lists copies between these: an array of sluice_copy."""
        for region in regions:
            self._check_writable(region)
        self._keep += (regions, remotes)  # before the call: an interrupt may follow it
        held = Held(copies)
        check(lib.transfer_add_many(self._handle, held.address, len(copies)))
        held.release()

    def _check_writable(self, region: Region) -> None:
        if self.op == "read" and not region.writable:
            raise ReadOnlyError(f"a read would change {region.name!r}, which is memory that may "
                                f"only be read")

    def add_pages(
        self,
        region: Region,
        target: Remote,
        /,
        entry_length: int,
        local: Optional[Indices] = None,
        remote: Optional[Indices] = None,
        *,
        count: Optional[int] = None,
        base: int = 0,
        stride: Optional[int] = None,
        remote_base: int = 0,
        remote_stride: Optional[int] = None,
    ) -> None:
        """Lists entries of one length: entry i lies at base + local[i] * stride of the region, and
        at remote_base + remote[i] * remote_stride of the target.

        None for a list is 0, 1, 2 and so on; strides are the entry's length unless given. Arrays of
        32-bit integers are not copied: leave them as they are until `reset` or `close`.
        """
        self._check_writable(region)
        pages = _library.Pages(entry_length=number(entry_length, "entry_length"))
        pages.size = ctypes.sizeof(pages)
        pages.local_base, pages.remote_base = number(base, "base"), number(remote_base,
            "remote_base")
        pages.local_stride = entry_length if stride is None else number(stride, "stride")
        pages.remote_stride = entry_length if remote_stride is None else number(remote_stride,
            "remote_stride")
        keep: list[Any] = [region, target]
        for field, indices, name in (("local", local, "local"), ("remote", remote, "remote")):
            if indices is None:
                continue
            held, n = hold_indices(indices, name)
            if count is not None and n != count:
                raise ValueError(f"{name} has {n} entries, and {count} are wanted")
            count = n
            setattr(pages, field, held.address)
            keep.append(held)
        if count is None:
            raise ValueError("pages: say how many by a list or by count")
        pages.count = number(count, "count")
        self._keep += keep  # before the call: an interrupt may follow it
        check(lib.transfer_add_pages(self._handle, region._handle, target._handle,
                                     ctypes.byref(pages)))

    def add_pattern(
        self,
        region: Region,
        target: Remote,
        /,
        shape: Sequence[int],
        itemsize: int,
        strides: Sequence[int],
        remote_strides: Sequence[int],
        *,
        offset: int = 0,
        remote_offset: int = 0,
        local: Side = None,
        remote: Side = None,
    ) -> None:
        """Lists arrays of one shape that the two sides lay out differently.

        By their strides in bytes, as numpy tells them.

        The first dimension is that of the entries, such as blocks, which a list on each side may
        choose: entry i lies at offset + local[i] * strides[0]. `Slots` is for several entries in
        each. What lies together on both sides goes as one run; at most three loops may remain of
        the other dimensions. Lists as for `add_pages`.
        """
        self._check_writable(region)
        pattern = nest(shape, itemsize, strides, remote_strides)
        pattern.size = ctypes.sizeof(pattern)
        self._keep += (region, target)
        self._keep += side(pattern.local, local, pattern.count, offset, "local")
        self._keep += side(pattern.remote, remote, pattern.count, remote_offset, "remote")
        check(lib.transfer_add_pattern(self._handle, region._handle, target._handle,
                                       ctypes.byref(pattern)))

    def message(self, message: bytes) -> None:
        """The peer receives this after the data is visible there."""
        message = octets(message, "message")
        check(lib.transfer_message(self._handle, message, len(message)))

    def post(self) -> None:
        """Starts it and returns at once. Only misuse is an error here."""
        code = lib.post(self._handle)
        if code:
            raise failure(code)

    def run(self, timeout: Optional[float] = None) -> None:
        """Posts and waits, quicker than in two calls for a thread that has nothing else to do."""
        long = timeout is None or timeout > SLICE
        code = lib.post_and_wait(self._handle, SLICE_NS if long else nanoseconds(timeout))
        if code:
            self._go_on(code, long, timeout)

    def _send(self, message: bytes, ns: int) -> int:
        """`message` and `run` in one call, which returns the code."""
        return lib.send(self._handle, message, len(message), ns)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. BusyError when it was never posted."""
        code = lib.test(self._handle)
        if code in (BusyError.code, HandleError.code):
            raise failure(code)
        return code != _PENDING

    def test(self) -> bool:
        """False while it is under way, True when it is done; its error as an exception. For a loop
        that asks again and again: it copies some bytes along, of which no other thread has hold.
        """
        code = lib.test(self._handle)
        if code < 0:
            raise failure(code)
        return code != _PENDING

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for the outcome. WaitTimeout ends the wait, not the transfer."""
        long = timeout is None or timeout > SLICE
        code = lib.wait(self._handle, SLICE_NS if long else nanoseconds(timeout))
        if code:
            self._go_on(code, long, timeout)

    def _go_on(self, code: int, long: bool, timeout: Optional[float]) -> None:
        """After the first slice of a wait, which is the only one mostly."""
        if code == _PENDING and long:
            handle = self._handle
            code = in_slices(lambda ns: lib.wait(handle, ns), None if timeout is None
                             else timeout - SLICE)
        if code:
            raise failure(code)

    def __await__(self) -> Generator[Any, None, None]:
        return self.peer.engine._arrivals.outcome(self).__await__()

    def abort(self, timeout: Optional[float] = None) -> None:
        """Ends it. When this returns, no byte of it lands any more on either side, and `test` says
        how it ended.
        """
        handle = self._handle
        check(in_slices(lambda ns: lib.abort(handle, ns), timeout))

    async def abort_async(self, timeout: Optional[float] = None) -> None:
        """`abort` for a task: the loop goes on meanwhile. Cancelling the task ends the wait, not
        the abort.
        """
        left = threading.Event()

        def work() -> None:
            handle = self._handle
            check(in_slices(lambda ns: 0 if left.is_set() else lib.abort(handle, ns), timeout))

        try:
            await asyncio.get_running_loop().run_in_executor(None, work)
        finally:
            left.set()

    def reset(self) -> None:
        """Empties the list. BusyError while it is posted."""
        check(lib.reset(self._handle))
        self._let_go()

    def close(self) -> None:
        """Aborts it if it is under way, and gives it back."""
        out = getattr(self, "_out", None)  # missing where it was never whole
        if out is None or not out.value:
            return
        handle = self._handle = out.value
        code = lib.transfer_close(handle)
        if code == BusyError.code:
            self.abort()
            code = lib.transfer_close(handle)
        if code != HandleError.code:
            check(code)
        self._handle = self._out.value = 0
        self.peer.engine._arrivals.closed(handle)
        self._let_go()

    def _let_go(self) -> None:
        for kept in self._keep:
            if isinstance(kept, Held):
                kept.release()
        self._keep.clear()

    def __del__(self) -> None:
        try:
            self.close()
        except Error:
            # the child of a fork, or a peer that proves nothing: the engine keeps what it needs
            pass
