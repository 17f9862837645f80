# SPDX-License-Identifier: Apache-2.0
"""Requests of prefill ranks handed over to decode ranks, layer by layer while the prefill computes.

The two groups may differ in their number of ranks and in their layouts. Each rank is an engine, and
is connected to all ranks of the other group, both ways. All ranks of both groups have the same
`Plan`, of a `Side` for each rank: what it keeps where.

    sender = Sender(engine, plan, rank, [region], peers)  # each prefill rank
    push = sender.begin(7, [blocks], tokens)
    for layer in range(layers):
        push.layer(layer)  # it is computed; this does not wait
    push.wait(60)  # its blocks are free

    receiver = Receiver(engine, plan, rank, [region], peers)  # each decode rank
    receiver.begin(7, [blocks], tokens).wait(60)  # all of it is here

Times are seconds. Any thread may call anything; the interpreter's lock is released in every call of
the library.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict, dataclass
from typing import Any, Optional, Sequence, Union

from . import _library
from ._buffers import Indices, hold_indices
from ._clock import in_slices, nanoseconds
from ._library import PENDING, lib
from ._region import Closing, Region, grow
from ._words import number, text
from .engine import Engine
from .errors import HandleError, check, failure
from .peer import Peer


@dataclass(frozen=True)
class Area:
    """A region of a rank."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Group:
    """Views that share a block table. Block numbers are below `blocks`."""

    blocks: int
    state: bool = False  # one slot a request, whatever its length
    window: int = 0  # tokens that attention looks back; 0: all
    ring: int = 0  # slots of the table that are used in turn; 0: they are not
    shards: int = 0  # a rank holds the tokens t with t // interleave % shards == shard
    shard: int = 0
    interleave: int = 0


@dataclass(frozen=True)
class View:
    """One part of one layer. The cell of block b, unit u and token t lies at `base + b * block +
    u * unit + t * token` of its region, in bytes, and is `cell` bytes. A tensor's strides times its
    element size are these numbers.
    """

    layer: int  # global number
    part: str  # "k", "v", "latent", ...
    dtype: str  # alike on both sides, to the letter
    cell: int  # bytes of one token in one unit
    units: int  # heads of the model
    first: int  # of those held here
    count: int  # held here
    tokens: int  # of a block
    base: int
    block: int
    unit: int
    token: int
    region: int = 0  # index in Side.regions
    group: int = 0  # index in Side.groups


@dataclass(frozen=True)
class Side:
    """What one rank keeps where."""

    model: str  # the same on both sides
    rank: int  # of its group
    regions: Sequence[Area]
    groups: Sequence[Group]
    views: Sequence[View]
    dp: int = 0  # data-parallel group: each has a plan of its own
    version: int = 1

    def encode(self) -> str:
        """JSON, for the other ranks."""
        return json.dumps(asdict(self))


class Plan:
    """All sides of two groups, each in the order of the ranks' indices. A side of another rank may
    be the text that its `Side.encode` gave.
    """

    def __init__(self, senders: Sequence[Union[Side, str]],
                 receivers: Sequence[Union[Side, str]]) -> None:
        def fields(side: Union[Side, str]) -> Any:
            return json.loads(side) if isinstance(side, str) else asdict(side)

        self.text = json.dumps({"senders": [fields(s) for s in senders],
                                "receivers": [fields(s) for s in receivers]})


class _Rank(Closing):
    """Makes an engine a rank: its messages are those of its ranks until the last is closed.

    `regions` are those of its side, in order, None where no view lies; `peers` all ranks of the
    other group. Limits are numbers: `window` (layers in flight of one request; 4), `requests_max`
    (at once; 256), `message_max` (bytes of a part of a long message; 64 KiB), `places_max` (bytes
    of block tables and leases of peers, of all requests; 256 MiB), and in seconds `meet_timeout`
    (for all ranks to begin a request; 30), `idle_timeout` (between two signs of life of the
    senders; 60), `layer_timeout` (for one layer to be moved; 10), `taken_timeout` (from the last
    layer on, for all receivers to have all; 60), `revoke_timeout` (to prove that nothing lands any
    more; 15) and `notify_timeout` (for a message to leave; 5).

    ArgumentError: the sides are not well formed, or cannot exchange a cache.
    """

    _role = 0

    def __init__(self, engine: Engine, plan: Plan, index: int,
                 regions: Sequence[Optional[Region]], peers: Sequence[Peer],
                 **limits: float) -> None:
        self.engine = engine
        self._out = ctypes.c_uint64()  # the library writes here: no interrupt comes between
        words = [f"{name}={nanoseconds(value)}ns" if name.endswith("_timeout") else
                 f"{name}={value}" for name, value in limits.items()]
        config = _library.HandoffConfig(
            role=self._role, index=number(index, "index", 32), plan=text(plan.text, "a plan"),
            regions=(ctypes.c_uint64 * len(regions))(*[r._handle if r else 0 for r in regions]),
            peers=(ctypes.c_uint64 * len(peers))(*[p._handle for p in peers]),
            regions_count=len(regions), peers_count=len(peers),
            options=(ctypes.c_char_p * (len(words) + 1))(*[text(w, "a limit") for w in words],
                                                         None))
        config.size = ctypes.sizeof(config)
        check(lib.handoff_open(engine._handle, ctypes.byref(config), ctypes.byref(self._out)))

    @property
    def _handle(self) -> int:
        return self._out.value

    def _begin(self, request: Request, n: int, tables: Sequence[Indices], tokens: int,
               first: int) -> None:
        held = [hold_indices(table, "a block table") for table in tables]
        listed = (_library.HandoffTable * len(held))(
            *[_library.HandoffTable(at.address, length) for at, length in held])
        check(lib.handoff_begin(self._handle, number(n, "the number of a request"), listed,
                                len(held), number(first, "first"), number(tokens, "tokens"),
                                ctypes.byref(request._out)))
        for at, _ in held:
            at.release()

    def stats(self) -> dict[str, Any]:
        """What has happened on this rank: requests "begun", "finished" and "ended", those by why;
        "strays", messages that belonged to none; "quarantined", leases that could not be revoked
        within `revoke_timeout`.
        """
        data = grow(lambda buffer, room, n: lib.handoff_stats(self._handle, buffer, room, n), 4096)
        stats: dict[str, Any] = json.loads(data.rstrip(b"\0"))
        return stats

    def close(self) -> None:
        """Ends all its requests, in a time that the limits bound. UnprovenError: blocks of one are
        not free; call it again.
        """
        if self._handle:
            code = lib.handoff_close(self._handle)
            if code != HandleError.code:  # else its engine has closed it
                check(code)
            self._out.value = 0


