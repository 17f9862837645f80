# SPDX-License-Identifier: Apache-2.0
"""Pages of a serving stack in a sluice cache: how they lie in the stack's memory, and a connection
to the cache whose loss is a miss.

A `PageStore` has one cache: of a server (`sluice cache serve`), or of this process. `add` gives it
a pool of pages: the memory, and a `Pattern` for each kind of run that a page has. A pattern is all
that the cache needs to move any number of pages in one operation, so nothing here looks at single
pages. `match`, `load` and `store` answer with a numpy array of bool, one a page, and raise nothing
where the cache cannot serve: the pages are misses, and a thread connects again.

What must never happen is that a stack uses memory again into which the cache may still write.
So a call that has lost the cache closes the whole session before it answers: its memory is detached
by then, whatever state the server is in (docs/cache.md). Where there is no such proof for
PROOF_LIMIT seconds the call raises UnprovenError: the one error that a stack can see.

Any thread may call anything.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import json
import logging
import threading
import time
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import Any, Callable, Mapping, Optional, Sequence

import numpy as np

from .. import errors
from .._config import Backend, Identity, is_cluster, is_local
from .._segments import HostMemory
from ..cache import KEY_BYTES, Blocks, Cache, Disk, Namespace, Op, Outcome, key_of
from ..engine import Engine

log = logging.getLogger("sluice.pages")

NAME_DIGITS = 64  # of SHA-256 in hex
KEYS_MAX = 65_536  # of one call of the library
PATTERNS_MAX = 16  # of one pool
PAUSE = 1.0  # seconds for which a cache that has not answered is not asked again
RETRY = (0.5, 8.0)  # seconds between attempts to connect: the first, and the longest
CONNECT = 5.0  # seconds, of one attempt
DETACH = 12.0  # seconds beyond its timeout that an operation may take to end
PROOF_LIMIT = 60.0  # seconds


@dataclass(frozen=True)
class Options:
    """What a configuration says, by the names that it uses. Either `address` or `path` is given."""

    # "unix:/path" or "tcp:host:port" of `sluice cache serve`, or "etcd:URL,..." or
    # "nodes:a=unix:/path,..." of a cluster
    address: str = ""
    path: str = ""  # a cache of this process alone, in a file on /dev/shm
    bytes: int = 0  # of that
    disks: tuple[Mapping[str, Any], ...] = ()  # behind that: path, size and what else Disk has
    namespace: str = ""  # the default is the model's name
    salt: str = ""  # pages of another salt are not found
    timeout: float = 5.0  # seconds, of one load or store
    lookup_timeout: float = 0.5  # seconds, of one lookup
    start_timeout: float = 10.0  # seconds, for the first connection
    certificate: str = ""  # over tcp: files in PEM
    key: str = ""
    authority: str = ""
    plaintext: bool = False  # over tcp, on a network that is trusted
    listen: str = ""  # over tcp: this host's address, "10.0.0.1:0"

    @classmethod
    def read(cls, said: Any) -> Options:
        """ArgumentError says which word is wrong, and what is wanted."""
        if not isinstance(said, Mapping):
            raise errors.ArgumentError(
                f'the configuration of sluice is {said!r}: want a table such as {{"address": '
                f'"unix:/run/sluice-cache.sock"}}')
        known = {f.name: f.default for f in fields(cls)}
        for name, value in said.items():
            if name not in known:
                raise errors.ArgumentError(f"sluice has no option {name!r}: it has "
                                           f"{', '.join(known)}")
            want: Any = type(known[name])
            if want is tuple and isinstance(value, list):
                continue
            if want is float and type(value) is int:
                continue
            if type(value) is not want:
                raise errors.ArgumentError(f"sluice's option {name!r} is {value!r}: want a "
                                           f"{want.__name__}")
        words: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items()}
        o = cls(**words)
        if bool(o.address) == bool(o.path):
            raise errors.ArgumentError(
                'sluice wants "address", of a `sluice cache serve`, or "path" and "bytes", for a '
                'cache of this process alone')
        if o.path and o.bytes <= 0:
            raise errors.ArgumentError('sluice wants "bytes" beside "path"')
        if not 0 < min(o.timeout, o.lookup_timeout, o.start_timeout):
            raise errors.ArgumentError("sluice's timeouts are seconds, above 0")
        return o

    def open(self, timeout: float) -> tuple[Cache, Optional[Engine]]:
        """The cache, and the engine to be closed behind it."""
        if self.path:
            return Cache.open(self.path, self.bytes, disks=[Disk(**d) for d in self.disks],
                              timeout=timeout), None
        if is_local(self.address):
            return Cache.connect(self.address, timeout=timeout), None
        identity = None
        if self.certificate:
            identity = Identity(self.certificate, self.key, self.authority)
        how: dict[str, Any] = {} if identity is None else identity._asdict()
        tcp = Backend("tcp", listen=self.listen or "0.0.0.0:0", plaintext=self.plaintext, **how)
        engine = Engine("pages", ["shm", Backend("rdma", optional=True), tcp], identity=identity,
                        plaintext=self.plaintext)
        try:
            return Cache.connect(self.address, engine=engine, timeout=timeout), engine
        except BaseException:
            engine.close()
            raise


@dataclass(frozen=True)
class Pattern:
    """Where pages lie: page k begins `base + k * stride`, and is the runs of a nest of loops."""

    base: int  # an address
    stride: int  # bytes
    run: int  # bytes that follow each other
    loops: tuple[tuple[int, int], ...] = ()  # outermost first: how many, and bytes apart

    @property
    def page_bytes(self) -> int:
        n = self.run
        for count, _ in self.loops:
            n *= count
        return n


Addresses = Callable[[int], "tuple[Sequence[int], Sequence[int]]"]


def patterns(of_page: Addresses, pages: int, region_of: Callable[[int], int]) -> list[Pattern]:
    """Finds how pages lie from what a stack says of a few of them: `of_page` has the addresses and
    the lengths of the runs of one page, `region_of` which memory an address is in. Runs of one
    memory, length and stride become one pattern. ArgumentError: pages do not lie evenly.
    """
    first, sizes = of_page(0)
    if not first or len(first) != len(sizes):
        raise errors.ArgumentError(f"a page has {len(first)} addresses and {len(sizes)} lengths")
    second = of_page(1)[0] if pages > 1 else [a + n for a, n in zip(first, sizes)]
    strides = [b - a for a, b in zip(first, second)]
    for page in {pages // 2, pages - 1}:
        if list(of_page(page)[0]) != [a + page * by for a, by in zip(first, strides)]:
            raise errors.ArgumentError(
                f"page {page} does not lie {page} times as far behind page 0 as page 1 does")
    kinds = [(region_of(a), n, by) for a, n, by in zip(first, sizes, strides)]
    found: list[Pattern] = []
    begin = 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[begin]:
            found += _fit(first[begin:end], sizes[begin], strides[begin])
            begin = end
    if len(found) > PATTERNS_MAX:
        raise errors.ArgumentError(f"the runs of a page make {len(found)} patterns: at most "
                                   f"{PATTERNS_MAX}")
    return found


def _fit(at: Sequence[int], run: int, stride: int) -> list[Pattern]:
    loops = _nest(at)
    if loops and loops[-1][1] == run:  # the innermost runs touch each other
        loops, run = loops[:-1], run * loops[-1][0]
    if loops is None or len(loops) > 3:
        return [Pattern(a, stride, run) for a in at]
    return [Pattern(at[0], stride, run, loops)]


def _nest(at: Sequence[int]) -> Optional[tuple[tuple[int, int], ...]]:
    """Addresses as a nest of loops; None where they are none."""
    if len(at) == 1:
        return ()
    by, n = at[1] - at[0], 2
    while n < len(at) and at[n] - at[n - 1] == by:
        n += 1
    if by <= 0 or len(at) % n or any(at[k] != at[k - k % n] + k % n * by for k in range(len(at))):
        return None
    outer = _nest(at[::n])
    return None if outer is None else (*outer, (n, by))


def keys_of(names: Sequence[str]) -> bytes:
    """The keys of pages whose names are SHA-256 in hex; other names are hashed."""
    n, text = len(names), ("\n".join(names) + "\n").encode()
    if len(text) == (NAME_DIGITS + 1) * n:
        rows = np.frombuffer(text, np.uint8).reshape(n, -1)
        # Each name has its length where all ends of lines are in one column.
        if (rows[:, NAME_DIGITS] == ord("\n")).all():
            digests = _unhex(rows[:, :NAME_DIGITS].tobytes())
            if digests:
                return np.frombuffer(digests, np.uint8).reshape(n, -1)[:, :KEY_BYTES].tobytes()
    return b"".join([_key(name.encode()) for name in names])


def _key(name: bytes) -> bytes:
    digest = _unhex(name) if len(name) == NAME_DIGITS else b""
    return digest[:KEY_BYTES] or key_of(name)


def _unhex(digits: bytes) -> bytes:
    """Nothing, where it is not hex."""
    try:
        return binascii.unhexlify(digits)
    except binascii.Error:
        return b""


@dataclass(eq=False)
class Pool:
    """Pages of one kind: the memory that they lie in, and where each kind of run lies there.
    Without a memory it is only asked about.
    """

    name: str
    memories: list[HostMemory]
    patterns: list[Pattern]
    geometries: list[bytes]  # of each pattern: what two processes must agree on to share it
    keep: Any = None  # a reference by which the memory lives as long as the pool

    @property
    def page_bytes(self) -> int:
        return sum(p.page_bytes for p in self.patterns)


def warn_of_version(package: str, run_with: Sequence[str]) -> None:
    """Says so where another version of a stack is there than those that the tests have run."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    if version not in run_with:
        log.warning("%s %s was not run with this version of sluice, but %s", package, version,
                    ", ".join(run_with))


