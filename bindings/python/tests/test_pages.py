# SPDX-License-Identifier: Apache-2.0
"""Pages of a serving stack (sluice.integrations._pages): how they lie, what a configuration may
say, and a cache that goes and comes. What needs SGLang's classes is in stacks/test_hicache.py.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
from conftest import LIMIT, Nodes, go_on, stop, until
from sluice import Backend, Engine, errors
from sluice._segments import HostMemory
from sluice.cache import Cache, Namespace
from sluice.integrations import _pages
from sluice.integrations._pages import (
    Job,
    Options,
    PageStore,
    Pattern,
    Pool,
    geometry,
    keys_of,
    patterns,
)

Start = Callable[..., "subprocess.Popen[str]"]
LAYERS, SLOTS, RUN = 3, 16, 64
PAGE_BYTES = 2 * LAYERS * RUN


def names(n: int, first: int = 0) -> list[str]:
    return [hashlib.sha256(b"%d" % k).hexdigest() for k in range(first, first + n)]


def lie(*offsets: tuple[int, int]) -> Callable[[int], Any]:
    """Pages whose runs of 8 bytes begin at an offset, and lie a stride behind that of the page
    before.
    """
    return lambda page: ([at + page * by for at, by in offsets], [8] * len(offsets))


def test_how_pages_lie() -> None:
    one: Callable[[int], int] = lambda _: 0
    assert patterns(lie((100, 8)), 4, one) == [Pattern(100, 8, 8)]
    # Keys and values of layers: K0, V0, K1, V1, ...
    layers = lie(*[(1000 * half + 100 * layer, 8) for layer in range(4) for half in range(2)])
    assert patterns(layers, 4, one) == [Pattern(0, 8, 8, ((4, 100), (2, 1000)))]
    # Runs that touch each other are one.
    assert patterns(lie(*[(8 * k, 64) for k in range(8)]), 4, one) == [Pattern(0, 64, 64)]
    # Memory of its own, or another stride, is a pattern of its own.
    assert patterns(lie((0, 8), (500, 8)), 4, lambda at: at // 500) == [Pattern(0, 8, 8),
                                                                       Pattern(500, 8, 8)]
    assert patterns(lie((0, 8), (500, 16)), 4, one) == [Pattern(0, 8, 8), Pattern(500, 16, 8)]
    # What is no nest is moved run by run; a backward step is none.
    assert patterns(lie((0, 8), (900, 8), (500, 8)), 4, one) == [
        Pattern(0, 8, 8), Pattern(900, 8, 8), Pattern(500, 8, 8)]
    assert patterns(lie((0, 8)), 1, one) == [Pattern(0, 8, 8)]
    uneven: Callable[[int], Any] = lambda page: ([page * page * 8], [8])
    with pytest.raises(errors.ArgumentError, match="does not lie"):
        patterns(uneven, 9, one)


def test_keys() -> None:
    digests = names(3)
    assert keys_of(digests) == b"".join(bytes.fromhex(d)[:16] for d in digests)
    for odd in ("short", "x" * 64, " " * 64, digests[0][:62] + "  "):
        mixed = keys_of([digests[0], odd])
        assert mixed[:16] == bytes.fromhex(digests[0])[:16]
        assert mixed[16:] == hashlib.sha256(odd.encode()).digest()[:16]
    shifted = keys_of([digests[0] + digests[1][:2], digests[1][2:]])  # 66 and 62 digits
    assert shifted[:16] == hashlib.sha256((digests[0] + digests[1][:2]).encode()).digest()[:16]
    assert keys_of([]) == b""


def test_what_a_configuration_may_say() -> None:
    assert Options.read({"address": "unix:/x", "timeout": 2}).timeout == 2
    for said, why in ((None, "table"), ({}, "address"), ({"adress": "x"}, "adress"),
                      ({"address": 3}, "want a str"), ({"path": "/x"}, "bytes"),
                      ({"address": "unix:/x", "path": "/x", "bytes": 1}, "address"),
                      ({"address": "unix:/x", "timeout": 0}, "timeouts")):
        with pytest.raises(errors.ArgumentError, match=why):
            Options.read(said)


class Made:
    """A pool as layer_first has it: a page is a run in each half of each layer."""

    def __init__(self) -> None:
        self.array = np.random.default_rng(3).integers(0, 256, (2, LAYERS, SLOTS, RUN), np.uint8)
        at, half, layer, page, _ = self.array.ctypes.data, *self.array.strides
        self.pool = Pool("kv", [HostMemory(at, self.array.nbytes)],
                         [Pattern(at, page, RUN, ((LAYERS, layer), (2, half)))],
                         [geometry("made")], keep=self.array)

    def job(self, keys: list[str], slots: list[int]) -> Job:
        return Job(self.pool, keys_of(keys), np.array(slots, np.uint32))


def move(call: Callable[[list[Job]], None], job: Job) -> list[bool]:
    call([job])
    done: list[bool] = job.done.tolist()
    return done


@pytest.fixture
def served(tmp_path: Path, start: Start) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    def serve() -> "subprocess.Popen[str]":
        child = start("cache_server.py", str(tmp_path))
        assert child.stdout is not None and child.stdout.readline() == "serves\n"
        return child

    yield serve


def test_a_cache_that_is_killed_is_a_miss(
    tmp_path: Path, served: Callable[[], "subprocess.Popen[str]"]
) -> None:
    server, made = served(), Made()
    store = PageStore(Options(address=f"unix:{tmp_path}/socket", timeout=LIMIT,
                              lookup_timeout=LIMIT, start_timeout=LIMIT), "model")
    try:
        store.add(made.pool)
        keys = names(4)
        assert made.pool.page_bytes == PAGE_BYTES
        assert move(store.store, made.job(keys, [2, 9, 4, 7])) == [True] * 4
        assert store.match(made.pool, keys_of([*keys, *names(1, 9)])).tolist() == [True] * 4 + [
            False]
        want = made.array[:, :, [2, 9, 4, 7]].copy()
        server.kill()
        server.wait()
        until(lambda: not store.match(made.pool, keys_of(keys)).any())
        assert move(store.load, made.job(keys, [0, 1, 2, 3])) == [False] * 4
        assert move(store.store, made.job(names(1, 50), [0])) == [False]
        served()
        until(lambda: store.match(made.pool, keys_of(keys)).all())
        made.array[:] = 0
        assert move(store.load, made.job(keys, [0, 1, 2, 3])) == [True] * 4
        assert np.array_equal(made.array[:, :, :4], want) and not made.array[:, :, 4:].any()
    finally:
        store.close()


def test_a_node_of_a_cluster_that_is_killed_loses_no_other(nodes: Nodes) -> None:
    """Its pages are misses, and the connection to the others stays, whatever is asked."""
    made, keys = Made(), names(SLOTS)
    store = PageStore(Options(address=nodes.address, timeout=LIMIT, lookup_timeout=LIMIT,
                              start_timeout=LIMIT), "model")
    try:
        store.add(made.pool)
        want, slots = made.array.copy(), list(range(SLOTS))
        until(lambda: all(move(store.store, made.job(keys, slots))))  # both are reached
        session = store._session
        nodes.kill("b")
        made.array[:] = 0
        done = move(store.load, made.job(keys, slots))
        assert 0 < sum(done) < SLOTS
        assert np.array_equal(made.array[:, :, done], want[:, :, done])
        assert store.match(made.pool, keys_of(keys)).tolist() == done
        assert not store.forget(made.pool, keys_of(keys[:1]))
        with pytest.raises(errors.NotSupportedError):
            store.clear()
        nodes.started("b")
        until(lambda: store.forget(made.pool, keys_of(keys[:1])))
        assert store.match(made.pool, keys_of(keys)).tolist() == [False] + [True] * (SLOTS - 1)
        assert store._session is session
    finally:
        store.close()


def test_connecting_goes_on_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(*_: Any) -> Any:
        tries.append(1)
        raise FileNotFoundError("the certificate")

    monkeypatch.setattr(Options, "open", refuse)
    monkeypatch.setattr(_pages, "RETRY", (0.01, 0.01))
    store = PageStore(Options(address="unix:/nowhere"), "model")
    try:
        until(lambda: len(tries) > 3)
    finally:
        store.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[PageStore]:
    store = PageStore(Options(path=f"{tmp_path}/memory", bytes=8 << 20, timeout=LIMIT), "model")
    yield store
    store.close()


def test_what_has_ended_is_not_lost(own: PageStore) -> None:
    """Another thread loses the session after a batch has ended, and before it is finished."""
    made = Made()
    own.add(made.pool)
    job = made.job(names(2), [2, 3])
    batch = own.begin([job], True)
    until(lambda: batch.ended() is not None)
    assert batch.session is not None
    batch.session.end()
    own.finish(batch)
    assert job.done.all() and not batch.begun and own._session is batch.session


@pytest.mark.parametrize("close", [True, False])
def test_memory_is_given_back_with_the_proof_alone(
        own: PageStore, monkeypatch: pytest.MonkeyPatch, close: bool) -> None:
    """A session that another thread is ending, or could not end, is not forgotten."""
    made, session = Made(), own._session
    assert session is not None
    own.add(made.pool)
    monkeypatch.setattr(own, "_connect_again", lambda: None)
    end, fails = session.end, [True, True]

    def prove() -> None:
        if fails and fails.pop():
            raise errors.UnprovenError("it may still reach memory")
        end()

    monkeypatch.setattr(session, "end", prove)

    def lost(*_: Any) -> Any:
        raise errors.HandleError("it is gone")

    monkeypatch.setattr(Namespace, "match", lost)
    assert not own.match(made.pool, keys_of(names(2))).any()  # a question is a miss
    assert own._session is None and not session._ended
    give_back = own.close if close else lambda: own.drop(made.pool)
    with pytest.raises(errors.UnprovenError):
        give_back()
    if close:
        give_back()
    else:
        own.close()
    assert session._ended and not own._lost


def test_pools_that_share_memory(own: PageStore) -> None:
    one, session = Made(), own._session
    other = Pool("other", one.pool.memories, one.pool.patterns, [geometry("other")])
    assert session is not None
    own.add(one.pool)
    own.add(other)
    own.drop(other)
    assert move(own.store, one.job(names(1), [2])) == [True]
    array = np.zeros(RUN, np.uint8)
    at = array.ctypes.data
    bad = Pool("bad", [HostMemory(at, RUN)], [Pattern(at, 1, 1, ((1, 1),) * 4)], [geometry("bad")])
    with pytest.raises(errors.ArgumentError):
        own.add(bad)
    own.drop(one.pool)
    assert not session._attached


def test_pages_that_a_cache_cannot_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A page longer than an extent is left out, and the log says so once; others go on."""
    store = PageStore(Options(path=f"{tmp_path}/memory", bytes=8 << 20, timeout=LIMIT,
                              lookup_timeout=LIMIT, start_timeout=LIMIT), "model")
    try:
        made, long = Made(), np.zeros(12 << 20, np.uint8)
        at = long.ctypes.data
        pool = Pool("long", [HostMemory(at, long.nbytes)], [Pattern(at, 6 << 20, 6 << 20)],
                    [geometry("long")], keep=long)
        store.add(made.pool)
        store.add(pool)
        for _ in range(2):
            job = Job(pool, keys_of(names(2)), np.arange(2, dtype=np.uint32))
            assert move(store.store, job) == [False] * 2
        assert move(store.store, made.job(names(2), [0, 1])) == [True] * 2
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert "extent" in caplog.text
    finally:
        store.close()


