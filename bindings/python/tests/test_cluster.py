# SPDX-License-Identifier: Apache-2.0
"""sluice.cache over the nodes of a cluster, one of which is killed."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import sluice
import sluice.cache as cache_module
from conftest import LIMIT, Nodes
from sluice.cache import Cache, Outcome
from test_cache import BYTES, GEOMETRY, LAYERS, SLOTS, filled, hashes, hint, use

def right(array: Any, want: Any, outcomes: bytes) -> Any:
    """Which blocks were loaded: all bytes of these are as they were stored."""
    done = np.frombuffer(outcomes, np.uint8) == Outcome.DONE
    assert (array[:, :len(done)][:, done] == want[:, :len(done)][:, done]).all()
    return done


def test_blocks(nodes: Nodes) -> None:
    """As in the cache of one node."""
    with nodes.connect() as cache:
        use(cache)
        hint(cache)
        cache.drain(LIMIT)
        errors: list[BaseException] = []

        def other_thread() -> None:  # which makes each call itself
            try:
                assert cache.namespace("model", GEOMETRY).match(hashes(5, 4)).prefix == 4
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(LIMIT)
        assert not thread.is_alive() and not errors


def test_a_question_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its time: nodes that are slower than a slice are no misses."""
    asked: list[int] = []
    monkeypatch.setattr(cache_module, "SLICE_NS", 0)

    def call(ns: int) -> int:
        asked.append(ns)
        return 0

    def ask() -> None:
        cache_module._ask(call, 3.0, whole=True)

    ask()  # in the main thread, which hears interrupts, and in another one
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(LIMIT)
    assert asked == [3_000_000_000] * 2


def test_an_interrupted_call_has_keys_and_a_token_of_its_own(
        nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on when the caller's keys are others, and what it was to return ends."""
    array, keys = filled(), hashes(1, 4)
    with nodes.connect() as cache, cache.attach(array, axis=1) as blocks:
        space = cache.namespace("model", GEOMETRY)
        assert set(space.store(keys, blocks, range(4)).wait(LIMIT)) == {Outcome.DONE}
        going_on: list[Callable[[], None]] = []

        def interrupted(call: Callable[[], None], *_: Any) -> None:
            going_on.append(call)
            raise KeyboardInterrupt

        mine = keys[:1].copy()
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "beside", interrupted)
            with pytest.raises(KeyboardInterrupt):
                space.remove(mine, LIMIT)
            with pytest.raises(KeyboardInterrupt):
                space.match_pinned([keys[1:]], 60, LIMIT)
        mine[:] = keys[1]
        going_on.pop(0)()
        assert [f > 0 for f in space.match(keys, LIMIT).found] == [False, True, True, True]
        closed: list[int] = []
        lib: Any = vars(cache_module)["lib"]
        close = lib.kv_token_close

        def counted(handle: int) -> Any:
            closed.append(handle)
            return close(handle)

        monkeypatch.setattr(lib, "kv_token_close", counted)
        going_on.pop()()
        gc.collect()
        assert len(closed) == 1


def test_connecting_ends_with_the_engine(tmp_path: Path) -> None:
    engine, errors = sluice.Engine("user"), list[BaseException]()

    def connect() -> None:
        try:
            Cache.connect(f"nodes:a=unix:{tmp_path}/none", engine=engine, timeout=None)
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    time.sleep(0.2)  # by then it mostly waits for the node
    engine.close()
    thread.join(LIMIT)
    assert len(errors) == 1 and isinstance(errors[0], (sluice.ClosedError, sluice.HandleError))


