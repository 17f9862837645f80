# SPDX-License-Identifier: Apache-2.0
"""Times vLLM's cache of processed images over our ring and over vLLM's own, in alternation: one
image of 9 MB after the other is put, and then got by four readers at once.

measure_ring.py prints medians in milliseconds; `hack/stacks measure` runs it.
"""

from __future__ import annotations

import json
import statistics
import time

from ring_sides import FORK, MIB, Scene, Side, image, sent

READERS, IMAGE, ROUNDS = 4, 9_000_000, 40


def main() -> None:
    lock = FORK.Lock()
    sides = [Side(lock) for _ in range(READERS)]
    scenes = {over: Scene(over, READERS, 128 * MIB, 16 * MIB, sides) for over in ("vllm", "sluice")}
    items = [image(n, IMAGE) for n in range(4)]
    puts: dict[str, list[float]] = {over: [] for over in scenes}
    gets: dict[str, list[float]] = {over: [] for over in scenes}
    for n in range(ROUNDS):
        for over, scene in scenes.items():
            before = time.perf_counter()
            item, _ = scene.sender.get_and_update_item((items[n % 4], []), str(n))
            puts[over].append(time.perf_counter() - before)
            assert sent(item)
            for side in sides:
                side.begin("timed", over, item, str(n))
            gets[over] += [side.end() for side in sides]
    for over, scene in scenes.items():
        print(json.dumps({"over": over, "put_ms": 1e3 * statistics.median(puts[over]),
                          "get_ms": 1e3 * statistics.median(gets[over])}), flush=True)
    for side in sides:
        side.kill()
    for scene in scenes.values():
        scene.sender.close()


main()
