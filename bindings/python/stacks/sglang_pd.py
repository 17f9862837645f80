# SPDX-License-Identifier: Apache-2.0
"""One side of a hand-over by SGLang's own classes (disaggregation.nixl), on processors.

    PYTHONPATH=$(python -m sluice.nixl.shim) python sglang_pd.py prefill|decode PORT

The pools are made here. Commands come by standard input, a line of JSON each, and so do answers by
standard output: {"room": 1, "pages": [3, 1], "chunk": 1} sends, or receives, these pages, and
"from" tells the decode which pages of the prefill they must equal.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_context, get_parallel

LAYERS, PAGES, TOKENS, HEADS, WIDTH, ROOMS = 4, 64, 16, 4, 64, 32
PATIENCE = 150.0


def content(layer: int) -> torch.Tensor:
    """What a prefill's keys or values of a layer are."""
    numbers = torch.arange(PAGES * TOKENS * HEADS * WIDTH, dtype=torch.float32) + layer * 1e6
    return numbers.view(PAGES, TOKENS, HEADS, WIDTH)


class Pools:
    """Keys and values of all layers, and a row of words for each request."""

    def __init__(self, role: str) -> None:
        self.kv = [torch.zeros(PAGES, TOKENS, HEADS, WIDTH) for _ in range(2 * LAYERS)]
        self.words = torch.zeros(ROOMS, 16, dtype=torch.int64)
        if role == "prefill":
            for i, pool in enumerate(self.kv):
                pool.copy_(content(i))
            self.words += torch.arange(ROOMS).view(-1, 1)

    def arguments(self) -> KVArgs:
        a = KVArgs()
        a.kv_data_ptrs = [p.data_ptr() for p in self.kv]
        a.kv_data_lens = [p.nbytes for p in self.kv]
        a.kv_item_lens = [p[0].nbytes for p in self.kv]
        a.kv_layer_ids, a.kv_cache_dtype_str = [*range(LAYERS)] * 2, "float32"
        a.kv_data_mem_kinds = ["DRAM"] * len(self.kv)
        a.aux_data_ptrs, a.aux_data_lens = [self.words.data_ptr()], [self.words.nbytes]
        a.aux_item_lens = [self.words[0].nbytes]
        for name in ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids", "dim_per_tensor",
                     "slice_outer_counts", "conv_shard_groups"):
            setattr(a, "state_" + name, [])
        a.engine_rank = a.gpu_id = a.system_dp_rank = a.pp_rank = a.prefill_start_layer = 0
        a.kv_head_num = a.total_kv_head_num = HEADS
        a.page_size, a.prefill_end_layer, a.ib_device = TOKENS, LAYERS, ""
        a.is_hybrid_mla_backend, a.rust_http_port = False, None
        a.swa_kv_cache_layout = a.mla_compression_ratios = None
        return a

    def right(self, room: int, pages: list[int], source: list[int]) -> bool:
        """Whether these pages, and the request's words, are the prefill's."""
        return bool((self.words[room] == room).all()) and all(
            torch.equal(pool[pages], content(i)[source]) for i, pool in enumerate(self.kv))

    def clean(self, pages: list[int]) -> bool:
        """Whether all other pages are as they were, and clears these."""
        for pool in self.kv:
            pool[pages] = 0
        return not any(bool(pool.any()) for pool in self.kv)


def ended(end: Any) -> str:
    """How a sender's or a receiver's request ends."""
    names = {KVPoll.Success: "success", KVPoll.Failed: "failed"}
    until = time.monotonic() + PATIENCE
    while (state := end.poll()) not in names and time.monotonic() < until:
        time.sleep(0.0005)
    return names.get(state, "under way")


def prefill(pools: Pools, port: int, q: dict[str, Any], m: Any) -> dict[str, Any]:
    from sglang.srt.disaggregation.nixl import NixlKVSender

    sender = NixlKVSender(m, f"127.0.0.1:{port}", q["room"])
    sender.init(len(q["pages"]), q["room"])
    until = time.monotonic() + PATIENCE
    while sender.poll() == KVPoll.Bootstrapping and time.monotonic() < until:
        time.sleep(0.0005)
    for at in range(0, len(q["pages"]), q["chunk"]):
        sender.send(np.array(q["pages"][at : at + q["chunk"]], dtype=np.int32))
    return {"status": ended(sender)}


def decode(pools: Pools, port: int, q: dict[str, Any], m: Any) -> dict[str, Any]:
    from sglang.srt.disaggregation.nixl import NixlKVReceiver

    at, until = f"127.0.0.1:{port}", time.monotonic() + PATIENCE
    while not m.try_ensure_parallel_info(at) and time.monotonic() < until:
        time.sleep(0.2)
    receiver = NixlKVReceiver(m, at, q["room"])
    receiver.init(0)
    begin = time.monotonic()
    receiver.send_metadata(np.array(q["pages"], dtype=np.int32), q["room"])
    if q.get("abort"):
        receiver.abort()
    status = ended(receiver)
    seconds = time.monotonic() - begin
    return {"status": status, "seconds": seconds, "clean": True,
            "right": pools.right(q["room"], q["pages"], q["from"])} | {
                "clean": pools.clean(q["pages"])}


def main(role: str, port: int) -> None:
    get_context().override_server_args(
        device="cpu", host="127.0.0.1", disaggregation_bootstrap_port=port,
        disaggregation_mode=role, disaggregation_transfer_backend="nixl").install()
    get_parallel().override_permanently(attn_tp_rank=0, attn_cp_rank=0, attn_dp_rank=0,
                                        attn_dcp_rank=0, pp_group=None)
    from sglang.srt.disaggregation.nixl import NixlKVBootstrapServer, NixlKVManager

    pools = Pools(role)
    if role == "prefill":
        NixlKVBootstrapServer("127.0.0.1", port)
    manager = NixlKVManager(pools.arguments(), DisaggregationMode(role), get_context().server_args)
    module = type(manager.agent).__module__
    print(json.dumps({"engine": "sluice" if module.startswith("sluice") else module}), flush=True)
    for line in sys.stdin:
        side = prefill if role == "prefill" else decode
        print(json.dumps(side(pools, port, json.loads(line), manager)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
