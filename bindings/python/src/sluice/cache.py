# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one node, or of a cluster: blocks by their content, in memory that outlives the
process, and on disks behind it. docs/cache.md and docs/cluster.md have what is promised.

    with Cache.open("/dev/shm/kv", 64 << 30) as cache:  # or Cache.connect("unix:/run/kv")
        space = cache.namespace("llama-70b", hashlib.sha256(layout).digest())
        kv = cache.attach(tensor, axis=1)  # (layers, slots, ...): a block is all of one slot
        found = space.match(hashes)
        space.load(hashes[:found.prefix], kv, slots[:found.prefix]).wait(5)

A block has a key of 16 bytes, the hash of its tokens and of all before them. Times are seconds.
Any thread may call anything; the interpreter's lock is released in every call of the library.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import hashlib
import itertools
import json
import os
import threading
import time
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Generator,
    Iterable,
    Iterator,
    NamedTuple,
    Optional,
    Sequence,
    TypeVar,
    Union,
)

from . import _library
from ._buffers import Indices, hold_indices
from ._clock import SLICE_NS, beside, in_slices, nanoseconds
from ._config import CLUSTERS, STREAMS, is_cluster, split
from ._library import PENDING, lib
from ._region import Closing, Region, grow
from ._words import number, octets, text
from .engine import Engine, Listener
from .errors import ArgumentError, HandleError, TimeoutError, check, failure

KEY_BYTES = 16

Keys = Any  # a buffer of 16 bytes a key, such as an array of shape (n, 16), or a list of bytes

_names = itertools.count()
_Enum = TypeVar("_Enum", bound=enum.IntEnum)


class Found(enum.IntFlag):
    """Where a block is: in both tiers, or stored by another operation at this moment."""

    IN_MEMORY = 1
    ON_DISK = 2
    COMING = 4


class Outcome(enum.IntEnum):
    """What became of one block of an operation."""

    UNDONE = 0  # the operation still runs
    DONE = 1  # the bytes are there
    KNOWN = 2  # store: the cache had it already; nothing was copied
    MISSING = 3  # load: the cache does not have it
    PENDING = 4  # another operation stores it at this moment
    DAMAGED = 5  # load: not the bytes that were stored; it is forgotten
    UNLIKE = 6  # load: it has another length
    CONFLICT = 7  # store: the cache has the key with another length, or other bytes
    NO_ROOM = 8  # there is no room that may be taken; of a load: nor comes any
    LATE = 9  # the timeout of the operation was over
    FAILED = 10  # its transfer failed: `wait` raises why
    BUSY = 11  # store: the cache cannot keep up: `wait` raises why


class Hint(enum.IntEnum):
    """What a program knows of blocks, and the cache cannot. All tiers obey."""

    SESSION_END = 0  # nobody uses them soon: they go before all others
    RETAIN = 1  # they stay, for a time and within hold_max of their namespace
    RELEASE = 2  # ends RETAIN
    DEMOTE = 3  # they leave memory once a disk has them
    PREFETCH = 4  # they are read from the disks, in the background


class HintResult(NamedTuple):
    """The blocks of a hint."""

    applied: int
    missing: int  # the cache does not have them
    refused: int  # by a budget, or a queue that is full


class Estimate(NamedTuple):
    """What a load of blocks would take now."""

    seconds: float
    memory_blocks: int  # by the tier that they would come from
    memory_bytes: int
    disk_blocks: int
    disk_bytes: int
    missing: int  # blocks
    measured: bool  # by rates that were measured; else some are assumed


class Flow(enum.IntEnum):
    """When the blocks of a namespace go to the disks."""

    WRITE_THROUGH = 0  # as they are stored
    WRITE_BACK = 1  # when they are about to leave memory
    MEMORY_ONLY = 2  # never


class Match(NamedTuple):
    """Which blocks of a chain the cache has."""

    prefix: int  # of the keys, from the first one on, without a gap
    found: bytes  # a byte a key, bits of Found: numpy.frombuffer(found, numpy.uint8)


