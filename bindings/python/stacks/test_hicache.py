# SPDX-License-Identifier: Apache-2.0

"""SGLang's HiCache over sluice.cache: its factory, its controller's steps and its host pools, from
its wheel, unpatched.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

pytest.importorskip("sglang", reason="unavailable: no sglang: hack/stacks installs it")

import sglang_pools as made
import torch
from cache_node import LIMIT, PATIENT, Cluster, Node
from sglang.srt.managers.cache_controller import HiCacheController, StorageOperation
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sluice import errors

PAGE, PAGES = made.PAGE, 32


def names(n: int, first: int = 0) -> list[str]:
    """Names of pages as SGLang makes them, of tokens."""
    return get_storage_hash_str([first + k for k in range(n * PAGE)], None, page_size=PAGE)


def indices(pages: Any, page: int = PAGE) -> torch.Tensor:
    return (torch.tensor(list(pages))[:, None] * page + torch.arange(page)).reshape(-1)


def fill(pool: Any) -> None:
    pool.kv_buffer.view(torch.uint8).random_(256)


def content(pool: Any, page: int) -> bytes:
    """The bytes of a page, by what the pool itself says of where they lie."""
    if pool.layout == "page_unified":
        return bytes(pool.kv_buffer[page].contiguous().view(torch.uint8).flatten().tolist())
    at, lengths = pool.get_page_buffer_meta(indices([page], pool.logical_page_size))
    return b"".join(ctypes.string_at(a, n) for a, n in zip(at, lengths))


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield name


def own(folder: str) -> dict[str, Any]:
    return {"path": f"{folder}/kv", "bytes": 64 << 20, **PATIENT}


def at(folder: str) -> dict[str, Any]:
    return {"address": f"unix:{folder}/socket", **PATIENT}


KINDS = [(made.mha, layout, {}) for layout in
         ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")]
KINDS += [(made.mla, layout, {}) for layout in
          ("layer_first", "page_first", "page_first_direct", "page_unified")]
KINDS += [(made.mla, layout, {"dcp_size": 2, "dcp_rank": 1}) for layout in
          ("layer_first", "page_first")]


@pytest.mark.parametrize("kind, layout, more", KINDS,
                         ids=[f"{k.__name__}-{n}-{len(m)}" for k, n, m in KINDS])
def test_pages_come_back_after_a_restart(folder: str, kind: Any, layout: str, more: Any) -> None:
    pool = kind(layout, PAGES, **more)
    said: dict[str, Any] = {"is_mla_model": kind is made.mla}
    if more:
        said.update(tp_size=2, tp_rank=1, logical_page_size=PAGE, **more)
        served, where = Node(folder).start(), at(folder)
    else:
        served, where = None, own(folder)
    tokens = pool.logical_page_size
    storage = made.storage(pool, where, **said)
    try:
        fill(pool)
        stored, loaded = [3, 9, 4, 31, 0, 17], [8, 2, 30, 5, 21, 11]
        want = [content(pool, p) for p in stored]
        keys = names(6)
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, indices(stored, tokens)) == [True] * 6
        storage.close()

        storage = made.storage(pool, where, **said)
        assert storage.batch_exists([*keys, *names(1, 999)]) == 6
        fill(pool)
        others = {p: content(pool, p) for p in range(PAGES) if p not in loaded}
        assert storage.batch_get_v1([*keys, *names(1, 999)], indices([*loaded, 1], tokens)) == [
            True] * 6 + [False]
        assert [content(pool, p) for p in loaded] == want
        assert {p: content(pool, p) for p in others} == others
        stats = storage.get_stats()
        assert stats.prefetch_pgs == [6] and stats.backup_pgs == []
    finally:
        storage.close()
        if served is not None:
            served.kill()


def controller(storage: Any, pool: Any) -> Any:
    """The steps of SGLang's controller that move pages, without its threads and its device."""
    made_one = HiCacheController.__new__(HiCacheController)
    made_one.storage_backend, made_one.storage_host_pool = storage, pool
    made_one.page_size = PAGE
    made_one.page_set_func, made_one.page_get_func = (made_one._page_set_zero_copy,
                                                      made_one._page_get_zero_copy)
    return made_one


