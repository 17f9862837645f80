# SPDX-License-Identifier: Apache-2.0
"""Runs agents, and an engine of Mooncake's, where the kernel refuses system calls: their names."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_NUMBERS = {"x86_64": {"memfd_create": 319, "io_uring_enter": 426},
            "aarch64": {"memfd_create": 279, "io_uring_enter": 426}}[platform.machine()]
_EPERM = 0x50001


def refuse(*names: str) -> None:
    """Has the kernel answer EPERM to these calls of this process, by seccomp."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    code = [(0x20, 0, 0, 0)]  # loads the number of the call
    for name in names:
        code += [(0x15, 0, 1, _NUMBERS[name]), (0x06, 0, 0, _EPERM)]
    code.append((0x06, 0, 0, 0x7fff0000))
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    program = Program(len(code), ctypes.addressof(text))
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0


refuse(*sys.argv[1:])

import numpy as np  # noqa: E402: the calls are refused before there is another thread
from nixl_agents import Two, finish  # noqa: E402
from sluice import nixl  # noqa: E402
from sluice.mooncake import TransferEngine  # noqa: E402

two = Two()
two.x[:] = 7
h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, 65536)), two.descs(two.y, (0, 65536)),
                          "beta")
finish(two.a, h)
assert (two.y[:65536] == 7).all()
h.release()
two.close()

files = nixl.nixl_agent("files", nixl.nixl_agent_config(backends=["POSIX"]))
data = np.full(4096, 5, np.uint8)
files.register_memory([(data.ctypes.data, 4096, 0, "")], "DRAM")
files.close()

engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
engine.close()
print("served", flush=True)
os._exit(0)
