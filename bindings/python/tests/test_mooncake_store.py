# SPDX-License-Identifier: Apache-2.0
"""The face of Mooncake's store over a cache: restarts, short extents, what is left of objects, and
runs of all shapes. stacks/test_mooncake_store.py runs the same scenario over the wheel.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import mmap
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import pytest
from conftest import HERE, LIMIT, MIB, Nodes, until
from sluice import errors
from sluice.cache import Cache, Outcome, key_of
from sluice.mooncake import objects
from sluice.mooncake.objects import FAILED, HEAD, INVALID, LOST, NO_ROOM, NOT_FOUND
from sluice.mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator
from test_mooncake import scenario

Start = Callable[..., "subprocess.Popen[str]"]


def said(folder: Any) -> str:
    return json.dumps({"address": f"unix:{folder}/socket", "timeout": LIMIT,
                       "lookup_timeout": LIMIT, "start_timeout": LIMIT})


def connect(folder: Any, **more: Any) -> Any:
    store = MooncakeDistributedStore()
    assert store.setup("here", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", said(folder), **more) == 0
    return store


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache.open(tmp_path / "memory", 64 * MIB, blocks=4096, timeout=LIMIT) as made:
        made.serve(f"unix:{tmp_path}/socket")
        yield made


@pytest.fixture
def store(cache: Cache, tmp_path: Path) -> Iterator[Any]:
    made = connect(tmp_path)
    yield made
    made.close()


class Memory:
    """Host memory of random bytes by its address."""

    def __init__(self, length: int) -> None:
        self.bytes = bytearray(random.Random(length).randbytes(length))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


def test_the_scenario_runs(cache: Cache, tmp_path: Path) -> None:
    seen = dict(scenario(sys.executable, "-m", "sluice.mooncake.shim",
                         str(HERE / "mooncake_store_scenario.py"), said(tmp_path)))
    assert seen["setup"] == seen["put"] == seen["put from"] == seen["close again"] == 0
    assert seen["there"] == [1, 5, b"hello".hex()] and seen["the first stays"] == b"hello".hex()
    assert seen["get into"][0] == seen["get into more"][0] == 1000
    assert seen["get into less"][0] == seen["no bytes"] == INVALID
    assert seen["get batch into"][0] == [100, NOT_FOUND, 200]
    assert seen["pages"] == [0] * 64 and seen["pages elsewhere"][0] == [4096] * 64
    assert seen["get layers"] == [4096] * 16 and seen["get runs"] == [150, 150, NOT_FOUND]
    assert seen["big"] == [0, 20 << 20, True] and seen["match"] == 11
    assert seen["nothing is left"] == [0] * 4


def test_a_killed_cache_is_a_code_and_comes_back(start: Start, tmp_path: Path) -> None:
    """Its extents are of 64 KiB: objects are in pieces of that."""
    server = start("cache_server.py", str(tmp_path))
    assert server.stdout is not None and server.stdout.readline() == "serves\n"
    store, memory = connect(tmp_path), Memory(MIB)
    at = memory.address
    assert store.register_buffer(at, MIB) == 0
    want = bytes(memory.bytes[:200_000])
    assert store.put_from("a", at, 200_000) == 0 and store.put("b", want) == 0
    server.kill()
    server.wait()
    assert store.batch_get_into(["a", "b"], [at, at], [MIB, MIB]) == [LOST, LOST]
    assert (store.is_exist("a"), store.get("a"), store.get_size("a")) == (LOST, b"", LOST)
    assert (store.put("c", b"c"), store.remove("a"), store.remove_all()) == (LOST,) * 3
    assert store.remove_by_regex("a") == LOST and store.get_buffer("a") is None
    assert store.get_replica_desc("a") == [] and store.health_check() == 2

    server = start("cache_server.py", str(tmp_path))
    until(lambda: store.health_check() == 0)
    memory.bytes[:] = bytes(MIB)
    assert store.batch_is_exist(["a", "b", "c"]) == [1, 1, 0]
    assert store.get_into("a", at, MIB) == 200_000 and memory.bytes[:200_000] == want
    assert store.get("b") == want and store.unregister_buffer(at) == 0
    store.close()
    store = connect(tmp_path)  # names survive who stored them
    assert store.get_size("a") == 200_000 and store.remove_by_regex("^a$") == 1
    assert store.batch_is_exist(["a", "b"]) == [0, 1]
    store.close()


def test_a_node_of_a_cluster_that_loses_all(nodes: Nodes) -> None:
    """An object of which it had a part is not there, and is stored anew. None has other bytes."""
    store, values = MooncakeDistributedStore(), {
        f"n{k}": random.Random(k).randbytes(200_000 if k % 4 == 0 else 1000) for k in range(24)}
    where = json.dumps({"address": nodes.address, "timeout": LIMIT, "lookup_timeout": LIMIT,
                        "start_timeout": LIMIT})
    assert store.setup("here", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", where) == 0
    assert store._objects is not None and store._objects._session is not None
    session = store._objects._session

    def all_there() -> None:
        nodes.wait(session.cache, "serving")
        for name, value in values.items():
            assert store.put(name, value) == 0 and store.get(name) == value

    all_there()
    assert store.batch_is_exist(list(values)) == [1] * len(values)
    asked = [n["requests"] for n in session.cache.stats()["nodes"]]
    assert store.upsert("n1", b"x") == FAILED  # and stores no piece
    assert [n["requests"] for n in session.cache.stats()["nodes"]] == asked
    assert store.remove_all() == FAILED
    assert store.get("n1") == values["n1"]
    nodes.kill("b")
    memory, others = Memory(24_000), [f"m{k}" for k in range(24)]
    codes = store.batch_put_from(others, range(memory.address, memory.address + 24_000, 1000),
                                 [1000] * 24)
    assert set(codes) <= {0, FAILED} and FAILED in codes
    assert store.batch_is_exist(others) == [int(code == 0) for code in codes]
    there = store.batch_is_exist(list(values))
    assert 0 in there
    for k, (name, value) in enumerate(values.items()):
        assert store.get(name) == (value if there[k] else b"")
        if there[k]:
            assert store.remove(name) == FAILED  # the other node may have it
    (nodes.folders["b"] / "memory").unlink()
    nodes.started("b")
    all_there()
    assert store.remove("n1") == 0 and store.is_exist("n1") == 0
    store.close()


def test_an_object_without_a_piece_is_not_there(cache: Cache, store: Any, tmp_path: Path) -> None:
    assert store.put("a", bytes(3 * MIB)) == 0  # two pieces
    heads, pieces = store._objects._spaces(store._objects._session)
    keys = b"".join(pieces.keys())
    assert len(keys) == 32
    pieces.remove(keys[:16])
    assert store.is_exist("a") == 0 and store.get("a") == b""
    assert store.get_size("a") == NOT_FOUND and store.put("a", b"new") == 0
    assert store.get("a") == b"new" and store.is_exist("a") == 1
    assert len(b"".join(pieces.keys())) == 16  # the other piece went

    heads.remove(key_of(b"a"))  # as an eviction does
    assert store.is_exist("a") == 0 and store.put("a", b"won") == 0 and store.get("a") == b"won"


def test_the_first_of_two_wins(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.put("a", b"first") == 0
    over = store._objects
    _, pieces = over._spaces(over._session)

    def before(session: Any, names: list[str]) -> list[Any]:
        monkeypatch.undo()
        return [(None, 0)] * len(names)

    monkeypatch.setattr(over, "_whole", before)
    assert store.put("a", b"other bytes") == 0  # as one that has looked before the first came
    assert store.get("a") == b"first" and len(b"".join(pieces.keys())) == 16


def counted(over: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the cache from now on; a "+" begins beside what is asked before it."""
    asked, running = list[str](), list[Any]()

    def count(space: Any, kind: str, what: str) -> None:
        call = getattr(space, what)

        def counting(*words: Any) -> Any:
            asked.append("+" * bool(running) + f"{what} {kind}")
            op = call(*words)
            if what in ("load", "store", "replace"):
                running.append(op)
                wait = op.wait

                def waiting(*limit: Any) -> Any:
                    running.clear()
                    return wait(*limit)

                op.wait = waiting
            return op

        monkeypatch.setattr(space, what, counting)

    for kind, space in zip(("head", "pieces"), over._spaces(over._session)):
        for what in ("match", "load", "store", "replace", "remove"):
            count(space, kind, what)
    return asked


