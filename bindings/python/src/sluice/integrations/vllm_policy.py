# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO for vLLM's own cache in the host's memory, in place of its "lru" and "arc":

    "kv_connector_extra_config": {"eviction_policy": "S3FIFO",
        "cache_policy_module_path": "sluice.integrations.vllm_policy", ...}

It is the policy of our own cache, with half the room for newcomers (Yang et al., SOSP 2023, who
give them a tenth): docs/cache.md has what it finds beside the others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Iterable, Optional, Sequence

try:
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys
except ImportError as e:
    raise ImportError(f"sluice.integrations.vllm_policy wants vLLM 0.32, which takes policies by "
                      f"cache_policy_module_path: {e}") from e

USES_MAX = 3


class S3FIFO(CachePolicy):  # type: ignore[misc]
    """Newcomers wait in a queue of half the room, from which only what was used again moves on;
    what it lets go and sees again soon begins in the other half. The oldest is first in a queue.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        self._newcomers: OrderedDict[bytes, Any] = OrderedDict()
        self._proved: OrderedDict[bytes, Any] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # twice as many as there are chunks
        self._uses: dict[bytes, int] = {}  # of those that were used since they came in
        self._idle = 0  # chunks that nobody reads or writes

    def get(self, key: bytes) -> Any:
        return self._newcomers.get(key) or self._proved.get(key)

    def insert(self, key: bytes, chunk: Any) -> None:
        (self._proved if key in self._gone else self._newcomers)[key] = chunk
        self._gone.pop(key, None)
        self._idle += chunk.ref_cnt == 0

    def remove(self, key: bytes) -> None:
        chunk = self._newcomers.pop(key, None) or self._proved.pop(key)
        self._uses.pop(key, None)
        self._idle -= chunk.ref_cnt == 0

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        for key in keys:
            if self.get(key) is not None:
                self._uses[key] = min(self._uses.get(key, 0) + 1, USES_MAX)

    def on_request_finished(self, key_groups: Sequence[Sequence[bytes]],
                            insertion_only_keys: set[bytes], reused_keys: set[bytes],
                            req_context: Any) -> None:
        """Counts a use of what the request has used, and gives what it has brought its place, the
        tail of the chain first: no block is of use without those before it.
        """
        for key in reversed(order_request_keys(key_groups, req_context)):
            if key in reused_keys:
                self.touch([key], req_context)
            elif key in insertion_only_keys:
                if key in self._newcomers:
                    self._newcomers.move_to_end(key)
                elif key in self._proved:
                    self._proved.move_to_end(key)

    def mark_evictable(self, key: bytes) -> None:
        self._idle += 1

    def mark_non_evictable(self, key: bytes) -> None:
        self._idle -= 1

    def evict(self, n: int, protected: set[bytes]) -> Optional[list[tuple[bytes, Any]]]:
        kept = (self.get(key) for key in protected)
        if n > self._idle - sum(chunk is not None and chunk.ref_cnt == 0 for chunk in kept):
            return None
        return [self._victim(protected) for _ in range(n)]

    def _victim(self, protected: set[bytes]) -> tuple[bytes, Any]:
        """It ends: a turn takes a use from a chunk, or moves one on that does not come back, or
        passes one that is held, of which there are no more in a row than chunks. Where all of the
        queue whose turn it is are held, it is the other one's. Preconditions: one is not held.
        """
        newcomers, proved = self._newcomers, self._proved
        held = {id(newcomers): 0, id(proved): 0}  # in a row
        while True:
            queue = proved if len(newcomers) < len(proved) else newcomers
            if held[id(queue)] >= len(queue):
                queue = newcomers if queue is proved else proved
            key, chunk = queue.popitem(last=False)
            if chunk.ref_cnt != 0 or key in protected:
                queue[key] = chunk
                held[id(queue)] += 1
                continue
            held = dict.fromkeys(held, 0)  # it may move to the other queue
            uses = self._uses.pop(key, 0)
            if uses == 0:
                if queue is newcomers:
                    self._gone[key] = None
                    if len(self._gone) > 2 * self.cache_capacity:
                        self._gone.popitem(last=False)
                self._idle -= 1
                return key, chunk
            if queue is proved and uses > 1:
                self._uses[key] = uses - 1
            proved[key] = chunk
