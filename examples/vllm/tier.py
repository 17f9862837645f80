# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiered KV offloading over a sluice cache: chunks are offloaded, the manager is shut down
as at the end of a server, and the next one finds and loads them. The figures as JSON.

    sluice cache serve --config cache.toml          # with socket = "/run/kv.sock"
    python tier.py unix:/run/kv.sock [CHUNKS [ROUNDS]]

It needs vLLM and no card: vLLM's own factory makes the managers and the tier from the configuration
that a server gets, and what its scheduler and its worker do is done here. `load_ms` is what a hit
costs, against the time to compute those tokens; `lookup_us` is what all chunks take in a step of
the scheduler, once the cache has answered.
"""

import json
import random
import statistics
import sys
import time
import uuid

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

CHUNK = 1 << 20  # bytes
STEP = ScheduleEndContext((), ())


def offloading(address, chunks):
    """As vLLM's connector makes it, by the line of docs/vllm-tier.md."""
    return OffloadingSpecFactory.create_spec(OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),), worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False, engine_id=uuid.uuid4().hex,
        extra_config={
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": chunks * CHUNK,
            "eviction_policy": "S3FIFO",
            "cache_policy_module_path": "sluice.integrations.vllm_policy",
            "secondary_tiers": [{
                "type": "SluiceTier", "module_path": "sluice.integrations.vllm_tier",
                "sluice": {"address": address, "timeout": 60.0, "lookup_timeout": 60.0}}]},
        model=OffloadingModelConfig("made", "uint8"), cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False))).get_manager()


def timed(call):
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin


def steps(manager, ends):
    """The scheduler goes on until something holds."""
    limit = time.monotonic() + 60
    while not ends():
        if time.monotonic() > limit:
            sys.exit("the cache has not answered within 60 s")
        manager.on_schedule_end(STEP)


def main(address: str, chunks: int = 1000, rounds: int = 5) -> None:
    times = {"store": [], "lookup": [], "load": [], "memcpy": []}
    right = True
    for number in range(rounds):
        keys = [make_offload_key(random.randbytes(32), 0) for _ in range(chunks)]
        first = offloading(address, chunks)
        rows = np.asarray(first.primary_tier.get_kv_memoryview())
        rows[:] = np.random.default_rng(number).integers(-128, 127, rows.shape, np.int8)
        request = ReqContext("first")
        first.on_new_request(request)
        places = first.prepare_store(keys, request).store_spec.block_ids
        wanted = rows[places]
        first.complete_store(keys, request)  # the worker's copy is there: it goes on to the tier
        _, seconds = timed(lambda: steps(first, lambda: not first.has_pending_work()))
        times["store"].append(seconds)
        first.on_request_finished(request)
        del rows
        first.shutdown()

        second = offloading(address, chunks)
        rows = np.asarray(second.primary_tier.get_kv_memoryview())
        request = ReqContext("second")
        second.on_new_request(request)
        tier = second.secondary_tiers[0]

        def lookup():
            return [tier.lookup(key, request) for key in keys]

        steps(second, lambda: LookupResult.RETRY not in lookup())
        found, seconds = timed(lookup)
        times["lookup"].append(seconds)
        for key in keys:
            second.lookup(key, request)  # each hit takes its place in vLLM's own cache
        second.on_schedule_end(STEP)
        _, seconds = timed(lambda: steps(second, lambda: not second.has_pending_work()))
        times["load"].append(seconds)
        second.on_schedule_end(STEP)
        right &= found == [LookupResult.HIT] * chunks
        right &= bool((rows[second.prepare_load(keys, request).block_ids] == wanted).all())
        second.complete_load(keys, request)
        second.on_request_finished(request)
        copied = np.ones_like(wanted)  # its pages are there
        _, seconds = timed(lambda: np.copyto(copied, wanted))
        times["memcpy"].append(seconds)
        del rows
        second.shutdown()
    took = {kind: statistics.median(each) for kind, each in times.items()}
    moved = chunks * CHUNK / 1e9
    print(json.dumps({
        "right": right, "chunks": chunks, "lookup_us": took["lookup"] * 1e6,
        "load_ms": took["load"] * 1e3, "store_gb_s": moved / took["store"],
        "load_gb_s": moved / took["load"], "memcpy_gb_s": moved / took["memcpy"]}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