def test_a_node_that_is_killed(nodes: Nodes) -> None:
    """Blocks that it had are missing, and back with it. None has other bytes."""
    array, keys = filled(), hashes(1, SLOTS)
    want = array.copy()
    with nodes.connect() as cache, cache.attach(array, axis=1) as blocks:
        space = cache.namespace("model", GEOMETRY)
        assert set(space.store(keys, blocks, range(SLOTS)).wait(LIMIT)) == {Outcome.DONE}
        nodes.kill("b")
        for _ in range(2):  # as it is lost, and once that is known
            array[:] = 0
            done = right(array, want, space.load(keys, blocks, range(SLOTS)).wait(LIMIT))
            assert 0 < done.sum() < SLOTS
            nodes.wait(cache, "serving", "unreachable")
        assert (np.frombuffer(space.match(keys).found, np.uint8) > 0).tolist() == done.tolist()
        said = np.frombuffer(space.store(keys, blocks, range(SLOTS)).wait(LIMIT), np.uint8)
        assert set(said[done]) == {Outcome.KNOWN} and set(said[~done]) == {Outcome.FAILED}
        with pytest.raises(sluice.PeerLostError, match="node b may still have"):
            space.remove(keys[:1])
        nodes.started("b")
        nodes.wait(cache, "serving")
        array[:] = 0
        assert right(array, want, space.load(keys, blocks, range(SLOTS)).wait(LIMIT))[1:].all()


def test_ranks_act_on_one_answer(nodes: Nodes) -> None:
    """A chain of each of two ranks, stored in two parts, and loaded by one token."""
    arrays = [filled(), filled()[::-1].copy()]
    chains = [hashes(1000 * (rank + 1), SLOTS) for rank in range(2)]
    with nodes.connect() as first, nodes.connect() as second:
        spaces = [cache.namespace("model", GEOMETRY) for cache in (first, second)]
        places = [cache.attach(a, axis=1) for cache, a in zip((first, second), arrays)]
        for space, chain, place in zip(spaces, chains, places):
            for begin, some in (0, chain[:9]), (9, chain[9:30]):
                with space.chain(chain[:begin]) as behind:
                    said = behind.store(some, place, range(begin, begin + len(some))).wait(LIMIT)
                    assert set(said) == {Outcome.DONE}
        want = [a.copy() for a in arrays]
        ranks = [space.chain() for space in spaces]
        assert ranks[0].match(chains[0]).prefix == 30
        with ranks[0].match_pinned([chains[0], chains[1][:31]], 60, LIMIT) as token:
            assert token.prefix == 30
            for a in arrays:
                a[:] = 0

            def load(rank: int) -> bytes:
                keys = chains[rank][:token.prefix]
                return ranks[rank].load_pinned(token.data, rank, keys, places[rank],
                                               range(token.prefix)).wait(LIMIT)

            for rank in range(2):
                assert right(arrays[rank], want[rank], load(rank)).all()
            with pytest.raises(sluice.BoundsError):
                ranks[0].load_pinned(token.data, 2, chains[0][:30], places[0], range(30)).wait()
            nodes.kill("b")
            with pytest.raises(sluice.MissingError, match="not there as a whole"):
                load(1)
        with pytest.raises(sluice.CorruptError):
            ranks[0].load_pinned(b"{}", 0, chains[0][:30], places[0], range(30))
        spaces[0].close()
        with pytest.raises(sluice.HandleError):
            ranks[0].match(chains[0])


def test_what_a_cluster_does_not_do(nodes: Nodes, tmp_path: Path) -> None:
    with nodes.connect() as cache, cache.attach(bytearray(LAYERS * BYTES),
                                                block_bytes=BYTES) as blocks:
        space = cache.namespace("model", GEOMETRY)
        calls: list[Callable[[], Any]] = [
            space.clear, lambda: space.replace(hashes(1, 1), blocks, [0]).wait(LIMIT)]
        for call in calls:
            with pytest.raises(sluice.NotSupportedError, match="cluster"):
                call()
        with pytest.raises(sluice.ArgumentError, match="of a cluster the directory"):
            cache.namespace("model", GEOMETRY, priority=1)
    for address, error, why in (
            ("nodes:a", sluice.BoundsError, "NAME=ADDRESS"),
            ("nodes:a=unix:/x,a=unix:/y", sluice.BoundsError, "twice"),
            (f"nodes:a=unix:{tmp_path}/none", sluice.TimeoutError, "no node of the cluster"),
            ("etcd:localhost", sluice.BoundsError, "http://HOST:PORT"),
            ("etcd:http://127.0.0.1:1", sluice.TimeoutError, "does not answer"),
            ("cluster:x", sluice.ArgumentError, "etcd:http://")):
        with pytest.raises(error, match=why):
            Cache.connect(address, timeout=0.1)