def geometry(*what: Any) -> bytes:
    """The digest of whatever decides which bytes a page has."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).digest()


class _Session:
    """One connection: the cache, what is attached to it, and the pools' namespaces."""

    def __init__(self, options: Options, namespace: str, pools: Sequence[Pool],
                 timeout: float) -> None:
        self._namespace, self._attached = namespace, dict[tuple[int, int], Blocks]()
        self.parts: dict[Pool, list[tuple[Namespace, Any]]] = {}
        self._ending = threading.Lock()
        self._ended = False
        self.cache, self._engine = options.open(timeout)
        try:
            for pool in pools:
                self.attach(pool)
        except BaseException:
            self.end()
            raise

    def attach(self, pool: Pool) -> None:
        """Registers the memory of a pool, which other pools may have registered before."""
        for m in pool.memories:
            if (m.address, m.length) not in self._attached:
                self._attached[m.address, m.length] = self.cache.attach(m, block_bytes=1)
        places: list[Any] = []
        for pattern in pool.patterns:
            m = next(m for m in pool.memories if _within(pattern.base, m))
            places.append(self._attached[m.address, m.length].place(
                pattern.base - m.address, pattern.stride, pattern.run, pattern.loops))
        self.parts[pool] = [
            (self.cache.namespace(self._namespace, digest), place) for digest, place in zip(
                pool.geometries, places or [None] * len(pool.geometries))]

    def detach(self, pool: Pool) -> None:
        """Returns with the proof that the cache reaches no memory that this pool alone has."""
        parts = self.parts.pop(pool, [])
        kept = {(m.address, m.length) for other in self.parts for m in other.memories}
        for at in {(m.address, m.length) for m in pool.memories} - kept:
            if at in self._attached:
                self._attached[at].close()
                del self._attached[at]
        for space, _ in parts:
            with contextlib.suppress(errors.BusyError):  # it is asked: it ends with the cache
                space.close()

    def end(self) -> None:
        """Returns with the proof that the cache reaches no memory any more."""
        limit = time.monotonic() + PROOF_LIMIT
        with self._ending:  # who comes later waits for the proof, too
            while not self._ended:
                try:
                    self.cache.close()
                    if self._engine is not None:
                        self._engine.close()
                    self._ended = True
                except errors.UnprovenError:
                    if time.monotonic() > limit:
                        raise
                    log.warning("the cache may still reach memory of pages; waiting for the proof "
                                "that it does not")


