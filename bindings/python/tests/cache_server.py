# SPDX-License-Identifier: Apache-2.0
"""Serves a cache at a folder's "socket", says so, and goes on until it is killed. A line on its
input is answered with how many blocks it has stored. A second word is the name of its engine, as a
node of a cluster has one.
"""

from __future__ import annotations

import sys

from patience import LIMIT
from sluice import Engine
from sluice.cache import Cache

folder, name = [*sys.argv[1:], "cache"][:2]
with Engine(name) as engine, Cache.open(f"{folder}/memory", 8 << 20, extent=64 << 10, blocks=2048,
                                        engine=engine, timeout=LIMIT) as cache:
    cache.serve(f"unix:{folder}/socket")
    print("serves", flush=True)
    for _ in sys.stdin:
        print(cache.stats()["stores"].get("done", 0), flush=True)
