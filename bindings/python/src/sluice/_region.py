# SPDX-License-Identifier: Apache-2.0
"""Memory, regions of it, and leases on parts of a region."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Optional, Type, TypeVar

from . import _library
from ._clock import SLICE_NS, beside, nanoseconds
from ._library import lib
from ._segments import Located
from ._words import number
from .errors import Error, HandleError, UnprovenError, check

if TYPE_CHECKING:
    from .engine import Engine


_Self = TypeVar("_Self", bound="Closing")


class Closing:
    """What a `with` closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: a copy would close "
                        f"the original")

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()


class Memory(Closing):
    """Zeroed memory that peers reach best. It has the buffer protocol by `view`.

    It belongs to no engine and outlives it; it is unmapped by `close`, or when no object
    holds it. Nothing of it may be touched after `close`.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        # the library writes here: no interrupt comes between
        self._out, self._at = ctypes.c_uint64(), ctypes.c_void_p()
        self._lock = threading.Lock()
        self._views: list[weakref.ref[object]] = []  # that may be looked at still

    @property
    def _handle(self) -> int:
        return self._out.value

    @property
    def address(self) -> int:
        """Where it lies."""
        return self._at.value or 0

    @property
    def view(self) -> memoryview:
        """Its bytes, which numpy.frombuffer and torch.frombuffer take as well."""
        with self._lock:
            if not self._handle:
                raise HandleError("the memory is closed: it has no bytes any more")
            block = (ctypes.c_ubyte * self.length).from_address(self.address)
            setattr(block, "memory", self)  # so that it is mapped as long as it is looked at
            self._views = [v for v in self._views if v() is not None]
            self._views.append(weakref.ref(block))
            return memoryview(block).cast("B")

    def close(self) -> None:
        """Unmaps it. BusyError while a region lies on it, BufferError while there are views of it.
        """
        with self._lock:
            if not self._handle:
                return
            if any(v() is not None for v in self._views):
                raise BufferError("the memory has views still, such as arrays made of them: let go "
                                  "of those first")
            code = lib.memory_close(self._handle)
            if code != HandleError.code:  # else an interrupt took the answer of an earlier close
                check(code)
            self._out.value = 0

    def __len__(self) -> int:
        return self.length

    def __del__(self) -> None:
        out = getattr(self, "_out", None)
        if out is not None and out.value:
            lib.memory_close(out.value)


class Region(Closing):
    """A registered range, known to peers by its name. Its engine holds it until `close`."""

    def __init__(self, engine: Engine, name: str, located: Located, length: int = 0) -> None:
        self.engine, self.name = engine, name
        self._out = ctypes.c_uint64()  # as for Memory
        self.length: int = length or located.segment.length
        self._located = located

    @property
    def _handle(self) -> int:
        return self._out.value

    @property
    def writable(self) -> bool:
        """Whether reads may land in it."""
        return self._located.writable

    def lease(self, offset: int, length: int, *, ttl: Optional[float] = None,
              read_only: bool = False) -> Lease:
        """Lets a peer with the lease's token reach a part, for ttl seconds or until it is
        revoked.
        """
        options = _library.LeaseOptions(flags=_library.READ_ONLY if read_only else 0)
        options.size = ctypes.sizeof(options)
        options.ttl_ns = max(1, nanoseconds(ttl)) if ttl is not None else 0
        lease = Lease(self)
        check(lib.lease_grant(self._handle, number(offset, "offset"), number(length, "length"),
                              ctypes.byref(options), ctypes.byref(lease._out)))
        return lease

    def close(self) -> None:
        """Revokes it, so that no peer reaches it any more; then its memory is the program's again.

        BusyError while a transfer lists it or a lease on it stands.
        """
        if self._handle:
            code = lib.region_close(self._handle)
            if code == HandleError.code and (why := self.engine._without_proof()):
                raise UnprovenError(why)
            if code != HandleError.code:  # else the engine has closed it
                check(code)
            self._forget()

    def _forget(self) -> None:
        if self._located.keep is not None:
            self.engine._holds.pop(id(self), None)
            self._located.release()
        if self.engine._regions.get(self.name) is self:
            # and no other of that name, registered since
            del self.engine._regions[self.name]
        self._out.value = 0  # the last: after an interrupt close goes on here

    def __repr__(self) -> str:
        return f"<Region {self.name!r} of {self.length} bytes>"


class Lease(Closing):
    """Permission that was given, until `revoke`. Keep it: one that is collected ends, too."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._out = ctypes.c_uint64()  # as for Memory

    @property
    def _handle(self) -> int:
        return self._out.value

    def token(self) -> bytes:
        """What its holder shows: `Peer.lease(token)`."""
        return grow(lambda buffer, room, length: lib.lease_token(self._handle, buffer, room,
            length), 512)

    @property
    def ended(self) -> bool:
        """Whether it is over, by `revoke` or by its time, and proved: no byte of the holder's lands
        any more. Revoke it all the same.
        """
        if not self._handle:
            return True
        ended = ctypes.c_int()
        check(lib.lease_ended(self._handle, ctypes.byref(ended)))
        return bool(ended.value)

    def revoke(self, timeout: Optional[float] = None) -> None:
        """Ends it. When this returns, no byte of the holder's lands any more, whatever state it is
        in.
        """
        if self._handle:
            end = None if timeout is None else time.monotonic() + timeout
            first = timeout if timeout is not None and timeout * 1e9 <= SLICE_NS else SLICE_NS / 1e9
            try:
                self._revoke(first)
            except Error:
                if first == timeout:
                    raise
                left = None if end is None else end - time.monotonic()
                beside(lambda: self._revoke(left), lambda _: None, lambda _: None)

    close = revoke

    def _revoke(self, timeout: Optional[float]) -> bool:
        code = lib.lease_revoke(self._handle, nanoseconds(timeout))
        if code == HandleError.code:  # a call that was interrupted, or the engine, has ended it
            if why := self.region.engine._without_proof():
                raise UnprovenError(why)
        else:
            check(code)
        self._out.value = 0
        return True

    def __del__(self) -> None:
        out = getattr(self, "_out", None)
        if out is not None and out.value:
            # ends it at once; the proof has time until the engine closes
            lib.lease_revoke(out.value, 0)


def grow(call: object, room: int) -> bytes:
    """What a call writes into a buffer, which it says the size of."""
    assert callable(call)
    length = ctypes.c_size_t()
    while True:
        buffer = ctypes.create_string_buffer(room)
        code = call(buffer, room, ctypes.byref(length))
        if code != SPACE:
            check(code)
            return ctypes.string_at(buffer, length.value)
        room = length.value + length.value // 8  # it may have grown meanwhile


SPACE = -4