def _within(address: int, memory: HostMemory) -> bool:
    return memory.address <= address < memory.address + memory.length


_FOUND = np.zeros(256, bool)
_FOUND[1:4] = True  # Found.IN_MEMORY, ON_DISK, or both
_LOADED = np.zeros(256, bool)
_LOADED[Outcome.DONE] = True
# What another operation stores at this moment is as good: should that fail, a load says so.
_STORED = np.zeros(256, bool)
_STORED[[Outcome.DONE, Outcome.KNOWN, Outcome.PENDING]] = True


@dataclass
class Job:
    """Pages of one pool to be loaded or stored, and which of them were."""

    pool: Pool
    keys: bytes
    slots: Any  # numpy.uint32, one a key
    # Where the slots lie in a pool whose memory is one range of bytes: the first one's offset, how
    # far they lie apart, and the length of a page.
    place: Optional[tuple[int, int, int]] = None
    done: Any = field(init=False)

    def __post_init__(self) -> None:
        self.done = np.zeros(len(self.slots), bool)


@dataclass(eq=False)
class Batch:
    """Jobs that were begun at once. What they move ends before `PageStore.finish` returns."""

    jobs: Sequence[Job]
    good: Any  # by outcome, whether a page is done
    session: Optional[_Session]
    begun: list[tuple[Job, slice, Op]] = field(default_factory=list)
    failed: list[errors.Error] = field(default_factory=list)
    limit: float = 0.0  # the moment by which all operations have ended, or the cache is lost

    def ended(self) -> Optional[bool]:
        """None while something moves; then whether `finish` returns at once. It does not where an
        operation has failed: the proof that nothing moves any more may take long.
        """
        try:
            outcomes = [op.wait(0) for _, _, op in self.begun]
        except errors.WaitTimeout:
            return None if time.monotonic() < self.limit else False
        except errors.Error:
            return False
        while outcomes:  # taken now: the session may be lost before `finish` is called
            self.take(outcomes.pop())
        return not self.failed

    def take(self, outcomes: bytes) -> None:
        """Notes what became of the last operation, which has ended or is given up."""
        job, some, op = self.begun.pop()
        job.done[some] &= self.good[np.frombuffer(outcomes, np.uint8)]
        op.close()