def test_a_server_that_is_killed_is_a_miss_and_comes_back(folder: str) -> None:
    server = Node(folder).start()
    pool = made.mha("layer_first", PAGES)
    storage = made.storage(pool, at(folder))
    try:
        fill(pool)
        tokens = list(range(12 * PAGE))
        operation = StorageOperation(indices(range(12)), tokens, hash_value=names(12))
        control = controller(storage, pool)
        control._page_backup(operation)
        assert operation.completed_tokens == len(tokens)
        want = [content(pool, p) for p in range(12)]

        server.kill()
        for _ in range(3):  # the first may see the loss, the others know of it
            begin = time.monotonic()
            assert storage.batch_exists(names(12)) == 0
            assert storage.batch_get_v1(names(12), indices(range(12))) == [False] * 12
            assert storage.batch_set_v1(names(12, 500), indices(range(12))) == [False] * 12
            assert time.monotonic() - begin < LIMIT

        server = Node(folder).start()
        query = StorageOperation(None, tokens)
        hashes, found = control._storage_hit_query(query)
        limit = time.monotonic() + LIMIT
        while found == 0 and time.monotonic() < limit:  # as requests come
            time.sleep(0.05)
            hashes, found = control._storage_hit_query(query)
        assert (found, hashes) == (len(tokens), names(12))
        fill(pool)
        query.request_id = "made"
        assert control._page_get_zero_copy(query, hashes, indices(range(20, 32))) == 12
        assert [content(pool, p) for p in range(20, 32)] == want
    finally:
        storage.close()
        server.kill()


def test_a_cluster_of_which_a_node_is_killed(folder: str) -> None:
    """Its pages are misses, and those of the other are there, as they were."""
    cluster = Cluster(folder)
    pool = made.mha("page_first", PAGES)
    storage = made.storage(pool, {"address": cluster.address, **PATIENT})
    try:
        fill(pool)
        want = [content(pool, p) for p in range(12)]
        limit = time.monotonic() + LIMIT
        while not all(storage.batch_set_v1(names(12), indices(range(12)))):  # both are reached
            assert time.monotonic() < limit
        assert storage.batch_exists(names(12)) == 12
        cluster.nodes["b"].kill()
        fill(pool)
        there = storage.batch_get_v1(names(12), indices(range(20, 32)))
        assert 0 < sum(there) < 12
        for k in range(12):
            assert not there[k] or content(pool, 20 + k) == want[k]
        assert storage.batch_exists(names(12)) == there.index(False)
        with pytest.raises(errors.NotSupportedError, match="cluster"):
            storage.clear()
    finally:
        storage.close()
        cluster.kill()


def test_a_server_may_come_later(folder: str) -> None:
    pool = made.mha("page_first", PAGES)
    storage = made.storage(pool, {**at(folder), "start_timeout": 0.1})
    try:
        assert storage.batch_exists(names(2)) == 0
        assert storage.batch_set_v1(names(2), indices([0, 1])) == [False, False]
        server = Node(folder).start()
        try:
            assert storage._store.wait(LIMIT)
            assert all(storage.batch_set_v1(names(2), indices([0, 1])))
            assert storage.batch_exists(names(2)) == 2
        finally:
            server.kill()
    finally:
        storage.close()


