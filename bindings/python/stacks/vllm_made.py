# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, its memory of KV cache and a connector in this process, with a made model: the
key and value of a token are a digest of all tokens up to it, and so is the next token. Before each
step all that a real model would read is compared.
"""

from __future__ import annotations

import copy
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_server import LIMIT, WORDS

TOKENS, LAYERS = 16, 3  # tokens of a block
CONNECTOR = {"kv_connector": "SluiceConnector", "kv_role": "kv_both",
             "kv_connector_module_path": "sluice.integrations.vllm_connector",
             "kv_load_failure_policy": "recompute"}
PATIENT = {"timeout": LIMIT, "lookup_timeout": LIMIT, "start_timeout": LIMIT}


def digests(tokens: list[int]) -> list[int]:
    """What a model computes at each token: from all tokens up to there."""
    made, at = [], 0
    for token in tokens:
        at = zlib.crc32(b"%d" % token, at)
        made.append(at % 1_000_003)
    return made


def answer(prompt: list[int], tokens: int) -> list[int]:
    """What a lone model answers."""
    said = list(prompt)
    for _ in range(tokens):
        said.append(3 + digests(said)[-1] % (WORDS - 3))
    return said[len(prompt):]


def parts(layer: Any) -> list[Any]:
    """Keys and values, [blocks, heads, tokens, ...] each. In a page that lies in one piece all keys
    lie before all values, as vLLM's attention on processors has them.
    """
    blocks, heads, tokens, content = layer.shape
    if layer.stride(2) == content:
        layer = layer.view(blocks, heads, 2 * tokens, content // 2)
    return [half.numpy() for half in layer.chunk(2, dim=2 if layer.shape[2] > tokens else 3)]


def spec(mla: bool, heads: int) -> Any:
    import torch

    if mla:
        return MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=16,
                                dtype=torch.float32, max_tp_shards=1)
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=8,
                             dtype=torch.float32)


def configured(folder: Path, address: str, ranks: int = 1, transfer: Any = None,
               **more: Any) -> Any:
    extra = {"sluice": {"address": address, **PATIENT}}
    said = {**CONNECTOR, "kv_connector_extra_config": extra, **(transfer or {})}
    words: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 1024, **more}
    return EngineArgs(
        model=str(folder / "model"), dtype="float32", max_num_seqs=8, block_size=TOKENS,
        tensor_parallel_size=ranks, enforce_eager=True, async_scheduling=False,
        kv_transfer_config=KVTransferConfig(**said), **words).create_engine_config()


class Made:
    """One server without its processes and its model."""

    def __init__(self, folder: Path, address: str, ranks: int = 1, blocks: int = 64,
                 layout: str = "LBHNC", mla: bool = False, window: bool = False,
                 **more: Any) -> None:
        config = self.config = configured(folder, address, ranks, **more)
        cache = config.cache_config
        cache.kv_cache_layout, self.ranks, self.mla = layout, ranks, mla
        one = spec(mla, 4 // ranks)
        kinds = {f"layers.{k}": one for k in range(LAYERS)}
        if window:
            kinds["layers.0"] = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=4, head_size=8,
                                                  dtype=one.dtype, sliding_window=64)
        made = get_kv_cache_configs(config, [kinds] * ranks,
                                    [blocks * LAYERS * one.page_size_bytes] * ranks)
        for each in made:
            each.kv_cache_layout = layout
        for_all = generate_scheduler_kv_cache_config(made)
        cache.num_gpu_blocks = for_all.num_blocks
        hashing = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(TOKENS, hashing)
        self.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=for_all, block_size=TOKENS,
            hash_block_size=TOKENS, structured_output_manager=StructuredOutputManager(config),
            log_stats=True)
        self.memory, self.workers = [], []
        for rank in range(ranks):
            of = copy.deepcopy(config)
            of.parallel_config.rank = rank
            worker = KVConnectorFactory.create_connector(of, KVConnectorRole.WORKER, made[rank])
            import torch

            memory = allocate_kv_cache(made[rank], torch.device("cpu"), KVCacheLayout[layout])
            worker.register_kv_caches(memory)
            self.memory.append([memory[name] for name in kinds])
            self.workers.append(worker)
        self._together = KVOutputAggregator(ranks)
        self.requests: dict[str, Any] = {}
        self.hits = 0  # tokens that the connector has said to load
        self.kv: dict[str, Any] = {}  # what a request that has ended says for another server

    def add(self, name: str, prompt: list[int], tokens: int, kv: Any = None, **more: Any) -> None:
        request = self.requests[name] = Request(
            name, prompt, SamplingParams(
                max_tokens=tokens, ignore_eos=True, temperature=0,
                extra_args=None if kv is None else {"kv_transfer_params": kv}),
            None, block_hasher=self._hasher, **more)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def value(self, rank: int, layer: int) -> Any:
        """What the key and value of a head have beyond the digest."""
        heads = self.memory[rank][layer].shape[1]
        first = 0 if self.mla else rank * heads
        return layer + 10 * np.arange(first, first + heads, dtype=np.float32)[:, None]

    def _hits(self, step: Any) -> int:
        return sum(len(load.slots) for load in step.loads) * TOKENS

    def _run(self, name: str, scheduled: int) -> list[int]:
        """Compares what is there of a request, writes what the step computes, and answers."""
        request = self.requests[name]
        begin = request.num_computed_tokens - scheduled  # the scheduler has counted the step
        end = begin + scheduled
        tokens = request.all_token_ids[:end]
        want = np.array(digests(tokens), np.float32)
        blocks, = self.scheduler.kv_cache_manager.get_block_ids(name)
        rows = np.arange(end)
        at, offset = np.array(blocks)[rows // TOKENS], rows % TOKENS
        for rank, layers in enumerate(self.memory):
            for k, layer in enumerate(layers):
                for of, view in enumerate(parts(layer)):
                    right = want[:, None, None] + self.value(rank, k) + of / 2
                    there = view[at[:begin], :, offset[:begin]]
                    assert (there == right[:begin]).all(), (name, rank, k, begin)
                    view[at[begin:], :, offset[begin:]] = right[begin:]
        done = end == request.num_tokens
        return [3 + int(want[-1]) % (WORDS - 3)] if done else []

    def step(self) -> None:
        out = self.scheduler.schedule()
        names = list(out.num_scheduled_tokens)
        results = []
        for worker in self.workers:
            worker.handle_preemptions(out.kv_connector_metadata)
            worker.bind_connector_metadata(out.kv_connector_metadata)
            self.hits += self._hits(out.kv_connector_metadata)
            worker.start_load_kv(None)
        said = [self._run(name, out.num_scheduled_tokens[name]) for name in names]
        for layer in range(LAYERS if names else 0):
            for worker, memory in zip(self.workers, self.memory):
                worker.save_kv_layer(f"layers.{layer}", memory[layer], None)
        for worker in self.workers:
            worker.wait_for_save()
            moved, told = worker.get_transfer_results(out.finished_req_ids), KVConnectorOutput()
            told.finished_recving, told.finished_sending = (moved.finished_recving,
                                                            moved.finished_sending)
            told.invalid_block_ids = worker.get_block_ids_with_load_errors()
            told.kv_connector_worker_meta = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
            results.append(ModelRunnerOutput(
                names, {name: k for k, name in enumerate(names)}, said,
                kv_connector_output=told))
        told = self.scheduler.update_from_output(out, self._together.aggregate(results))
        for outputs in told.values():
            self.kv.update((one.request_id, one.kv_transfer_params) for one in outputs.outputs
                           if one.finish_reason is not None)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or
                    self.scheduler.connector.has_pending_push_work())

    def run(self) -> None:
        """Until all requests have ended, and no store runs."""
        end = time.monotonic() + LIMIT
        while self.busy:
            self.step()
            assert time.monotonic() < end, "requests do not end"
            time.sleep(0.001)

    def ask(self, name: str, prompt: list[int], tokens: int, **more: Any) -> list[int]:
        self.add(name, prompt, tokens, **more)
        self.run()
        return self.said(name)

    def said(self, name: str) -> list[int]:
        return list(self.requests[name].output_token_ids)

    def close(self) -> None:
        for connector in [*self.workers, self.scheduler.connector]:
            connector.shutdown()
