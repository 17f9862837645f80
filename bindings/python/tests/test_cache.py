# SPDX-License-Identifier: Apache-2.0
"""sluice.cache: blocks of this process and of a server, in arrays and tensors, by threads and
loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Tuple

import numpy as np
import pytest
import sluice
from conftest import LIMIT, descriptors, go_on, need, no_more_descriptors, stop, until
from sluice import cache as kv
from sluice._library import lib
from sluice.cache import Cache, Outcome

Start = Callable[..., "subprocess.Popen[str]"]
GEOMETRY = hashlib.sha256(b"layers, heads, bytes").digest()
LAYERS, SLOTS, BYTES = 4, 32, 1024
SHAPE = (LAYERS, SLOTS, BYTES)


def hashes(first: int, n: int) -> Any:
    """Keys as an array of shape (n, 16)."""
    keys = np.zeros((n, 16), np.uint8)
    keys[:, :8] = np.arange(first, first + n, dtype=np.uint64).view(np.uint8).reshape(n, 8)
    return keys


def filled() -> Any:
    return np.random.default_rng(7).integers(0, 256, SHAPE, np.uint8)


def open_cache(folder: Path, **options: Any) -> Cache:
    return Cache.open(folder / "memory", 8 << 20, extent=64 << 10, blocks=2048, timeout=LIMIT,
                      **options)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cache]:
    with open_cache(tmp_path) as cache:
        yield cache


Served = Tuple[Cache, "subprocess.Popen[str]"]


@pytest.fixture
def served(tmp_path: Path, start: Start) -> Iterator[Served]:
    """The cache of another process, and that process."""
    child = start("cache_server.py", str(tmp_path))
    assert child.stdout is not None and child.stdout.readline() == "serves\n"
    with Cache.connect(f"unix:{tmp_path}/socket", timeout=LIMIT) as cache:
        yield cache, child


def use(cache: Cache) -> None:
    """Blocks come back as they were stored, to other slots."""
    space = cache.namespace("model", GEOMETRY)
    array, keys, slots = filled(), hashes(1, 8), np.arange(8, dtype=np.uint32)
    want = array.copy()
    with cache.attach(array, axis=1) as blocks:
        assert (blocks.slots, blocks.block_bytes) == (SLOTS, LAYERS * BYTES)
        assert space.match(keys) == kv.Match(0, bytes(8))
        assert set(space.load(keys, blocks, slots).wait(LIMIT)) == {Outcome.MISSING}
        with space.store(keys, blocks, slots) as op:
            assert set(op.wait(LIMIT)) == {Outcome.DONE} and op.done
        assert set(space.store(keys, blocks, slots).wait(LIMIT)) == {Outcome.KNOWN}
        found = space.match(hashes(1, 10))
        assert found.prefix == 8 and found.found[8:] == b"\0\0"
        assert found.found[7] & kv.Found.IN_MEMORY
        array[:] = 0
        assert space.load(keys, blocks, range(16, 24)).wait(LIMIT).count(Outcome.DONE) == 8
        assert (array[:, 16:24] == want[:, :8]).all() and not array[:, :16].any()
        space.remove(keys[:4])
        assert space.match(keys).prefix == 0 and space.match(keys[4:]).prefix == 4
        assert cache.namespace("model", bytes(32)).match(keys).prefix == 0


def keep_books(cache: Cache) -> None:
    """Blocks lie in places that no array has, are listed, and go all at once."""
    space, other = cache.namespace("listed", GEOMETRY), cache.namespace("listed", bytes(32))
    array, keys, slots = filled(), hashes(1, 8), np.arange(8, dtype=np.uint32)
    want = array.copy()
    with cache.attach(array, block_bytes=1) as memory:
        # The runs of a block are a loop, as those of an array with axis 1.
        blocks = memory.place(0, BYTES, BYTES, [(LAYERS, SLOTS * BYTES)])
        assert (blocks.slots, blocks.block_bytes) == (SLOTS, LAYERS * BYTES)
        assert memory.place(array.nbytes - 8, 8, 8).slots == 1
        assert memory.place(array.nbytes - 4, 8, 8).slots == 0
        for some in (space, other):
            assert set(some.store(keys, blocks, slots).wait(LIMIT)) == {Outcome.DONE}
        array[:] = 0
        assert set(space.load(keys, blocks, range(16, 24)).wait(LIMIT)) == {Outcome.DONE}
        assert (array[:, 16:24] == want[:, :8]).all() and not array[:, :16].any()
        listed = b"".join(space.keys())
        assert {listed[k:k + 16] for k in range(0, 128, 16)} == {bytes(key) for key in keys}
        space.clear()
        assert not list(space.keys()) and space.match(keys) == kv.Match(0, bytes(8))
        assert other.match(keys).prefix == 8
    with pytest.raises(sluice.ArgumentError):
        memory.place(0, 1, 1, [(1, 1)] * 4)


def hint(cache: Cache) -> None:
    """What is said of blocks is heard."""
    space, keys = cache.namespace("held", GEOMETRY), hashes(1, 8)
    with cache.attach(filled(), axis=1) as blocks:
        space.store(keys, blocks, range(8)).wait(LIMIT)
    assert space.hint(kv.Hint.RETAIN, hashes(1, 9), seconds=60) == kv.HintResult(8, 1, 0)
    assert space.hint(kv.Hint.RELEASE, keys).applied == 8
    for seconds in (0, 0.5):
        with pytest.raises(sluice.BoundsError, match="a second at least"):
            space.hint(kv.Hint.RETAIN, keys, seconds=seconds)
    assert space.hint(kv.Hint.RELEASE, keys).applied == 8
    told = space.hint_envelope(json.dumps({"message_id": "m", "actions": [
        {"action_id": "a", "action_type": "kv.session_end", "action_version": "1.0",
         "payload": {"block_hashes": [bytes(key).hex() for key in keys]}},
        {"action_id": "b", "action_type": "kv.fly", "action_version": "1.0"}]}).encode())
    assert [(t["action_id"], t["status"]) for t in told] == [("a", "applied"), ("b", "unsupported")]
    with pytest.raises(sluice.CorruptError):
        space.hint_envelope(b"hints")
    guess = space.estimate(hashes(1, 9))
    assert (guess.memory_blocks, guess.disk_blocks, guess.missing) == (8, 0, 1)
    assert guess.memory_bytes == 8 * LAYERS * BYTES and guess.seconds > 0
    assert set(space.prefetch(keys).wait(LIMIT)) == {Outcome.DONE}


def test_hints(own: Cache) -> None:
    hint(own)


def test_hints_for_a_server(served: Served) -> None:
    hint(served[0])


def test_a_namespace_that_is_closed(own: Cache) -> None:
    with own.attach(filled(), axis=1) as blocks:
        with own.namespace("model", GEOMETRY) as space, own.namespace("model", GEOMETRY) as same:
            space.store(hashes(0, 2), blocks, range(2)).wait(LIMIT)
            space.close()
            space.close()
            with pytest.raises(sluice.HandleError):
                space.match(hashes(0, 2))
            assert same.match(hashes(0, 2)).prefix == 2
        with pytest.raises(sluice.HandleError):
            same.load(hashes(0, 2), blocks, range(2))
        with own.namespace("model", GEOMETRY) as again:
            assert again.match(hashes(0, 2)).prefix == 2


def test_other_bytes_for_a_key(tmp_path: Path) -> None:
    array = filled()
    with open_cache(tmp_path, compare_known=True) as cache, cache.attach(array, axis=1) as blocks:
        space = cache.namespace("model", GEOMETRY)
        space.store(hashes(0, 2), blocks, range(2)).wait(LIMIT)
        array[0, 1, 0] += 1
        told = space.store(hashes(0, 2), blocks, range(2)).wait(LIMIT)
        assert list(told) == [Outcome.KNOWN, Outcome.CONFLICT]


def test_options_of_a_namespace(tmp_path: Path) -> None:
    disk = kv.Disk(str(tmp_path / "disk"), 1 << 20, blocks=64)
    with open_cache(tmp_path, disks=[disk]) as cache, cache.attach(filled(), axis=1) as blocks:
        space = cache.namespace("model", GEOMETRY, flow=kv.Flow.MEMORY_ONLY, ttl=3600,
                                hold_max=5 * LAYERS * BYTES)
        space.store(hashes(0, 8), blocks, range(8)).wait(LIMIT)
        cache.drain(LIMIT)
        assert set(space.match(hashes(0, 8)).found) == {kv.Found.IN_MEMORY}
        with pytest.raises(sluice.FullError):
            space.hint(kv.Hint.RETAIN, hashes(0, 8), seconds=60)
        assert space.hint(kv.Hint.RELEASE, hashes(0, 8)).applied == 8
        cache.namespace("model", GEOMETRY, memory_quota=4 * LAYERS * BYTES)
        until(lambda: cache.stats()["namespaces"]["model"]["blocks"]["memory"] <= 4)


def test_places_and_lists(own: Cache) -> None:
    keep_books(own)


def test_places_and_lists_of_a_server(served: Served) -> None:
    keep_books(served[0])


def test_a_cache_of_this_process(own: Cache) -> None:
    use(own)
    stats = own.stats()
    assert stats["namespaces"]["model"]["blocks"]["memory"] == 4
    assert stats["stores"] == {"done": 8, "known": 8} and stats["attached"]["blocks"] == 0
    own.drain(LIMIT)


def test_a_cache_of_another_process(served: Served) -> None:
    use(served[0])
    stats = served[0].stats()
    assert stats["stores"] == {"done": 8, "known": 8} and stats["clients"] == 1
    served[0].drain(LIMIT)


def test_what_a_process_before_has_left(tmp_path: Path) -> None:
    disk = kv.Disk(str(tmp_path / "disk"), 1 << 20, blocks=64, bytes_a_day=1 << 30, durable=True)
    array = filled()
    want = array.copy()
    for again in range(2):
        with open_cache(tmp_path, disks=[disk], verify_first=True, policy="lru") as cache:
            space = cache.namespace("model", GEOMETRY, priority=3, memory_quota=1 << 20)
            with cache.attach(array, axis=1) as blocks:
                if again:
                    array[:] = 0
                    assert cache.stats()["attached"]["blocks"] == SLOTS
                    space.load(hashes(0, SLOTS), blocks, range(SLOTS)).wait(LIMIT)
                else:
                    space.store(hashes(0, SLOTS), blocks, range(SLOTS)).wait(LIMIT)
                    cache.drain(LIMIT)
                    assert set(space.match(hashes(0, SLOTS)).found) == {
                        kv.Found.IN_MEMORY | kv.Found.ON_DISK}
    assert (array == want).all()


def test_forms_of_keys_and_memory(own: Cache) -> None:
    space = own.namespace("model", GEOMETRY)
    array = hashes(1, 4)
    memory = own.engine.alloc(4 * 4096)
    memory.view[:] = bytes(range(256)) * 64
    with own.attach(memory, block_bytes=4096) as blocks:
        space.store(array, blocks, [0, 1, 2, 3]).wait(LIMIT)
    assert blocks.slots == 4
    for keys in (array, array.tobytes(), bytearray(array), [bytes(k) for k in array],
                 array.view(np.uint64), memoryview(array)):
        assert space.match(keys).prefix == 4
    assert space.match([]).prefix == 0 and space.match(b"") == kv.Match(0, b"")
    assert space.match([kv.key_of(b"x" * 32)]).prefix == 0
    back = bytearray(4 * 4096)
    with own.attach(back, block_bytes=4096) as blocks:
        assert set(space.load(array, blocks, [3, 2, 1, 0]).wait(LIMIT)) == {Outcome.DONE}
    assert back == bytes(range(256)) * 64
    whole = np.zeros((2, 2, 4096), np.uint8)  # of the shape (slots, 2, 4096): two runs that follow
    with own.attach(whole) as blocks:
        assert blocks.block_bytes == 8192
        assert space.load(array[:1], blocks, [0]).wait(LIMIT) == bytes([Outcome.UNLIKE])


def test_tensors(own: Cache) -> None:
    torch = need("torch", "pip install torch")
    space = own.namespace("model", GEOMETRY)
    tensor = torch.arange(LAYERS * SLOTS * 64, dtype=torch.float32).reshape(LAYERS, SLOTS, 64)
    want, keys = tensor.clone(), torch.from_numpy(hashes(1, SLOTS))
    slots = torch.arange(SLOTS, dtype=torch.int32)
    with own.attach(tensor, axis=1) as blocks:
        assert blocks.block_bytes == LAYERS * 64 * 4
        space.store(keys, blocks, slots).wait(LIMIT)
        tensor.zero_()
        space.load(keys, blocks, slots).wait(LIMIT)
    assert torch.equal(tensor, want)


def test_what_makes_no_sense(own: Cache, tmp_path: Path) -> None:
    space = own.namespace("model", GEOMETRY)
    array, keys = filled(), hashes(1, 4)
    for wrong, words in (
        (lambda: own.namespace("model", b"short"), "a digest of 32"),
        (lambda: own.namespace("", GEOMETRY), "from 1 to"),
        (lambda: own.namespace("x", GEOMETRY, priority=9), "from 0 to 7"),
        (lambda: own.attach(array, axis=3), "3 dimensions"),
        (lambda: own.attach(np.asfortranarray(array)), "contiguous"),
        (lambda: own.attach(bytearray(10)), "block_bytes"),
        (lambda: own.attach(bytearray(10), block_bytes=3), "10 bytes is no slots of 3"),
        (lambda: own.namespace("x", GEOMETRY, flow=7),  # type: ignore[arg-type]
         "flow is 7: want one of Flow.WRITE_THROUGH"),
        (lambda: space.hint("retain", keys),  # type: ignore[arg-type]
         "kind is 'retain': want one of Hint.SESSION_END"),
        (lambda: space.match(keys[:, :8].copy()), "16 bytes a key"),
        (lambda: space.match(keys[::2]), "contiguous"),
        (lambda: space.match(b"x" * 17), "16 bytes a key"),
        (lambda: space.match([b"x" * 16, b"x" * 32]), "key_of"),
        (lambda: space.match(bytes(16 * 65537)), "at most 65536 a call"),
        (lambda: Cache.open(tmp_path / "other", 8 << 20, policy="best"), "s3fifo, lru and arc"),
        (lambda: Cache.open(tmp_path / "other", 8 << 20, disks=[kv.Disk("", 1 << 20)]), "path"),
        (lambda: Cache.connect("udp:nowhere"), "unix:/path"),
    ):
        with pytest.raises((sluice.ArgumentError, sluice.BoundsError), match=words):
            wrong()
    with own.attach(array, axis=1) as blocks:
        with pytest.raises(sluice.ArgumentError, match="3 slots for 4 keys"):
            space.load(keys, blocks, [1, 2, 3])
        op = space.store(keys, blocks, [1, 2, 3, SLOTS])  # one lies outside
        with pytest.raises(sluice.Error):
            op.wait(LIMIT)
        assert set(op.outcomes) == {Outcome.FAILED}
        late = space.store(keys, blocks, range(4), timeout=0)
        with pytest.raises(sluice.TimeoutError):
            late.wait(LIMIT)
        assert set(late.outcomes) == {Outcome.LATE}
    with pytest.raises(sluice.HandleError):
        space.load(keys, blocks, range(4))
    read_only = np.zeros(SHAPE, np.uint8)
    read_only.flags.writeable = False
    with own.attach(read_only, axis=1) as blocks:
        assert set(space.store(keys, blocks, range(4)).wait(LIMIT)) == {Outcome.DONE}
        with pytest.raises(sluice.Error):  # a load would write there
            space.load(keys, blocks, range(4)).wait(LIMIT)
    assert not read_only.any()
    with pytest.raises(sluice.TimeoutError):  # another cache has the file
        open_cache_now(tmp_path)
    own.close()
    with pytest.raises(sluice.HandleError):
        space.match(keys)
    with pytest.raises(sluice.HandleError):
        own.stats()
    with pytest.raises(sluice.HandleError):
        late.wait(0)


def open_cache_now(folder: Path) -> None:
    Cache.open(folder / "memory", 8 << 20, extent=64 << 10, blocks=2048, timeout=0.05)


def test_connecting_goes_on_until_a_server_is_there(tmp_path: Path, start: Start) -> None:
    address, began = f"unix:{tmp_path}/socket", time.monotonic()
    with pytest.raises(sluice.Error, match="no engine served there"):
        Cache.connect(address, timeout=0.5)
    assert time.monotonic() - began >= 0.5
    caches: list[Cache] = []
    thread = threading.Thread(target=lambda: caches.append(Cache.connect(address, timeout=LIMIT)))
    thread.start()
    child = start("cache_server.py", str(tmp_path))
    thread.join(LIMIT)
    assert child.poll() is None and caches
    with caches[0] as cache:
        use(cache)


def test_a_call_that_a_slice_ended_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its error is: a detach that has had too little time says UNPROVEN."""
    codes = [sluice.UnprovenError.code, 0]
    monkeypatch.setattr(kv, "SLICE_NS", 0)
    kv._ask(lambda _: codes.pop(0), LIMIT)
    assert not codes