@dataclass(frozen=True)
class Disk:
    """A file of the tier behind the memory."""

    path: str
    size: int  # bytes for blocks
    extent: int = 0  # bytes, as for Cache.open; 0: that of the memory
    blocks: int = 0  # how many it may hold; 0: as the file has, else size by 64 KiB
    bytes_a_day: int = 0  # what may be written in 24 hours; 0: nothing bounds it
    durable: bool = False  # what is on it survives a loss of power


def key_of(name: bytes) -> bytes:
    """The key of a hash of another length, or of any bytes that name a block."""
    return hashlib.sha256(name).digest()[:KEY_BYTES]


class Cache(Closing):
    """A cache of this process, by `open`, or of others, by `connect`.

    Close it, or use it by `with`: that ends its operations and detaches its memory. Its files keep
    their blocks.
    """

    def __init__(self, engine: Optional[Engine], timeout: Optional[float],
                 call: Callable[[int, int, Any], int], whole: bool = False) -> None:
        self._own, self._whole = engine is None, whole
        self.engine = Engine("cache") if engine is None else engine
        out = self._out = ctypes.c_uint64()  # the library writes here: no interrupt comes between
        try:
            beside(lambda: check(call(self.engine._handle, nanoseconds(timeout),
                                      ctypes.byref(out))),
                   lambda _: lib.kv_close(out.value), lambda _: None)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Union[str, os.PathLike[str]], size: int, *, disks: Iterable[Disk] = (),
             extent: int = 0, blocks: int = 0, policy: str = "s3fifo", verify_first: bool = False,
             compare_known: bool = False, ops_max: int = 0, engine: Optional[Engine] = None,
             timeout: Optional[float] = 30.0) -> Cache:
        """Opens a cache of `size` bytes in a file at `path`, on /dev/shm or a hugetlbfs, with the
        blocks that a process before left there.

        `extent` is the longest block in bytes, `blocks` how many the cache can know; 0 chooses by
        the size. `policy` says which block goes first: "s3fifo", "lru" or "arc". With
        `verify_first` the CRC-32C of a block is verified by its first load alone. With
        `compare_known` a store reads blocks that the cache has, too: other bytes are CONFLICT.
        `ops_max` operations run at a time; 0 is 1,024. TimeoutError: another cache has the file.

        `engine` moves the bytes: without one the cache has its own, for memory of the host.
        """
        words = [f"path={os.fspath(path)}", f"bytes={size}", f"extent={extent}", f"blocks={blocks}",
                 f"policy={policy}", f"verify_first={str(verify_first).lower()}",
                 f"compare_known={str(compare_known).lower()}", f"ops_max={ops_max}"]
        for d in disks:
            words += [f"disk={d.path}", f"disk_bytes={d.size}", f"disk_extent={d.extent}",
                      f"disk_blocks={d.blocks}", f"disk_bytes_a_day={d.bytes_a_day}",
                      f"disk_durable={str(d.durable).lower()}"]
        listed = (ctypes.c_char_p * (len(words) + 1))(*[text(w, "option") for w in words], None)
        return cls(engine, timeout, lambda of, ns, out: lib.kv_open(of, listed, ns, out))

    @classmethod
    def connect(cls, address: str, *, engine: Optional[Engine] = None,
                timeout: Optional[float] = 30.0) -> Cache:
        """The cache that another process serves at "unix:/path" or "tcp:host:port", or those of
        the nodes of a cluster: of a list, "nodes:a=unix:/path,b=tcp:host:port", or of an etcd,
        "etcd:http://host:port,http://host:port", with "/prefix" behind the last one where the nodes
        have another than sluice.

        It reads and writes the memory that is attached, one-sided; no byte of a block passes a
        message. The messages of `engine` are the cache's: without one the cache has its own, of
        this host; over a network give one that has a backend for it.

        Where no process serves there yet it tries again, for as long as `timeout` says, at most
        the `connect_timeout` of the engine; of a cluster until one node is reached. What a node
        has that is not reached, silent or late is missing then, and is no error. `keys`, `clear`
        and `replace` of a namespace are NotSupportedError there.
        """
        network, where = split(address, {**STREAMS, **CLUSTERS})
        return cls(engine, timeout, lambda of, ns, out: lib.kv_dial(of, network, where, ns, out),
                   is_cluster(address))

    @property
    def _handle(self) -> int:
        return self._out.value

    def _ask(self, call: Callable[[int], int], timeout: Optional[float]) -> None:
        _ask(call, timeout, self._whole)

    def serve(self, address: str) -> Listener:
        """Lets other processes `connect` at "unix:/path" or "tcp:host:port", until the listener or
        the cache is closed. The messages of its engine are the cache's from then on.
        """
        check(lib.kv_serve(self._handle))
        return self.engine.serve(address)

    def namespace(self, name: str, geometry: bytes, *, priority: int = 0, memory_quota: int = 0,
                  disk_quota: int = 0, hold_max: int = 0, ttl: float = 0,
                  flow: Flow = Flow.WRITE_THROUGH, timeout: Optional[float] = 5.0) -> Namespace:
        """Opens a namespace, which may have blocks already. A cluster finds the nodes of a block by
        its key alone; see `Namespace.chain`.

        `geometry` is a digest of 32 bytes of what two processes must agree on to share a block: the
        model, its layout, the salt of a tenant. Blocks of a lower priority, from 0 to 7, go first.
        Quotas are bytes; 0 is what there is. `hold_max` bounds the bytes that retained blocks
        keep; 0 is an eighth of the memory. Blocks that were not used for `ttl` seconds go; 0
        is never. Opening it again changes these. Of a cache that was connected the server says
        them, of a cluster its etcd.
        """
        if len(geometry) != 32:
            raise ArgumentError(f"geometry has {len(geometry)} bytes: want a digest of 32, such as "
                                f"hashlib.sha256(...).digest()")
        flow = _member(Flow, flow, "flow")
        options = _library.KVNamespaceOptions(
            priority=number(priority, "priority", 32), name=text(name, "the name of a namespace"),
            memory_quota=number(memory_quota, "memory_quota"),
            disk_quota=number(disk_quota, "disk_quota"),
            geometry=(ctypes.c_uint8 * 32).from_buffer_copy(geometry),
            hold_max=number(hold_max, "hold_max"), ttl_ns=nanoseconds(ttl), flow=flow)
        options.size = ctypes.sizeof(options)
        out = ctypes.c_uint64()
        self._ask(lambda ns: lib.kv_namespace_open(self._handle, ctypes.byref(options), ns,
                                                   ctypes.byref(out)), timeout)
        return Namespace(self, name, out.value)

    def attach(self, source: Any, *, axis: int = 0, block_bytes: Optional[int] = None,
               timeout: Optional[float] = 5.0) -> Blocks:
        """Lets the cache read and write memory in which blocks lie, until `Blocks.close`.

        `source` is what `Engine.register` takes. Of an array or a tensor, which must be contiguous,
        dimension `axis` counts the slots, and a block is all that has one index there: of the shape
        (layers, slots, heads, 128) with axis 1 it is a run in each layer. Other memory, or that
        with `block_bytes`, has slots of so many bytes one behind the other.
        """
        shape, unit = _shape(source, block_bytes)
        if not -len(shape) <= axis < len(shape):
            raise ArgumentError(f"axis is {axis}, of memory with {len(shape)} dimensions")
        axis %= len(shape)
        run, outer = unit, 1
        for n in shape[axis + 1:]:
            run *= n
        for n in shape[:axis]:
            outer *= n
        region = self.engine.register(f"kv cache {next(_names)}", source, private=True)
        blocks = Blocks(self, region, shape[axis], run, outer)
        try:
            self._ask(lambda ns: lib.kv_attach(self._handle, region._handle, ns), timeout)
            return blocks
        except BaseException:
            blocks.close()
            raise

    def stats(self) -> dict[str, Any]:
        """Counters, as `sluice cache stat --json` has them: blocks and bytes by tier ("memory",
        "disk"), namespace and disk, blocks of loads and stores by their outcome, and what `open`
        found. A server tells those alone who have come by its Unix socket: OperatingSystemError.
        """
        data = grow(lambda buffer, room, n: lib.kv_stats(self._handle, buffer, room, n), 1 << 14)
        stats: dict[str, Any] = json.loads(data.rstrip(b"\0"))
        return stats

    def drain(self, timeout: Optional[float] = None) -> None:
        """Waits until all blocks that were stored are on the disks, or will not be. TimeoutError:
        some are not yet.
        """
        self._ask(lambda ns: lib.kv_drain(self._handle, ns), timeout)

    def close(self) -> None:
        """Ends its operations, detaches its memory and closes its files. UnprovenError: it may
        still reach memory, which stays held; call it again.
        """
        if self._handle:
            code = lib.kv_close(self._handle)
            if code != HandleError.code:  # else its engine has closed it
                check(code)
            self._out.value = 0
        if self._own:
            self.engine.close()


