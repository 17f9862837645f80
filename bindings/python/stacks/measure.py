# SPDX-License-Identifier: Apache-2.0
"""Times hand-overs between two actors by sluice and by NIXL's wheel, in alternation.

`build/stacks/bin/python measure.py [rounds]`.

Prints for each shape the medians from the call that makes the tensors to the end of the task that
takes them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0",
                  RAY_memory_monitor_refresh_ms="0")

import ray
import torch
from sluice.integrations.ray import SluiceTransport

SHAPES = {"256 MiB": (1, 64 << 20), "1,000 of 4 KiB": (1000, 1024)}


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Actor:
    def make(self, count: int, length: int) -> list[torch.Tensor]:
        return [torch.full((length,), float(i)) for i in range(count)]

    def take(self, tensors: list[torch.Tensor]) -> float:
        return float(tensors[-1][-1])


def once(a: Any, b: Any, transport: str, count: int, length: int) -> tuple[float, float]:
    start = time.perf_counter()
    ref = a.make.options(tensor_transport=transport).remote(count, length)
    ray.wait([ref])
    made = time.perf_counter()
    assert ray.get(b.take.remote(ref)) == count - 1
    return made - start, time.perf_counter() - made


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
             object_store_memory=100 << 20)
    ray.experimental.register_tensor_transport("sluice", ["cpu", "cuda"], SluiceTransport,
                                               torch.Tensor)
    a, b = Actor.remote(), Actor.remote()
    for shape, (count, length) in SHAPES.items():
        times: dict[str, list[tuple[float, float]]] = {"sluice": [], "nixl": []}
        for i in range(rounds + 1):
            for transport, seen in times.items():
                took = once(a, b, transport, count, length)
                if i:  # the first opens and connects
                    seen.append(took)
        for transport, seen in times.items():
            made, pulled = (1e3 * statistics.median(part) for part in zip(*seen))
            whole = [1e3 * sum(t) for t in seen]
            print(f"{shape}, {transport}: made in {made:.1f} ms, pulled in {pulled:.1f} ms; both "
                  f"{min(whole):.1f} to {max(whole):.1f} ms", flush=True)
    print(f"{rounds} rounds in alternation, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
          f"processors")
    ray.shutdown()


main()
