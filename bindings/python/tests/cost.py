# SPDX-License-Identifier: Apache-2.0
"""What posting and waiting takes from Python: the twin of bindings/c/testdata/cost.c, with the same
arguments and output.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import sluice

COUNT, ENTRY, STRIDE = 2048, 656, 1024


def measure(t: sluice.Transfer, posts: int, together: bool) -> float:
    start = time.perf_counter_ns()
    if together:
        for _ in range(posts):
            t.run(60)
    else:
        for _ in range(posts):
            t.post()
            t.wait(60)
    return (time.perf_counter_ns() - start) / posts


def main() -> None:
    rounds, posts, together = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "together"
    with sluice.Engine("a", ["shm"]) as a, sluice.Engine("b", ["shm"]) as b:
        local = a.register("data", a.alloc(COUNT * STRIDE))
        b.register("data", b.alloc(COUNT * STRIDE))
        peer = a.connect(b.describe())
        remote = peer.remote("data")
        numbers = np.arange(COUNT, dtype=np.uint32)
        here, there = numbers * 7 % COUNT, numbers * 13 % COUNT
        large, tiny, small = (peer.transfer("write") for _ in range(3))
        large.add_pages(local, remote, ENTRY, here, there, stride=STRIDE, remote_stride=STRIDE)
        tiny.add_pages(local, remote, 8, here, there, stride=STRIDE, remote_stride=STRIDE)
        small.add(local, 0, remote, 0, 64)
        shapes = ((large, 1), (tiny, 10), (small, 100))
        for t, _ in shapes:
            measure(t, 10, together)
        for _, _line in zip(range(rounds), sys.stdin):
            print(*(f"{measure(t, posts * more, together):.1f}" for t, more in shapes), flush=True)


main()
