# SPDX-License-Identifier: Apache-2.0
"""Another engine, and what it lets us reach."""

from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, Any, Optional, Sequence

from . import _library
from ._clock import nanoseconds
from ._library import lib
from ._region import Closing, Region, grow
from ._typed import PeerInfo
from ._words import octets, text
from .errors import ArgumentError, check, failure
from .transfer import Op, Transfer

if TYPE_CHECKING:
    from .engine import Engine


class Peer(Closing):
    """An engine that is connected. An engine is its own peer for local moves and files."""

    def __init__(self, engine: Engine, handle: int) -> None:
        self.engine, self._handle = engine, handle
        self._lost = ctypes.c_int()  # the library writes here, and nothing but the truth
        self._lost_at = ctypes.byref(self._lost)

    def remote(self, name: str) -> Remote:
        """Its region of that name, as described. NoRouteError when there is none."""
        out = ctypes.c_uint64()
        check(lib.remote_find(self._handle, text(name, "the name of a region"), ctypes.byref(out)))
        return Remote(self, out.value)

    def remotes(self, names: Sequence[str]) -> list[Remote]:
        """The same for many names, by one call of the library."""
        n = len(names)
        listed = (ctypes.c_char_p * n)(*[text(name, "the name of a region") for name in names])
        handles, lengths = (ctypes.c_uint64 * n)(), (ctypes.c_uint64 * n)()
        check(lib.remote_find_many(self._handle, listed, n, handles, lengths))
        return [Remote(self, *found) for found in zip(handles, lengths)]

    def lease(self, token: bytes) -> Remote:
        """A range that was leased to us."""
        out = ctypes.c_uint64()
        check(lib.remote_import(self._handle, token, len(token), ctypes.byref(out)))
        return Remote(self, out.value, leased=True)

    def transfer(self, op: Op, *, only: Optional[str] = None, durable: bool = False) -> Transfer:
        """An empty transfer: "read" from the peer or "write" to it.

        By one backend alone where `only` names it.

        A durable write ends without error only once its bytes would survive a loss of power, as
        those of a file do after a sync; `add` raises NoRouteError where nothing can promise that.
        """
        ops = {"read": _library.READ, "write": _library.WRITE}
        if op not in ops:
            raise ArgumentError(f'op is {op!r}: there are "read" and "write"')
        route = _library.Route(flags=_library.DURABLE if durable else 0, only=text(only, "only")
                               if only else None)
        route.size = ctypes.sizeof(route)
        transfer = Transfer(self, op)
        check(lib.transfer_new_route(self._handle, ops[op], ctypes.byref(route),
                                     ctypes.byref(transfer._out)))
        transfer._watch()
        return transfer

    def notify(self, message: bytes, timeout: Optional[float] = 5.0) -> None:
        """Sends a message without data. What the peer has yet to acknowledge, as over tcp, is lost
        with its connection alone, and nothing is told of it. TimeoutError when the peer had no room
        for it: it is taken back then, which may cost the connection. A transfer that has a message
        alone waits longer, and hears of both.
        """
        message = octets(message, "message")
        check(lib.notify(self._handle, message, len(message), nanoseconds(timeout)))

    def refresh(self, description: bytes) -> None:
        """Takes a newer description of the same engine: its new regions become known."""
        description = octets(description, "description")
        check(lib.peer_refresh(self._handle, description, len(description)))

    @property
    def lost(self) -> bool:
        """Whether no connection to it is alive any more: connect anew for another peer."""
        code = lib.peer_lost(self._handle, self._lost_at)
        if code:
            raise failure(code)
        return bool(self._lost.value)

    @property
    def name(self) -> str:
        """What its engine has called itself."""
        return self.about()["name"]

    def about(self) -> PeerInfo:
        """What is known of it."""
        data = grow(lambda buffer, room, n: lib.peer_about(self._handle, buffer, room, n), 4096)
        about: PeerInfo = json.loads(data.rstrip(b"\0"))
        return about

    def explain(self, region: Region, remote: Remote) -> str:
        """Which backends could serve, which would, and why, as text."""
        return self._explain(region, remote, _library.TEXT)

    def explain_data(self, region: Region, remote: Remote) -> dict[str, Any]:
        """The same as data."""
        data: dict[str, Any] = json.loads(self._explain(region, remote, _library.JSON))
        return data

    def _explain(self, region: Region, remote: Remote, how: int) -> str:
        def ask(buffer: Any, room: int, length: Any) -> int:
            return lib.explain(self._handle, region._handle, remote._handle, how, buffer, room,
                               length)

        return grow(ask, 4096).rstrip(b"\0").decode()

    def close(self) -> None:
        """Ends its transfers with ClosedError."""
        if self._handle:
            lib.peer_close(self._handle)  # stale when the engine has closed it
            self.engine._peers.pop(self._handle, None)
            self._handle = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Peer) and self._handle == other._handle

    def __hash__(self) -> int:
        return hash(self._handle)


class Remote(Closing):
    """A region of a peer's, or a part of one that was leased to us."""

    def __init__(self, peer: Peer, handle: int, length: Optional[int] = None, *,
                 leased: bool = False) -> None:
        self.peer, self._handle, self._leased = peer, handle, leased
        if length is None:
            out = ctypes.c_uint64()
            check(lib.remote_length(handle, ctypes.byref(out)))
            length = out.value
        self.length = length

    def close(self) -> None:
        """Forgets it. BusyError while a transfer lists it."""
        if self._handle:
            check(lib.remote_close(self._handle))
            self._handle = 0

    def __del__(self) -> None:
        if getattr(self, "_leased", False) and self._handle:  # a region's has one handle for all
            lib.remote_close(self._handle)


def is_lost(peer: Peer) -> bool:
    """Whether it is lost, or closed meanwhile."""
    return lib.peer_lost(peer._handle, peer._lost_at) != 0 or peer._lost.value != 0