def test_one_cache_an_engine_has_its_messages(tmp_path: Path) -> None:
    with sluice.Engine("both", schedule=True) as engine, open_cache(
            tmp_path, engine=engine) as cache:
        with cache.serve(f"unix:{tmp_path}/socket") as listener:
            with pytest.raises(sluice.BusyError):
                engine.receive(0)
            with Cache.connect(listener.address, timeout=LIMIT) as other:
                use(other)
        cache.close()
        with contextlib.suppress(sluice.WaitTimeout):  # what the program that was connected sent
            while not engine.receive(0).lost:
                pass


def test_a_server_that_is_killed_under_loads(served: Served, tmp_path: Path) -> None:
    cache, child = served
    space, array = cache.namespace("model", GEOMETRY), filled()
    want, keys = array.copy(), hashes(1, SLOTS)
    blocks = cache.attach(array, axis=1)
    space.store(keys, blocks, range(SLOTS)).wait(LIMIT)
    ops = [space.load(keys, blocks, range(SLOTS)) for _ in range(50)]
    ops[0].wait(LIMIT)
    child.kill()
    for op in ops:
        try:
            assert set(op.wait(LIMIT)) == {Outcome.DONE}
        except (sluice.PeerLostError, sluice.UnprovenError):
            assert not op.outcomes.count(Outcome.UNDONE)
    with pytest.raises(sluice.PeerLostError):
        space.match(keys)
    blocks.close()  # nothing lands there any more
    array[:] = 0
    cache.close()
    child.wait()
    with open_cache(tmp_path) as again, again.attach(array, axis=1) as blocks:
        space = again.namespace("model", GEOMETRY)
        assert set(space.load(keys, blocks, range(SLOTS)).wait(LIMIT)) == {Outcome.DONE}
    assert (array == want).all()


