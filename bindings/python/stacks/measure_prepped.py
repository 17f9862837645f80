# SPDX-License-Identifier: Apache-2.0
"""Times make_prepped_xfer of the descriptors that vLLM's connector takes: microseconds as JSON.

Runs over NIXL's wheel, or over sluice with the shim on PYTHONPATH.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

COUNT, EACH, BYTES = 3008, 8192, 64 << 20


def timed(call: Any) -> float:
    took = []
    for _ in range(200):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(took)


def main() -> None:
    here, there = (nixl_agent(n, nixl_agent_config(backends=["UCX"])) for n in ("here", "there"))
    sides = []
    for agent in here, there:
        memory = np.zeros(BYTES, np.uint8)
        agent.register_memory([(memory.ctypes.data, BYTES, 0, "")], "DRAM")
        sides.append((memory, [(memory.ctypes.data + i * 2 * EACH, EACH, 0)
                               for i in range(COUNT)]))
    name = here.add_remote_agent(there.get_agent_metadata())
    lists = [here.get_xfer_descs(rows, "DRAM") for _, rows in sides]
    local = here.prep_xfer_dlist("NIXL_INIT_AGENT", lists[0])
    remote = here.prep_xfer_dlist(name, lists[1])

    def make(indices: Any) -> None:
        here.release_xfer_handle(here.make_prepped_xfer("READ", local, indices, remote, indices))

    print(json.dumps({kind: round(timed(lambda: make(indices)), 1) for kind, indices in {
        "list": list(range(COUNT)), "array": np.arange(COUNT)}.items()}))


main()
