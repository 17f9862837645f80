# SPDX-License-Identifier: Apache-2.0
"""Weights that some processes serve, each in parts of its own, and that others read into place.

A Box is a part of a tensor and where a process keeps it. `Serving` registers the memory of boxes,
and lets peers read a table of them and the version that they hold. A `Source` is such a process as
a peer sees it: a trainer's rank, or a worker that has the version already. `Reader` cuts the boxes
that a process wants from those of its sources, once, into transfers that are posted again for each
update. vllm_weights.py is the face of vLLM over it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import logging
import time
from typing import Any, Iterable, NamedTuple, NoReturn, Optional, Sequence

import numpy as np

from .. import errors
from .._config import Backend, Limits
from .._patience import CONNECT
from .._region import Closing, Region
from .._segments import DeviceMemory, HostMemory
from ..engine import Engine
from ..peer import Peer, Remote, is_lost
from ..transfer import Transfer
from ._tensors import Storage

log = logging.getLogger("sluice.weights")

# What is read, told to peers and checked together: bytes, or more where there were too many groups.
GROUP, GROUPS_MAX = 64 << 20, 64
POLL = 0.001  # seconds between two looks at a peer that has a group not yet
BEGIN = 2.0  # seconds for a peer to begin with an update that we have begun with
TABLE_MAX = 256 << 20  # bytes of a peer's table
_TABLE, _STATE = "table", "state"
_WHOLE, _BEGUN, _FIRST = 0, 1, 2  # places of the words of a state
Numbers = tuple[int, ...]


class Box(NamedTuple):
    """A part of a tensor, from `starts` on in each dimension, and where it lies: in a region, by
    its number, at an offset, with strides; all in bytes.
    """

    name: str
    starts: Numbers
    shape: Numbers
    itemsize: int
    region: int
    offset: int
    strides: Numbers

    def length(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    def end(self) -> int:
        """Behind its last byte in the region."""
        return self.offset + span(self.shape, self.strides) + self.itemsize

    def check(self, length: int) -> None:
        """ArgumentError where a storage of so many bytes does not have all of it."""
        if self.length() and self.end() > length:
            raise errors.ArgumentError(
                f"{self.name} has {self.length()} bytes, and its storage {length}: who has freed "
                f"it (FSDP of torch.distributed.fsdp does between steps) must gather it before, as "
                f"by summon_full_params, or hand over a source with the shards that it has")


class Place(NamedTuple):
    """Where a tensor lies in the memory of a storage, in elements."""

    storage: int
    offset: int
    shape: Numbers
    strides: Numbers


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How far the last element lies behind the first one."""
    return sum((n - 1) * by for n, by in zip(shape, strides))


def last_writes(places: Sequence[Place]) -> list[int]:
    """Which of several writes, in their order, are not written over: by a later one of the same
    place. ValueError: two overlap in another way.
    """
    last = {place: k for k, place in enumerate(places)}
    open_now: list[Place] = []
    for place in sorted(last):
        open_now = [p for p in open_now if p.storage == place.storage
                    and p.offset + span(p.shape, p.strides) >= place.offset]
        if any(not _side_by_side(p, place) for p in open_now):
            raise ValueError("two writes overlap")
        open_now.append(place)
    return sorted(last.values())


def _side_by_side(a: Place, b: Place) -> bool:
    """Whether two places are different columns of rows of one length."""
    row = max([by for p in (a, b) for n, by in zip(p.shape, p.strides) if n > 1], default=1)
    columns = []
    for place in (a, b):
        first = place.offset % row
        columns.append((first, first + 1 + sum(
            (n - 1) * by for n, by in zip(place.shape, place.strides) if by != row)))
    (first, end), (other, other_end) = columns
    return max(end, other_end) <= row and (end <= other or other_end <= first)


class Offer(NamedTuple):
    """What a peer needs to read a table: the description, and the digest that it then has."""

    description: str
    digest: str