@pytest.mark.timed
def test_other_threads_run_while_a_load_waits(served: Served) -> None:
    """The library is asked to wait for a minute by one call. Meanwhile this thread counts, and then
    has the server go on.
    """
    cache, child = served
    space, keys = cache.namespace("model", GEOMETRY), hashes(1, SLOTS)
    with cache.attach(filled(), axis=1) as blocks:
        space.store(keys, blocks, range(SLOTS)).wait(LIMIT)
        stop(child)
        op = space.load(keys, blocks, range(SLOTS), timeout=LIMIT)
        codes: list[int] = []
        asked = threading.Event()

        def wait() -> None:
            asked.set()
            codes.append(lib.kv_op_wait(op._handle, int(LIMIT * 1e9), None, 0))

        thread = threading.Thread(target=wait)
        thread.start()
        asked.wait()
        count = 0
        while count < 100_000:
            count += 1
        assert not codes and not op.done
        go_on(child)
        thread.join(LIMIT)
        assert codes == [0] and set(op.outcomes) == {Outcome.DONE}


def test_other_threads_run_while_a_call_waits(own: Cache, tmp_path: Path) -> None:
    """The same of a call that waits for the file of a cache, which this thread closes."""
    codes: list[int] = []
    asked, out = threading.Event(), ctypes.c_uint64()
    with sluice.Engine("waits") as engine:
        words = [f"path={tmp_path}/memory".encode(), b"bytes=8MiB", b"extent=64KiB", b"blocks=2048",
                 None]
        options = (ctypes.c_char_p * 5)(*words)

        def wait() -> None:
            asked.set()
            codes.append(lib.kv_open(engine._handle, options, int(LIMIT * 1e9), ctypes.byref(out)))

        thread = threading.Thread(target=wait)
        thread.start()
        asked.wait()
        count = 0
        while count < 100_000:
            count += 1
        assert not codes
        own.close()
        thread.join(LIMIT)
        assert codes == [0] and lib.kv_close(out.value) == 0


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT))


