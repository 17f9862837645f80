# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiered offloading on processors: its own spec, scheduler and managers. Its worker copies
by streams of a card alone, so the copies are made here. A server takes it by spec_module_path.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Copies(OffloadingWorker):
    """Of one group, and of one block a chunk."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        assert len(caches.group_data_refs) == 1
        self._region = region
        self._pairs = [(t.tensor, region.create_next_worker_view(t.page_size_bytes))
                       for t in caches.tensors]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            chunks[torch.from_numpy(dst_spec.block_ids).long()] = blocks[
                torch.from_numpy(src_spec.block_ids).long()]
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pairs:
            blocks[torch.from_numpy(dst_spec.block_ids).long()] = chunks[
                torch.from_numpy(src_spec.block_ids).long()]
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """All have ended when they are submitted."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class OnProcessors(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1 and self.config.parallel.world_size == 1
        return Copies(kv_caches, SharedOffloadRegion(
            engine_id=self.config.engine_id, num_chunks=self.num_chunks, rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker))
