# SPDX-License-Identifier: Apache-2.0
"""LMCache's multiprocess mode over a sluice cache: chunks of KV cache that outlive its server.
docs/lmcache.md has the configuration to paste.

    --l2-adapter '{"type": "native_plugin", "module_path": "sluice.integrations.lmcache",
        "class_name": "SluiceLMCache", "adapter_params": {"address": "unix:/run/kv.sock"}}'

What arrives: names of chunks, `<model>@<rank>@<group>@<hash>[@<salt>]`, which are hashed to keys of
the cache, and where chunks lie in LMCache's own pool (L1). What leaves: completions, and an eventfd
that says when there are some.

LMCache does not tell a native plugin where its pool lies. So the whole mapping of this process in
which a chunk lies is attached, once: the cache reads and writes the pool itself, and nothing is
copied in between. At most MAPPINGS_MAX mappings are attached at a time; the one that was not used
for longest is detached for the next. A mapping must stay until it is detached: LMCache unmaps its
pools after it has closed its adapters.

One thread begins all operations and waits for their completion fds: a batch of chunks of one
length is one operation of the cache. A completion is reported once nothing can write into its
chunks any more, whatever has happened to the cache (_pages.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from .. import errors
from .._buffers import Held
from .._segments import HostMemory
from ..cache import KEY_BYTES
from ._pages import (
    Batch,
    Job,
    Options,
    PageStore,
    Pattern,
    Pool,
    geometry,
    keys_of,
    warn_of_version,
)

log = logging.getLogger("sluice.lmcache")

RUN_WITH = ("0.5.6",)  # versions of LMCache that the tests have run
MAPPINGS_MAX = 16  # that are attached at a time
REQUESTS_MAX = 4096  # that wait for the thread; one more fails at once
SLOTS_MAX = 1 << 32
AGAIN = 1.0  # seconds until the thread looks again for a proof that it has not found

# Of LMCache: the number of a request, whether all went well, why not, and what became of each name.
Completion = Tuple[int, bool, str, Optional[List[bool]]]


@dataclass(eq=False)
class _Mapping:
    begin: int
    end: int
    pool: Pool
    users: int = 0  # jobs that run


@dataclass(eq=False)
class _Request:
    number: int
    what: str  # "get", "set", "exists" or "delete"
    names: list[str]
    chunks: list[Any]  # memoryviews, one a name
    parts: list[tuple[_Mapping, list[int]]] = field(default_factory=list)  # of each job
    batch: Optional[Batch] = None
    fds: set[int] = field(default_factory=set)  # of operations that have not ended


class SluiceLMCache:
    """What LMCache's NativeConnectorL2Adapter calls. LMCache's factory makes it from its
    configuration, and its adapter closes it.
    """

    def __init__(self, **adapter_params: Any) -> None:
        warn_of_version("lmcache", RUN_WITH)
        options = Options.read(adapter_params)
        self._numbers = itertools.count(1)
        self._asked: deque[_Request] = deque()
        self._done: deque[Completion] = deque()
        self._calls = threading.Lock()  # of LMCache: none uses a descriptor that is closed
        self._closing = False
        # What follows is the thread's.
        self._begun: dict[int, _Request] = {}  # by the completion fds of their operations
        self._unproven: list[_Request] = []  # the cache may still reach their chunks
        self._store = PageStore(options, "lmcache")
        self._mappings = _Mappings(self._store, geometry("lmcache 1", options.salt))
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True, name="sluice-lmcache")
        self._thread.start()

    # What LMCache calls.

    def event_fd(self) -> int:
        """An eventfd that is readable while there are completions."""
        return self._fd

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Loads chunks. What lies in the memory of one that was not loaded is undefined."""
        return self._submit("get", keys, memoryviews)

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Stores chunks, whose memory does not change before the completion."""
        return self._submit("set", keys, memoryviews)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Looks for chunks."""
        return self._submit("exists", keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Forgets chunks: of one that is True in the completion no restart finds anything."""
        return self._submit("delete", keys)

    def drain_completions(self) -> list[Completion]:
        """What has ended since the last call; nothing after `close`."""
        with self._calls:
            if self._closing:
                return []
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Ends it, and detaches LMCache's memory. What runs gets no completion any more.
        UnprovenError: the cache may still reach that memory.
        """
        with self._calls:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        try:
            self._store.close()  # which ends what the thread waits for
        finally:
            self._thread.join()
            for fd in [*self._begun, self._fd, self._wake]:
                os.close(fd)
            self._epoll.close()

    def _submit(self, what: str, names: Sequence[str], chunks: Sequence[Any] = ()) -> int:
        request = _Request(next(self._numbers), what, list(names), list(chunks))
        with self._calls:
            if self._closing or len(self._asked) >= REQUESTS_MAX:
                self._complete(request, [False] * len(request.names))
            else:
                self._asked.append(request)
                os.eventfd_write(self._wake, 1)
        return request.number

    def _complete(self, r: _Request, done: list[bool]) -> None:
        well = r.what == "exists" or all(done)
        why = "" if well else (f"{r.what} failed for {done.count(False)} of {len(done)} chunks: "
                               f"`sluice cache stat` counts why")
        self._done.append((r.number, well, why, done))
        if not self._closing:
            os.eventfd_write(self._fd, 1)

    # The thread.

    def _run(self) -> None:
        while not self._closing:
            for fd, _ in self._epoll.poll(self._pause()):
                if fd == self._wake:
                    os.eventfd_read(fd)
                elif fd in self._begun:
                    self._ended(fd)
            while self._asked and not self._closing:
                request = self._asked.popleft()
                try:
                    self._begin(request)
                except Exception:
                    log.exception("a request of LMCache cannot be begun")
                    assert request.batch is None
                    for mapping, _ in request.parts:
                        mapping.users -= 1
                    self._complete(request, [False] * len(request.names))
            while self._pause() == 0:  # the cache has not ended it in time
                for fd in list(next(iter(self._begun.values())).fds):
                    self._ended(fd)
            again, self._unproven = self._unproven, []
            for request in again:
                self._finish(request)

    def _pause(self) -> Optional[float]:
        """Seconds until there is something to do, whatever happens."""
        again = AGAIN if self._unproven else None
        for request in self._begun.values():  # the first must end first
            assert request.batch is not None
            left = max(0.0, request.batch.limit - time.monotonic())
            return left if again is None else min(left, again)
        return again

    def _begin(self, r: _Request) -> None:
        keys = keys_of(r.names)
        if r.what == "exists":
            self._complete(r, self._store.match(self._mappings.none, keys).tolist())
        elif r.what == "delete":
            self._complete(r, [self._store.forget(self._mappings.none, keys)] * len(r.names))
        else:
            r.batch = self._store.begin(self._jobs(r, keys), r.what == "set")
            for _, _, op in r.batch.begun:
                try:
                    fd = os.dup(op.fd)
                except (OSError, errors.Error):  # no descriptor is left, or it has lost its cache
                    continue
                try:
                    self._epoll.register(fd, select.EPOLLIN)
                except OSError:  # the user has max_user_watches
                    os.close(fd)
                    continue
                self._begun[fd] = r
                r.fds.add(fd)
            if not r.fds:
                self._finish(r)

    def _ended(self, fd: int) -> None:
        r = self._begun.pop(fd)
        r.fds.remove(fd)
        self._epoll.unregister(fd)
        os.close(fd)
        if not r.fds:
            self._finish(r)

    def _finish(self, r: _Request) -> None:
        """Waits for what has no descriptor, or is late, and for the proof where it takes one."""
        assert r.batch is not None
        try:
            self._store.finish(r.batch)
        except errors.Error as e:
            log.error("no completion for %d chunks, which the cache may still reach: %s",
                      len(r.names), e)
            self._unproven.append(r)
            return
        done = np.zeros(len(r.names), bool)
        for (mapping, which), job in zip(r.parts, r.batch.jobs):
            mapping.users -= 1
            done[which] = job.done
        self._complete(r, done.tolist())

    def _jobs(self, r: _Request, keys: bytes) -> list[Job]:
        """A job for all chunks of one length in one mapping."""
        parts: dict[tuple[_Mapping, int], tuple[list[int], list[int]]] = {}
        for k, chunk in enumerate(r.chunks[:len(r.names)]):
            held = Held(chunk)
            at, length, writable = held.address, held.length, held.writable
            held.release()  # LMCache keeps the chunk in place until the completion
            if not length or not writable:
                continue
            mapping = self._mappings.around(at, length)
            if mapping is None:
                continue
            which, places = parts.setdefault((mapping, length), ([], []))
            if not which:
                mapping.users += 1
                r.parts.append((mapping, which))
            which.append(k)
            places.append(at)
        rows, jobs = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES), []
        for (mapping, length), (which, places) in parts.items():
            offsets = np.array(places, np.uint64) - np.uint64(mapping.begin)
            base = int(offsets.min())
            offsets -= np.uint64(base)
            # Slots are units of what divides all distances: chunks of several lengths share a pool.
            unit = int(np.gcd.reduce(offsets)) or length
            slots = (offsets // np.uint64(unit)).astype(np.uint32)
            if int(offsets.max()) // unit >= SLOTS_MAX:
                raise errors.ArgumentError(f"chunks lie {int(offsets.max())} bytes apart in units "
                                           f"of {unit} bytes: want a larger align_bytes of L1")
            jobs.append(Job(mapping.pool, rows[which].tobytes(), slots, (base, unit, length)))
        return jobs


class _Mappings:
    """Mappings of this process that are attached to the cache."""

    def __init__(self, store: PageStore, digest: bytes) -> None:
        self._store, self._digest = store, digest
        self._attached: list[_Mapping] = []  # the one that was used last is the last
        one = np.zeros(1, np.uint8)
        self.none = self._pool(one.ctypes.data, 1, one)  # to ask for chunks without any memory

    def _pool(self, at: int, length: int, keep: Any = None) -> Pool:
        pool = Pool("chunks", [HostMemory(at, length)], [Pattern(at, 1, 1)], [self._digest], keep)
        self._store.add(pool)
        return pool

    def around(self, at: int, length: int) -> Optional[_Mapping]:
        """The one in which some bytes lie; None where it cannot be attached."""
        for mapping in reversed(self._attached):
            if mapping.begin <= at and at + length <= mapping.end:
                if mapping is not self._attached[-1]:
                    self._attached.remove(mapping)
                    self._attached.append(mapping)
                return mapping
        span = _writable(at, length)
        if span is None or not self._has_room():
            log.error("a chunk of %d bytes is not cached: %s", length,
                      "it lies in no memory that can be written" if span is None else
                      f"chunks of {MAPPINGS_MAX} other mappings are under way")
            return None
        mapping = _Mapping(*span, self._pool(span[0], span[1] - span[0]))
        self._attached.append(mapping)
        return mapping

    def _has_room(self) -> bool:
        if len(self._attached) < MAPPINGS_MAX:
            return True
        for mapping in self._attached:
            if mapping.users == 0:
                self._attached.remove(mapping)
                self._store.drop(mapping.pool)
                return True
        return False


def _writable(at: int, length: int) -> Optional[tuple[int, int]]:
    """Begin and end of the mapping of this process in which some bytes lie, or of several that
    follow each other.
    """
    begin = end = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(word, 16) for word in line.split(maxsplit=1)[0].split("-"))
            if high <= at:
                continue
            if line.split(maxsplit=2)[1][:2] != "rw" or low > (end or at):
                return None
            begin, end = begin or low, high
            if at + length <= end:
                return begin, end
    return None