def test_a_cache_of_another_host(tmp_path: Path) -> None:
    """By tcp; the address is of this host, whose bytes go by shared memory all the same."""
    made = Made()
    with Engine("node", ["shm", Backend("tcp", listen="127.0.0.1:0", plaintext=True)],
                plaintext=True) as node:
        with Cache.open(f"{tmp_path}/memory", 8 << 20, engine=node, timeout=LIMIT) as cache:
            store = PageStore(Options(address=cache.serve("tcp:127.0.0.1:0").address,
                                      plaintext=True, listen="127.0.0.1:0", timeout=LIMIT,
                                      lookup_timeout=LIMIT, start_timeout=LIMIT), "model")
            try:
                store.add(made.pool)
                assert move(store.store, made.job(names(2), [2, 3])) == [True] * 2
                want = made.array[:, :, 2:4].copy()
                assert move(store.load, made.job(names(2), [0, 1])) == [True] * 2
                assert np.array_equal(made.array[:, :, :2], want)
                with pytest.raises(errors.OperatingSystemError, match="permission"):
                    store.clear()  # the cache lists nothing to other hosts
                assert store.match(made.pool, keys_of(names(2))).all()
            finally:
                store.close()


@pytest.mark.timed
def test_a_cache_that_stands_still_is_a_miss_and_writes_nothing_afterwards(
    tmp_path: Path, served: Callable[[], "subprocess.Popen[str]"]
) -> None:
    server, made = served(), Made()
    store = PageStore(Options(address=f"unix:{tmp_path}/socket", timeout=1.0, lookup_timeout=1.0,
                              start_timeout=LIMIT), "model")
    try:
        store.add(made.pool)
        until(lambda: all(move(store.store, made.job(names(2), [2, 3]))))
        session = store._session
        assert session is not None
        stop(server)
        assert move(store.load, made.job(names(2), [0, 1])) == [False] * 2
        assert session._ended  # with the proof that docs/cache.md promises of Close
        made.array[:, :, :2] = 0  # the stack uses the pages again
        go_on(server)
        until(lambda: store.match(made.pool, keys_of(names(2))).all())
        assert not made.array[:, :, :2].any()
    finally:
        store.close()
