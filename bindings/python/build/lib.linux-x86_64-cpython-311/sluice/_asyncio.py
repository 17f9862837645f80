# SPDX-License-Identifier: Apache-2.0
"""Outcomes and messages of an engine in asyncio loops, by its two descriptors.

A loop watches a descriptor only while a task waits there, so that an engine
which is used by threads wakes no loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING, Callable, Optional

from . import _library
from ._library import lib
from .errors import ClosedError, check, failure

if TYPE_CHECKING:
    from .engine import Engine
    from .transfer import Transfer

    _Future = asyncio.Future[None]

_BATCH = 64


class _Descriptor:
    """One descriptor of an engine, watched by the loops in which a task waits.

    Each loop watches a duplicate of its own, which it may keep when the engine is gone.
    """

    def __init__(self, fd: int, arrived: Callable[[], None]) -> None:
        self.fd, self.arrived = fd, arrived
        # duplicate, how many wait
        self.waiting: dict[asyncio.AbstractEventLoop, tuple[int, int]] = {}

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        fd, n = self.waiting.get(loop, (-1, 0))
        if n == 0:
            fd = os.dup(self.fd)
            loop.add_reader(fd, self.arrived)
        self.waiting[loop] = (fd, n + 1)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        fd, n = self.waiting.pop(loop)
        if n > 1:
            self.waiting[loop] = (fd, n - 1)
            return
        if not loop.is_closed():
            loop.remove_reader(fd)
        os.close(fd)


class Arrivals:
    """What tells the loops of an engine's threads."""

    def __init__(self, engine: Engine) -> None:
        self._handle = engine._handle
        # guards what follows; a collected transfer may come in between
        self._lock = threading.RLock()
        self._ends: Optional[_Descriptor] = None
        self._notes: Optional[_Descriptor] = None
        self._futures: dict[int, list[_Future]] = {}  # by the handles of transfers
        self._readers: list[_Future] = []
        self._closed = False

    async def outcome(self, transfer: Transfer) -> None:
        """Waits for a transfer that was posted. Its task may be cancelled: that ends the wait, not
        the transfer.
        """
        code = lib.test(transfer._handle)
        if code == _library.PENDING:
            code = await self._wait(transfer._handle)
        if code:
            raise failure(code)

    async def _wait(self, handle: int) -> int:
        loop = asyncio.get_running_loop()
        future: _Future = loop.create_future()
        with self._lock:
            self._check_open()
            if self._ends is None:
                fd = ctypes.c_int()
                check(lib.completion_fd(self._handle, ctypes.byref(fd)))
                self._ends = _Descriptor(fd.value, self._ended)
            ends = self._ends
            ends.enter(loop)
            self._futures.setdefault(handle, []).append(future)
        try:
            # it may have ended and been told of before this future was there
            code = lib.test(handle)
            while code == _library.PENDING:
                self._check_open()
                await future
                future = self._again(handle, future)
                code = lib.test(handle)
            return code
        finally:
            with self._lock:
                self._drop(handle, future)
                ends.leave(loop)

    def _again(self, handle: int, woken: _Future) -> _Future:
        """A future in place of one that was used: the transfer may have been posted anew meanwhile.
        """
        future: _Future = woken.get_loop().create_future()
        with self._lock:
            self._drop(handle, woken)
            self._futures.setdefault(handle, []).append(future)
        return future

    def _drop(self, handle: int, future: _Future) -> None:
        futures = self._futures.get(handle, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._futures.pop(handle, None)

    def _ended(self) -> None:
        """Takes what has ended, and wakes the tasks that wait for it, in any loop."""
        many = (_library.Completion * _BATCH)()
        n = ctypes.c_size_t()
        if lib.completions(self._handle, many, _BATCH, ctypes.byref(n)):
            return  # the engine is closing, and says so to everybody
        with self._lock:
            for i in range(n.value):
                for future in self._futures.get(many[i].word, ()):
                    _wake(future)

    async def message(self) -> None:
        """Waits until there may be a message."""
        loop = asyncio.get_running_loop()
        future: _Future = loop.create_future()
        with self._lock:
            self._check_open()
            if self._notes is None:
                fd = ctypes.c_int()
                check(lib.notification_fd(self._handle, ctypes.byref(fd)))
                self._notes = _Descriptor(fd.value, self._arrived)
            notes = self._notes
            notes.enter(loop)
            self._readers.append(future)
        try:
            await future
        finally:
            with self._lock:
                self._readers.remove(future)
                notes.leave(loop)

    def _arrived(self) -> None:
        with self._lock:
            for future in self._readers:
                _wake(future)

    def closed(self, handle: int) -> None:
        """Wakes what waits for a transfer that was closed, and is told so then."""
        with self._lock:
            for future in self._futures.get(handle, ()):
                _wake(future)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine was closed")

    def close(self) -> None:
        """Wakes everybody: what they ask for next says that the engine is closed."""
        with self._lock:
            self._closed = True
            for futures in [*self._futures.values(), self._readers]:
                for future in futures:
                    _wake(future)


def _wake(future: _Future) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    loop = future.get_loop()
    try:
        running: Optional[asyncio.AbstractEventLoop] = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        resolve()
    else:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits there
            loop.call_soon_threadsafe(resolve)
