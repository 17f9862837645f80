# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefixes in a sluice cache: blocks of KV cache that outlive the server, on one node for
all of its servers and ranks. docs/vllm-connector.md has the configuration to paste.

    --kv-transfer-config '{"kv_connector": "SluiceConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "sluice.integrations.vllm_connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"sluice": {"address": "unix:/run/sluice-cache.sock"}}}'

vLLM makes a connector in the process of its scheduler, and one in each worker. The scheduler's
asks the cache, in a thread, which of a request's blocks all ranks can load, by the hashes that
vLLM has of blocks. It tells the workers by the metadata of a step what to load and to store. A
worker attaches its KV cache, which is one allocation with the layers an even stride apart, so that
one operation moves any number of blocks of all layers.

Loads run between the steps of the model (asynchronous, in vLLM's words). A request whose load has
failed is computed. Stores begin when the step that computes their blocks has ended, and the
scheduler's connector holds a reference to each block until all ranks have said that its store has
ended: neither a preemption nor the end of a request has vLLM use the block for something else.

A server that is killed is a miss, and is connected to again (_pages.py).
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

import numpy as np

RUN_WITH = ("0.32",)  # versions of vLLM that the tests have run

try:
    from vllm import __version__ as _version
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheLayout,
        UniformTypeKVCacheSpecs,
        iter_layer_specs,
    )
except ImportError as e:
    raise ImportError(f"sluice.integrations.vllm_connector wants vLLM {', '.join(RUN_WITH)}: "
                      f"{e}") from e
if _version.rpartition(".")[0] not in RUN_WITH:
    raise ImportError(f"sluice.integrations.vllm_connector was run with vLLM {', '.join(RUN_WITH)}"
                      f", and this is {_version}: its connectors' interface changes with each "
                      f"version. Install one of those, or a sluice that knows this one")

from .. import errors
from .._segments import HostMemory
from ..cache import KEY_BYTES
from ._pages import Job, Options, PageStore, Pattern, Pool, geometry

log = logging.getLogger("sluice.vllm")

LOADS, STORES = 8, 2  # at a time, of one worker: each has a thread
PINNED_PART = 4  # stores keep at most this part of all blocks from being used again


@dataclass
class Load:
    """Blocks of one request that a worker is to load."""

    request: str
    keys: bytes
    slots: Any  # numpy.uint32, one a key


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers are to do in a step. All stores of a step are one operation."""

    loads: list[Load] = field(default_factory=list)
    store: int = 0  # its number; 0: nothing is to be stored
    keys: bytes = b""
    slots: Any = None


@dataclass
class StoresEnded(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """How many workers have ended each store."""

    workers: Counter[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoresEnded:
        assert isinstance(other, StoresEnded)
        return StoresEnded(self.workers + other.workers)


def supported(config: Any, cache: Any) -> list[Any]:
    """The specs of all layers. ArgumentError, NotSupportedError: what to do about it is in its
    words.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise errors.ArgumentError("blocks that could not be loaded must be computed, and vLLM "
                                   "fails their requests by default: set \"kv_load_failure_"
                                   "policy\": \"recompute\" in --kv-transfer-config")
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size",
                 "decode_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise errors.NotSupportedError(
                f"{name} is {getattr(parallel, name)}: sluice keeps blocks of tensor parallel "
                f"ranks alone. Set it to 1")
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        raise errors.NotSupportedError(
            f"the model has {len(groups)} groups of KV cache, and sluice keeps blocks of one: "
            f"start vLLM with --disable-hybrid-kv-cache-manager, which makes layers with "
            f"sliding windows full ones. Models with state of Mamba are not supported")
    specs = list(iter_layer_specs(groups[0].kv_cache_spec))
    if not all(isinstance(spec, FullAttentionSpec) for spec in specs):
        raise errors.NotSupportedError(
            f"the model's layers are of {', '.join(sorted({type(s).__name__ for s in specs}))}:"
            f" sluice keeps blocks of full attention and MLA alone. Start vLLM without this "
            f"connector")
    return specs


