# SPDX-License-Identifier: Apache-2.0
"""Host pools of SGLang's own classes on a machine without a card, and what goes with them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # not 10 GB: these pools have some kB


def mha(layout: str, pages: int = 32, **more: Any) -> Any:
    """A pool of keys and values: the classes of the assembler over device buffers on the CPU."""
    head_dim, layers = more.pop("dim", DIM), more.pop("layers", LAYERS)
    heads, page = more.pop("heads", HEADS), more.pop("page", PAGE)
    rows = [torch.zeros(page, heads, head_dim, dtype=torch.bfloat16) for _ in range(2 * layers)]
    pointers = torch.tensor([r.data_ptr() for r in rows], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(k=tuple(rows[:layers]), v=tuple(rows[layers:]),
                          k_data_ptrs=pointers[:layers], v_data_ptrs=pointers[layers:],
                          layout=next(iter(KVBufferLayout))),
        page_size=page, head_num=heads, head_dim=head_dim, v_head_dim=head_dim,
        dtype=torch.bfloat16, device=torch.device("cpu"))
    return MHATokenToKVPoolHost(
        info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=page,
        start_layer=0, end_layer=layers, host_token_capacity=pages * page, **more)


def mla(layout: str, pages: int = 32, **more: Any) -> Any:
    rows = [torch.zeros(PAGE, 1, 24, dtype=torch.bfloat16) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(rows),
        data_ptrs=torch.tensor([r.data_ptr() for r in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE,
        kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24, dtype=torch.bfloat16,
        device=torch.device("cpu"))
    return MLATokenToKVPoolHost(
        info, 1.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0,
        end_layer=LAYERS, target_layer_num=LAYERS, host_token_capacity=pages * PAGE, **more)


def config(sluice: dict[str, Any], **more: Any) -> HiCacheStorageConfig:
    """What the controller makes of the line of docs/hicache.md."""
    extra = {"backend_name": "sluice", "module_path": "sluice.integrations.hicache",
             "class_name": "SluiceHiCache", "interface_v1": 1, "sluice": sluice}
    extra.update(more.pop("extra", {}))
    given: dict[str, Any] = dict(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=True, is_page_first_layout=False,
        model_name="made", extra_config=extra)
    given.update(more)
    return HiCacheStorageConfig(**given)


def storage(pool: Any, sluice: dict[str, Any], **more: Any) -> Any:
    """A storage by SGLang's factory, with its pool registered as the controller does."""
    made = StorageBackendFactory.create_backend("dynamic", config(sluice, **more), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made