def test_how_often_the_cache_is_asked(store: Any, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(8 * MIB)
    at = memory.address
    assert store.register_buffer(at, 8 * MIB) == 0
    other = connect(tmp_path)
    with monkeypatch.context() as m:
        asked = counted(store._objects, m)

        def of(want: Any, code: Any) -> list[str]:
            assert code == want
            said = asked.copy()
            asked.clear()
            return said

        put, look = ["store pieces", "+store head"], ["match head", "load head", "match pieces"]
        assert of(0, store.put_from("a", at, MIB)) == put
        assert of(0, store.put_from("b", at, 8 * MIB)) == ["match head", *put, "match pieces"]
        known = ["load pieces", "+load head"]
        assert of(MIB, store.get_into("a", at, 8 * MIB)) == known
        assert of(8 * MIB, store.get_into("b", at, 8 * MIB)) == known
        assert of(0, store.put_from("a", at, MIB)) == look  # it is there, as is known
        assert other.put_from("c", at, MIB) == 0
        assert of(0, store.put_from("c", at, MIB)) == [*put, "remove pieces", *look]
        assert of([0, 0, 0], store.batch_put_from(["g", "c", "h"], [at] * 3, [MIB] * 3)) == [
            *look, *put]
        assert of([MIB, NOT_FOUND], store.batch_get_into(["g", "i"], [at, at + MIB], [MIB] * 2)
                  ) == ["load head", "load pieces"]
        assert other.put("d", b"x") == 0 and other.put("e", b"x" * 3 * MIB) == 0
        assert of(1, store.get_into("d", at, 8 * MIB)) == ["load head", "load pieces"]
        assert of(0, store.put_from("e", at, 3 * MIB)) == look
        assert of(0, store.upsert_from("f", at, MIB)) == [
            "store pieces", "load head", "replace head"]
        assert of(0, store.upsert_from("f", at, MIB)) == [
            "store pieces", "load head", "replace head", "remove pieces"]
    other.close()


def test_a_head_that_was_seen_before(cache: Cache, store: Any, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have stored or removed since is found all the same."""
    monkeypatch.setattr(objects, "SEEN_MAX", 4)
    other, memory = connect(tmp_path), Memory(4 * MIB)
    at = memory.address
    assert store.register_buffer(at, 4 * MIB) == 0
    for n in range(3):
        assert store.put("a", b"old") == 0 and store.get("a") == b"old"
        if n:
            assert other.upsert("a", b"x" * n * MIB) == 0
            assert store.get_into("a", at, 4 * MIB) == n * MIB
            assert store.get_into("a", at, 2) == INVALID
            assert memory.bytes[:n * MIB] == b"x" * n * MIB
        assert other.remove("a") == 0
        assert store.get_into("a", at, MIB) == NOT_FOUND and store.get("a") == b""
    names = [f"r{k}" for k in range(9)]
    assert store.put_batch(names, [b"y" * (k + 1) for k in range(9)]) == 0
    assert len(store._objects._seen) == 4
    assert other.remove("r8") == 0 and other.upsert("r7", b"z") == 0
    assert store.get_batch(names) == [*(b"y" * (k + 1) for k in range(7)), b"z", b""]
    _, pieces = store._objects._spaces(store._objects._session)
    assert store.put("lost", b"x") == 0
    pieces.remove(b"".join(pieces.keys()))
    assert store.get("lost") == b"" and store.put("lost", b"new") == 0
    assert store.get("lost") == b"new"
    other.close()


def test_memory_that_is_named_anew(store: Any, tmp_path: Path) -> None:
    """For values that others have replaced since `into` may name the memory of each other."""
    other, memory = connect(tmp_path), Memory(MIB)
    names, asked = ["a", "b"], [0, 0]
    assert store.put_batch(names, [b"old a", b"old b"]) == 0  # so that the heads are known
    assert other.upsert("a", b"new a") == 0 and other.upsert("b", b"new b") == 0

    def into(k: int, size: int) -> Any:
        asked[k] += 1
        return objects.Value([memory.address + (k + asked[k]) % 2 * 100], [size])

    assert store._objects.get(names, into) == [5, 5] and asked == [2, 2]
    assert (memory.bytes[:5], memory.bytes[100:105]) == (b"new a", b"new b")
    other.close()


def test_a_head_of_others_that_never_comes(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put is not told 0 before one of them is there."""
    over = store._objects
    heads, _ = over._spaces(over._session)
    move = over._move_blocks

    def pending(session: Any, how: Any, blocks: Any, beside: Any = None, others: Any = ()) -> bytes:
        if how == heads.store:
            return bytes([Outcome.PENDING]) * len(blocks)
        return bytes(move(session, how, blocks)) + bytes([Outcome.PENDING]) * len(others)

    monkeypatch.setattr(over, "_move_blocks", pending)
    assert store.put("a", b"x") == FAILED
    assert store.put_batch(["b", "c"], [b"x", b"x"]) == FAILED
    monkeypatch.undo()
    assert store.put("a", b"x") == 0 and store.get("a") == b"x"


def test_an_upsert_between_a_head_and_its_pieces(store: Any, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Both were asked for at a time, of a head that was seen: the new value is found."""
    other, over = connect(tmp_path), store._objects
    assert store.put("a", b"old") == 0
    heads, pieces = over._spaces(over._session)
    load = pieces.load

    def late(*words: Any) -> Any:
        with over._ours(HEAD) as memory:  # the head is read before, and once more beside this
            assert over._move_blocks(over._session, heads.load, [
                objects._Block(key_of(b"a"), memory, 0, HEAD)]) == b"\1"
            stale = ctypes.string_at(memory.address, HEAD)
        monkeypatch.undo()
        monkeypatch.setattr(over, "_head_at", lambda address, *more: reads(stale, *more))
        assert other.upsert("a", b"new") == 0
        return load(*words)

    def reads(stale: bytes, *more: Any) -> Any:
        monkeypatch.undo()
        held = ctypes.create_string_buffer(stale, HEAD)
        return over._head_at(ctypes.addressof(held), *more)

    monkeypatch.setattr(pieces, "load", late)
    assert store.get("a") == b"new"
    other.close()


def test_a_head_that_waits_for_its_pieces(store: Any, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not find the object yet, and one that puts it is told 0 once it is there."""
    other, over = connect(tmp_path), store._objects
    heads, pieces = over._spaces(over._session)
    stores = pieces.store

    def late(*words: Any) -> Any:
        monkeypatch.undo()
        over._put_heads(over._session, ["a"], {0: objects.Head(3, MIB, 1, 1)}, heads.store)
        assert (other.is_exist("a"), other.get("a"), other.get_size("a")) == (0, b"", NOT_FOUND)
        assert other.put("a", b"won") == 0 and other.get("a") == b"won"
        return stores(*words)

    monkeypatch.setattr(pieces, "store", late)
    assert store.put("a", b"all") == 0 and store.get("a") == other.get("a") == b"won"
    assert len(b"".join(pieces.keys())) == 16
    other.close()


def test_runs_of_all_shapes(store: Any) -> None:
    """Even ones in place, others by way of our memory, and what was stored as one comes in runs."""
    memory, back, rng = Memory(8 * MIB), Memory(8 * MIB), random.Random(1)
    assert store.register_buffer(memory.address, 8 * MIB) == 0
    assert store.register_buffer(back.address, 4 * MIB) == 0  # half of it
    for n in range(60):
        count, length, by = rng.randint(1, 9), rng.choice([1, 64, 4096, 100_000]), rng.choice(
            [0, 64, 70_000])
        offsets, at = [], rng.randint(0, 4096)
        for _ in range(count):
            offsets.append(at)
            at += length + by + rng.choice([0, 0, 0, 64 * (n % 3)])
        if n % 4 == 0:
            rng.shuffle(offsets)
        name, size = f"object {n}", count * length
        assert store.batch_put_from_multi_buffers(
            [name], [[memory.address + o for o in offsets]], [[length] * count]) == [0]
        want = b"".join(bytes(memory.bytes[o:o + length]) for o in offsets)
        assert store.get(name) == want
        begin = rng.choice([0, 5 * MIB])
        cut = rng.randint(1, size)
        there = [[back.address + begin, back.address + begin + size + 4096]]
        assert store.batch_get_into_multi_buffers(
            [name], there, [[cut, size - cut]] if cut < size else [[size, 1]]) == [size]
        assert back.bytes[begin:begin + cut] == want[:cut]
        rest = begin + size + 4096
        assert back.bytes[rest:rest + size - cut] == want[cut:]
        assert store.remove(name) == 0
    partly = back.address + 4 * MIB - 10
    assert store.put("a", b"x" * 100) == 0 and store.get_into("a", partly, 100) == INVALID
    assert store.put_from("b", partly, 100) == INVALID


def test_many_names_in_one_call(store: Any) -> None:
    """Slots that lie unevenly are an operation each, and more of them than run at a time."""
    memory = Memory(4 * MIB)
    assert store.register_buffer(memory.address, 4 * MIB) == 0
    n = 600
    at, sizes = [memory.address + 5003 * k for k in range(n)], [4096 + k % 5 for k in range(n)]
    names = [f"name {k}" for k in range(n)]
    assert store.batch_put_from(names, at, sizes) == [0] * n
    assert store.batch_is_exist([*names, "other"]) == [1] * n + [0]
    want = bytes(memory.bytes)
    memory.bytes[:] = bytes(4 * MIB)
    assert store.batch_get_into(names, at, [s + 10 for s in sizes]) == sizes
    for k in range(n):
        assert memory.bytes[5003 * k:][:sizes[k]] == want[5003 * k:][:sizes[k]]
    assert store.remove_all() == n and store.batch_is_exist(names) == [0] * n


def test_threads(store: Any) -> None:
    memory = Memory(MIB)
    want = bytes(memory.bytes)
    assert store.register_buffer(memory.address, MIB) == 0

    def work(k: int) -> bool:
        own = bytearray(4096)
        at = ctypes.addressof(ctypes.c_char.from_buffer(own))
        return bool(store.register_buffer(at, 4096) == 0
                and store.put_from(f"{k % 20}", memory.address + 4096 * (k % 20), 4096) == 0
                and store.get_into(f"{k % 20}", at, 4096) == 4096
                and store.get(f"{k % 20}") == own == want[4096 * (k % 20):][:4096]
                and store.unregister_buffer(at) == 0)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_tenants_and_other_addresses(cache: Cache, store: Any, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch,
                                     caplog: pytest.LogCaptureFixture) -> None:
    other = connect(tmp_path, tenant_id="other")
    assert store.put("a", b"x") == 0 and other.is_exist("a") == 0
    assert other.put("a", b"other") == 0 and other.remove_all() == 1 and store.get("a") == b"x"
    other.close()
    made = MooncakeDistributedStore()
    master = ("here", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:50051")
    monkeypatch.delenv("SLUICE_CACHE", raising=False)
    with caplog.at_level(logging.ERROR, "sluice.mooncake"):
        assert made.setup(*master) == INVALID and "SLUICE_CACHE" in caplog.text
        assert made.put("a", b"x") == INVALID and made.get("a") == b""
        assert (made.health_check(), made.register_buffer(4096, 1)) == (1, INVALID)
    monkeypatch.setenv("SLUICE_CACHE", said(tmp_path))
    assert made.setup(*master) == 0 and made.get("a") == b"x" and made.get_hostname() == "here"
    made.close()
    assert made.setup_dummy(0, 0, f"unix:{tmp_path}/socket") == 0 and made.health_check() == 0
    made.close()
    nowhere = json.dumps({"address": f"unix:{tmp_path}/none", "start_timeout": 0.1})
    assert made.setup(*master[:6], nowhere) == LOST
    assert made.setup(*master[:6], '{"adress": "unix:/x"}') == INVALID


def test_what_there_is_no_room_for(cache: Cache, store: Any) -> None:
    assert store.put("a", bytes(65 * MIB)) == NO_ROOM and store.is_exist("a") == 0
    _, pieces = store._objects._spaces(store._objects._session)
    assert not b"".join(pieces.keys()) and store.get("a") == b""
    assert store.put_batch(["a", "b"], [bytes(65 * MIB), b"b"]) == NO_ROOM
    assert store.batch_is_exist(["a", "b"]) == [0, 1] and len(b"".join(pieces.keys())) == 16
    assert store.put("k" * 65_537, b"x") == INVALID
    assert store.put_tensor_from("a", 0, 4096) == store.put_from("a", 0, 4096) == INVALID
    assert store.put("k" * 65_536, b"x") == 0 and store.remove_by_regex("^k{65536}$") == 1


def test_a_value_whose_last_pieces_evict_its_first(store: Any, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    monkeypatch.setattr(objects, "KEYS_MAX", 8)
    monkeypatch.setattr(objects, "OPS_MAX", 1)
    assert store.put("a", bytes(65 * MIB)) == NO_ROOM and store.is_exist("a") == 0
    assert store.put("a", b"x") == 0 and store.get("a") == b"x"


def test_an_upsert_that_fails_leaves_the_old_value(store: Any, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    over = store._objects
    heads, pieces = over._spaces(over._session)
    old, name = bytes(range(256)) * 16, "k" * 600  # which has a piece for its name, too
    assert store.put(name, old) == 0

    def is_old() -> bool:
        return store.get(name) == old and len(b"".join(pieces.keys())) == 32

    assert store.upsert(name, b"") == store.upsert_from(name, 0, 8) == INVALID and is_old()
    assert store.upsert_batch([name, "b"], [b"x"]) == INVALID and is_old()

    def refuse(*_: Any) -> Any:
        raise errors.BusyError("the cache cannot keep up")

    monkeypatch.setattr(pieces, "store", refuse)
    assert store.upsert(name, b"new") == NO_ROOM and is_old()
    monkeypatch.undo()
    monkeypatch.setattr(heads, "replace", refuse)
    assert store.upsert(name, b"new") == NO_ROOM and is_old()
    monkeypatch.undo()
    assert store.upsert(name, b"new") == 0 and store.get(name) == b"new"
    assert len(b"".join(pieces.keys())) == 32


def test_a_value_that_cannot_be_read_is_not_taken_for_the_new_one(
        store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    over = store._objects
    heads, pieces = over._spaces(over._session)
    assert store.put("a", b"old") == 0

    def refuse(*_: Any) -> Any:
        raise errors.BusyError("the cache cannot keep up")

    monkeypatch.setattr(heads, "load", refuse)
    assert store.upsert("a", b"new") == store.remove("a") == NO_ROOM
    monkeypatch.undo()
    assert store.get("a") == b"old" and len(b"".join(pieces.keys())) == 16
    assert store.upsert("a", b"new") == 0 and store.get("a") == b"new"


def test_upserts_at_a_time_leave_no_piece(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    over = store._objects
    _, pieces = over._spaces(over._session)
    put_pieces = over._put_pieces

    def beside(*words: Any) -> Any:
        monkeypatch.undo()
        assert store.upsert("a", b"of another") == 0
        return put_pieces(*words)

    assert store.put("a", b"old") == 0
    monkeypatch.setattr(over, "_put_pieces", beside)
    assert store.upsert("a", b"last") == 0 and store.get("a") == b"last"
    assert len(b"".join(pieces.keys())) == 16


class Stepped:
    """An upsert that stands before each step that others can see: it stores pieces and reads what
    there is, replaces the head, and removes the former pieces.
    """

    STEPS = ("_put_pieces", "_put_heads", "_remove")

    def __init__(self, folder: Path, value: bytes) -> None:
        self.store, self.value = connect(folder), value
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        over = self.store._objects
        for name in self.STEPS:
            setattr(over, name, self._gated(getattr(over, name)))

    def _gated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*words: Any) -> Any:
            if words[min(2, len(words) - 1)]:  # else it has nothing to do
                self._stands.release()
                assert self._go.acquire(timeout=LIMIT)
            return call(*words)

        return wait

    def begin(self) -> None:
        self.code: Optional[int] = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._stands.acquire(timeout=LIMIT)

    def _run(self) -> None:
        self.code = self.store.upsert("a", self.value)
        self._stands.release()

    def step(self) -> bool:
        """Goes on to the next call, or to the end; False: it has ended."""
        if self.code is not None:
            return False
        self._go.release()
        assert self._stands.acquire(timeout=LIMIT)
        return self.code is None

    def end(self) -> None:
        self._thread.join()


def test_every_order_of_two_upserts(store: Any, tmp_path: Path) -> None:
    """Of two upserts in any order of their steps one stays, and others find one value at each."""
    values = [b"old" * 999, b"first" * 888, b"other" * 777]
    sides = [Stepped(tmp_path, value) for value in values[1:]]
    steps = len(Stepped.STEPS)
    for turns in itertools.combinations(range(2 * steps), steps):
        assert store.upsert("a", values[0]) == 0
        for side in sides:
            side.begin()
        for k in range(2 * steps):
            sides[k in turns].step()
            assert store.get("a") in values and store.is_exist("a") == 1
        for side in sides:
            assert not side.step()
            side.end()
            assert side.code == 0
        assert store.get("a") in values[1:]
    for side in sides:
        side.store.close()


def test_upserts_of_processes_that_are_killed(cache: Cache, store: Any, start: Start,
                                              tmp_path: Path) -> None:
    """At each moment others find one value as a whole, also after both have been killed."""
    def is_whole() -> None:
        value = store.get("a")
        assert value and value == value[:1] * len(value)

    assert store.put("a", b"\1") == 0
    for round in range(2):
        sides = [start("mooncake_upserts.py", said(tmp_path), str(which)) for which in range(2)]
        for side in sides:
            assert side.stdout is not None and side.stdout.readline() == "1\n"
        for _ in range(10):
            is_whole()
        for side in sides:
            side.kill()
            side.wait()
            is_whole()
    assert store.upsert("a", b"last") == 0 and store.get("a") == b"last"


def test_a_get_beside_an_upsert(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of the former value is not lost with its pieces: the new one is found."""
    over = store._objects
    heads = over._heads

    def beside(*words: Any) -> Any:
        monkeypatch.undo()
        read = heads(*words)
        assert store.upsert("a", b"new") == 0
        return read

    looks: list[tuple[Callable[[str], Any], Any]] = [
        (store.get, b"new"), (store.is_exist, 1), (store.get_size, 3)]
    for look, want in looks:
        assert store.upsert("a", b"old" * 9) == 0
        over._seen.clear()
        monkeypatch.setattr(over, "_heads", beside)
        assert look("a") == want


def test_two_objects_to_one_address(store: Any) -> None:
    memory = Memory(MIB)
    assert store.register_buffer(memory.address, MIB) == 0
    assert store.put_batch(["a", "b"], [b"aa", b"bb"]) == 0
    assert store.batch_get_into(["a", "b"], [memory.address] * 2, [MIB] * 2) == [2, INVALID]
    assert memory.bytes[:2] == b"aa"
    assert store.unregister_buffer(memory.address) == 0

    memory = Memory(8 * MIB)
    at = memory.address  # the second piece of one is where the first of the other is
    assert store.register_buffer(at, 8 * MIB) == 0
    assert store.put_from("c", at, 3 * MIB) == store.put_from("d", at, MIB) == 0
    assert store.batch_get_into(["c", "d"], [at, at + 2 * MIB], [3 * MIB, MIB]) == [INVALID] * 2
    assert store.get_into("c", at, 3 * MIB) == 3 * MIB
    assert store.unregister_buffer(at) == 0


def test_short_extents_leave_no_piece(tmp_path: Path) -> None:
    """What was stored before an extent was found too short for the rest goes."""
    with Cache.open(tmp_path / "memory", 8 * MIB, extent=64 << 10, blocks=2048,
                    timeout=LIMIT) as cache:
        cache.serve(f"unix:{tmp_path}/socket")
        store = connect(tmp_path)
        assert store.put_batch(["small", "k" * 600, "large"], [b"x", b"y", bytes(200_000)]) == 0
        over = store._objects
        _, pieces = over._spaces(over._session)
        assert len(b"".join(pieces.keys())) == 16 * (1 + 2 + 4)
        store.close()


def test_a_head_that_is_none(store: Any) -> None:
    over = store._objects
    heads, _ = over._spaces(over._session)
    with over._session.cache.attach(bytearray(HEAD), block_bytes=HEAD) as blocks:
        heads.store([key_of(b"a")], blocks, [0], LIMIT).wait(LIMIT)
    assert store.is_exist("a") == 0 and store.get("a") == b"" and store.get_size("a") == NOT_FOUND
    assert store.upsert("a", b"x") == 0 and store.get("a") == b"x"


def test_memory_of_the_host() -> None:
    allocator = MooncakeHostMemAllocator()
    at = allocator.alloc(8192)
    ctypes.memset(at, 7, 8192)
    assert ctypes.string_at(at + 8191, 1) == b"\7"
    assert (allocator.free(at), allocator.free(at)) == (0, -1)


def test_memory_of_a_card_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(4096)
    monkeypatch.setattr(objects, "card_of", lambda address, location: 0)
    assert store.register_buffer(memory.address, 4096) == INVALID
    assert store.put_from("a", memory.address, 4096) == INVALID and store.is_exist("a") == 0


def test_an_operation_that_fails(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    over = store._objects
    heads, pieces = over._spaces(over._session)

    def refuse(*_: Any) -> Any:
        raise errors.BusyError("the cache cannot keep up")

    monkeypatch.setattr(pieces, "store", refuse)
    assert store.put("a", b"x") == NO_ROOM
    monkeypatch.undo()
    assert store.is_exist("a") == 0 and store.put("a", b"x") == 0 and store.health_check() == 0


def test_a_small_object_far_behind_the_start(store: Any) -> None:
    """Slots of its size have numbers of more than 32 bits."""
    length, far = 5 << 30, (4 << 30) + 3
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert store.register_buffer(at, length) == 0
    memory[far] = 7
    assert store.batch_put_from(["a", "b"], [at + far, at + 3], [1, 1]) == [0, 0]
    memory[far] = 0
    assert (store.get("a"), store.get("b")) == (b"\7", b"\0")
    assert store.get_into("a", at + far, 1) == 1 and memory[far] == 7 and memory[3] == 0
    assert store.unregister_buffer(at) == 0


@pytest.mark.parametrize("end", ["unregister", "close"])
def test_no_byte_lands_behind_an_end(store: Any, end: str,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what another thread copies by way of our memory."""
    memory, scatter, landed = Memory(4096), objects._scatter, threading.Event()
    at = memory.address
    assert store.register_buffer(at, 4096) == 0 and store.put("a", b"x" * 100) == 0

    def stop() -> None:
        assert (store.unregister_buffer(at) if end == "unregister" else store.close()) == 0
        assert landed.is_set()

    with ThreadPoolExecutor(1) as pool:
        ending = []

        def late(*what: Any) -> None:
            ending.append(pool.submit(stop))
            wait(ending, 0.3)  # where it does not wait for this call, it is over
            landed.set()
            scatter(*what)

        monkeypatch.setattr(objects, "_scatter", late)
        uneven = [[at, at + 1000]], [[60, 40]]
        assert store.batch_get_into_multi_buffers(["a"], *uneven) == [100]
        ending[0].result(LIMIT)


def test_an_end_awaits_the_proof_that_another_call_has_not_yet(store: Any) -> None:
    """The session is lost, and its cache may reach memory until it has ended."""
    memory, over, proof = Memory(4096), store._objects, threading.Event()
    assert store.register_buffer(memory.address, 4096) == 0
    session, asked = over._session, list[int]()
    end = session.end

    def late() -> None:
        asked.append(1)
        assert proof.wait(LIMIT)
        end()

    session.end = late
    with ThreadPoolExecutor(2) as pool:
        losing = pool.submit(over._lose, session, errors.UnavailableError("lost"))
        until(lambda: len(asked) == 1)
        ending = pool.submit(store.unregister_buffer, memory.address)
        until(lambda: len(asked) == 2 or ending.done())
        assert not ending.done()
        proof.set()
        losing.result(LIMIT)
        assert ending.result(LIMIT) == 0
    assert over._lost == []


def test_an_end_without_proof_is_asked_for_again(store: Any) -> None:
    memory, over = Memory(4096), store._objects
    assert store.register_buffer(memory.address, 4096) == 0
    session = over._session
    end = session.end

    def refuse(*_: Any) -> None:
        raise errors.UnprovenError("not yet")

    session.detach = session.end = refuse
    assert store.unregister_buffer(memory.address) == INVALID
    assert store.unregister_buffer(memory.address) == INVALID
    session.end = end
    assert store.unregister_buffer(memory.address) == 0
    until(lambda: store.health_check() == 0)
    assert store.register_buffer(memory.address, 4096) == 0
