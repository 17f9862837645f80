# SPDX-License-Identifier: Apache-2.0

"""SGLang's own HiCacheNixl stores pages in files and loads them again: the figures as JSON.

    PYTHONPATH=$(python -m sluice.nixl.shim) python hicache.py DIRECTORY [PAGES [ROUNDS]]

Without PYTHONPATH it runs over NIXL's wheel. The pool of pages is made here: memory as SGLang's
layout page_first has it, a K and a V of 512 KiB for each page.
"""

import json
import statistics
import sys
import time

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

HALF = 512 << 10  # bytes of a page's keys, and of its values
TOKENS = 16  # of a page


class Pool:
    """What HiCacheNixl asks of SGLang's HostKVCache."""

    layout, page_size, pin_memory, device = "page_first", TOKENS, False, "cpu"

    def __init__(self, pages: int):
        room = torch.empty(2 * pages * HALF + 4096, dtype=torch.uint8)
        skip = -room.data_ptr() % 4096
        self.kv_buffer = room[skip : skip + 2 * pages * HALF].view(2, pages, HALF)
        self.size, self.page_num = pages * TOKENS, pages

    def get_page_buffer_meta(self, indices):
        base, keys = self.kv_buffer.data_ptr(), self.kv_buffer.shape[1] * HALF
        places = []
        for at in indices[::TOKENS].tolist():
            k = base + at // TOKENS * HALF
            places += [k, k + keys]
        return places, [HALF] * len(places)

    def is_stride_page_aligned(self, size):
        return HALF % size == 0 and self.kv_buffer.data_ptr() % size == 0

    def get_ksize_per_token(self):
        return HALF // TOKENS

    def get_size_per_token(self):
        return 2 * HALF // TOKENS


def timed(call):
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin


def main(directory: str, pages: int = 128, rounds: int = 5) -> None:
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="made", extra_config={"plugin": {"posix": {"active": True}},
                                         "l3_cleaner_enabled": False})
    pool = Pool(pages)
    storage = HiCacheNixl(config, file_path=directory)
    storage.register_mem_pool_host(pool)
    where = torch.arange(pages * TOKENS)
    sets, gets, looks, right = [], [], [], True
    for number in range(rounds):
        keys = [f"{number}-{i}" for i in range(pages)]
        pool.kv_buffer.random_(256)
        wanted = pool.kv_buffer.clone()
        stored, seconds = timed(lambda: storage.batch_set_v1(keys, where))
        sets.append(seconds)
        there, seconds = timed(lambda: storage.batch_exists([*keys, "never stored"]))
        looks.append(seconds)
        pool.kv_buffer.zero_()
        loaded, seconds = timed(lambda: storage.batch_get_v1(keys, where))
        gets.append(seconds)
        right &= all(stored) and all(loaded) and there == pages
        right &= torch.equal(pool.kv_buffer, wanted)
    missing = storage.batch_get_v1(["never stored"], where[:TOKENS])
    storage.close()
    moved = 2 * pages * HALF / 1e9
    print(json.dumps({
        "right": right, "missing": missing, "pages": pages, "engine": engine(),
        "set_gb_s": moved / statistics.median(sets), "get_gb_s": moved / statistics.median(gets),
        "exists_ms": statistics.median(looks) * 1e3}))


def engine() -> str:
    import nixl._api

    return "sluice" if "sluice" in nixl._api.nixl_agent.__module__ else "nixl"


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