@pytest.mark.parametrize("of", ["own", "served"])
def test_await(of: str, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(of)
    cache: Cache = made if of == "own" else made[0]

    async def work() -> None:
        space = cache.namespace("model", GEOMETRY)
        with cache.attach(filled(), axis=1) as blocks:
            ops = [space.store(hashes(8 * i, 8), blocks, range(8)) for i in range(20)]
            assert {o for got in await asyncio.gather(*ops) for o in got} == {Outcome.DONE}
            op = space.load(hashes(0, 8), blocks, range(8))
            several = await asyncio.gather(*[awaited(op) for _ in range(5)])
            assert several == [bytes([Outcome.DONE] * 8)] * 5 == [await op] * 5
            late = space.load(hashes(0, 8), blocks, range(8), timeout=0)
            with pytest.raises(sluice.TimeoutError):
                await late

    run(work())
    before = descriptors()
    cache.namespace("model", GEOMETRY).remove(hashes(0, 160))
    run(work())
    no_more_descriptors(before)


async def awaited(op: kv.Op) -> bytes:
    return await op


@pytest.mark.timed
def test_cancelling_ends_the_wait_and_closing_wakes(served: Served) -> None:
    cache, child = served

    async def work() -> None:
        space = cache.namespace("model", GEOMETRY)
        blocks = cache.attach(filled(), axis=1)
        await space.store(hashes(0, 8), blocks, range(8))
        stop(child)
        op = space.load(hashes(0, 8), blocks, range(8), timeout=LIMIT)
        task = asyncio.ensure_future(awaited(op))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not op.done and not op.outcomes[0]
        task = asyncio.ensure_future(awaited(op))
        await asyncio.sleep(0)
        op.cancel()
        with pytest.raises(sluice.Error):  # aborted, or unproven: the server does not answer
            await task
        other = space.load(hashes(0, 8), blocks, range(8), timeout=LIMIT)
        task = asyncio.ensure_future(awaited(other))
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, cache.close)
        with pytest.raises(sluice.Error):
            await task

    run(work())


def test_an_operation_that_is_dropped_goes_on(own: Cache) -> None:
    space = own.namespace("model", GEOMETRY)
    with own.attach(filled(), axis=1) as blocks:
        for i in range(30):
            space.store(hashes(i * SLOTS, SLOTS), blocks, range(SLOTS))
    assert space.match(hashes(0, 30 * SLOTS)).prefix == 30 * SLOTS


def test_closing_an_engine_closes_its_cache(tmp_path: Path) -> None:
    engine = sluice.Engine("owner")
    cache = open_cache(tmp_path, engine=engine)
    cache.attach(filled(), axis=1)
    engine.close()
    cache.close()
    with open_cache(tmp_path) as again:
        assert not again.stats()["attached"].get("fresh")