class Blocks(Closing):
    """Memory that a cache may reach, with `slots` places for blocks of `block_bytes` bytes each."""

    def __init__(self, cache: Cache, region: Region, slots: int, run: int, outer: int) -> None:
        self.cache, self.region, self.slots, self.block_bytes = cache, region, slots, run * outer
        place = self._place = _library.KVPlace(region=region._handle, stride=run, run=run)
        place.size = ctypes.sizeof(place)
        if outer > 1:
            place.loops_count = 1
            place.loops[0].n, place.loops[0].by = number(outer, "a dimension", 32), slots * run

    def place(self, base: int, stride: int, run: int,
              loops: Sequence[tuple[int, int]] = ()) -> Blocks:
        """Other blocks of the same memory: that of slot k begins `base + k * stride` bytes from the
        start, and is the runs of a nest of at most three loops, outermost first, each a count and
        how many bytes lie between two of what is inside it. In the cache one run follows the other.
        They end when these are closed.
        """
        if len(loops) > 3:
            raise ArgumentError(f"{len(loops)} loops: at most 3")
        placed = Blocks(self.cache, self.region, 0, run, 1)
        place, span = placed._place, run
        place.base, place.stride = number(base, "base"), number(stride, "stride")
        place.run, place.loops_count = number(run, "run"), len(loops)
        for k, (n, by) in enumerate(loops):
            place.loops[k].n, place.loops[k].by = number(n, "a loop", 32), number(by, "a loop")
            placed.block_bytes *= n
            span += max(n - 1, 0) * by
        left = self.slots * self.block_bytes - base - span  # behind the first block
        placed.slots = 0 if left < 0 else left // stride + 1 if stride else 1
        return placed

    def close(self, timeout: Optional[float] = 30.0) -> None:
        """Ends it: when this returns, the cache neither reads nor writes the memory any more,
        whatever state the process is in that has it. Operations that run end with an error, or this
        waits for them. After an error there is no proof yet: call it again.
        """
        if self.region._handle:
            try:
                self.cache._ask(lambda ns: lib.kv_detach(self.cache._handle, self.region._handle,
                                                         ns), timeout)
            except HandleError:  # the cache was closed, which has detached it
                pass
            self.region.close()