def open_engine(name: str, host: str, cards: Sequence[int]) -> Engine:
    """On one host shm; between hosts RDMA where there is a device, and else tcp, encrypted by the
    key in the description.
    """
    backends = [Backend("shm"), Backend("rdma", optional=True), Backend("tcp", listen=f"{host}:0")]
    if cards:
        backends.insert(1, Backend("cuda", optional=True, devices=cards))
    # a worker has a transfer for each group and source, and rank 0 knows all workers
    return Engine(name, backends, connect_timeout=CONNECT,
                  limits=Limits(transfers=1 << 16, peers=1 << 14, notifications=1 << 14))


def box_of(full: Sequence[int], first: int,
           view: Iterable[tuple[int, int, int]]) -> Optional[tuple[Numbers, Numbers, Numbers]]:
    """What a view of a contiguous tensor covers of it: the starts, the shape, and where each
    dimension goes. `view` has length, stride in the tensor and stride of the target for each
    dimension of the view, in elements. None for what is no box, such as every other row.
    """
    joined: list[tuple[int, int, int]] = []  # from the outermost on, without what adjoins
    for n, stride, target in view:
        if n == 1:
            continue
        if joined and joined[-1][1:] == (n * stride, n * target):
            n *= joined.pop()[0]
        joined.append((n, stride, target))
    steps = [int(np.prod(full[d + 1:], dtype=np.int64)) for d in range(len(full))]
    starts = [first // step % n for n, step in zip(full, steps)]
    shape, targets = [1] * len(full), [0] * len(full)
    by_step = {step: d for d, (n, step) in enumerate(zip(full, steps)) if n > 1}
    for n, stride, target in reversed(joined):
        while n > 1:
            d = by_step.pop(stride, None)
            if d is None:
                return None
            shape[d], targets[d] = n, target
            if n <= full[d] - starts[d]:
                break
            if starts[d] or n % full[d]:
                return None
            shape[d], n = full[d], n // full[d]
            stride, target = stride * full[d], target * full[d]
    return tuple(starts), tuple(shape), tuple(targets)


class Serving:
    """The memory that a process serves, a table of what lies in it, and words that say which
    version: which all of it has, which is being read, and which each group has. 0 is none.
    """

    def __init__(self, engine: Engine, groups: int = 0) -> None:
        self._engine, self._numbers = engine, itertools.count()
        self._regions: dict[Storage, tuple[Region, Any]] = {}
        self._memory = engine.alloc((_FIRST + groups) * 8, huge=False)
        self.words = np.frombuffer(self._memory.view, np.uint64)
        self._state = engine.register(_STATE, self._memory, read_only=True)
        self._table: Optional[Region] = None
        self._told = b""

    def register(self, storages: dict[Storage, Any]) -> list[Region]:
        """Has these storages registered, and those no more that it had before. Each stays as it is
        while it is in both.
        """
        for gone in self._regions.keys() - storages.keys():
            self._regions[gone][0].close()
            del self._regions[gone]
        new = [s for s in storages if s not in self._regions]
        sources: list[tuple[str, Any]] = []
        for s in new:
            memory: Any = HostMemory(s.address, s.length, s.writable)
            if s.device >= 0:
                memory = DeviceMemory(s.address, s.length, s.device)
            sources.append((f"w{next(self._numbers)}", memory))
        for s, (name, memory) in zip(new, sources):
            region = self._engine.register(name, memory, read_only=True)
            self._regions[s] = region, storages[s]
        return [self._regions[s][0] for s in storages]

    def publish(self, regions: list[Region], boxes: list[Box], **more: Any) -> Offer:
        """Tells peers what lies where. An offer that nothing has changed in stays the same."""
        description = base64.b64encode(self._engine.describe(*regions, self._state)).decode()
        told = json.dumps({"description": description, "regions": [r.name for r in regions],
                           "boxes": [box[:] for box in boxes], **more}).encode()
        if told != self._told:
            if self._table is not None:
                self._table.close()
            self._table = self._engine.register(_TABLE, np.frombuffer(told, np.uint8),
                                                read_only=True)
            self._told = told
        assert self._table is not None
        small = self._engine.describe(self._table, self._state)
        return Offer(base64.b64encode(small).decode(), hashlib.sha256(told).hexdigest())

    def close(self) -> None:
        """Ends what peers read just now: none reads any of it when this returns."""
        for region, _ in self._regions.values():
            region.close()
        self._regions.clear()
        if self._table is not None:
            self._table.close()
        self._state.close()
        del self.words
        self._memory.close()


class Source:
    """A process that serves weights, as its reader sees it."""

    def __init__(self, engine: Engine, what: str) -> None:
        self._engine, self.what, self.offer = engine, what, Offer("", "")
        self.boxes: list[Box] = []
        self.remotes: list[Remote] = []
        self.told: dict[str, Any] = {}
        self.peer: Optional[Peer] = None
        self._words: Optional[_Mirror] = None

    def meet(self, offer: Offer, limit: float) -> None:
        """Connects, reads the table, and compares its digest."""
        if self.lost():
            self.leave()
        try:
            self._meet(offer, time.monotonic() + limit)
        except errors.Error as e:
            _tell(self, e)
        except (KeyError, TypeError, ValueError) as e:
            raise errors.CorruptError(f"{self.what} has a table that is none: have both sides run "
                                      f"one version of sluice: {e!r}") from e
        self.offer = offer

    def _meet(self, offer: Offer, end: float) -> None:
        description = base64.b64decode(offer.description)
        self.peer = self._engine.connect(description, max(0.0, end - time.monotonic()))
        self.peer.refresh(description)
        with _Mirror(self._engine, self.peer.remote(_TABLE)) as table:
            data = table.read(end - time.monotonic()).tobytes()
        if hashlib.sha256(data).hexdigest() != offer.digest:
            raise errors.CorruptError("it has another table than was announced: it has gone on, so "
                                      "announce its weights anew")
        self.told = json.loads(data)
        self.peer.refresh(base64.b64decode(self.told["description"]))
        self.remotes = self.peer.remotes(self.told["regions"])
        self.boxes = [_box(len(self.remotes), *box) for box in self.told["boxes"]]
        if self._words is None:
            state = self.peer.remote(_STATE)
            if state.length < 8 * _FIRST or state.length % 8:
                raise ValueError(f"{state.length} bytes of versions")
            self._words = _Mirror(self._engine, state)

    def words(self, limit: float) -> Any:
        """What it says now of its versions."""
        assert self._words is not None
        try:
            return self._words.read(limit).view(np.uint64)
        except errors.Error as e:
            _tell(self, e)

    def leave(self) -> None:
        """Closes what transfers of plans do not list any more."""
        if self._words is not None:
            self._words.close()
        if self.peer is not None:
            self.peer.close()
        self.peer = self._words = None

    def lost(self) -> bool:
        return self.peer is not None and is_lost(self.peer)


def _box(regions: int, name: str, starts: Sequence[int], shape: Sequence[int], itemsize: int,
         region: int, offset: int, strides: Sequence[int]) -> Box:
    """A box of a table, which its process may have made up."""
    numbers = [*starts, *shape, itemsize, region, offset, *strides]
    if (not isinstance(name, str) or len({len(starts), len(shape), len(strides)}) > 1
            or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers)
            or region >= regions):
        raise ValueError(f"{name}: {starts} {shape} {itemsize} {region} {offset} {strides}")
    return Box(name, tuple(starts), tuple(shape), itemsize, region, offset, tuple(strides))