@dataclass
class Blocks:
    """What both sides know of a model's blocks: they must agree to find each other's."""

    options: Options
    model: str
    tokens: int  # of a block
    shards: int  # ranks with bytes of their own; several have the same ones of MLA
    replicas: int
    geometries: list[list[bytes]]  # of each shard, and of each part that a block consists of

    @classmethod
    def of(cls, config: Any, cache: Any) -> Blocks:
        """ArgumentError, NotSupportedError: what to do about it is in its words."""
        transfer, parallel, model = (config.kv_transfer_config, config.parallel_config,
                                     config.model_config)
        options = Options.read(transfer.kv_connector_extra_config.get("sluice", {}))
        if options.path:
            raise errors.ArgumentError("a cache by \"path\" is for one process, and vLLM has "
                                       "several: start `sluice cache serve`, and give its "
                                       "\"address\"")
        specs = supported(config, cache)
        layout = KVCacheLayout[cache.kv_cache_layout]
        if not layout.is_block_compact:
            raise errors.NotSupportedError(
                f"with the layout {layout.name} a block of a layer is not in one piece: set "
                f"VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC")
        replicas = cache.kv_tp_replicas
        shards = parallel.tensor_parallel_size // replicas
        # The scheduler is told of the first layer's spec alone, where layers differ.
        same = ["vllm 1", options.salt, model.model, model.revision, str(model.dtype),
                model.quantization, model.hf_overrides, config.cache_config.cache_dtype,
                config.cache_config.prefix_caching_hash_algo, layout.name, repr(specs[0]),
                getattr(config.speculative_config, "model", None)]
        parts = [len(t.layers) for t in cache.kv_cache_tensors]
        return cls(options, model.model[-128:], specs[0].block_size, shards, replicas, [
            [geometry(*same, [shard, shards], parts, k) for k in range(len(parts))]
            for shard in range(shards)])

    @staticmethod
    def keys(hashes: Sequence[bytes]) -> bytes:
        """The ends of hashes, by which routers know vLLM's blocks. Precondition: there are some.
        All have one length.
        """
        rows = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)
        return rows[:, -KEY_BYTES:].tobytes()


@dataclass
class Tracked:
    """A request, as the scheduler's side sees it."""

    request: Any
    # How many of its first blocks the cache has, and the keys that it was asked for.
    answer: Optional[Future[tuple[int, bytes]]] = None
    computed: int = 0  # blocks that vLLM has itself, when it last asked
    loaded: int = -1  # its number of preemptions, when a load was begun
    stored: int = 0  # first blocks that the cache has, or was given


