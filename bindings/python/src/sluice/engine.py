# SPDX-License-Identifier: Apache-2.0
"""The engine: backends, memory, regions, peers and messages."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import threading
import warnings
import weakref
from collections import deque
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Tuple, Union

from . import _library
from ._asyncio import Arrivals
from ._clock import beside, in_slices, nanoseconds
from ._config import DEFAULT_BACKENDS, Backend, Identity, Limits, as_struct, split
from ._library import PENDING, lib
from ._region import SPACE, Closing, Memory, Region, grow
from ._segments import Located, locate
from ._typed import Stats
from ._words import number as _number
from ._words import octets, text
from .errors import BoundsError, Error, HandleError, UnprovenError, check, failure
from .peer import Peer

_NOTHING = 1  # a status that the library does not say: no message has come


class Notification(NamedTuple):
    """A message that has come. `sender` is None when we are not connected to the sender."""

    data: bytes
    sender: Optional[Peer]
    lost: bool  # the last word about this sender, without data: it is lost


_Found = Tuple[Optional[Notification], bool]  # and whether there may be more


class _Room:
    """Where the library writes a message. One call at a time has it."""

    def __init__(self) -> None:
        self.note: Any = _library.Notification(ctypes.sizeof(_library.Notification))
        self.at = ctypes.byref(self.note)
        self.resize(1 << 16)

    def resize(self, size: int) -> None:
        self.buffer, self.size = ctypes.create_string_buffer(size), size
        self.buffer_at = ctypes.addressof(self.buffer)


class _Holds(Dict[int, Located]):
    """What keeps the memory of an engine's regions in place, by the regions."""


# Those of engines that are not closed. The collector may take an engine and its memory in any
# order, so it must not find the memory before the engine has ended.
_OPEN: dict[int, _Holds] = {}

_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_ENGINES.clear)  # the child has none of them to close


@atexit.register
def _close_all() -> None:
    """Ends transfers when the interpreter ends, before objects lose the memory that they use."""
    for engine in list(_ENGINES):
        try:
            engine.close()
        except (Error, BufferError):  # the program has ended
            pass