def test_ranks(folder: str) -> None:
    """MLA: what rank 0 stores all ranks find. Else each rank has pages of its own."""
    server, where = Node(folder).start(), at(folder)
    opened: list[Any] = []

    def rank(kind: Any, number: int, layout: str = "page_first", size: int = 2, **more: Any) -> Any:
        pool = kind(layout, PAGES, **more.pop("pool", {}))
        storage = made.storage(pool, where, is_mla_model=kind is made.mla, tp_rank=number,
                               tp_size=size, **more)
        opened.append(storage)
        return storage, pool

    try:
        zero, from_pool = rank(made.mla, 0)
        one, to_pool = rank(made.mla, 1)
        fill(from_pool), fill(to_pool)
        assert one.batch_set_v1(names(3), indices(range(3))) == [True] * 3
        assert zero.batch_exists(names(3)) == 0  # rank 1 has stored nothing
        assert zero.batch_set_v1(names(3), indices(range(3))) == [True] * 3
        assert one.batch_exists(names(3)) == 3
        assert one.batch_get_v1(names(3), indices([7, 5, 6])) == [True] * 3
        assert [content(to_pool, p) for p in (7, 5, 6)] == [content(from_pool, p) for p in range(3)]

        zero, from_pool = rank(made.mha, 0)
        one, _ = rank(made.mha, 1)
        assert zero.batch_set_v1(names(3), indices(range(3))) == [True] * 3
        assert (zero.batch_exists(names(3)), one.batch_exists(names(3))) == (3, 0)
        assert one.batch_set_v1(names(3), indices(range(3))) == [True] * 3
        other, _ = rank(made.mha, 0, "page_first_direct")
        assert other.batch_exists(names(3)) == 0  # pages of another layout have other bytes

        # Four heads of one rank are two of each of two ranks.
        whole, from_pool = rank(made.mha, 0, "page_head", 1, pool={"heads": 4}, tp_lcm_size=2,
                                should_split_heads=True)
        zero.clear()  # also of a server, and of no other rank's
        assert (zero.batch_exists(names(3)), one.batch_exists(names(3))) == (0, 3)
        fill(from_pool)
        assert whole.batch_set_v1(names(2, 70), indices([4, 8])) == [True] * 2
        for number in range(2):
            part, to_pool = rank(made.mha, number, "page_head", 2, pool={"heads": 2},
                                 tp_lcm_size=2)
            assert part.batch_exists(names(2, 70)) == 2
            assert part.batch_get_v1(names(2, 70), indices([1, 2])) == [True] * 2
            heads = slice(2 * number, 2 * number + 2)
            assert torch.equal(to_pool.kv_buffer[:, [1, 2]].view(torch.int16),
                               from_pool.kv_buffer[:, [4, 8], heads].view(torch.int16))
    finally:
        for storage in opened:
            storage.close()
        server.kill()


def test_pools_by_name(folder: str) -> None:
    """The second interface: pools beside that of keys and values, and how they bound a hit."""
    pool, window = made.mha("page_first", PAGES), made.mha("layer_first", PAGES, layers=1)
    storage = made.storage(pool, own(folder))
    try:
        storage.register_mem_host_pool_v2(window, PoolName.SWA)
        fill(pool), fill(window)
        keys = names(8)
        both = [PoolTransfer(PoolName.KV, host_indices=indices(range(8)), keys=keys),
                PoolTransfer(PoolName.SWA, host_indices=indices([2, 3, 6, 7]),
                             keys=[keys[2], keys[3], keys[6], keys[7]])]
        assert storage.batch_set_v2(both) == {"kv": [True] * 8, "swa": [True] * 4}

        def look(policy: PoolHitPolicy, trailing: int) -> Any:
            return storage.batch_exists_v2(keys, [PoolTransfer(
                PoolName.SWA, keys=["any"] * trailing, hit_policy=policy)])

        trailing = look(PoolHitPolicy.TRAILING_PAGES, 2)
        assert (trailing.kv_hit_pages, trailing.restorable_prefix_pages) == (8, [4, 8])
        assert trailing.extra_pool_hit_pages == {"kv": 8, "swa": 8}
        assert look(PoolHitPolicy.TRAILING_PAGES, 1).restorable_prefix_pages == [3, 4, 7, 8]
        everywhere = look(PoolHitPolicy.ALL_PAGES, 1)
        assert (everywhere.kv_hit_pages, everywhere.restorable_prefix_pages) == (0, [])

        want = [content(window, p) for p in (2, 3, 6, 7)]
        window.kv_buffer.zero_()
        assert storage.batch_get_v2([
            PoolTransfer(PoolName.SWA, host_indices=indices([20, 21, 22, 23]), keys=both[1].keys)
        ]) == {"swa": [True] * 4}
        assert [content(window, p) for p in (20, 21, 22, 23)] == want
        assert storage.batch_get_v2([PoolTransfer(
            PoolName.INDEXER, host_indices=indices([0]), keys=keys[:1])]) == {"indexer": [False]}
    finally:
        storage.close()


