# SPDX-License-Identifier: Apache-2.0
"""A secondary tier of vLLM's KV offloading over a sluice cache: chunks that outlive the server.
docs/vllm-tier.md has the configuration to paste.

    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": …,
        "secondary_tiers": [{"type": "SluiceTier", "module_path": "sluice.integrations.vllm_tier",
                             "sluice": {"address": "unix:/run/sluice-cache.sock"}}]}

It runs in vLLM's scheduler, which waits for nothing here. `lookup` answers from a dictionary; what
that lacks is RETRY, and a thread asks the cache, once a step for all of it. A job is one operation
over vLLM's cache in the host's memory, which is attached once, as a whole; another thread begins
it, and `get_finished_jobs` looks which have ended. The end of one that has failed is a third
thread's: a job is told as failed once the cache reaches the memory no more (_pages.py), since vLLM
then uses it for something else.

A cache that is killed, or does not answer, is MISS, and jobs that fail.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Iterable, Optional, Sequence

import numpy as np

try:
    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        OffloadingGaugeMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as e:
    raise ImportError(f"sluice.integrations.vllm_tier wants vLLM 0.32.0, whose tiers are loaded by "
                      f"module_path: {e}") from e

from .. import errors
from .._config import is_local
from .._segments import HostMemory
from ..cache import KEY_BYTES, key_of
from ._pages import PROOF_LIMIT, Batch, Job, Options, PageStore, Pattern, Pool, geometry

log = logging.getLogger("sluice.vllm_tier")

RUN_WITH = ("0.32.0",)  # versions of vLLM that the tests have run
if __version__.split(".")[:2] not in [v.split(".")[:2] for v in RUN_WITH]:
    raise ImportError(f"sluice.integrations.vllm_tier runs with vLLM {', '.join(RUN_WITH)} and its "
                      f"patches, and this is {__version__}: vLLM changes its tiers without notice")

GROUP_BYTES = 4  # at the end of vLLM's keys, behind the hash of the block
SLACK = 0.5  # seconds beyond lookup_timeout after which a question counts as answered: not there
CONNECTED = "vllm:kv_offload_sluice_connected"
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def cache_keys(keys: Sequence[bytes]) -> bytes:
    """The cache's keys of vLLM's: the last 16 bytes of the hash, with the group in the first four.
    Routers know vLLM's blocks by the last eight.
    """
    if len(set(map(len, keys))) == 1 and len(keys[0]) >= KEY_BYTES + GROUP_BYTES:
        rows = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
        made = rows[:, -GROUP_BYTES - KEY_BYTES:-GROUP_BYTES].copy()
        made[:, :GROUP_BYTES] ^= rows[:, -GROUP_BYTES:]
        return made.tobytes()
    return b"".join([key_of(key) for key in keys])


def hints_of(envelope: Any, groups: int) -> bytes:
    """A KvHintsEnvelope in JSON, with the cache's keys for vLLM's hashes in hex. A hash that is no
    such text stays, and the cache says that it is missing or no good.
    """
    def named(value: Any) -> list[Any]:
        try:
            block = bytes.fromhex(value.removeprefix("0x"))
        except (AttributeError, ValueError):
            return [value]
        if len(block) < KEY_BYTES:
            return [value]
        return [cache_keys([block + g.to_bytes(GROUP_BYTES, "big")]).hex() for g in range(groups)]

    actions = []
    for a in envelope.actions:
        payload = dict(a.payload)
        if isinstance(payload.get("block_hashes"), list):
            payload["block_hashes"] = [key for h in payload["block_hashes"] for key in named(h)]
        actions.append({"action_id": a.action_id, "action_type": a.action_type,
                        "action_version": a.action_version, "payload": payload})
    return json.dumps({"protocol_version": envelope.protocol_version,
                       "message_id": envelope.message_id, "actions": actions},
                      allow_nan=False).encode()


class _Line:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self.put = self._calls.put
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            except Exception:  # nothing of it may end the thread
                log.exception("a call of %s failed", self._thread.name)

    def end(self, limit: float) -> bool:
        """Whether it has ended."""
        self.put(None)
        self._thread.join(limit)
        return not self._thread.is_alive()


@dataclass(eq=False)
class _Question:
    keys: list[bytes]
    limit: float  # the moment from which nobody waits for the answer
    answer: Optional[dict[bytes, LookupResult]] = None


@dataclass(eq=False)
class _Run:
    """A job of vLLM under way."""

    id: int
    request: str
    keys: list[bytes]
    is_load: bool
    batch: Optional[Batch] = None  # once it has begun
    began: float = field(default_factory=time.monotonic)


class SluiceTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier of one scheduler. vLLM's factory makes it; what it may give later is ignored."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None, sluice: Any = None,
                 locality: Optional[str] = None, **more: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config, options = offloading_spec.config, Options.read(sluice)
        replicas = config.parallel.data_parallel_size
        if options.path and replicas > 1:
            raise errors.ArgumentError(
                f"a cache by \"path\" is for one scheduler, and there are {replicas} replicas: "
                f"start `sluice cache serve`, and give its \"address\"")
        local = options.path or is_local(options.address)
        self.locality = Locality(locality or ("LOCAL" if local else "REMOTE"))
        self._groups = len(config.groups)
        rows = np.asarray(primary_kv_view)
        (count, length), at = rows.shape, rows.ctypes.data
        del rows  # an array that stayed would keep vLLM from releasing the view
        self._pool = Pool("primary", [HostMemory(at, count * length)],
                          [Pattern(at, length, length)],
                          [_geometry(offloading_spec, length, options.salt)])

        # What is known of keys, and which request has asked first: it ends with that request.
        self._known: dict[bytes, LookupResult] = {}
        self._asked: dict[str, list[bytes]] = {}
        self._new: list[bytes] = []  # of this step
        self._questions: deque[_Question] = deque()
        self._patience = options.lookup_timeout + SLACK

        self._running: list[_Run] = []
        self._ending = 0  # jobs that the thread for it ends
        self._ended: deque[_Run] = deque()
        self._finished: list[JobResult] = []
        self._drain_limit = options.timeout

        self._store = PageStore(options, config.model.name[-128:])
        try:
            self._store.add(self._pool)
        except BaseException:
            self._store.close()
            raise
        self._ask, self._start, self._end = (
            _Line(f"sluice-tier-{name}") for name in ("ask", "start", "end"))

    # Lookups.

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        known = self._known.get(key)
        if known is not None:
            return known
        self._known[key] = RETRY
        self._new.append(key)
        try:
            self._asked[req_context.req_id].append(key)
        except KeyError:  # vLLM had not told of the request
            self._asked[req_context.req_id] = [key]
        return RETRY

    def on_schedule_end(self, context: Any) -> None:
        self._hear()
        if self._new:
            question = _Question(self._new, time.monotonic() + self._patience)
            self._new = []
            self._questions.append(question)
            self._ask.put(partial(self._answer, question))

    def _answer(self, question: _Question) -> None:
        """On the thread for it."""
        if time.monotonic() < question.limit:
            found = self._store.match(self._pool, cache_keys(question.keys)).tolist()
            question.answer = dict(zip(question.keys, map((MISS, HIT).__getitem__, found)))

    def _hear(self) -> None:
        """Takes the answers that there are. Without one in time all keys are misses."""
        while self._questions:
            question = self._questions[0]
            answer = question.answer
            if answer is None and time.monotonic() < question.limit:
                return
            self._questions.popleft()
            self._tell(answer or dict.fromkeys(question.keys, MISS))

    def _tell(self, answer: dict[bytes, LookupResult]) -> None:
        """Notes what is there, of keys that some request asks for."""
        for key in answer.keys() - self._known.keys():
            del answer[key]
        self._known.update(answer)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._asked.setdefault(req_context.req_id, [])
        if req_context.kv_hints is not None:
            self._ask.put(partial(self._hint, req_context.kv_hints))
        return RequestOffloadingContext()

    def _hint(self, envelope: Any) -> None:
        """On the thread for questions."""
        for told in self._store.hint(self._pool, hints_of(envelope, self._groups)):
            log.debug("hint: %s", told)

    def on_request_finished(self, req_context: Any) -> None:
        for key in self._asked.pop(req_context.req_id, ()):
            self._known.pop(key, None)

    # Jobs.

    def submit_store(self, job_metadata: Any) -> None:
        self._begin(job_metadata, False)

    def submit_load(self, job_metadata: Any) -> None:
        self._begin(job_metadata, True)

    def _begin(self, said: Any, is_load: bool) -> None:
        run = _Run(said.job_id, said.req_context.req_id, list(said.keys), is_load)
        self._running.append(run)
        self._start.put(partial(self._started, run, said.chunk_ids))

    def _started(self, run: _Run, chunks: Any) -> None:
        """On the thread for it."""
        job = Job(self._pool, b"", np.zeros(len(run.keys), np.uint32))
        try:
            job.keys, job.slots = cache_keys(run.keys), np.array(chunks, np.uint32)
            run.batch = self._store.begin([job], not run.is_load)
        except Exception:
            log.exception("job %d cannot be begun", run.id)
            run.batch = Batch([job], b"", None)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._hear()
        self._look()
        finished, self._finished = self._finished, []
        return finished

    def _look(self) -> None:
        """Takes the jobs that have ended. It waits for none."""
        running, self._running = self._running, []
        for run in running:
            batch = run.batch
            ended = None if batch is None else batch.ended()
            if batch is None or ended is None:
                self._running.append(run)
            elif ended:
                self._store.finish(batch)
                self._finish(run)
            else:
                self._ending += 1
                self._end.put(partial(self._prove, run))
        while self._ended:
            self._ending -= 1
            self._finish(self._ended.popleft())

    def _prove(self, run: _Run) -> None:
        """Ends a job that has failed, on the thread for it: nothing of it moves any more."""
        assert run.batch is not None
        while True:
            try:
                self._store.finish(run.batch)
                break
            except errors.UnprovenError as e:
                log.error("job %d is not told, since the cache may still reach its memory: %s",
                          run.id, e)
        self._ended.append(run)

    def _finish(self, run: _Run) -> None:
        assert run.batch is not None
        done = run.batch.jobs[0].done
        all_done = bool(done.all())
        loaded: Optional[list[bytes]] = None
        if all_done:
            self._tell(dict.fromkeys(run.keys, HIT))
        elif run.is_load:
            there = done.tolist()
            loaded = [key for key, is_there in zip(run.keys, there) if is_there]
            self._miss(run.request, [key for key, is_there in zip(run.keys, there)
                                     if not is_there])
        self._finished.append(JobResult(
            run.id, all_done, loaded, time.monotonic() - run.began,
            int(done.sum()) * self.block_size_bytes))

    def _miss(self, request: str, keys: Iterable[bytes]) -> None:
        """What a load has not found this request computes."""
        asked = self._asked.get(request)
        for key in keys:
            if key not in self._known and asked is not None:
                asked.append(key)
            if key in self._known or asked is not None:
                self._known[key] = MISS

    def drain_jobs(self) -> None:
        """Waits for all jobs. Each has a timeout, and its end a proof."""
        self._wait(float("inf"))

    def _wait(self, limit: float) -> None:
        end = time.monotonic() + limit
        self._look()
        while (self._running or self._ending) and time.monotonic() < end:
            time.sleep(0.001)
            self._look()

    def shutdown(self) -> None:
        """Gives jobs the time that one may take, and detaches vLLM's memory. UnprovenError: the
        cache may still reach it.
        """
        self._wait(self._drain_limit)
        self._store.close()
        self._ask.end(self._patience)
        self._start.end(self._patience)
        if not self._end.end(PROOF_LIMIT):
            raise errors.UnprovenError(f"the cache may still reach vLLM's memory: there was no "
                                       f"proof within {PROOF_LIMIT:g} s")

    # Metrics.

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        return {CONNECTED: OffloadingGaugeMetadata(
            documentation="1 while the sluice cache is connected; else all its chunks are misses.")}

    def get_stats(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        stats.set_gauge(CONNECTED, float(self._store.wait(0)))
        return stats


def _geometry(spec: Any, length: int, salt: str) -> bytes:
    """What vLLM's own tiers tell chunks apart by, and what decides how a chunk lies in its row."""
    config = spec.config
    one = config.canonical_layout or config.replicated_layout  # of all ranks
    files = FileMapper.from_offloading_spec(
        "", spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=one)
    return geometry("vllm tier 1", salt, files.get_run_config(), config.kv_cache_layout, length)