class _Mirror(Closing):
    """A copy of a small region of a peer's, which `read` brings up to date."""

    def __init__(self, engine: Engine, remote: Remote) -> None:
        if remote.length > TABLE_MAX:
            raise errors.CorruptError(f"its table has {remote.length} bytes: want {TABLE_MAX} or "
                                      f"less")
        self._memory = engine.alloc(remote.length, huge=False)
        self._region = engine.register(f"mirror-{id(self)}", self._memory, private=True)
        self._transfer = remote.peer.transfer("read")
        self._transfer.add(self._region, 0, remote, 0, remote.length)

    def read(self, limit: float) -> Any:
        try:
            self._transfer.run(max(0.0, limit))
        except errors.WaitTimeout:
            self._transfer.abort(CONNECT)
            raise errors.TimeoutError("it does not say within the limit which version it has: "
                                      "see what keeps that process") from None
        return np.frombuffer(self._memory.view, np.uint8).copy()

    def close(self) -> None:
        self._transfer.close()
        self._region.close()
        self._memory.close()


class _Read(NamedTuple):
    source: Source
    transfer: Transfer


class Reader:
    """The boxes that a process wants, and the transfers that fill them. `index` is the process's
    number among those that read: where several sources have a part, readers begin at different
    ones.
    """

    def __init__(self, wanted: list[Box], regions: list[Region], index: int) -> None:
        self._regions, self._index = regions, index
        size = max(GROUP, sum(box.length() for box in wanted) // GROUPS_MAX)
        self.groups: list[list[Box]] = [[]]
        room = size
        for box in wanted:
            if room <= 0:
                self.groups.append([])
                room = size
            self.groups[-1].append(box)
            room -= box.length()
        self._plans: dict[Numbers, list[list[_Read]]] = {}

    def state(self) -> Any:
        """Words for an update that nobody follows."""
        return np.zeros(_FIRST + len(self.groups), np.uint64)

    def plan(self, sources: list[Source]) -> list[list[_Read]]:
        """The transfers of each group. They are made once for the same sources."""
        key = tuple(map(id, sources))
        if key not in self._plans:
            parts: dict[str, dict[tuple[Numbers, Numbers], list[tuple[Source, Box]]]] = {}
            for source in sources:
                for box in source.boxes:
                    parts.setdefault(box.name, {}).setdefault((box.starts, box.shape), []).append(
                        (source, box))
            self._plans[key] = [self._cut(group, parts) for group in self.groups]
        return self._plans[key]

    def _cut(self, group: list[Box],
             parts: dict[str, dict[tuple[Numbers, Numbers], list[tuple[Source, Box]]]]
             ) -> list[_Read]:
        reads: dict[int, _Read] = {}
        try:
            for i, want in enumerate(group):
                # Parts fill a box exactly if they have as many bytes, and its corners alone are
                # corners of an odd number of them.
                found, corners = 0, _corners(want.starts, want.shape)
                for holders in parts.get(want.name, {}).values():
                    source, have = holders[(self._index + i) % len(holders)]
                    lo = [max(a, b) for a, b in zip(want.starts, have.starts)]
                    shape = [min(a + n, b + m) - at for a, n, b, m, at in
                             zip(want.starts, want.shape, have.starts, have.shape, lo)]
                    if any(n <= 0 for n in shape) or len(want.shape) != len(have.shape):
                        continue
                    if want.itemsize != have.itemsize:
                        raise errors.ArgumentError(
                            f"{want.name} has {have.itemsize} bytes an element at {source.what}, "
                            f"and {want.itemsize} here: have both sides use one type")
                    if id(source) not in reads:
                        assert source.peer is not None
                        reads[id(source)] = _Read(source, source.peer.transfer("read"))
                    _add(reads[id(source)].transfer, self._regions[want.region], want,
                         source.remotes[have.region], have, lo, shape)
                    found += int(np.prod(shape, dtype=np.int64)) * want.itemsize
                    corners ^= _corners(lo, shape)
                if found != want.length() or corners:
                    raise errors.ArgumentError(
                        f"{want.name}: {found} bytes are served of the {want.length()} that are "
                        f"wanted, or some are served twice and others not: have each part of it be "
                        f"served by one rank, or by several alike")
        except BaseException:
            for read in reads.values():
                read.transfer.close()
            raise
        return list(reads.values())

    def update(self, sources: list[Source], version: int, limit: float, words: Any,
               peer: Optional[Source] = None) -> None:
        """Reads all boxes from the sources; or from the peer, group by group as it gets them.
        `words` are those of our own state. When an error comes, no byte lands any more.
        """
        end = time.monotonic() + limit
        words[:] = 0
        words[_BEGUN] = version
        first = 0 if peer is None else self._follow(peer, version, end, limit / 4, words)
        plan = self.plan(sources)[first:] if first < len(self.groups) else []
        posted: list[_Read] = []
        try:
            for group in plan:
                for read in group:
                    posted.append(read)
                    read.transfer.post()
            for g, group in enumerate(plan, first):
                for read in group:
                    _wait(read, end)
                for read in group:
                    left = end - time.monotonic()
                    if read.source.words(left)[_WHOLE] != version:
                        raise errors.VersionError(
                            f"{read.source.what} does not hold version {version} any more: it went "
                            f"on before all of it was read")
                words[_FIRST + g] = version
        except BaseException:
            _abort(posted)
            raise
        words[_WHOLE] = version

    def _follow(self, peer: Source, version: int, end: float, patience: float, words: Any) -> int:
        """Reads groups from a peer as it gets them. Returns how many came: the sources have the
        others.
        """
        done, group = 0, list[_Read]()
        try:
            if len(peer.words(patience)) < len(words):
                raise errors.CorruptError(f"{peer.what} does not say which groups it has")
            for group in self.plan([peer]):
                if not self._has(peer, version, done, end, patience):
                    return done
                for read in group:
                    read.transfer.post()
                late = min(end, time.monotonic() + patience)
                for read in group:
                    _wait(read, late)
                if peer.words(late - time.monotonic())[_FIRST + done] != version:
                    return done
                words[_FIRST + done] = version
                done += 1
        except errors.Error as e:
            _abort(group)
            log.warning("the rest comes from the trainer: %s", e)
        except BaseException:
            _abort(group)
            raise
        return done

    def _has(self, peer: Source, version: int, group: int, end: float, patience: float) -> bool:
        """Waits until the peer has a group."""
        now = time.monotonic()
        begin, late = now + BEGIN, min(end, now + patience)
        while True:
            said, now = peer.words(late - now), time.monotonic()
            if said[_FIRST + group] == version:
                return True
            if now > late or said[_BEGUN] != version and now > begin:
                return False
            time.sleep(POLL)

    def forget(self, source: Optional[Source] = None) -> None:
        """Closes the transfers of the plans with a source, or of all. None is under way."""
        gone = [key for key in self._plans if source is None or id(source) in key]
        for group in itertools.chain.from_iterable(map(self._plans.pop, gone)):
            for read in group:
                read.transfer.close()


def _corners(lo: Sequence[int], shape: Sequence[int]) -> set[Numbers]:
    return set(itertools.product(*((at, at + n) for at, n in zip(lo, shape))))


def _add(transfer: Transfer, region: Region, want: Box, remote: Remote, have: Box,
         lo: Sequence[int], shape: Sequence[int]) -> None:
    """Lists the part of two boxes that begins at `lo` in the tensor."""
    here = want.offset + sum((at - s) * n for at, s, n in zip(lo, want.starts, want.strides))
    there = have.offset + sum((at - s) * n for at, s, n in zip(lo, have.starts, have.strides))
    run, dims = want.itemsize, [d for d in zip(shape, want.strides, have.strides) if d[0] > 1]
    while dims and dims[-1][1:] == (run, run):
        run *= dims.pop()[0]
    if not dims:
        transfer.add(region, here, remote, there, run)
        return
    transfer.add_pattern(region, remote, [d[0] for d in dims], run, [d[1] for d in dims],
                         [d[2] for d in dims], offset=here, remote_offset=there)


def _wait(read: _Read, end: float) -> None:
    try:
        read.transfer.wait(max(0.0, end - time.monotonic()))
    except errors.WaitTimeout:
        raise errors.TimeoutError(f"{read.source.what} has not sent all within the limit of the "
                                  f"update: raise it, or see what keeps that process") from None
    except errors.Error as e:
        _tell(read.source, e)


def _tell(source: Source, e: errors.Error) -> NoReturn:
    """The same error, and of whom it is."""
    raise type(e)(f"{source.what}: {e}") from e


def _abort(reads: list[_Read]) -> None:
    """Ends reads, all at the same time. UnprovenError where bytes may land still."""
    for read in reads:
        with contextlib.suppress(errors.Error):
            read.transfer.abort(0)
    failed: Optional[errors.UnprovenError] = None
    end = time.monotonic() + CONNECT
    for read in reads:
        try:
            read.transfer.abort(max(0.0, end - time.monotonic()))
        except (errors.UnprovenError, errors.WaitTimeout) as e:
            failed = errors.UnprovenError(f"{read.source.what}: {e}")
        except errors.Error:  # it was not posted, or its peer is closed
            pass
    if failed is not None:
        raise failed
