# SPDX-License-Identifier: Apache-2.0

"""LMCache's multiprocess mode over a sluice cache: chunks are stored, the adapter is closed as at
the end of an LMCache server, and the next one finds and loads them. The figures as JSON. Then the
first token of a prompt, of a small model on processors (../python/first_token.py): computed from
all of it, and from its chunks in the cache, which another adapter finds and loads.

    sluice cache serve --config cache.toml          # with socket = "/run/kv.sock"
    python chunks.py unix:/run/kv.sock [CHUNKS [ROUNDS]]

It needs LMCache and no card: its factory makes the adapter from the JSON that a server gets by
--l2-adapter, and chunks of 1 MiB lie in a pool of its own (L1). A server without the cache computes
all tokens of a prompt; with it, it loads the chunks that a lookup has found: `load_ms` is what that
takes for CHUNKS. The prompt has an eighth of them, of 256 tokens each: `first_token_ms` is the time
to its first token without a hit, `first_token_hit_ms` with one, lookup and load among it.
"""

import argparse
import json
import select
import statistics
import sys
import time
from pathlib import Path

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager

sys.path.append(str(Path(__file__).parents[1] / "python"))
from first_token import CHUNK, Prompt

LIMIT = 60.0  # seconds


def adapter(address):
    """As LMCache's server makes it, by the line of docs/lmcache.md."""
    said = {"type": "native_plugin", "module_path": "sluice.integrations.lmcache",
            "class_name": "SluiceLMCache",
            "adapter_params": {"address": address, "timeout": LIMIT, "lookup_timeout": LIMIT}}
    parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(said)]))
    return create_l2_adapter(parsed.adapters[0])


def ended(fd, look):
    """What a task has come to, as LMCache's controllers wait for it; and the seconds until then."""
    begin, poll = time.perf_counter(), select.poll()
    poll.register(fd, select.POLLIN)
    while (found := look()) is None:
        if time.perf_counter() - begin > 2 * LIMIT:
            raise TimeoutError("LMCache's adapter has not answered")
        poll.poll(100)
    return found, time.perf_counter() - begin


def store(of, keys, objects):
    task = of.submit_store_task(keys, objects)
    return ended(of.get_store_event_fd(), lambda: of.pop_completed_store_tasks().get(task))


def lookup(of, keys, layout):
    task = of.submit_lookup_and_lock_task(keys, {0: layout})
    return ended(of.get_lookup_and_lock_event_fd(), lambda: of.query_lookup_and_lock_result(task))


def load(of, keys, objects):
    task = of.submit_load_task(keys, objects)
    return ended(of.get_load_event_fd(), lambda: of.query_load_result(task))


def first_token(address, keys, objects, memory, layout):
    """Whether both first tokens are the same, and the seconds of each, without a hit and with."""
    prompt = Prompt(len(keys))
    wanted, alone = prompt.compute(memory)
    first = adapter(address)
    stored, _ = store(first, keys, objects)
    first.close()
    for one in memory:
        one.zero_()
    second = adapter(address)
    begin = time.perf_counter()
    found, _ = lookup(second, keys, layout)
    loaded, _ = load(second, keys, objects)
    token = prompt.resume(memory)
    seconds = time.perf_counter() - begin
    second.close()
    right = stored.is_successful() and found.popcount() == loaded.popcount() == len(keys)
    return right and token == wanted, alone, seconds


def main(address: str, chunks: int = 128, rounds: int = 5) -> None:
    pool = L1MemoryManager(L1MemoryManagerConfig((chunks + 1) * CHUNK, use_lazy=False, shm_name=""))
    layout = MemoryLayoutDesc([torch.Size([CHUNK])], [torch.uint8])
    error, objects = pool.allocate(layout, chunks)
    assert len(objects) == chunks, error
    memory = [torch.frombuffer(chunk.byte_array, dtype=torch.uint8) for chunk in objects]
    times = {"store": [], "lookup": [], "load": [], "memcpy": []}
    right = True
    run = time.time_ns() << 64  # keys that no run before has stored
    for number in range(rounds):
        keys = [ObjectKey((run + number * chunks + k).to_bytes(32, "big"), "made", 0)
                for k in range(chunks)]
        for one in memory:
            one.random_(256)
        wanted = [one.clone() for one in memory]
        first = adapter(address)
        stored, seconds = store(first, keys, objects)
        times["store"].append(seconds)
        first.close()
        second = adapter(address)
        found, seconds = lookup(second, keys, layout)
        times["lookup"].append(seconds)
        for one in memory:
            one.zero_()
        loaded, seconds = load(second, keys, objects)
        times["load"].append(seconds)
        right &= stored.is_successful() and found.popcount() == loaded.popcount() == chunks
        right &= all(torch.equal(a, b) for a, b in zip(memory, wanted))
        copies = [torch.ones_like(one) for one in wanted]  # whose pages are there
        begin = time.perf_counter()
        for to, one in zip(copies, wanted):
            to.copy_(one)
        times["memcpy"].append(time.perf_counter() - begin)
        second.close()
    n = max(1, chunks // 8)
    keys = [ObjectKey((run - 1 - k).to_bytes(32, "big"), "made", 0) for k in range(n)]
    same, alone, hit = first_token(address, keys, objects[:n], memory[:n], layout)
    right &= same
    pool.free(objects)
    pool.close()
    took = {kind: statistics.median(each) for kind, each in times.items()}
    moved = chunks * CHUNK / 1e9
    print(json.dumps({
        "right": right, "chunks": chunks, "first_token_ms": alone * 1e3,
        "first_token_hit_ms": hit * 1e3, "load_ms": took["load"] * 1e3,
        "lookup_us": took["lookup"] * 1e6, "store_gb_s": moved / took["store"],
        "load_gb_s": moved / took["load"], "memcpy_gb_s": moved / took["memcpy"]}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
