# SPDX-License-Identifier: Apache-2.0
"""Two agents that know each other, and one in a process of its own."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from conftest import LIMIT
from sluice import nixl

N = 1 << 20


class Two:
    """Two agents of this process that know each other."""

    def __init__(self, **config: Any) -> None:
        self.a, self.b = (nixl.nixl_agent(n, nixl.nixl_agent_config(**config))
                          for n in ("alpha", "beta"))
        self.x, self.y = np.zeros(N, np.uint8), np.zeros(N, np.uint8)
        self.a.register_memory([(self.x.ctypes.data, N, 0, "")], "DRAM")
        self.b.register_memory([(self.y.ctypes.data, N, 0, "")], "DRAM")
        self.a.add_remote_agent(self.b.get_agent_metadata())

    def descs(self, of: Any, *ranges: tuple[int, int]) -> Any:
        return self.a.get_xfer_descs([(of.ctypes.data + at, n, 0) for at, n in ranges], "DRAM")

    def close(self) -> None:
        self.a.close()
        self.b.close()


def finish(agent: nixl.nixl_agent, handle: nixl.nixl_xfer_handle) -> None:
    end = time.monotonic() + LIMIT
    state = agent.transfer(handle)
    while state == "PROC":
        assert time.monotonic() < end
        state = agent.check_xfer_state(handle)
    assert state == "DONE"


def begin(start: Any, backend: str, params: dict[str, str], length: int) -> tuple[Any,
    nixl.nixl_agent, int]:
    child = start("nixl_target.py", backend, json.dumps(params), str(length))
    metadata, address = json.loads(child.stdout.readline())
    agent = nixl.nixl_agent("initiator", nixl.nixl_agent_config(backends=[]))
    agent.create_backend(backend, params)
    assert agent.add_remote_agent(bytes.fromhex(metadata)) == b"target"
    return child, agent, address


def ask(child: Any, line: str) -> str:
    child.stdin.write(line + "\n")
    child.stdin.flush()
    answer: str = child.stdout.readline().strip()
    return answer
