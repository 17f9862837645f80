# SPDX-License-Identifier: Apache-2.0
"""A process with an agent and memory, which says how to reach it and then answers lines."""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np
from sluice.nixl import nixl_agent, nixl_agent_config


def main() -> None:
    backend, params = sys.argv[1], json.loads(sys.argv[2])
    agent = nixl_agent("target", nixl_agent_config(backends=[]))
    agent.create_backend(backend, params)
    memory = np.zeros(int(sys.argv[3]), np.uint8)
    agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], "DRAM")
    print(json.dumps([agent.get_agent_metadata().hex(), memory.ctypes.data]), flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "digest":
            print(hashlib.sha256(memory).hexdigest(), flush=True)
        elif word == "meet":
            agent.add_remote_agent(bytes.fromhex(rest))
            agent.send_notif("initiator", b"met")
        elif word == "notifs":
            got: dict[str, list[bytes]] = {}
            while not got:
                got = agent.get_new_notifs()
                time.sleep(0.001)
            print(json.dumps({k: [m.decode() for m in v] for k, v in got.items()}), flush=True)


main()
