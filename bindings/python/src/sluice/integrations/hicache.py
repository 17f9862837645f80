# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache over a sluice cache: pages of KV cache that outlive the server, on one node for
all of its ranks. docs/hicache.md has the configuration to paste.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "sluice", "module_path": "sluice.integrations.hicache",
        "class_name": "SluiceHiCache", "interface_v1": 1,
        "sluice": {"address": "unix:/run/sluice-cache.sock"}}'

What arrives: names of pages, which are SHA-256 in hex of all tokens up to there, and the indices of
their tokens in a host pool of SGLang. What leaves: which pages were found, loaded or stored. A host
pool is attached once, as one region, and its own `get_page_buffer_meta` says of a few pages where
they lie; from that the patterns of _pages.py are made, one of which moves any number of pages in
one operation, whatever the layout is.

A page is found by those whose bytes are the same: the name of the model, the layout and the type of
the pool, and the rank, decide the namespace. Of a model with MLA all ranks have the same bytes: the
rank is left out, and rank 0 alone stores.

A server that is killed is a miss, and is connected to again (_pages.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial
from itertools import takewhile
from typing import Any, List, Optional, Sequence

import numpy as np
import torch

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
except ImportError as e:
    raise ImportError(
        f"sluice.integrations.hicache wants SGLang 0.5.23, whose HiCacheStorage has host pools by "
        f"name (PoolTransfer): {e}") from e

from .. import errors
from .._segments import HostMemory
from ._pages import (
    Job,
    Options,
    PageStore,
    Pattern,
    Pool,
    geometry,
    keys_of,
    patterns,
    warn_of_version,
)

log = logging.getLogger("sluice.hicache")

RUN_WITH = ("0.5.23",)  # versions of SGLang that the tests have run
FLAT_BYTES = 8 << 20  # staged at a time by the calls that give pages as tensors
SAMPLES_MAX = 4096  # kept between two calls of get_stats


class SluiceHiCache(HiCacheStorage):  # type: ignore[misc]
    """A storage of one rank. SGLang's factory makes it, and its controller closes it."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None,
                 **more: Any) -> None:
        warn_of_version("sglang", RUN_WITH)
        self.storage_config = c = storage_config
        extra = dict(c.extra_config or {})
        options = Options.read(extra.get("sluice", {}))
        ranks = c.tp_size * c.pp_size * c.attn_cp_size
        if options.path and ranks > 1:
            raise errors.ArgumentError(
                f"a cache by \"path\" is for one rank, and there are {ranks}: start `sluice cache "
                f"serve`, and give its \"address\"")
        self._flat_pages = not extra.get("interface_v1")
        self._salt = options.salt
        self._host_pool: Any = None  # whose pages come as tensors
        self.registered_pools: dict[str, Any] = {}
        self._pools: dict[str, list[Pool]] = {}
        self._flat: dict[int, tuple[Pool, Any]] = {}
        self._flat_lock = threading.Lock()
        self._samples: dict[str, deque[tuple[int, float]]] = {
            kind: deque(maxlen=SAMPLES_MAX) for kind in ("load", "store")}
        self._store = PageStore(options, (c.model_name or "hicache")[-128:])

    # Host pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._host_pool = mem_pool_host
        if not self._flat_pages:
            self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Attaches the memory of a pool. One that only counts, without memory, is none."""
        if self.registered_pools.get(host_pool_name) is host_pool:
            return
        self.registered_pools[host_pool_name] = host_pool
        buffers = _buffers(host_pool)
        if not buffers:
            return
        memories = _memories(buffers)
        splits = self._splits(host_pool_name)
        pools = [Pool(str(host_pool_name), memories, found,
                      [self._geometry(str(host_pool_name), host_pool, p, k, rank)
                       for k, p in enumerate(found)], keep=buffers)
                 for rank, found in _layouts(host_pool, memories, splits)]
        for pool in pools:
            self._store.add(pool)
        self._pools[host_pool_name] = pools

    def _splits(self, name: str) -> int:
        """Into how many parts the heads of a page are split, so that servers of several sizes of
        tensor parallelism share them."""
        c = self.storage_config
        return c.tp_lcm_size // c.tp_size if name == PoolName.KV and c.should_split_heads else 1

    def _geometry(self, name: str, pool: Any, pattern: Pattern, part: int, split: int) -> bytes:
        c = self.storage_config
        splits = self._splits(name)
        shard: Any = [c.tp_rank * splits + split, c.tp_size * splits]
        if self._is_replicated(name, pool):
            shard = None
        runs = [pattern.run, *[n for n, _ in pattern.loops]]
        return geometry(
            "hicache 1", self._salt, c.model_name, name, part, runs, pool.page_size,
            str(getattr(pool, "layout", "")), str(getattr(pool, "dtype", "")),
            getattr(pool, "storage_format_tag", None), shard, [c.pp_rank, c.pp_size],
            [c.attn_cp_rank, c.attn_cp_size], [c.dcp_rank, c.dcp_size, c.logical_page_size])

    def _is_replicated(self, name: str, pool: Any) -> bool:
        """Whether all ranks have the same bytes. State of Mamba, and drafts with heads, are
        sharded even beside MLA.
        """
        if not self.storage_config.is_mla_model or name == PoolName.MAMBA:
            return False
        return not (name in (PoolName.DRAFT, PoolName.DRAFT_SWA) and hasattr(pool, "head_num"))

    # Pages of the host pool, by the indices of their tokens.

    def batch_exists(self, keys: List[str],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> int:
        if self._flat_pages:
            return _prefix(self._found_flat(keys))
        return _prefix(self._found(PoolName.KV, keys))

    def batch_get_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        return self._move("load", [PoolTransfer(PoolName.KV, host_indices=host_indices,
                                                keys=keys)])[PoolName.KV]

    def batch_set_v1(self, keys: List[str], host_indices: torch.Tensor,
                     extra_info: Optional[HiCacheStorageExtraInfo] = None) -> List[bool]:
        return self._move("store", [PoolTransfer(PoolName.KV, host_indices=host_indices,
                                                 keys=keys)])[PoolName.KV]

    def batch_get_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None
                     ) -> dict[str, List[bool]]:
        return self._move("load", transfers)

    def batch_set_v2(self, transfers: List[PoolTransfer],
                     extra_info: Optional[HiCacheStorageExtraInfo] = None
                     ) -> dict[str, List[bool]]:
        return self._move("store", transfers)

    def batch_exists_v2(self, keys: List[str],
                        pool_transfers: Optional[List[PoolTransfer]] = None,
                        extra_info: Optional[HiCacheStorageExtraInfo] = None
                        ) -> PoolTransferResult:
        """All lengths of a prefix that every pool can restore, of which the longest is the hit.
        BLOCK_GROUPS has no verdict, as of SGLang's own storages.
        """
        there = self._found(PoolName.KV, keys)
        pages = _prefix(there)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = np.ones(pages, bool)  # of length k + 1
        for transfer in pool_transfers or []:
            if not restorable.any():
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue
            found = self._found(transfer.name, keys[:pages])
            need = len(keys)
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                need = max(1, len(transfer.keys or ()))
            # How many pages without a gap end at each one.
            at = np.arange(1, pages + 1)
            gap = np.maximum.accumulate(np.where(found, 0, at))
            fits = at - gap >= np.minimum(at, need)
            boundary = int(at[fits][-1]) if fits.any() else 0
            if boundary:
                hits[transfer.name] = boundary
            restorable &= fits
        lengths = (np.flatnonzero(restorable) + 1).tolist()
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _found(self, name: str, keys: Sequence[str]) -> Any:
        """Which pages the cache has whole, as an array of bool."""
        pools, pool = self._pools.get(name), self.registered_pools.get(name)
        if not pools:  # a pool that only counts has all pages
            return np.full(len(keys), pool is not None and not _buffers(pool))
        listed = keys_of(keys)
        found = self._store.match(pools[0], listed)
        for other in pools[1:]:
            found &= self._store.match(other, listed)
        return found

    def _move(self, kind: str, transfers: Sequence[PoolTransfer]) -> dict[str, List[bool]]:
        """Loads or stores pages of several pools at once."""
        results: dict[str, List[bool]] = {}
        jobs: list[tuple[str, Job]] = []
        began = time.perf_counter()
        for t in transfers:
            keys = t.keys or []
            pool, pools = self.registered_pools.get(t.name), self._pools.get(t.name, [])
            results[t.name] = [False] * len(keys)
            if pool is None:
                log.error("pool %s was not registered", t.name)
            elif not pools:
                results[t.name] = [not _buffers(pool)] * len(keys)
            elif (kind == "store" and not self.storage_config.is_storage_writer
                  and self._is_replicated(str(t.name), pool)):
                results[t.name] = [True] * len(keys)  # rank 0 stores the same
            elif keys:
                slots = _slots(pool, pools[0], t.host_indices, len(keys))
                if slots is not None:
                    listed = keys_of(keys)
                    jobs += [(t.name, Job(p, listed, slots)) for p in pools]
        (self._store.load if kind == "load" else self._store.store)([job for _, job in jobs])
        done: dict[str, Any] = {}
        for name, job in jobs:
            done[name] = done[name] & job.done if name in done else job.done
        results.update({name: which.tolist() for name, which in done.items()})
        if self.storage_config.enable_storage_metrics and jobs:
            moved = sum(int(job.done.sum()) * job.pool.page_bytes for _, job in jobs)
            pages = sum(int(which.sum()) for which in done.values())
            self._samples[kind].append((pages, moved / 1e9 / (time.perf_counter() - began)))
        return results

    # Pages as tensors, which SGLang gives without "interface_v1": a copy more.

    def set(self, key: str, value: Optional[Any] = None, target_location: Optional[Any] = None,
            target_sizes: Optional[Any] = None) -> bool:
        return self.batch_set([key], [value if value is not None else target_location])

    def get(self, key: str, target_location: Optional[Any] = None,
            target_sizes: Optional[Any] = None) -> Optional[torch.Tensor]:
        return self.batch_get([key], [target_location])[0]

    def exists(self, key: str) -> bool:
        return bool(self._found_flat([key])[0])

    def batch_set(self, keys: List[str], values: Optional[Any] = None,
                  target_locations: Optional[Any] = None,
                  target_sizes: Optional[Any] = None) -> bool:
        return all(self._move_flat(keys, values or target_locations or [], True))

    def batch_get(self, keys: List[str], target_locations: Optional[Any] = None,
                  target_sizes: Optional[Any] = None) -> List[Optional[torch.Tensor]]:
        places = target_locations or []
        done = self._move_flat(keys, places, False)
        return [place if there else None for place, there in zip(places, done)]

    def _move_flat(self, keys: List[str], values: Sequence[Any], store: bool) -> List[bool]:
        if len(values) != len(keys) or not all(isinstance(v, torch.Tensor) for v in values):
            raise errors.ArgumentError(
                f"{len(keys)} keys want as many tensors: set \"interface_v1\": 1 for pages by the "
                f"indices of their tokens")
        done: List[bool] = []
        listed, begin = keys_of(keys) if keys else b"", 0
        with self._flat_lock:
            while begin < len(keys):
                pool, rows = self._stage(values[begin].nbytes)
                # A page of another length begins the next step.
                some = [_octets(v) for v in takewhile(
                    lambda v: v.nbytes == rows.shape[1], values[begin:begin + len(rows)])]
                job = Job(pool, listed[16 * begin:16 * (begin + len(some))],
                          np.arange(len(some), dtype=np.uint32))
                if store:
                    for row, octets in zip(rows, some):
                        row[:] = octets
                    self._store.store([job])
                else:
                    self._store.load([job])
                    for there, row, octets in zip(job.done, rows, some):
                        if there:
                            octets[:] = row
                done += job.done.tolist()
                begin += len(some)
        return done

    def _found_flat(self, keys: Sequence[str]) -> Any:
        with self._flat_lock:
            pool, _ = self._stage(next(iter(self._flat), 1))
        return self._store.match(pool, keys_of(keys)) if keys else np.zeros(0, bool)

    def _stage(self, length: int) -> tuple[Pool, Any]:
        """Memory for some pages of one length. Preconditions: _flat_lock is held."""
        if length not in self._flat:
            c = self.storage_config
            if len(self._flat) == 16:
                raise errors.ArgumentError("pages of more than 16 lengths")
            rows = np.empty((max(1, min(128, FLAT_BYTES // max(length, 1))), length), np.uint8)
            at = rows.ctypes.data
            shard = None if c.is_mla_model else [c.tp_rank, c.tp_size]
            of = [str(getattr(self._host_pool, name, "")) for name in (
                "layout", "dtype", "page_size", "storage_format_tag")]
            pool = Pool("flat", [HostMemory(at, rows.nbytes)], [Pattern(at, length, length)],
                        [geometry("hicache flat 2", self._salt, c.model_name, of, shard, c.pp_rank,
                                  c.pp_size, c.attn_cp_rank, c.attn_cp_size, c.dcp_rank,
                                  c.dcp_size, c.logical_page_size)], keep=rows)
            self._store.add(pool)
            self._flat[length] = pool, rows
        return self._flat[length]

    # The rest.

    def prove(self) -> None:
        """Returns with the proof that what an error has ended moves no byte any more."""
        self._store.prove()

    def get_stats(self) -> Any:
        """What was moved since the last call, as SGLang's metrics want it."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for kind, pages, rates in (
                ("load", metrics.prefetch_pgs, metrics.prefetch_bandwidth),
                ("store", metrics.backup_pgs, metrics.backup_bandwidth)):
            samples = self._samples[kind]
            while samples:
                n, rate = samples.popleft()
                pages.append(n)
                rates.append(rate)
        return metrics

    def clear(self) -> None:
        """Forgets the pages that this rank may find, those of other servers with the same ones
        included. SGLang logs what it raises, and answers that it has failed.
        """
        self._store.clear()

    def close(self) -> None:
        """Detaches the host pools. UnprovenError: the cache may still reach their memory."""
        self._store.close()


def _prefix(there: Any) -> int:
    return int(there.argmin()) if not there.all() else len(there)


def _octets(value: torch.Tensor) -> Any:
    """The bytes of a contiguous tensor, in place."""
    if not value.is_contiguous():
        raise errors.ArgumentError("the tensor of a page is not contiguous")
    return value.detach().view(torch.uint8).reshape(-1).numpy()


def _buffers(pool: Any) -> list[torch.Tensor]:
    """The tensors in which the pages of a pool lie."""
    if getattr(pool, "kv_buffer", None) is None and not hasattr(pool, "get_hybrid_pool_buffer"):
        return []
    if hasattr(pool, "get_hybrid_pool_buffer"):
        found = pool.get_hybrid_pool_buffer()
    else:
        found = pool.kv_buffer if isinstance(pool.kv_buffer, (list, tuple)) else [pool.kv_buffer]
    return [b for b in found if b is not None and b.numel()]


def _memories(buffers: Sequence[torch.Tensor]) -> list[HostMemory]:
    """The memory of tensors: views of one storage are one."""
    stores = {}
    for b in buffers:
        if b.device.type != "cpu":
            raise errors.NotSupportedError(f"the pool lies on {b.device}: want memory of the host")
        s = b.untyped_storage()
        stores[s.data_ptr()] = s.nbytes()
    return [HostMemory(at, length) for at, length in stores.items()]


def _layouts(pool: Any, memories: Sequence[HostMemory],
             splits: int) -> list[tuple[int, list[Pattern]]]:
    """How the pages of a pool lie, for each part of their heads."""
    page = _tokens(pool)
    pages = int(pool.size) // int(pool.page_size or 1)

    def region_of(address: int) -> int:
        for k, m in enumerate(memories):
            if m.address <= address < m.address + m.length:
                return k
        raise errors.ArgumentError("a page lies outside the tensors of its pool")

    def of_page(number: int) -> tuple[list[int], list[int]]:
        indices = torch.arange(number * page, (number + 1) * page)
        if splits > 1:
            found = pool.get_split_heads_page_buffer_meta(indices, splits)
        else:
            found = pool.get_page_buffer_meta(indices)
        return found[0], found[1]

    if getattr(pool, "layout", "") == "page_unified":
        one = pool.page_unified_layout.bytes_per_page
        return [(0, [Pattern(pool.kv_buffer.data_ptr(), one, one)])]
    if getattr(pool, "shared_allocation_domain", None) is not None:
        # Pages move: each call asks where they are.
        [at], [one] = of_page(0)
        base = memories[region_of(at)].address
        return [(0, [Pattern(base + (at - base) % one, one, one)])]
    try:
        if splits == 1:
            return [(0, patterns(of_page, pages, region_of))]
        each = len(of_page(0)[0]) // splits

        def of_part(split: int, number: int) -> tuple[list[int], list[int]]:
            at, lengths = of_page(number)
            part = slice(split * each, (split + 1) * each)
            return at[part], lengths[part]

        return [(k, patterns(partial(of_part, k), pages, region_of)) for k in range(splits)]
    except (NotImplementedError, ValueError) as e:
        raise errors.NotSupportedError(
            f"pages of {type(pool).__name__} with the layout {getattr(pool, 'layout', None)!r} "
            f"cannot be moved ({e}): start SGLang with --hicache-mem-layout page_first") from e


def _tokens(pool: Any) -> int:
    """Indices that SGLang gives for one page."""
    return int(getattr(pool, "logical_page_size", None) or pool.page_size or 1)


def _slots(pool: Any, of: Pool, indices: Optional[torch.Tensor], pages: int) -> Any:
    """The slot of each page; None where the indices are not those of so many pages."""
    page = _tokens(pool)
    if indices is None or len(indices) != pages * page:
        log.error("%d indices for %d pages of %d tokens", 0 if indices is None else len(indices),
                  pages, page)
        return None
    indices = indices.detach().cpu()
    if getattr(pool, "shared_allocation_domain", None) is not None:
        at = np.asarray(pool.get_page_buffer_meta(indices)[0], np.int64)
        return ((at - of.patterns[0].base) // of.patterns[0].stride).astype(np.uint32)
    return (indices.numpy()[::page] // page).astype(np.uint32)
