# SPDX-License-Identifier: Apache-2.0

"""LMCache's multiprocess mode over sluice.cache: its factory, its L1 pools, its storage manager
with the threads of that, and its benchmark, from its wheel, unpatched.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

pytest.importorskip("lmcache", reason="unavailable: no lmcache: hack/stacks installs it")

import torch
from cache_node import LIMIT, PATIENT, Node
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_manager import StorageManager
from sluice import errors

LAYOUTS = [MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])
           for shape in ((2, 4, 16, 64), (1, 3, 16, 10))]  # the second is no whole page


def plugin(folder: str, **more: Any) -> dict[str, Any]:
    """What docs/lmcache.md has to paste."""
    return {"type": "native_plugin", "module_path": "sluice.integrations.lmcache",
            "class_name": "SluiceLMCache",
            "adapter_params": {"address": f"unix:{folder}/socket", **PATIENT}, **more}


def listed(*adapters: dict[str, Any]) -> Any:
    return parse_args_to_l2_adapters_config(
        argparse.Namespace(l2_adapter=[json.dumps(a) for a in adapters]))


def names(n: int, group: int = 0, first: int = 0, salt: str = "") -> list[ObjectKey]:
    return [ObjectKey(k.to_bytes(32, "big"), "org/model", 0xff000100, group, salt)
            for k in range(first, first + n)]


def pool(shm_name: str = "") -> L1MemoryManagerConfig:
    return L1MemoryManagerConfig(32 << 20, use_lazy=False, shm_name=shm_name)


def octets(chunk: Any) -> Any:
    return torch.frombuffer(chunk.byte_array, dtype=torch.uint8)


def fill(chunk: Any) -> None:
    octets(chunk).random_(256)


def content(chunk: Any) -> bytes:
    return bytes(chunk.byte_array)


def until(holds: Callable[[], Any]) -> None:
    limit = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


class Memory:
    """A pool of LMCache."""

    def __init__(self) -> None:
        self._manager, self._given = L1MemoryManager(pool()), list[Any]()

    def chunks(self, n: int, layout: int = 0) -> list[Any]:
        error, made = self._manager.allocate(LAYOUTS[layout], n)
        assert len(made) == n, error
        self._given += made
        for chunk in made:
            fill(chunk)
        return made

    def close(self) -> None:
        self._manager.free(self._given)
        self._manager.close()


class Adapter:
    """An adapter of LMCache's factory, and the steps of its controllers."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.adapter = create_l2_adapter(listed(said).adapters[0])

    def _wait(self, fd: int, look: Callable[[], Any]) -> Any:
        poll, limit = select.poll(), time.monotonic() + LIMIT
        poll.register(fd, select.POLLIN)
        while (found := look()) is None:
            assert time.monotonic() < limit
            poll.poll(100)
        return found

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> tuple[bool, int]:
        task = self.adapter.submit_store_task(keys, objects)
        ended = self._wait(self.adapter.get_store_event_fd(),
                           lambda: self.adapter.pop_completed_store_tasks().get(task))
        return ended.is_successful(), ended.bytes_transferred()

    def lookup(self, keys: list[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        found = self._wait(self.adapter.get_lookup_and_lock_event_fd(),
                           lambda: self.adapter.query_lookup_and_lock_result(task))
        self.adapter.submit_unlock(keys)
        return [found.test(k) for k in range(len(keys))]

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        done = self._wait(self.adapter.get_load_event_fd(),
                          lambda: self.adapter.query_load_result(task))
        return [done.test(k) for k in range(len(keys))]


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield name


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.close()


def test_chunks_outlive_the_cache(folder: str, memory: Memory) -> None:
    server = Node(folder).start()
    of = Adapter(plugin(folder, max_capacity_gb=1))
    try:
        first, second = memory.chunks(6), memory.chunks(3, 1)
        keys, others = names(6), names(3, 1)
        assert of.lookup(keys) == [False] * 6
        assert of.store(keys, first) == (True, sum(c.get_size() for c in first))
        assert of.store([*others, *keys[:1]], [*second, first[0]]) == (
            True, sum(c.get_size() for c in second))
        want = [content(c) for c in [*first, *second]]

        server.kill()
        until(lambda: not any(of.lookup(keys)))
        for chunk in first:
            fill(chunk)
        assert of.load(keys, first) == [False] * 6
        assert of.store(names(1, first=90), first[:1]) == (False, 0)
        server = Node(folder).start()
        until(lambda: all(of.lookup([*keys, *others])))
        [missing] = memory.chunks(1)
        assert of.load([*reversed(keys), *others, *names(1, first=99)],
                       [*reversed(first), *second, missing]) == [True] * 9 + [False]
        assert [content(c) for c in [*first, *second]] == want
        assert of.lookup(names(6, salt="other")) == [False] * 6

        of.adapter.delete([*keys[:2], *names(1, first=99)])
        assert of.lookup(keys) == [False] * 2 + [True] * 4
        assert of.adapter.get_usage().total_bytes_used == sum(
            c.get_size() for c in [*first[2:], *second])
        # A chunk of another length under the key.
        assert of.load(keys[3:4], second[:1]) == [False]
        assert of.store(keys[3:4], second[:1])[0] is False
    finally:
        of.adapter.close()
        server.kill()


@pytest.mark.parametrize("shared", [False, True])
def test_the_storage_manager(folder: str, shared: bool) -> None:
    """What LMCache's threads store is there for the next LMCache, after a kill of the cache."""
    server = Node(folder).start()

    def manager() -> StorageManager:
        name = f"sluice{Path(folder).name}" if shared else ""
        return StorageManager(StorageManagerConfig(
            L1ManagerConfig(pool(name)), EvictionConfig("LRU"), listed(plugin(folder))))

    groups = [(names(8), LAYOUTS[0]), (names(8, 1), LAYOUTS[1])]
    want: dict[ObjectKey, bytes] = {}
    of = manager()
    try:
        for keys, layout in groups:
            made = of.reserve_write(keys, layout)
            assert len(made) == len(keys)
            for key, chunk in made.items():
                fill(chunk)
                want[key] = content(chunk)
            of.finish_write(keys)
        [(_, adapter)] = of.l2_adapters()
        until(lambda: adapter.get_usage().total_bytes_used == sum(map(len, want.values())))
    finally:
        of.close()
        server.kill()
    server = Node(folder).start()
    of = manager()
    try:
        handle = of.submit_prefetch_task(PrefetchTaskSpec(
            [GroupedObjectKeys(keys, k, layout) for k, (keys, layout) in enumerate(groups)]))
        assert of.wait_prefetch_status(handle, LIMIT)
        result = of.query_prefetch_status(handle)
        assert result is not None and result.l2_hit_count == 16
        found = dict(zip(*of.unsafe_read(list(want))))
        assert {key: content(chunk) for key, chunk in found.items()} == want
        of.finish_read_prefetched(list(want))
        [(_, adapter)] = of.l2_adapters()
        assert len(adapter._client._mappings._attached) == 1  # the whole pool, once
    finally:
        of.close()
        server.kill()


def test_with_the_faults_that_lmcache_makes(folder: str, memory: Memory) -> None:
    server = Node(folder).start()
    of = Adapter({"type": "fault_inject", "inner": plugin(folder), "rate": 0.3, "seed": 4,
                  "gap_indices": [2]})
    try:
        made, keys = memory.chunks(16), names(16)
        want = [content(c) for c in made]
        assert of.store(keys, made)[0]
        for chunk in made:
            fill(chunk)
        assert of.lookup(keys) == [True] * 16
        loaded = of.load(keys, made)
        assert not loaded[2] and 0 < sum(loaded) < 16
        assert [content(c) for c in made] == want  # also those of which it says that they failed
    finally:
        of.adapter.close()
        server.kill()


def test_the_cache_may_come_later(folder: str, memory: Memory) -> None:
    said = plugin(folder)
    said["adapter_params"]["start_timeout"] = 0.1
    of = Adapter(said)
    try:
        made = memory.chunks(2)
        assert of.lookup(names(2)) == [False] * 2
        assert of.store(names(2), made) == (False, 0)
        server = Node(folder).start()
        try:
            until(lambda: of.store(names(2), made)[0])
            assert of.lookup(names(2)) == [True] * 2
        finally:
            server.kill()
    finally:
        of.adapter.close()


def test_what_a_configuration_may_say(folder: str) -> None:
    said = plugin(folder)
    for params, why in (({}, "address"), ({"adress": "unix:/x"}, "adress")):
        with pytest.raises(errors.ArgumentError, match=why):
            Adapter({**said, "adapter_params": params})


def test_the_benchmark_of_lmcache(folder: str) -> None:
    """It stores, looks up and loads 3 rounds of 4 batches of 16 chunks, and compares the last."""
    server = Node(folder).start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from lmcache.cli.main import main; main()", "bench", "l2",
             "--l2-adapter", json.dumps(plugin(folder)), "--num-keys", "16", "--data-size-kb",
             "64", "--in-flight", "4", "--rounds", "3", "--lookup-max-hit-rate", "1",
             "--no-skip-verify"], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.findall(r"Total success: *(\d+)", done.stdout) == ["192"] * 3, done.stdout
    finally:
        server.kill()


@pytest.mark.soak
def test_the_example(folder: str) -> None:
    server = Node(folder).start()
    example = Path(__file__).parents[3] / "examples/lmcache/chunks.py"
    try:
        done = subprocess.run([sys.executable, str(example), f"unix:{folder}/socket", "8", "2"],
                              capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["right"]
    finally:
        server.kill()