class Engine(Closing):
    """Opens backends, registers memory and connects to peers: mostly one for each process.

    Any thread may call anything. Times are seconds; None for the engine's own default. `serve` and
    `dial` over tcp want an identity, or plaintext on a network that is trusted: then each program
    that connects reaches the regions. With `schedule` the loads of a cache go before its prefetches
    and stores, and before what it writes to disks.
    """

    def __init__(
        self,
        name: str = "",
        backends: Iterable[Union[str, Backend]] = DEFAULT_BACKENDS,
        *,
        identity: Optional[Identity] = None,
        plaintext: bool = False,
        schedule: bool = False,
        transfer_timeout: Optional[float] = None,
        abort_grace: Optional[float] = None,
        connect_timeout: Optional[float] = None,
        handshake_timeout: Optional[float] = None,
        spin: Optional[float] = None,
        limits: Limits = Limits(),
    ) -> None:
        self.name = name
        self._out = ctypes.c_uint64()  # the library writes here: no interrupt comes between
        self._told = 4096  # bytes that a description may take
        self._unproven = ""  # why bytes may land still though it is closed
        self._regions: dict[str, Region] = {}
        self._holds = _Holds()
        _OPEN[id(self._holds)] = self._holds
        self._peers: dict[int, Peer] = {}  # without a lock: no handle comes twice
        self._closing = threading.Lock()
        self._rooms: list[_Room] = []
        # messages and peers that the library gave to a call which an interrupt ended: the next
        # call returns them
        self._kept: deque[Notification] = deque()
        self._accepted: deque[int] = deque()
        config, keep = as_struct(name, [Backend(b) if isinstance(b, str) else b for b in backends],
                                 limits)
        config.flags = plaintext * _library.PLAINTEXT | schedule * _library.SCHEDULE
        if identity is not None:
            config.cert_file, config.key_file, config.ca_file = [os.fsencode(path)
                for path in identity]
        for field, seconds in (
            ("transfer_timeout_ns", transfer_timeout),
            ("abort_grace_ns", abort_grace),
            ("connect_timeout_ns", connect_timeout),
            ("handshake_timeout_ns", handshake_timeout),
            ("spin_ns", spin),
        ):
            setattr(config, field, 0 if seconds is None else
                    max(1, nanoseconds(seconds)) if seconds > 0 else -1)
        try:
            check(lib.open(ctypes.byref(config), ctypes.byref(self._out)))
            self._arrivals = Arrivals(self)
            _ENGINES.add(self)
        except BaseException as e:
            if self._handle:
                lib.close(self._handle)
                self._out.value = 0
            _OPEN.pop(id(self._holds), None)
            if isinstance(e, BoundsError):  # which names a field of sluice.h
                raise BoundsError(re.sub(r"\b(\w+)_max is", r"limits.\1 is", str(e))) from None
            raise
        del keep

    @property
    def _handle(self) -> int:
        return self._out.value

    def alloc(
        self,
        length: int,
        *,
        node: Optional[int] = None,
        huge: bool = True,
        populate: bool = False,
    ) -> Memory:
        """Zeroed memory that peers reach best: on a NUMA node, in huge pages, found at once."""
        options = _library.AllocOptions(node=0 if node is None else node + 1)
        options.size = ctypes.sizeof(options)
        options.flags = (0 if huge else _library.NO_HUGE) | (_library.POPULATE if populate else 0)
        size, memory = _number(length, "length"), Memory(length)
        out, address = ctypes.byref(memory._out), ctypes.byref(memory._at)
        check(lib.alloc(self._handle, ctypes.byref(options), size, out, address))
        return memory

    def register(self, name: str, source: Any, *, read_only: bool = False,
                 private: bool = False) -> Region:
        """Makes memory known under a name that no other region has. Nothing is copied.

        `source` is Memory, File, a buffer, an array, a tensor of the host or of a card, or an
        address as HostMemory or DeviceMemory. It is held until the region or the engine is closed.
        Peers may only read what is read_only; what is private is in no description.
        """
        located = self._locate(source)
        segment = located.segment
        if read_only:
            segment.flags |= _library.READ_ONLY
        if private:
            segment.flags |= _library.PRIVATE
        named = text(name, "the name of a region")
        region = Region(self, name, located)
        try:  # an interrupt may come anywhere
            self._holds[id(region)] = located
            check(lib.register(self._handle, named, ctypes.byref(segment),
                               ctypes.byref(region._out)))
            self._regions[name] = region
            return region
        except BaseException:
            if not region._handle or not lib.region_close(region._handle):
                region._forget()
            raise

    def _locate(self, source: Any) -> Located:
        if isinstance(source, Memory):
            return Located(_library.Segment(kind=_library.KIND_MEMORY, memory=source._handle,
                                            length=source.length), source)
        return locate(source)

    def register_many(self, sources: Iterable[tuple[str, Any]]) -> list[Region]:
        """Registers many, as pairs of a name and what `register` takes, by one call of the library:
        all, or none.
        """
        return self._register_many([(name, self._locate(source)) for name, source in sources])

    def _register_many(self, named: list[tuple[str, Located]]) -> list[Region]:
        return self._register_all(
            (ctypes.c_char_p * len(named))(*[text(name, "the name of a region")
                                             for name, _ in named]),
            (_library.Segment * len(named))(*[at.segment for _, at in named]),
            [Region(self, name, at) for name, at in named])

    def _register_all(self, names: Any, segments: Any, regions: list[Region]) -> list[Region]:
        handles = (ctypes.c_uint64 * len(regions))()
        try:  # an interrupt may come anywhere
            for region in regions:
                if region._located.keep is not None:
                    self._holds[id(region)] = region._located
            check(lib.register_many(self._handle, names, segments, len(regions), handles))
            for region, handle in zip(regions, handles):
                region._out.value = handle
                self._regions[region.name] = region
            return regions
        except BaseException:
            for region, handle in zip(regions, handles):
                region._out.value = handle
                if not handle or not lib.region_close(handle):
                    region._forget()
            raise

    def close_many(self, regions: Iterable[Region]) -> None:
        """Closes regions of this engine by one call of the library, in order and up to the first
        that cannot be closed.
        """
        listed = [region for region in regions if region._out.value]
        handles = (ctypes.c_uint64 * len(listed))(*[region._out.value for region in listed])
        done = not lib.region_close_many(handles, len(listed))
        for region in listed:
            if done:
                region._forget()
            else:
                region.close()

    def describe(self, *regions: Region) -> bytes:
        """The bytes with which a peer connects, of the regions given or of all.

        A program that has them can reach those regions: send them over a channel that you trust.
        """
        handles = (ctypes.c_uint64 * len(regions))(*[r._out.value for r in regions])
        told = grow(lambda buffer, room, n: lib.describe(self._handle, handles, len(regions),
            buffer, room, n), self._told)
        self._told = max(4096, len(told) + len(told) // 8)
        return told

    def connect(self, description: bytes, timeout: Optional[float] = 30.0) -> Peer:
        """The engine that a description is of. Our own gives what `self_peer` gives."""
        description = octets(description, "description")

        def call(out: Any) -> int:
            return lib.connect(self._handle, description, len(description), nanoseconds(timeout),
                               out)

        return self._connected(call)

    def self_peer(self) -> Peer:
        """This engine as a peer: for moves within the process, and for files."""
        out = ctypes.c_uint64()
        check(lib.self(self._handle, ctypes.byref(out)))
        return self._peer(out.value)

    def serve(self, address: str) -> Listener:
        """Exchanges descriptions with peers that dial "unix:/path" or "tcp:host:port".

        `accept` then has the peer.

        Over unix, other users are refused; over tcp, peers without a certificate of the authority:
        see `Engine`.
        """
        network, where = split(address)
        bound, listener = ctypes.create_string_buffer(512), Listener(network.decode())
        try:
            check(lib.serve(self._handle, network, where, bound, len(bound),
                            ctypes.byref(listener._out)))
            listener.address += ":" + bound.value.decode()
            return listener
        except BaseException:
            listener.close()
            raise

    def accept(self, timeout: Optional[float] = None) -> Peer:
        """The next peer that came through `serve`."""
        out = ctypes.c_uint64()

        def wait(ns: int) -> int:
            with contextlib.suppress(IndexError):
                out.value = self._accepted.popleft()
            return 0 if out.value else lib.accept(self._handle, ns, ctypes.byref(out))

        try:
            check(in_slices(wait, timeout))
            return self._peer(out.value)
        except BaseException:
            if out.value:
                self._accepted.append(out.value)
            raise

    def dial(self, address: str, timeout: Optional[float] = 30.0) -> Peer:
        """The engine that serves there, which has connected back when this returns."""
        network, where = split(address)
        return self._connected(lambda out: lib.dial(self._handle, network, where,
                                                    nanoseconds(timeout), out))

    def _connected(self, call: Callable[[Any], int]) -> Peer:
        def connect() -> int:
            out = ctypes.c_uint64()
            check(call(ctypes.byref(out)))
            return out.value

        peer = Peer(self, 0)

        def keep(handle: int) -> Peer:
            peer._handle = handle
            return self._peers.setdefault(handle, peer)

        def undo(handle: int) -> None:
            if self._peers.get(handle, peer) is peer:  # not ourselves, which others have
                self._peers.pop(handle, None)
                lib.peer_close(handle)

        return beside(connect, undo, keep)

    def _peer(self, handle: int) -> Peer:
        return self._peers.get(handle) or self._peers.setdefault(handle, Peer(self, handle))

    def receive(self, timeout: Optional[float] = None) -> Notification:
        """The next message. The data that it came with is visible then."""
        note, _ = self._next(timeout)
        if note is None:
            raise failure(PENDING)
        return note

    def _next(self, timeout: Optional[float]) -> _Found:
        """`receive`, but None where none comes in time: an exception costs a loop that polls more
        than the call.
        """
        found: _Found = (None, False)
        room: Optional[_Room]
        try:
            room = self._rooms.pop()
        except IndexError:
            room = _Room()
        room.note.status = _NOTHING
        try:
            if timeout == 0 and not self._kept:  # in line: this is what loops that poll do
                code = lib.receive(self._out.value, room.at, room.buffer_at, room.size, 0)
            else:
                code = self._await(room, timeout)
            if code != PENDING:
                found = self._found(room, timeout, code)
            spare, room = room, None
            self._rooms.append(spare)
            return found
        except BaseException:  # an interrupt loses no message
            if room is not None and room.note.status != _NOTHING:
                found = self._taken(room)
            if found[0] is not None:
                self._kept.append(found[0])
            raise

    def _await(self, room: _Room, timeout: Optional[float]) -> int:
        def wait(ns: int) -> int:
            return 0 if self._kept else lib.receive(self._handle, room.at, room.buffer_at,
                                                    room.size, ns)

        return in_slices(wait, timeout)

    def _found(self, room: _Room, timeout: Optional[float], code: int) -> _Found:
        """What a call that gave this code has found."""
        while code != PENDING:
            if code == SPACE:
                room.resize(room.note.length)
            elif code:
                raise failure(code)
            elif room.note.status != _NOTHING:
                return self._taken(room)
            else:
                with contextlib.suppress(IndexError):  # else another thread has taken it
                    return self._kept.popleft(), True
            code = self._await(room, timeout)
        return None, False

    def _taken(self, room: _Room) -> _Found:
        note = room.note
        sender = self._peer(note.peer) if note.peer else None
        return Notification(ctypes.string_at(room.buffer, note.length), sender,
                            note.status != 0), note.more != 0

    async def next_notification(self) -> Notification:
        """The next message, in an asyncio loop. Ask first before threads begin to receive."""
        while True:
            try:
                return self.receive(0)
            except TimeoutError:
                await self._arrivals.message()

    def stats(self) -> Stats:
        """Counters: what is posted and registered, and for each peer and backend bytes, errors and
        latencies.
        """
        data = grow(lambda buffer, room, n: lib.stats(self._handle, buffer, room, n), 4096)
        stats: Stats = json.loads(data.rstrip(b"\0"))
        return stats

    @property
    def closed(self) -> bool:
        return not self._handle

    def close(self) -> None:
        """Ends transfers in flight with ClosedError, and closes peers and regions. It takes no
        longer than the abort's grace. UnprovenError, here and from each close of a region from then
        on, where bytes may land still, or where an interrupt took the proof: memory stays held.
        """
        with self._closing:  # what comes second waits for the first
            if not self._handle:
                if self._unproven:
                    raise UnprovenError(self._unproven)
                return
            code: Optional[int] = None
            try:
                code = lib.close(self._handle)
            finally:
                if code is None:  # an interrupt came before the call, or took its answer
                    code = lib.close(self._handle)
                    if code == HandleError.code:
                        code = UnprovenError.code
                error = failure(code) if code else None
                self._ended(error)
            if error is not None:
                raise error

    def _without_proof(self) -> str:
        """Why bytes may land still though it is closed; "": they may not. Waits for a close that
        runs, which makes handles stale before it answers."""
        with self._closing:
            return self._unproven

    def _ended(self, error: Optional[Error]) -> None:
        self._out.value = 0
        self._arrivals.close()
        self._peers.clear()
        if isinstance(error, UnprovenError):  # bytes may land still: the memory stays held
            self._unproven = str(error) or "the engine was closed without a proof"
            return
        for region in list(self._regions.values()):
            region._forget()
        _OPEN.pop(id(self._holds), None)

    def __del__(self) -> None:
        if hasattr(self, "_out") and self._handle:
            warnings.warn(f"engine {self.name!r} was never closed", ResourceWarning, source=self)
            try:
                self.close()
            except Error:  # the child of a fork has nothing to close
                pass


class Listener(Closing):
    """Answers peers that dial `address`, until it is closed."""

    def __init__(self, address: str) -> None:
        self.address, self._out = address, ctypes.c_uint64()  # as for Engine

    def close(self) -> None:
        if self._out.value:
            lib.listener_close(self._out.value)  # stale when the engine has closed it
            self._out.value = 0
