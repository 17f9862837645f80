# SPDX-License-Identifier: Apache-2.0
"""A frontend and four workers that share images: python images.py

The frontend puts each image once and sends its handle. Each worker looks at the bytes where they
lie.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Any

from sluice.ring import Reader, Writer

WORKERS, IMAGES, SIDE = 4, 8, 512


def worker(path: str, handles: Any, sums: Any) -> None:
    with Reader.join(path, timeout=60) as reader:
        while (handle := handles.get()) is not None:
            with reader.get(handle) as view:
                image = view.memory.cast("B", (SIDE, SIDE, 3))  # or view.numpy, or view.torch
                sums.put(image[0, 0, 0] + image[SIDE - 1, SIDE - 1, 2])
                image.release()


def main() -> None:
    spawn = multiprocessing.get_context("spawn")  # a fork has no part in the ring
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "images")
        queues, sums = [spawn.Queue() for _ in range(WORKERS)], spawn.Queue()
        workers = [spawn.Process(target=worker, args=(path, q, sums)) for q in queues]
        for w in workers:
            w.start()
        # room for four images: the fifth waits until all workers have let go of one
        with Writer(path, 4 * SIDE * SIDE * 3, awaited=WORKERS) as ring:
            for n in range(IMAGES):
                handle = ring.put(f"image {n}", bytes([n]) * (SIDE * SIDE * 3), timeout=60)
                for q in queues:
                    q.put(handle)
            for q in queues:
                q.put(None)
            seen = sorted(sums.get(timeout=60) for _ in range(WORKERS * IMAGES))
            for w in workers:
                w.join()
            puts = ring.stats()["puts"]
    assert seen == sorted(2 * n for n in range(IMAGES) for _ in range(WORKERS))
    print(f"{WORKERS} workers saw {IMAGES} images that were put {puts} times")


if __name__ == "__main__":
    main()
