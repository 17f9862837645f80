# SPDX-License-Identifier: Apache-2.0
"""Times put and get of objects by mooncake.store, over the cache of another process and over
Mooncake's wheel with a master and another client that has the memory, in alternation.

`build/stacks/bin/python stacks/measure_store.py [rounds]`.

Prints for each call and size the medians in milliseconds, and how many times as long the wheel
takes.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from mooncake_master import master

SIZES = {"1 MiB": 1 << 20, "16 MiB": 16 << 20}
CALLS = ("put_from", "get_into", "put", "get")
ROOM = 512 << 20
MEMORY = f"""
import sys, tempfile
from sluice.cache import Cache
with Cache.open(sys.argv[1] + "/memory", {ROOM}) as cache:
    cache.serve("unix:" + sys.argv[1] + "/socket")
    print(0, flush=True)
    sys.stdin.read()
"""


def client(address: str, memory: str) -> None:
    """Answers each line, a call and a size, with how many seconds it took."""
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    store, most = MooncakeDistributedStore(), max(SIZES.values())
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(memory), 64 << 20, "tcp", "",
                       address) == 0
    buffer = (ctypes.c_ubyte * (2 * most))()
    source = ctypes.addressof(buffer)
    to = source + most
    ctypes.memmove(source, bytes(range(256)) * (most >> 8), most)
    assert store.register_buffer(source, 2 * most) == 0
    print(0, flush=True)
    for n, line in enumerate(sys.stdin):
        call, size = line.split()[0], int(line.split()[1])
        key, value = f"{n} of {size}", ctypes.string_at(source, size)
        if call.startswith("get"):
            assert store.put_from(key, source, size) == 0
        ctypes.memset(to, 0, size)
        begin = time.perf_counter()
        if call == "put_from":
            good = store.put_from(key, source, size) == 0
        elif call == "get_into":
            good = store.get_into(key, to, size) == size
        elif call == "put":
            good = store.put(key, value) == 0
        else:
            got = store.get(key)
            good = len(got) == size
        took = time.perf_counter() - begin
        if call == "get_into":
            got = ctypes.string_at(to, size)
        assert good and (call.startswith("put") or got == value)
        assert store.remove(key, force=True) == 0
        print(took, flush=True)


def start(stack: ExitStack, *words: str) -> Any:
    """A process, once it has said that it is ready."""
    child = subprocess.Popen([sys.executable, *words], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stack.callback(child.wait)
    stack.callback(child.kill)
    assert child.stdout is not None and child.stdout.readline(), f"{words} did not start"
    return child


def ask(child: Any, call: str, size: int) -> float:
    child.stdin.write(f"{call} {size}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        address = stack.enter_context(master())
        start(stack, __file__, "client", address, str(ROOM))
        wheel = start(stack, __file__, "client", address, "0")
        start(stack, "-c", MEMORY, folder)
        ours = start(stack, "-m", "sluice.mooncake.shim", __file__, "client",
                     f"unix:{folder}/socket", "0")
        for name, size in SIZES.items():
            for call in CALLS:
                times: dict[str, list[float]] = {"sluice": [], "wheel": []}
                for n in range(rounds + 1):
                    for who, child in (("sluice", ours), ("wheel", wheel)):
                        took = ask(child, call, size)
                        if n:  # the first one touches memory for the first time
                            times[who].append(took)
                a, b = (statistics.median(t) * 1e3 for t in times.values())
                print(json.dumps({"call": call, "size": name, "sluice_ms": round(a, 3),
                                  "wheel_ms": round(b, 3), "times": round(b / a, 2)}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        client(*sys.argv[2:])
    else:
        main()