class Namespace(Closing):
    """Blocks that only those find who name it. It ends with its cache, or by `close`.

    Keys are at most 65,536 a call, as an array of shape (n, 16) and bytes, other contiguous memory
    of 16 bytes a key, or a list of bytes.
    """

    def __init__(self, cache: Cache, name: str, handle: int) -> None:
        self.cache, self.name, self._handle = cache, name, handle

    def close(self) -> None:
        """Ends its use; its blocks stay. Calls with it raise HandleError then, and others that the
        same name was opened by go on. BusyError: its operations run, and no other has it open: call
        it again. A name that has no blocks makes way for others then; of a cache that was connected
        once the cache is closed, where its server does not answer within a second.
        """
        if self._handle:
            try:
                check(lib.kv_namespace_close(self._handle))
            except HandleError:  # its cache was closed
                pass
            self._handle = 0

    def chain(self, before: Keys = b"") -> Namespace:
        """The same blocks for calls whose keys are a chain from its first block on, or go on where
        these keys end. A cluster keeps a chain that was stored so at few nodes, and does not find
        it by the keys alone, nor the other way round. It ends with this namespace, or by `close`.
        """
        out = ctypes.c_uint64()
        listed = _listed(before)
        check(lib.kv_chain(self._handle, listed, len(listed) // KEY_BYTES, ctypes.byref(out)))
        return Namespace(self.cache, self.name, out.value)

    def match(self, keys: Keys, timeout: Optional[float] = 5.0) -> Match:
        """Looks for blocks. It moves nothing and does not count as a use. What it found may go
        before it is loaded: `Hint.RETAIN` has it stay.
        """
        listed = _listed(keys)
        n = len(listed) // KEY_BYTES
        found, prefix = ctypes.create_string_buffer(max(n, 1)), ctypes.c_size_t()
        self.cache._ask(lambda ns: lib.kv_match(self._handle, listed, n, ns, found,
                                                ctypes.byref(prefix)), timeout)
        return Match(prefix.value, found.raw[:n])

    def load(self, keys: Keys, to: Blocks, slots: Indices, timeout: Optional[float] = 30.0) -> Op:
        """Copies blocks to slots, one a key and all different, and returns at once.

        Each is verified while it is copied. What lies in the slot of a block that is not DONE
        is undefined. The timeout bounds all of it: what is not there by then is LATE. BusyError:
        too many operations run.
        """
        return self._move(lib.kv_load, keys, to, slots, timeout)

    def store(self, keys: Keys, source: Blocks, slots: Indices,
              timeout: Optional[float] = 30.0) -> Op:
        """Copies blocks from slots, one a key, into the cache, and returns at once. The first store
        of a key wins; a block that is KNOWN is not copied. The slots must not change before the
        end. A block that is BUSY was refused, and `Op.wait` raises BusyError: store it later, or
        leave it out.
        """
        return self._move(lib.kv_store, keys, source, slots, timeout)

    def replace(self, keys: Keys, source: Blocks, slots: Indices,
                timeout: Optional[float] = 30.0) -> Op:
        """`store` for keys that name something else than content: each block takes the place of the
        one that its key has, at one moment, before which others find that one. Of several at a time
        the last one wins.
        """
        return self._move(lib.kv_replace, keys, source, slots, timeout)

    def _move(self, call: Callable[..., int], keys: Keys, at: Blocks, slots: Indices,
              timeout: Optional[float]) -> Op:
        listed = _listed(keys)
        n = len(listed) // KEY_BYTES
        held, m = hold_indices(slots, "slots")
        if n != m:
            raise ArgumentError(f"{m} slots for {n} keys: want one each")
        place = _library.KVPlace.from_buffer_copy(at._place)
        place.slots = held.address
        op = Op(n, self, at)
        check(call(self._handle, listed, n, ctypes.byref(place), nanoseconds(timeout),
                   ctypes.byref(op._out)))
        held.release()
        return op

    def match_pinned(self, chains: Sequence[Keys], seconds: float,
                     timeout: Optional[float] = 5.0) -> Token:
        """One answer of a cluster for several ranks, each of which has a chain: the longest prefix
        that all have, where it is, and pins that have it stay for so many seconds, from 1 to 3,600.
        """
        rows = [_listed(keys) for keys in chains]
        shortest = min(map(len, rows), default=0)
        joined = b"".join([row[:shortest] for row in rows])
        token = Token()
        self.cache._ask(lambda ns: lib.kv_match_pinned(
            self._handle, joined, shortest // KEY_BYTES, len(rows), nanoseconds(seconds), ns,
            ctypes.byref(token._out), ctypes.byref(token._prefix)), timeout)
        token._read()
        return token

    def load_pinned(self, token: bytes, chain: int, keys: Keys, to: Blocks, slots: Indices,
                    timeout: Optional[float] = 30.0) -> Op:
        """`load` of the chain of one rank by the `Token.data` of another process: keys are the
        first `Token.prefix` of the chain. MissingError of `Op.wait`: not all were loaded, so none
        counts, and a group has to agree that all its ranks miss.
        """
        data, number_of = octets(token, "token"), number(chain, "chain")

        def call(handle: int, *rest: Any) -> int:
            return lib.kv_load_pinned(handle, data, len(data), number_of, *rest)

        return self._move(call, keys, to, slots, timeout)

    def prefetch(self, keys: Keys, timeout: Optional[float] = 30.0) -> Op:
        """Reads blocks from the disks into memory, for a load to come, and returns at once. It
        brings at most a quarter of the memory; what is beyond is NO_ROOM.
        """
        listed = _listed(keys)
        op = Op(len(listed) // KEY_BYTES, self)
        check(lib.kv_prefetch(self._handle, listed, op.keys, nanoseconds(timeout),
                              ctypes.byref(op._out)))
        return op

    def hint(self, kind: Hint, keys: Keys, seconds: float = 0,
             timeout: Optional[float] = 5.0) -> HintResult:
        """Gives a hint; RETAIN is for so many seconds, from 1 to 3,600 at a time: whole ones, a
        part is rounded up. FullError: a budget has refused some blocks. BoundsError: RETAIN for
        less or more.
        """
        kind = _member(Hint, kind, "kind")
        result = _library.KVHintResult()
        listed = _listed(keys)
        self.cache._ask(lambda ns: lib.kv_hint(self._handle, kind, nanoseconds(seconds), listed,
                                               len(listed) // KEY_BYTES, ns,
                                               ctypes.byref(result)), timeout)
        return HintResult(result.applied, result.missing, result.refused)

    def hint_envelope(self, envelope: bytes, timeout: Optional[float] = 5.0) -> list[
            dict[str, Any]]:
        """Gives the hints of a KvHintsEnvelope, in JSON, as a router attaches it to a request, and
        says what became of each action: its action_id, status, and reason. docs/cache.md lists the
        actions.
        """
        data = octets(envelope, "envelope")
        room, length = ctypes.create_string_buffer(1 << 20), ctypes.c_size_t()
        self.cache._ask(lambda ns: lib.kv_hint_envelope(self._handle, data, len(data), ns, room,
                                                        len(room), ctypes.byref(length)), timeout)
        told: Optional[list[dict[str, Any]]] = json.loads(room.raw[:length.value].rstrip(b"\0"))
        return told or []

    def estimate(self, keys: Keys, timeout: Optional[float] = 5.0) -> Estimate:
        """Says what a load would take now, by measured rates and queues. It moves nothing, and is
        no use of the blocks: compare it with the time to compute them anew.
        """
        e = _library.KVEstimate()
        e.size = ctypes.sizeof(e)
        listed = _listed(keys)
        self.cache._ask(lambda ns: lib.kv_estimate(self._handle, listed, len(listed) // KEY_BYTES,
                                                   ns, ctypes.byref(e)), timeout)
        return Estimate(e.time_ns / 1e9, e.memory_blocks, e.memory_bytes, e.disk_blocks,
                        e.disk_bytes, e.missing, bool(e.measured))

    def remove(self, keys: Keys, timeout: Optional[float] = 30.0) -> None:
        """Forgets blocks: when this returns, no restart finds them, nor any node of a cluster that
        is in its list now.
        """
        listed = _listed(keys)
        self.cache._ask(lambda ns: lib.kv_remove(self._handle, listed, len(listed) // KEY_BYTES,
                                                 ns), timeout)

    def keys(self, timeout: Optional[float] = 5.0) -> Iterator[bytes]:
        """Lists the blocks that are there, in no order: up to 4,096 keys behind each other a time,
        each question within the timeout. OperatingSystemError: the server lists nothing to
        clients that come over tcp, unless its operator lets it.
        """
        at, n = ctypes.c_uint32(), ctypes.c_size_t()
        room = ctypes.create_string_buffer(_library.KV_LISTED_MAX * KEY_BYTES)
        while True:
            self.cache._ask(lambda ns: lib.kv_list(self._handle, ctypes.byref(at), ns, room,
                                                   ctypes.byref(n)), timeout)
            if n.value:
                yield room.raw[:n.value * KEY_BYTES]
            if not at.value:
                return

    def clear(self, timeout: Optional[float] = 30.0) -> None:
        """Forgets all blocks that are there when it begins, as `remove` does. Those that are stored
        meanwhile may stay. The timeout is for each question.
        """
        for some in self.keys(timeout):
            self.remove(some, timeout)


class Token(Closing):
    """What `Namespace.match_pinned` has found: `prefix` blocks of each chain. Hand `data` to the
    ranks, and close it once all have loaded: that ends the pins.
    """

    prefix = 0
    data = b""

    def __init__(self) -> None:
        self._out, self._prefix = ctypes.c_uint64(), ctypes.c_size_t()  # as for Cache

    def _read(self) -> None:
        self.prefix = self._prefix.value
        self.data = grow(lambda buffer, room, n: lib.kv_token_bytes(self._out.value, buffer, room,
                                                                    n), 4096)

    def close(self) -> None:
        handle, self._out.value = self._out.value, 0
        if handle:
            lib.kv_token_close(handle)  # stale when its cache was closed

    def __del__(self) -> None:  # also after an interrupt, once the call has ended
        if hasattr(self, "_out"):
            self.close()


class Op(Closing):
    """A load or a store. `wait` on a thread, `await op` in an asyncio loop, or poll `fd`.

    It goes on where nobody waits for it. Outcomes are bytes, one a key:
    `op.wait().count(Outcome.DONE)`.
    """

    def __init__(self, keys: int, *keep: Any) -> None:
        self.keys, self._keep = keys, keep
        self._out = ctypes.c_uint64()  # as for Cache

    @property
    def _handle(self) -> int:
        return self._out.value

    def wait(self, timeout: Optional[float] = None) -> bytes:
        """Waits for the end, and returns the outcomes. The first error of a transfer is raised
        instead; `outcomes` has them then, too. A block that is missing is no error. WaitTimeout
        ends the wait, not the operation.

        After UnprovenError the memory may still be read or written, until `Blocks.close` returns.
        """
        code, outcomes = self._look(timeout)
        check(code)
        return outcomes

    def _look(self, timeout: Optional[float]) -> tuple[int, bytes]:
        room = ctypes.create_string_buffer(max(self.keys, 1))
        code = in_slices(lambda ns: lib.kv_op_wait(self._handle, ns, room, self.keys), timeout)
        return code, room.raw[:self.keys]

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        code, _ = self._look(0)
        if code == HandleError.code:
            raise failure(code)
        return code != PENDING

    @property
    def outcomes(self) -> bytes:
        """An Outcome for each key; UNDONE while it runs."""
        code, outcomes = self._look(0)
        if code == HandleError.code:
            raise failure(code)
        return outcomes

    @property
    def fd(self) -> int:
        """A descriptor that is readable from the end on, until the operation is closed. For poll:
        do not read or close it.
        """
        fd = ctypes.c_int()
        check(lib.kv_op_fd(self._handle, ctypes.byref(fd)))
        return fd.value

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._ended().__await__()

    async def _ended(self) -> bytes:
        """`wait` for a task. Cancelling the task ends the wait, not the operation."""
        if not self.done:
            loop = asyncio.get_running_loop()
            readable: asyncio.Future[None] = loop.create_future()
            fd = os.dup(self.fd)  # of our own: several tasks may wait

            def ended() -> None:
                if not readable.done():
                    readable.set_result(None)

            loop.add_reader(fd, ended)
            try:
                await readable
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return self.wait(0)

    def cancel(self) -> None:
        """Ends it soon, as its timeout does. It does not wait."""
        check(lib.kv_op_cancel(self._handle))

    def close(self) -> None:
        """Forgets it. One that runs goes on."""
        handle, self._out.value = self._handle, 0
        if handle:
            lib.kv_op_close(handle)  # stale when its cache was closed

    def __del__(self) -> None:
        if hasattr(self, "_out"):
            self.close()


def _ask(call: Callable[[int], int], timeout: Optional[float], whole: bool = False) -> None:
    """Makes a call that may be made again when its time is over. One that takes long goes on in a
    thread, so that an interrupt is heard meanwhile. A whole one is of a cluster: it is made once,
    since nodes that have not answered within a slice would be misses, and other threads than the
    main one, which alone hears interrupts, make it themselves.
    """
    ns = nanoseconds(timeout)
    if 0 <= ns <= SLICE_NS or whole and threading.current_thread() is not threading.main_thread():
        check(call(ns))
        return
    if not whole:
        began = time.monotonic()
        code = call(SLICE_NS)
        if code != TimeoutError.code and time.monotonic() - began < SLICE_NS / 1e9:
            check(code)
            return
        if code == 0:
            return
        # The slice has ended it, whatever the error is: a detach says UNPROVEN then.
        timeout = None if timeout is None else began + timeout - time.monotonic()
    beside(lambda: check(call(nanoseconds(timeout))), lambda _: None, lambda _: None)


def _member(of: type[_Enum], value: Any, what: str) -> _Enum:
    """A member of an enumeration, or its number."""
    try:
        return of(value)
    except ValueError:
        names = ", ".join(f"{of.__name__}.{m.name}" for m in of)
        raise ArgumentError(f"{what} is {value!r}: want one of {names}") from None


def _shape(source: Any, block_bytes: Optional[int]) -> tuple[Sequence[int], int]:
    """The dimensions of memory, and the bytes of one element."""
    shape = getattr(source, "shape", None)
    if block_bytes is None and shape is not None and len(shape) > 0:
        size = getattr(source, "element_size", None)  # torch has a method, numpy a number
        unit = size() if callable(size) else source.itemsize
        return [int(n) for n in shape], int(unit)
    if block_bytes is None:
        raise ArgumentError("the memory has no dimensions: say how long a block is by block_bytes")
    unit = number(block_bytes, "block_bytes")
    if hasattr(source, "element_size"):
        length = source.element_size() * source.numel()
    else:
        length = getattr(source, "nbytes", None) or getattr(source, "length", None) or len(source)
    if unit == 0 or length % unit:
        raise ArgumentError(f"memory of {length} bytes is no slots of {unit} bytes each")
    return [length // unit], unit


def _listed(keys: Keys) -> bytes:
    """Keys behind each other, in memory of their own: a call that an interrupt leaves reads them
    when the caller's may be gone, or have others.
    """
    if isinstance(keys, (list, tuple)):
        if any(n != KEY_BYTES for n in set(map(len, keys))):
            raise ArgumentError(f"a key has {KEY_BYTES} bytes: make keys of other hashes by key_of")
        return b"".join(keys)
    if hasattr(keys, "numpy"):  # a tensor in host memory
        keys = keys.numpy()
    view = memoryview(keys)
    if not view.c_contiguous:
        raise ArgumentError("keys: want contiguous memory")
    rows = view.shape[0] if view.shape and view.ndim > 1 else view.nbytes // KEY_BYTES
    if view.nbytes != rows * KEY_BYTES:
        raise ArgumentError(f"keys of the shape {view.shape} and {view.itemsize} bytes each: "
                            f"want {KEY_BYTES} bytes a key, such as (n, {KEY_BYTES}) of uint8")
    return view.tobytes()