class Request(Closing):
    """A request on one rank. `wait` on a thread, or poll `fd`."""

    def __init__(self, rank: _Rank) -> None:
        self.rank = rank
        self._out = ctypes.c_uint64()  # as for _Rank

    @property
    def _handle(self) -> int:
        return self._out.value

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for the end, and raises why it was none of success. WaitTimeout ends the wait, not
        the request. Then the blocks of this rank are free, but after UnprovenError: `abort` says
        more.
        """
        check(in_slices(lambda ns: lib.handoff_wait(self._handle, ns), timeout))

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        code = lib.handoff_wait(self._handle, 0)
        if code == HandleError.code:
            raise failure(code)
        return code != PENDING

    @property
    def fd(self) -> int:
        """A descriptor that is readable from the end on, until the request is closed. For poll: do
        not read or close it.
        """
        fd = ctypes.c_int()
        check(lib.handoff_fd(self._handle, ctypes.byref(fd)))
        return fd.value

    def abort(self, timeout: Optional[float] = None) -> None:
        """Ends it on all ranks, unless it has ended. When it returns, the blocks of this rank are
        the program's: no byte of a peer lands there any more, whatever state the peer is in.
        WaitTimeout: that is not proved yet. UnprovenError: it never will be.
        """
        check(in_slices(lambda ns: lib.handoff_abort(self._handle, ns), timeout))

    def close(self) -> None:
        """Forgets it. BusyError while it runs, or its blocks are not free: abort it first."""
        if self._handle:
            code = lib.handoff_request_close(self._handle)
            if code != HandleError.code:  # else its rank was closed
                check(code)
            self._out.value = 0

    def __del__(self) -> None:
        out = getattr(self, "_out", None)
        if out is not None and out.value:
            lib.handoff_request_close(out.value)  # one that runs goes on until its rank is closed


class Push(Request):
    """A request on a rank that sends."""

    def layer(self, layer: int) -> None:
        """This layer, by its global number, is complete in this rank's memory. It goes over once
        all ranks have begun the request, and this does not wait. Each layer of this rank is told
        once, in any order; behind the last one the request ends by itself. Raises why the request
        has ended, if it has.
        """
        check(lib.handoff_layer(self._handle, number(layer, "layer", 32)))


class Sender(_Rank):
    __doc__ = f"One prefill rank. {_Rank.__doc__}"

    _role = _library.SENDER

    def begin(self, request: int, tables: Sequence[Indices], tokens: int, first: int = 0) -> Push:
        """Hands tokens of a request over, from `first` on up to `tokens`, and returns at once.

        All ranks of both groups begin it, in any order, by one number, which names this hand-over
        for ever. `tables` are its blocks by the groups of the side; slot 0 has its first token. Its
        blocks must not change behind `Push.layer` until it has ended. What is wrong with it is
        raised by `wait`.
        """
        push = Push(self)
        self._begin(push, request, tables, tokens, first)
        return push


class Receiver(_Rank):
    __doc__ = f"One decode rank. {_Rank.__doc__}"

    _role = _library.RECEIVER

    def begin(self, request: int, tables: Sequence[Indices], tokens: int,
              first: int = 0) -> Request:
        """Expects tokens of a request, as `Sender.begin` hands them over, and returns at once.
        Nothing else may use its blocks until it has ended.
        """
        expected = Request(self)
        self._begin(expected, request, tables, tokens, first)
        return expected