class PageStore:
    """The pages of one process. Close it."""

    def __init__(self, options: Options, namespace: str) -> None:
        self._options, self._namespace = options, options.namespace or namespace
        self._closing, self._there = threading.Event(), threading.Event()
        self._resume = 0.0  # until this moment the cache is not asked
        self._warned: set[str] = set()
        self._lock = threading.Lock()  # guards what follows
        self._pools: list[Pool] = []
        self._session: Optional[_Session] = None
        self._lost: list[_Session] = []  # without the proof that they reach no memory
        self._thread: Optional[threading.Thread] = None
        try:
            self._session = _Session(options, self._namespace, [], options.start_timeout)
            self._there.set()
        except (OSError, errors.NoRouteError) as e:
            if options.path:
                raise
            log.warning("no cache at %s yet: all pages are misses until there is: %s",
                        options.address, e)
            self._connect_again()

    def wait(self, timeout: float) -> bool:
        """Waits until it is connected, at most so many seconds."""
        return self._there.wait(timeout)

    def add(self, pool: Pool) -> None:
        """Attaches the memory of a pool, now and after each reconnection."""
        with self._lock:
            self._pools.append(pool)
            session = self._session
            if session is None:
                return
            try:
                session.attach(pool)
                return
            except (errors.ArgumentError, errors.BoundsError, errors.NotSupportedError):
                self._pools.remove(pool)
                session.detach(pool)  # what of it was attached
                raise
            except errors.Error as e:
                error = e
        self._lose(session, error)

    def drop(self, pool: Pool) -> None:
        """Detaches the memory of a pool, which no operation uses. What no other pool has of it is
        the program's again when this returns.
        """
        error: Optional[errors.Error] = None
        with self._lock:
            if pool in self._pools:  # else a call before this one got no proof
                self._pools.remove(pool)
            session, lost = self._session, list(self._lost)
            if session is not None:
                try:
                    session.detach(pool)
                except errors.Error as e:
                    error = e
        self._prove(*lost)
        if session is not None and error is not None:
            self._lose(session, error)

    def match(self, pool: Pool, keys: bytes) -> Any:
        """Which pages the cache has whole. Behind 65,536 pages with a gap it looks at no more."""
        n = len(keys) // KEY_BYTES
        found = np.zeros(n, bool)
        session = self._usable()
        parts = [] if session is None else session.parts.get(pool, [])
        if session is None or not parts:
            return found
        try:
            for begin in range(0, n, KEYS_MAX):
                some = keys[begin * KEY_BYTES:(begin + KEYS_MAX) * KEY_BYTES]
                there = np.ones(len(some) // KEY_BYTES, bool)
                for space, _ in parts:
                    match = space.match(some, self._options.lookup_timeout)
                    there &= _FOUND[np.frombuffer(match.found, np.uint8)]
                found[begin:begin + KEYS_MAX] = there
                if not there.all():
                    break
        except errors.Error as e:
            self._unanswered(session, e)
        return found

    def load(self, jobs: Sequence[Job]) -> None:
        """Copies pages into slots, all jobs at once, and says in `Job.done` which are there. What
        lies in the slots of the others is undefined, and nothing writes there any more.
        """
        self._move(jobs, False)

    def store(self, jobs: Sequence[Job]) -> None:
        """Copies pages from slots; those that the cache has already are done."""
        self._move(jobs, True)

    def clear(self) -> None:
        """Forgets all pages of the pools. It raises where it could not: some may be left."""
        session = self._usable()
        if session is None:
            raise errors.UnavailableError("the cache is not there now: nothing was cleared")
        for parts in list(session.parts.values()):
            for space, _ in parts:
                space.clear()

    def hint(self, pool: Pool, envelope: bytes) -> list[dict[str, Any]]:
        """Gives the hints of an envelope, and says what became of each action; nothing where the
        cache is not there.
        """
        session = self._usable()
        told: list[dict[str, Any]] = []
        if session is None:
            return told
        try:
            for space, _ in session.parts.get(pool, []):
                told += space.hint_envelope(envelope, self._options.lookup_timeout)
        except errors.Error as e:
            self._unanswered(session, e)
        return told

    def forget(self, pool: Pool, keys: bytes) -> bool:
        """Forgets pages of a pool: True where no restart finds them any more."""
        session = self._usable()
        parts = [] if session is None else session.parts.get(pool, [])
        if session is None or not parts:
            return False
        try:
            for begin in range(0, len(keys), KEYS_MAX * KEY_BYTES):
                for space, _ in parts:
                    space.remove(keys[begin:begin + KEYS_MAX * KEY_BYTES], self._options.timeout)
            return True
        except errors.Error as e:
            self._unanswered(session, e)
            return False

    def _move(self, jobs: Sequence[Job], store: bool) -> None:
        self.finish(self.begin(jobs, store))

    def begin(self, jobs: Sequence[Job], store: bool) -> Batch:
        """Begins an operation for each pattern of each job, and returns at once."""
        session = self._usable()
        batch = Batch(jobs, _STORED if store else _LOADED, session)
        timeout = self._options.timeout
        for job in jobs if session is not None else []:
            assert session is not None
            parts = session.parts.get(job.pool, [])
            job.done[:] = bool(parts)
            for begin in range(0, len(job.slots), KEYS_MAX):
                some = slice(begin, begin + KEYS_MAX)
                keys = job.keys[begin * KEY_BYTES:(begin + KEYS_MAX) * KEY_BYTES]
                for space, blocks in parts:
                    try:
                        at = blocks if job.place is None else blocks.place(*job.place)
                        move = space.store if store else space.load
                        batch.begun.append((job, some, move(keys, at, job.slots[some], timeout)))
                    except errors.Error as e:
                        job.done[some] = False
                        batch.failed.append(e)
        batch.limit = time.monotonic() + timeout + DETACH
        return batch

    def finish(self, batch: Batch) -> None:
        """Waits for all operations of a batch: when this returns, none of them moves a byte any
        more, and `Job.done` has what is there. After UnprovenError call it again.
        """
        while batch.begun:
            op = batch.begun[-1][2]
            try:
                outcomes = op.wait(max(0.0, batch.limit - time.monotonic()))
            except errors.Error as e:
                batch.failed.append(e)
                outcomes = _outcomes_of(op)
            batch.take(outcomes)
        while batch.failed:
            assert batch.session is not None
            self._failed(batch.session, batch.failed[-1])
            batch.failed.pop()

    def _usable(self) -> Optional[_Session]:
        return None if time.monotonic() < self._resume else self._session

    def _unanswered(self, session: _Session, error: errors.Error) -> None:
        """As `_failed`, of a call without memory: it does not raise that a proof is missing, which
        calls with memory wait for."""
        try:
            self._failed(session, error)
        except errors.Error as e:
            log.error("a lost session to the cache has not ended: %s", e)

    def _failed(self, session: _Session, error: errors.Error) -> None:
        """Decides what an error means for the next calls, and for memory. The nodes of a cluster
        are lost, and come back, one by one, and without this.
        """
        of_nodes = is_cluster(self._options.address) and not isinstance(
            error, (errors.UnprovenError, errors.ClosedError))
        if isinstance(error, errors.BusyError):  # the disks do not keep up: pages are left out
            return
        if isinstance(error, errors.TimeoutError) and not (
                of_nodes or isinstance(error, errors.WaitTimeout)):
            self._resume = time.monotonic() + PAUSE
            return
        if of_nodes or isinstance(error, (errors.ArgumentError, errors.BoundsError,
                                          errors.FullError, errors.NotSupportedError)):
            if str(error) not in self._warned and len(self._warned) < 64:
                self._warned.add(str(error))
                log.error("pages are not cached: %s", error)
            return
        self._lose(session, error)

    def _lose(self, session: _Session, error: errors.Error) -> None:
        """Ends a session, and has a thread connect again."""
        with self._lock:
            if self._session is session:
                self._session = None
                self._there.clear()
                if not self._closing.is_set():
                    log.warning("the cache at %s is lost: all pages are misses until it is back: "
                                "%s", self._options.address or self._options.path, error)
                    self._connect_again()
            if session not in self._lost:
                self._lost.append(session)
        self._prove(session)

    def _prove(self, *sessions: _Session) -> None:
        """Returns with the proof that they reach no memory any more."""
        for session in sessions:
            session.end()
            with self._lock:
                if session in self._lost:
                    self._lost.remove(session)

    def prove(self) -> None:
        """Returns with the proof that no session which was lost reaches memory any more."""
        with self._lock:
            lost = list(self._lost)
        self._prove(*lost)

    def _connect_again(self) -> None:
        """Preconditions: _lock is held, or nobody else has this yet; there is no session."""
        self._thread = threading.Thread(target=self._reconnect, daemon=True,
                                        name="sluice-pages-connect")
        self._thread.start()

    def _reconnect(self) -> None:
        pause, longest = RETRY
        while not self._closing.wait(pause):
            pause = min(2 * pause, longest)
            with self._lock:
                pools = list(self._pools)
            try:
                session = _Session(self._options, self._namespace, pools, CONNECT)
            except (errors.Error, OSError) as e:  # a certificate that is renewed is not there
                log.debug("no cache yet: %s", e)
                continue
            with self._lock:
                try:
                    for pool in self._pools:
                        if pool not in session.parts:
                            session.attach(pool)
                    for pool in session.parts.keys() - set(self._pools):
                        session.detach(pool)
                except errors.Error as e:
                    log.debug("no cache yet: %s", e)
                else:
                    if not self._closing.is_set():
                        self._session = session
                        self._there.set()
                        log.warning("the cache at %s is back",
                                    self._options.address or self._options.path)
                        return
            try:
                session.end()
            except errors.Error as e:  # nothing was asked of it, so nothing of it moves
                log.warning("a connection to the cache did not end: %s", e)

    def close(self) -> None:
        """Ends the connection. UnprovenError: the cache may still reach the pools' memory."""
        self._closing.set()
        with self._lock:
            if self._session is not None:
                self._lost.append(self._session)
                self._session = None
            thread = self._thread
        if thread is not None:
            thread.join(2 * CONNECT)
        self._prove(*self._lost)  # also what other threads are ending, or could not end


def _outcomes_of(op: Op) -> bytes:
    """The outcomes of an operation that has failed; UNDONE for each key where it has none yet."""
    try:
        return op.outcomes
    except errors.Error:  # its cache was closed
        return bytes(op.keys)
