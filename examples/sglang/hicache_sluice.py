# SPDX-License-Identifier: Apache-2.0

"""SGLang's HiCache over a sluice cache: pages are stored, the storage is closed as at the end of a
server, and the next one finds and loads them. The figures as JSON.

    sluice cache serve --config cache.toml          # with socket = "/run/kv.sock"
    python hicache_sluice.py unix:/run/kv.sock [PAGES [ROUNDS]]

It needs SGLang and no card: its factory makes the storage from the configuration that a server
gets. The pool of pages is made here: memory as the layout page_first has it, a K and a V of 512 KiB
for each page. A server without the cache computes all tokens of a prompt before the first answer;
with it, it loads the pages that batch_exists has found: `load_ms` is what that takes.
"""

import hashlib
import json
import statistics
import sys
import time

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

HALF = 512 << 10  # bytes of a page's keys, and of its values
TOKENS = 16  # of a page


class Pool:
    """What a storage asks of SGLang's HostKVCache."""

    layout, page_size, dtype = "page_first", TOKENS, torch.uint8

    def __init__(self, pages: int):
        self.kv_buffer = torch.zeros((2, pages, HALF), dtype=torch.uint8)
        self.size, self.page_num = pages * TOKENS, pages

    def get_page_buffer_meta(self, indices):
        base, keys = self.kv_buffer.data_ptr(), self.kv_buffer.shape[1] * HALF
        places = []
        for at in indices[::TOKENS].tolist():
            k = base + at // TOKENS * HALF
            places += [k, k + keys]
        return places, [HALF] * len(places)


def storage(address, pool):
    """As SGLang's controller makes it, by the line of docs/hicache.md."""
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="made", extra_config={
            "backend_name": "sluice", "module_path": "sluice.integrations.hicache",
            "class_name": "SluiceHiCache", "interface_v1": 1,
            "sluice": {"address": address, "timeout": 60.0, "lookup_timeout": 60.0}})
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def timed(call):
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin


def main(address: str, pages: int = 128, rounds: int = 5) -> None:
    pool = Pool(pages)
    where = torch.arange(pages * TOKENS)
    times = {"store": [], "exists": [], "load": [], "memcpy": []}
    right = True
    run = str(time.time_ns())  # keys that no run before has stored
    for number in range(rounds):
        keys = [hashlib.sha256(f"{run} {number} {i}".encode()).hexdigest() for i in range(pages)]
        pool.kv_buffer.random_(256)
        wanted, copied = pool.kv_buffer.clone(), torch.empty_like(pool.kv_buffer)
        first = storage(address, pool)
        stored, seconds = timed(lambda: first.batch_set_v1(keys, where))
        times["store"].append(seconds)
        first.close()
        second = storage(address, pool)
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
        second.close()
    took = {kind: statistics.median(each) for kind, each in times.items()}
    moved = 2 * pages * HALF / 1e9
    print(json.dumps({
        "right": right, "pages": pages, "load_ms": took["load"] * 1e3,
        "exists_us": took["exists"] * 1e6, "store_gb_s": moved / took["store"],
        "load_gb_s": moved / took["load"], "memcpy_gb_s": moved / took["memcpy"]}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
