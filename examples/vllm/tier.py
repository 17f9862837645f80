# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiered KV offloading over a sluice cache: chunks are offloaded, the manager is shut down
as at the end of a server, and the next one finds and loads them. The figures as JSON. The first
chunks are the KV cache of a prompt, of a small model on processors (../python/first_token.py), for
the time to its first token: computed from all of it, and from what the next manager has loaded.

    sluice cache serve --config cache.toml          # with socket = "/run/kv.sock"
    python tier.py unix:/run/kv.sock [CHUNKS [ROUNDS]]

It needs vLLM and no card: vLLM's own factory makes the managers and the tier from the configuration
that a server gets, and what its scheduler and its worker do is done here. `load_ms` is what a hit
costs for CHUNKS, and `lookup_us` what all of them take in a step of the scheduler, once the cache
has answered. The prompt has an eighth of the chunks, at most 16, of 256 tokens each:
`first_token_ms` is without a hit, and `first_token_hit_ms` with one, lookup and load among it.
"""

import json
import random
import statistics
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import torch
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

sys.path.append(str(Path(__file__).parents[1] / "python"))
from first_token import CHUNK, Prompt

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


def first_token(address, chunks):
    """Whether both first tokens are the same, and the seconds of each, without a hit and with."""
    prompt, keys = Prompt(chunks), [make_offload_key(random.randbytes(32), 0)
                                    for _ in range(chunks)]

    def memory(manager, places):
        rows = np.asarray(manager.primary_tier.get_kv_memoryview())
        return [torch.from_numpy(rows[place]) for place in places]

    first, request = offloading(address, chunks), ReqContext("first")
    first.on_new_request(request)
    places = first.prepare_store(keys, request).store_spec.block_ids
    wanted, alone = prompt.compute(memory(first, places))
    first.complete_store(keys, request)
    steps(first, lambda: not first.has_pending_work())
    first.on_request_finished(request)
    first.shutdown()

    second, request = offloading(address, chunks), ReqContext("second")
    begin = time.perf_counter()
    second.on_new_request(request)
    steps(second, lambda: [second.lookup(key, request) for key in keys] == [LookupResult.HIT]
          * chunks)
    token = prompt.resume(memory(second, second.prepare_load(keys, request).block_ids))
    seconds = time.perf_counter() - begin
    second.complete_load(keys, request)
    second.on_request_finished(request)
    second.shutdown()
    return token == wanted, alone, seconds


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
    same, alone, hit = first_token(address, min(16, max(1, chunks // 8)))
    right &= same
    took = {kind: statistics.median(each) for kind, each in times.items()}
    moved = chunks * CHUNK / 1e9
    print(json.dumps({
        "right": right, "chunks": chunks, "first_token_ms": alone * 1e3,
        "first_token_hit_ms": hit * 1e3, "lookup_us": took["lookup"] * 1e6,
        "load_ms": took["load"] * 1e3, "store_gb_s": moved / took["store"],
        "load_gb_s": moved / took["load"], "memcpy_gb_s": moved / took["memcpy"]}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