class Scheduler:
    """The side that asks the cache, and plans."""

    def __init__(self, blocks: Blocks, workers: int, loads: bool, stores: bool) -> None:
        self._of, self._workers, self._may_load, self._may_store = blocks, workers, loads, stores
        self._store = PageStore(blocks.options, blocks.model)
        self._shards = [Pool(f"shard {k}", [], [], listed)
                        for k, listed in enumerate(blocks.geometries)]
        for pool in self._shards:
            self._store.add(pool)
        self._asking = ThreadPoolExecutor(1, "sluice-vllm-ask")
        self._asking.submit(int)  # no request waits for the start of the thread
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._stores = 0
        self._pins: dict[int, tuple[list[int], int]] = {}  # of a store: blocks, workers to come
        self._pinned = 0
        self._pool: Any = None  # vLLM's blocks

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def _ask(self, hashes: Sequence[bytes]) -> tuple[int, bytes]:
        """How many of the first blocks all ranks can load, and the keys of these."""
        keys = self._of.keys(hashes)
        for pool in self._shards:
            found = self._store.match(pool, keys)
            n = len(found) if found.all() else int(found.argmin())
            keys = keys[:n * KEY_BYTES]
            if not n:
                break
        return n, keys

    def matched(self, request: Any, computed: int) -> tuple[Optional[int], bool]:
        """None until the cache has answered. Each request is loaded once, and once more after a
        preemption: where a load fails, the request is computed.
        """
        t = self._tracked.setdefault(request.request_id, Tracked(request))
        t.computed = computed // self._of.tokens
        # vLLM computes the last token, to have a next one.
        hashes = request.block_hashes[:(request.num_tokens - 1) // self._of.tokens]
        if (not self._may_load or t.loaded == request.num_preemptions
                or len(hashes) <= t.computed):
            return 0, False
        if t.answer is None:
            t.answer = self._asking.submit(self._ask, hashes)
        if not t.answer.done():
            return None, False
        more = max(0, min(t.answer.result()[0], len(hashes)) - t.computed) * self._of.tokens
        return more, more > 0

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        t, keys = self._tracked.setdefault(request.request_id, Tracked(request)), b""
        if t.answer is not None:
            if t.answer.done():  # else vLLM had not asked for the request to be found
                t.stored, keys = t.answer.result()
            t.answer = None
        elif t.loaded == request.num_preemptions:  # what it could not load it computes, and stores
            t.stored = min(t.stored, request.num_computed_tokens // self._of.tokens)
        if external:
            t.loaded = request.num_preemptions
            first, end = t.computed, t.computed + external // self._of.tokens
            self._loads.append(Load(request.request_id, keys[first * KEY_BYTES:end * KEY_BYTES],
                                    _slots(blocks.get_block_ids()[0][first:end])))

    def plan(self, step: Any) -> StepMetadata:
        """Stores blocks that the step fills, also those of answers, which the next question of a
        conversation begins with.
        """
        made, self._loads = StepMetadata(self._loads), []
        keys: list[bytes] = []
        slots: list[int] = []
        room = self._pool.num_gpu_blocks // PINNED_PART - self._pinned
        for name, tokens in step.num_scheduled_tokens.items() if self._may_store else ():
            t = self._tracked[name]
            full = min((t.request.num_computed_tokens + tokens) // self._of.tokens,
                       len(t.request.block_hashes), t.stored + room - len(slots))
            if full > t.stored:  # what there is no room for comes with a later step
                keys += t.request.block_hashes[t.stored:full]
                listed, = step.kv_connector_block_state.get_block_ids(name)
                slots += listed[t.stored:full]
                t.stored = full
        if slots:
            self._stores += 1
            made.store, made.keys = self._stores, self._of.keys(keys)
            made.slots = _slots(slots)
            self._pool.touch([self._pool.blocks[k] for k in slots])
            self._pins[made.store] = slots, self._workers
            self._pinned += len(slots)
        return made

    def ended(self, told: Any) -> None:
        """Gives back the blocks of stores that all workers have ended."""
        for store, workers in told.workers.items() if isinstance(told, StoresEnded) else ():
            slots, left = self._pins.pop(store)
            if left > workers:
                self._pins[store] = slots, left - workers
                continue
            self._pinned -= len(slots)
            # The last of a chain is to be evicted first.
            self._pool.free_blocks([self._pool.blocks[k] for k in reversed(slots)])

    @property
    def storing(self) -> bool:
        return bool(self._pins)

    def finished(self, request: Any) -> None:
        self._tracked.pop(request.request_id, None)

    def reset(self) -> bool:
        """Forgets all blocks of the model, as after a change of its weights."""
        if self._pins:  # they would come after it
            log.warning("the cache was not reset: %d blocks are being stored", self._pinned)
            return False
        try:
            self._store.clear()
        except errors.Error as e:
            log.error("the cache was not reset: %s", e)
            return False
        return True

    def close(self) -> None:
        self._asking.shutdown(cancel_futures=True)
        self._store.close()


def _slots(blocks: list[int]) -> Any:
    return np.array(array("I", blocks), np.uint32)  # numpy takes ten times as long over a list


class Worker:
    """The side that moves blocks of one rank."""

    def __init__(self, blocks: Blocks, cache: Any, rank: int) -> None:
        self._of, self._cache = blocks, cache
        self._geometries = blocks.geometries[rank // blocks.replicas]
        self._writes = rank % blocks.replicas == 0  # the others have the same bytes
        self._store = PageStore(blocks.options, blocks.model)
        self._loader = ThreadPoolExecutor(LOADS, "sluice-vllm-load")
        self._storer = ThreadPoolExecutor(STORES, "sluice-vllm-store")
        self._pool: Any = None
        self._loads: dict[str, tuple[Job, Future[None]]] = {}
        self._stores: dict[int, Optional[Future[None]]] = {}
        self._failed: set[int] = set()  # blocks, not told yet

    def register(self, caches: dict[str, Any]) -> None:
        """Attaches the allocation in which all layers lie, and says how blocks lie there."""
        first = caches[self._cache.kv_cache_tensors[0].layers[0]]
        if first.device.type != "cpu":
            raise errors.NotSupportedError(
                f"the KV cache lies on {first.device}, and the cache of a node reaches memory of "
                f"the host alone: start vLLM on processors, or without this connector")
        whole = first.untyped_storage()
        spec = self._cache.kv_cache_groups[0].kv_cache_spec
        made = []
        for t in self._cache.kv_cache_tensors:
            for k, layer in enumerate(t.layers):
                at = whole.data_ptr() + t.offset + k * t.layer_stride
                if caches[layer].data_ptr() != at:
                    raise errors.NotSupportedError(
                        f"the KV cache of {layer} does not lie where vLLM's configuration says: "
                        f"start vLLM without this connector")
            one = spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                one = spec.kv_cache_specs[t.layers[0]]
            run, layers = one.page_size_bytes, len(t.layers)
            if layers > 1 and t.layer_stride == run:
                run, layers = run * layers, 1
            loops = ((layers, t.layer_stride),) if layers > 1 else ()
            made.append(Pattern(whole.data_ptr() + t.offset, t.block_stride, run, loops))
        self._pool = Pool("kv", [HostMemory(whole.data_ptr(), whole.nbytes())], made,
                          self._geometries, keep=whole)
        self._store.add(self._pool)

    def load(self, step: StepMetadata) -> None:
        for load in step.loads:
            job = Job(self._pool, load.keys, load.slots)
            self._loads[load.request] = job, self._loader.submit(self._store.load, [job])

    def store(self, step: StepMetadata) -> None:
        """Precondition: the step's model has run."""
        if step.store:
            job = Job(self._pool, step.keys, step.slots)
            self._stores[step.store] = (
                self._storer.submit(self._store.store, [job]) if self._writes else None)

    def loaded(self) -> set[str]:
        """Requests whose loads have ended, well or not. UnprovenError: the cache may still write,
        so vLLM must not use the blocks again.
        """
        ended = {name for name, (_, future) in self._loads.items() if future.done()}
        for name in ended:
            job, future = self._loads.pop(name)
            future.result()
            self._failed.update(job.slots[~job.done].tolist())
        return ended

    def failed(self) -> set[int]:
        told, self._failed = self._failed, set()
        return told

    def ended(self) -> Optional[StoresEnded]:
        """Stores whose blocks nothing reads any more. UnprovenError: that cannot be said."""
        ended = [store for store, future in self._stores.items()
                 if future is None or future.done()]
        for store in ended:
            future = self._stores.pop(store)
            if future is not None:
                future.result()
        return StoresEnded(Counter(ended)) if ended else None

    def close(self) -> None:
        for threads in self._loader, self._storer:
            threads.shutdown(cancel_futures=True)
        self._store.close()


class SluiceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's factory makes it, once for the scheduler and once in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any,
                 **more: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        blocks = Blocks.of(vllm_config, kv_cache_config)
        ranks, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
        self._scheduler: Any = None
        self._worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(blocks, ranks.tensor_parallel_size,
                                        transfer.is_kv_consumer, transfer.is_kv_producer)
        else:
            self._worker = Worker(blocks, kv_cache_config, ranks.rank % ranks.tensor_parallel_size)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that was not stored is computed

    # In the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> tuple[Optional[int], bool]:
        matched: tuple[Optional[int], bool] = self._scheduler.matched(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any,
                                 num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.ended(connector_output.kv_connector_worker_meta)

    def has_pending_push_work(self) -> bool:
        return bool(self._scheduler.storing)  # vLLM steps on, and so hears of the end of stores

    def has_pending_block_frees(self) -> bool:
        return bool(self._scheduler.storing)

    def request_finished(self, request: Any,
                         block_ids: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
            self, request: Any,
            block_ids: tuple[list[int], ...]) -> tuple[bool, Optional[dict[str, Any]]]:
        """Stores that run have references to their blocks, so the request itself may end."""
        self._scheduler.finished(request)
        return False, None

    def reset_cache(self) -> Optional[bool]:
        return None if self._scheduler is None else bool(self._scheduler.reset())

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request of a step waits for a load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        """`wait_for_save` stores blocks of all layers at once."""

    def wait_for_save(self) -> None:
        self._worker.store(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Optional[set[str]],
                                                                Optional[set[str]]]:
        return None, self._worker.loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed: set[int] = self._worker.failed()
        return failed

    def build_connector_worker_meta(self) -> Optional[KVConnectorWorkerMetadata]:
        return self._worker.ended()

    def shutdown(self) -> None:
        """UnprovenError: the cache may still reach the KV cache of this process."""
        for side in self._scheduler, self._worker:
            if side is not None:
                side.close()
