# SPDX-License-Identifier: Apache-2.0
"""A process with an agent and memory, which says how to reach it and then answers lines. Its name
is the fourth argument.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np
import patience  # noqa: F401
from sluice.nixl import nixl_agent, nixl_agent_config


def move(agent: nixl_agent, memory: Any, address: int, other: str) -> str:
    try:
        h = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(memory.ctypes.data, len(memory), 0)], "DRAM"),
            agent.get_xfer_descs([(address, len(memory), 0)], "DRAM"),
            other,
            b"filled",
        )
        state = agent.transfer(h)
        while state == "PROC":
            state = agent.check_xfer_state(h)
        h.release()
        return state
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def main() -> None:
    backend, params = sys.argv[1], json.loads(sys.argv[2])
    name = sys.argv[4] if len(sys.argv) > 4 else "target"
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
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
        elif word == "know":
            print(agent.add_remote_agent(bytes.fromhex(rest)).decode(), flush=True)
        elif word == "lose":  # waits until it knows that the agent is lost
            while agent.check_remote_metadata(rest):
                time.sleep(0.001)
            print("lost", flush=True)
        elif word == "alone":  # waits for the end of a peer's connection, behind all its bytes
            engine = agent._engine
            assert engine is not None
            while not engine.receive().lost:
                pass
            print("alone", flush=True)
        elif word == "fill":  # our memory, and then that of an agent by ours, with a message
            value, address, other = rest.split()
            memory[:] = int(value)
            print(move(agent, memory, int(address), other), flush=True)
        elif word == "notifs":
            got: dict[str, list[bytes]] = {}
            while not got:
                got = agent.get_new_notifs()
                time.sleep(0.001)
            print(json.dumps({k: [m.decode() for m in v] for k, v in got.items()}), flush=True)


main()