def test_pages_as_tensors(folder: str) -> None:
    """Without interface_v1 SGLang gives pages as tensors."""
    pool = made.mha("layer_first", PAGES)
    storage = made.storage(pool, own(folder), extra={"interface_v1": 0})
    try:
        fill(pool)
        control = controller(storage, pool)
        keys = names(5)
        assert control._generic_page_set(keys, indices(range(5)))
        assert storage.batch_exists([*keys, "other"]) == 5
        want = [content(pool, p) for p in range(5)]
        operation = StorageOperation(None, [])
        operation.request_id, operation.is_terminated = "made", lambda: False
        assert control._generic_page_get(operation, keys, indices(range(9, 14))) == 5
        assert [content(pool, p) for p in range(9, 14)] == want
        storage.clear()
        assert storage.batch_exists(keys) == 0
        assert control._generic_page_set(keys, indices(range(5)))
        assert storage.exists(keys[0]) and not storage.exists("other")
        small = torch.arange(10)
        assert storage.set("other", small) and storage.exists("other")
        assert torch.equal(storage.get("other", torch.zeros_like(small)), small)
        assert storage.get("none", torch.zeros_like(small)) is None
        lengths = [torch.arange(4), torch.arange(9), torch.arange(4, 8)]
        assert storage.batch_set(names(3, 700), lengths)
        for name, value in zip(names(3, 700), lengths):
            assert torch.equal(storage.get(name, torch.zeros_like(value)), value)
        with pytest.raises(errors.ArgumentError, match="contiguous"):
            storage.get("other", torch.zeros(5, 2, dtype=torch.int64).t())
        storage.close()
        pool = made.mha("page_first", PAGES)
        storage = made.storage(pool, own(folder), extra={"interface_v1": 0})
        assert not storage.exists("other")  # pages of another layout have other bytes
    finally:
        storage.close()


def test_with_the_failures_that_sglang_makes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    pool = made.mha("page_first", PAGES)
    storage = made.storage(pool, own(folder))
    assert isinstance(storage, HiCacheStorageFailureInjector)
    try:
        fill(pool)
        want = [content(pool, p) for p in range(16)]
        stored = [False] * 16
        for _ in range(64):
            for p in range(16):
                stored[p] |= storage.batch_set_v1(names(16)[p:p + 1], indices([p]))[0]
        loaded = [False] * 16
        for _ in range(64):
            got = storage.batch_get_v1(names(16), indices(range(16, 32)))
            loaded = [a or b for a, b in zip(loaded, got)]
        assert loaded == stored == [True] * 16
        assert [content(pool, p) for p in range(16, 32)] == want
    finally:
        storage.close()


def test_what_a_configuration_may_say(folder: str) -> None:
    pool = made.mha("page_first", PAGES)
    for said, why in (({}, "address"), ({"adress": "unix:/x"}, "adress"),
                      ({"path": "/dev/shm/x"}, "bytes"), ({"address": 3}, "str")):
        with pytest.raises(errors.ArgumentError, match=why):
            made.storage(pool, said)
    with pytest.raises(errors.ArgumentError, match="sluice cache serve"):
        made.storage(pool, own(folder), tp_size=2)


@pytest.mark.soak
def test_the_example(folder: str) -> None:
    server = Node(folder).start()
    example = Path(__file__).parents[3] / "examples/sglang/hicache_sluice.py"
    try:
        done = subprocess.run([sys.executable, str(example), f"unix:{folder}/socket", "8", "2"],
                              capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["right"]
    finally:
        server.kill()
