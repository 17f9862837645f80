# SPDX-License-Identifier: Apache-2.0
"""A program for NIXL that runs over sluice by one line, or without it: python -m sluice.nixl.shim
program.py
"""

import time

import numpy as np

# was: from nixl._api import nixl_agent, nixl_agent_config
from sluice.nixl import nixl_agent, nixl_agent_config

N = 1 << 20
source, target = np.arange(N, dtype=np.uint32).view(np.uint8), np.zeros(4 * N, np.uint8)
prefill, decode = (nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("prefill",
    "decode"))
prefill.register_memory([(source.ctypes.data, source.nbytes, 0, "")], "DRAM")
decode.register_memory([(target.ctypes.data, target.nbytes, 0, "")], "DRAM")
prefill.add_remote_agent(decode.get_agent_metadata())  # bytes, over any channel

mine = prefill.get_xfer_descs([(source.ctypes.data, 4096, 0), (source.ctypes.data + 65536, 4096,
    0)], "DRAM")
theirs = decode.get_xfer_descs([(target.ctypes.data + 8192, 4096, 0), (target.ctypes.data, 4096,
    0)], "DRAM")
handle = prefill.initialize_xfer("WRITE", mine, theirs, "decode", b"layer 0")
state, end = prefill.transfer(handle), time.monotonic() + 60
while state == "PROC" and time.monotonic() < end:
    state = prefill.check_xfer_state(handle)
print(state, bool((target[8192:12288] == source[:4096]).all()),
      bool((target[:4096] == source[65536:69632]).all()))

notes: dict[str, list[bytes]] = {}
while not notes and time.monotonic() < end:
    notes = decode.get_new_notifs()
print(notes)
prefill.release_xfer_handle(handle)
