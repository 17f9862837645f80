# SPDX-License-Identifier: Apache-2.0
"""SGLang's radix cache over a sluice cache, without a pool of host memory that SGLang manages.
docs/hicache.md has the configuration to paste.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "SluiceLinker",
        "linker_module_path": "sluice.integrations.sglang_linker",
        "linker_extra_config": {"address": "unix:/run/sluice-cache.sock"}}'

What arrives: names of pages, which are SHA-256 in hex of all tokens up to there, and the indices of
their tokens in the device pools of SGLang. What leaves: how much of a prefix can be restored, and
when loads and offloads have ended. A page goes by way of memory of the host, in which all layers of
it lie one behind the other: that memory is a host pool to SluiceHiCache, whose names of pages and
whose reconnection these are. One thread loads and one offloads, so that neither waits for the
other; the layers of a load are told when all of them are on the device.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Iterator, NamedTuple, Optional, Sequence

import torch

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
        resolve_hybrid_device_pool_group,
    )
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
        LayerWiseLoadCounter,
        UnifiedCacheLinker,
    )
    from sglang.srt.utils import get_device_module
except ImportError as e:
    raise ImportError(f"sluice.integrations.sglang_linker wants SGLang 0.5.23, which has external "
                      f"linkers: {e}") from e

from .. import errors
from .hicache import SluiceHiCache

log = logging.getLogger("sluice.sglang_linker")

STAGE = 64 << 20  # bytes of the host's memory for what one thread copies of one pool at a time


class _Counts:
    """A pool without memory, which has all pages."""


class _Stage:
    """Memory of the host for some pages of a device pool: the first half of its slots is for loads,
    the other for offloads. To SluiceHiCache it is a host pool.
    """

    layout, page_size = "device pages", 1

    def __init__(self, entry: Any) -> None:
        self._entry = entry
        first = entry.kv_buffer[0]
        self._rows = entry.buffer_meta[0][0][2] * first.shape[0] // first.nbytes  # of a page
        self._buffers = [_pages(b, self._rows) for b in entry.kv_buffer]
        page = sum(b.shape[1] for b in self._buffers)
        self.room = max(1, STAGE // page)
        self.size = 2 * self.room
        self.device = first.device
        self.kv_buffer = torch.empty((self.size, page), dtype=torch.uint8,
                                     pin_memory=self.device.type != "cpu")
        # What decides which bytes a page has.
        self.dtype = [[str(b.dtype), list(b.shape[1:])] for b in entry.kv_buffer]
        self.storage_format_tag = entry.page_size

    def get_page_buffer_meta(self, slots: torch.Tensor) -> tuple[list[int], list[int]]:
        page = self.kv_buffer.shape[1]
        return [self.kv_buffer.data_ptr() + int(k) * page for k in slots], [page] * len(slots)

    def pages(self, indices: torch.Tensor) -> torch.Tensor:
        """The numbers of pages of the device pool, from the indices of their tokens."""
        return torch.tensor(self._entry.prepare_locations(indices)) // self._rows

    def copy(self, first: int, pages: torch.Tensor, to_device: bool) -> None:
        """Copies between pages of the device pool and slots, on the current stream."""
        at, to = 0, pages.to(self.device)
        for buffer in self._buffers:
            slots = self.kv_buffer[first:first + len(pages), at:at + buffer.shape[1]]
            at += buffer.shape[1]
            if to_device:
                buffer.index_copy_(0, to, slots.to(self.device, non_blocking=True))
            else:
                slots.copy_(buffer.index_select(0, to), non_blocking=True)


def _pages(buffer: torch.Tensor, rows: int) -> torch.Tensor:
    """The pages of a buffer, of so many rows each, as bytes."""
    row = buffer.nbytes // buffer.shape[0]
    stride = buffer.stride(0) * buffer.element_size()
    if not buffer[0].is_contiguous() or rows > 1 and stride != row:
        raise errors.NotSupportedError("rows of a device pool are not contiguous")
    octets = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
    return octets.as_strided((buffer.shape[0] // rows, rows * row), (rows * stride, 1),
                             buffer.storage_offset() * buffer.element_size())


class _Part(NamedTuple):
    """Pages of one pool that are copied at a time."""

    stage: _Stage
    name: Any
    keys: list[str]
    pages: torch.Tensor


class SluiceLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """The linker of one rank. SGLang's factory makes it, and the scheduler's thread calls it."""

    def __init__(self, server_args: Any, params: Any, *, components: Any, extra_config: Any = None,
                 forward_stream: Any = None, **more: Any) -> None:
        self.forward_stream = forward_stream
        group = self._group = resolve_hybrid_device_pool_group(
            kvcache=params.token_to_kv_pool_allocator.get_kvcache(), page_size=params.page_size,
            params=params, components=components)
        self.pools = group.entry_map
        tp_rank, tp_size = 0, int(server_args.tp_size)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = params.attn_tp_cache_group or params.tp_cache_group
            tp_rank = torch.distributed.get_rank(group=ranks)
            tp_size = torch.distributed.get_world_size(group=ranks)
            if group.rank_replicated and server_args.enable_linker_mla_dedup and tp_size > 1:
                log.warning("--enable-linker-mla-dedup has no effect: each rank loads its pages "
                            "from the cache, which has them once for all")
        self._stages = {name: _Stage(entry) for name, entry in self.pools.items()}
        self._storage = SluiceHiCache(HiCacheStorageConfig(
            tp_rank=tp_rank, tp_size=tp_size, pp_rank=params.pp_rank, pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank, attn_cp_size=params.attn_cp_size,
            is_mla_model=group.rank_replicated, enable_storage_metrics=False,
            is_page_first_layout=False, model_name=str(server_args.model_path),
            extra_config={"interface_v1": 1, "sluice": dict(extra_config or {})}))
        try:
            for name, stage in self._stages.items():
                self._storage.register_mem_host_pool_v2(stage, name)
        except BaseException:
            self._storage.close()
            raise
        if PoolName.KV not in self._stages:  # its pages lie in pools of other names
            self._storage.registered_pools[PoolName.KV] = _Counts()
        self._module = get_device_module()
        device = next(iter(self._stages.values())).device
        self._loading, self._offloading = (
            ThreadPoolExecutor(1, f"sluice-{what}-{tp_rank}", self._module.set_device, (device,))
            for what in ("load", "offload"))
        self.layer_done_counter = LayerWiseLoadCounter(group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, list[PoolTransfer]] = {}
        self._offloads: SimpleQueue[bool] = SimpleQueue()

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        expanded = self._group.resolve_transfers(transfers)
        if not expanded:
            return []
        keys = next(t.keys for t in transfers if t.name == PoolName.KV)
        others = [t for t in expanded if t.name != PoolName.KV]
        found = self._storage.batch_exists_v2(list(keys), others)
        return list(found.restorable_prefix_pages or [])

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        # What lies on the device already is not asked for, so that pools may be left out.
        expanded = self._group.resolve_transfers(transfers, allow_partial=True,
                                                 allow_missing_kv=True)
        if not expanded:
            return False
        if rid in self._queued:
            raise errors.ArgumentError(f"a load of the request {rid} is queued already")
        self._queued[rid] = expanded
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        counter: int = self.layer_done_counter.update_producer()
        ready = self._module.Event()
        ready.record()
        self._loading.submit(self._load, counter, list(queued.values()), ready)
        return counter

    def _load(self, counter: int, requests: Sequence[list[PoolTransfer]], ready: Any) -> None:
        try:
            ready.synchronize()  # the slots are nobody else's any more
            for part in self._parts([t for transfers in requests for t in transfers]):
                self._move(part, 0, True)
            for layer in range(self._group.num_layers):
                self.layer_done_counter.complete(counter, layer)
        except BaseException as e:
            log.error("a load failed, whose requests SGLang aborts: %s", e)
            self.layer_done_counter.fail(counter, e)

    def _parts(self, transfers: Sequence[PoolTransfer]) -> Iterator[_Part]:
        for t in transfers:
            stage = self._stages[t.name]
            pages = stage.pages(t.host_indices)
            for begin in range(0, len(pages), stage.room):
                some = slice(begin, begin + stage.room)
                yield _Part(stage, t.name, list(t.keys[some]), pages[some])

    def _move(self, part: _Part, first: int, load: bool) -> None:
        """Copies pages by way of slots. It raises where not all of them came."""
        slots = torch.arange(first, first + len(part.pages))
        self._storage.prove()  # else what was given up may still come into these slots
        named = [PoolTransfer(part.name, host_indices=slots, keys=part.keys)]
        if not load:
            self._copy(part, first, False)
        move = self._storage.batch_get_v2 if load else self._storage.batch_set_v2
        done = move(named)[part.name]
        if not all(done):
            raise errors.UnavailableError(
                f"{done.count(False)} of {len(done)} pages of {part.name} "
                f"{'are not in the cache any more' if load else 'were not stored'}")
        if load:
            self._copy(part, first, True)

    def _copy(self, part: _Part, first: int, to_device: bool) -> None:
        with self._module.stream(self._module.Stream()):
            try:
                part.stage.copy(first, part.pages, to_device)
            finally:  # SGLang uses the pages for others once a load has failed
                ended = self._module.Event()
                ended.record()
                ended.synchronize()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def offload(self, transfers: list[PoolTransfer], session_id: Optional[str] = None) -> bool:
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if not expanded:
            return False
        if self._group.rank_replicated and not self._storage.storage_config.is_storage_writer:
            self._offloads.put(True)  # rank 0 stores the same
            return True
        self._offloading.submit(self._offload, expanded, self.record_offload_ready())
        return True

    def _offload(self, transfers: list[PoolTransfer], ready: list[Any]) -> None:
        stored = False
        try:
            for event in ready:
                event.synchronize()
            for part in self._parts(transfers):
                self._move(part, part.stage.room, False)
            stored = True
        except BaseException as e:
            log.warning("pages were not kept: %s", e)
        finally:
            self._offloads.put(stored)

    def num_completed_offloads(self) -> int:
        return self._offloads.qsize()

    def pop_completed_offload(self) -> bool:
        return self._offloads.get_nowait()

    def reset(self) -> None:
        """Returns when nothing is copied any more. What the cache has stays."""
        self._queued.clear()
        for thread in (self._loading, self._offloading):
            thread.submit(lambda: None).result()
        try:
            while True:
                self._offloads.get_nowait()
        except Empty:
            pass
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Returns when nothing is copied any more. UnprovenError: the cache may still reach memory
        of the host that pages go by.
        """
        self._queued.clear()
        self._loading.shutdown()
        self._offloading.shutdown()
        self._storage.close()
