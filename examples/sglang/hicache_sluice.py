# SPDX-License-Identifier: Apache-2.0

"""SGLang's HiCache over a sluice cache: pages are stored, the storage is closed as at the end of a
server, and the next one finds and loads them. The figures as JSON. Then the first token of a
prompt, of a small model on processors (../python/first_token.py): computed from all of it, and from
its pages in the cache, which another storage finds and loads.

    sluice cache serve --config cache.toml          # with socket = "/run/kv.sock"
    python hicache_sluice.py unix:/run/kv.sock [PAGES [ROUNDS]]
    python -m sluice.mooncake.shim hicache_sluice.py unix:/run/kv.sock PAGES ROUNDS mooncake

The last is the same by SGLang's own storage for Mooncake, whose store is the cache then.

It needs SGLang, transformers and no card: SGLang's factory makes the storage from the configuration
that a server gets. The pool of pages is made here: memory as the layout page_first has it, a K and
a V of 512 KiB for each page of 256 tokens. A server without the cache computes all tokens of a
prompt before the first answer; with it, it loads the pages that batch_exists has found: `load_ms`
is what that takes for PAGES. The prompt has an eighth of them: `first_token_ms` is the time to its
first token without a hit, `first_token_hit_ms` with one, lookup and load among it.
"""

import hashlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

sys.path.append(str(Path(__file__).parents[1] / "python"))
from first_token import CHUNK, TOKENS, Prompt

HALF = CHUNK // 2  # bytes of a page's keys, and of its values


class Pool:
    """What a storage asks of SGLang's HostKVCache."""

    layout, page_size, dtype = "page_first", TOKENS, torch.uint8

    def __init__(self, pages: int):
        self.kv_buffer = torch.zeros((pages, CHUNK), dtype=torch.uint8)
        self.size, self.page_num = pages * TOKENS, pages

    def get_ksize_per_token(self):
        return HALF // TOKENS

    def get_page_buffer_meta(self, indices):
        base, places = self.kv_buffer.data_ptr(), []
        for at in indices[::TOKENS].tolist():
            k = base + at // TOKENS * CHUNK
            places += [k, k + HALF]
        return places, [HALF] * len(places)


def storage(address, pool, kind):
    """As SGLang's controller makes it, by the line of docs/hicache.md, or of docs/mooncake.md."""
    extra = {"master_server_address": address, "local_hostname": "localhost"}
    if kind == "dynamic":
        extra = {"backend_name": "sluice", "module_path": "sluice.integrations.hicache",
                 "class_name": "SluiceHiCache", "interface_v1": 1,
                 "sluice": {"address": address, "timeout": 60.0, "lookup_timeout": 60.0}}
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="made", extra_config=extra)
    made = StorageBackendFactory.create_backend(kind, config, pool)
    made.register_mem_pool_host(pool)
    if kind == "dynamic":
        made.on_host_pools_registered()
    return made


def close(made):
    """SGLang's storage for Mooncake leaves that to the end of its process."""
    getattr(made, "store", made).close()


def timed(call):
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin


def first_token(address, kind, keys):
    """Whether both first tokens are the same, and the seconds of each, without a hit and with."""
    pool, prompt = Pool(len(keys)), Prompt(len(keys))
    memory, where = list(pool.kv_buffer), torch.arange(len(keys) * TOKENS)
    wanted, alone = prompt.compute(memory)
    first = storage(address, pool, kind)
    stored = first.batch_set_v1(keys, where)
    close(first)
    pool.kv_buffer.zero_()
    second = storage(address, pool, kind)
    begin = time.perf_counter()
    there = second.batch_exists(keys)
    loaded = second.batch_get_v1(keys, where)
    token = prompt.resume(memory)
    seconds = time.perf_counter() - begin
    close(second)
    return all(stored) and all(loaded) and there == len(keys) and token == wanted, alone, seconds


def main(address: str, pages: int = 128, rounds: int = 5, kind: str = "dynamic") -> None:
    pool = Pool(pages)
    where = torch.arange(pages * TOKENS)
    times = {"store": [], "exists": [], "load": [], "memcpy": []}
    right = True
    run = str(time.time_ns())  # keys that no run before has stored

    def names(number, n):
        return [hashlib.sha256(f"{run} {number} {i}".encode()).hexdigest() for i in range(n)]

    for number in range(rounds):
        keys = names(number, pages)
        pool.kv_buffer.random_(256)
        wanted, copied = pool.kv_buffer.clone(), torch.empty_like(pool.kv_buffer)
        first = storage(address, pool, kind)
        stored, seconds = timed(lambda: first.batch_set_v1(keys, where))
        times["store"].append(seconds)
        close(first)
        second = storage(address, pool, kind)
        there, seconds = timed(lambda: second.batch_exists([*keys, "never stored"]))
        times["exists"].append(seconds)
        pool.kv_buffer.zero_()
        loaded, seconds = timed(lambda: second.batch_get_v1(keys, where))
        times["load"].append(seconds)
        right &= all(stored) and all(loaded) and there == pages
        right &= torch.equal(pool.kv_buffer, wanted)
        copied.fill_(1)  # its pages are there
        _, seconds = timed(lambda: copied.copy_(wanted))
        times["memcpy"].append(seconds)
        close(second)
    same, alone, hit = first_token(address, kind, names("first", max(1, pages // 8)))
    right &= same
    took = {kind: statistics.median(each) for kind, each in times.items()}
    moved = pages * CHUNK / 1e9
    print(json.dumps({
        "right": right, "pages": pages, "first_token_ms": alone * 1e3,
        "first_token_hit_ms": hit * 1e3, "load_ms": took["load"] * 1e3,
        "exists_us": took["exists"] * 1e6, "store_gb_s": moved / took["store"],
        "load_gb_s": moved / took["load"], "memcpy_gb_s": moved / took["memcpy"]}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:])
