# SPDX-License-Identifier: Apache-2.0
"""LMCache's own benchmark, `lmcache bench l2`, over our native_plugin, over LMCache's adapters of
files on /dev/shm, in Python and in C++, and over Mooncake's store, in alternation.

`build/stacks/bin/python stacks/measure_lmcache.py [turns]`, some 4 minutes for 3 turns.

LMCache's wheel has its adapter of Mooncake without the extension in C++ that makes the calls
(`lmcache.lmcache_mooncake`, which is built from Mooncake's headers, and these are in no wheel). So
`Mooncake` here makes those calls in its place: a native_plugin with 4 threads, as that has by
default, each of which puts, gets or looks for one chunk at a time by Mooncake's wheel, over TCP,
with a master and another process that has the memory.

The lines are medians over all rounds of all turns, and in brackets how many times as long the other
takes as sluice. `fault_inject` is our plugin inside LMCache's adapter of that name, which reports a
quarter of the chunks as not loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

from cache_node import Node
from measure_store import start
from mooncake_master import master

ROOM = 2 << 30
THREADS = 4
SIZES = ({"keys": 32, "kib": 256, "flight": 1, "rounds": 20},
         {"keys": 32, "kib": 1024, "flight": 4, "rounds": 3})
WHAT = ("Store", "Lookup", "Load")
TURNS = 3


class MooncakeChunks:
    """Calls of Mooncake's store for a batch, one chunk at a time, by 4 threads."""

    def __init__(self, address: str, salt: str) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self._store, self._salt = MooncakeDistributedStore(), salt
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", address) == 0
        self._fd, self._number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), 0
        self._done: deque[tuple[int, bool, str, list[bool]]] = deque()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _submit(self, names: Sequence[str], of: Callable[[int, str], bool]) -> int:
        self._number += 1
        number, done, left = self._number, [False] * len(names), [len(names)]

        def one(k: int) -> None:
            done[k] = of(k, self._salt + names[k])
            with self._lock:
                left[0] -= 1
                ended = not left[0]
            if ended:
                self._done.append((number, all(done), "", done))
                os.eventfd_write(self._fd, 1)

        for k in range(len(names)):
            self._calls.put(lambda k=k: one(k))  # type: ignore[misc]
        return number

    def event_fd(self) -> int:
        return self._fd

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        at = list(map(_address, memoryviews))
        return self._submit(keys, lambda k, name: self._store.get_into(
            name, at[k], memoryviews[k].nbytes) == memoryviews[k].nbytes)

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        at = list(map(_address, memoryviews))
        return self._submit(keys, lambda k, name: self._store.put_from(
            name, at[k], memoryviews[k].nbytes) == 0)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._submit(keys, lambda _, name: self._store.is_exist(name) == 1)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        return self._submit(keys, lambda _, name: self._store.remove(name, force=True) == 0)

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool]]]:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        self._store.remove_all(force=True)
        self._store.close()
        os.close(self._fd)


def _address(chunk: Any) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(chunk))


def bench(adapter: dict[str, Any], size: dict[str, int]) -> dict[str, list[float]]:
    """Milliseconds of each round that LMCache's benchmark tells, without the one to warm up. It
    compares what the last one has loaded.
    """
    said = subprocess.run(
        [sys.executable, "-c", "from lmcache.cli.main import main; main()", "bench", "l2",
         "--l2-adapter", json.dumps(adapter), "--num-keys", str(size["keys"]), "--data-size-kb",
         str(size["kib"]), "--in-flight", str(size["flight"]), "--rounds", str(size["rounds"]),
         "--lookup-max-hit-rate", "1", "--no-skip-verify"], capture_output=True, text=True,
        timeout=240, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    assert said.returncode == 0, said.stdout + said.stderr
    whole = size["keys"] * size["flight"]
    took: dict[str, list[float]] = {}
    for what in WHAT:
        rounds = re.findall(rf"\[{what}\] Round \d+: ([0-9.]+) ms, \w+=(\d+)/{whole}", said.stdout)
        assert len(rounds) == size["rounds"] + 1, said.stdout
        done = sum(int(n) for _, n in rounds) / whole / len(rounds)
        assert done < 1 if adapter.get("rate") and what == "Load" else done == 1, said.stdout
        took[what] = [float(ms) for ms, _ in rounds[1:]]
    return took


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        address = stack.enter_context(master())
        start(stack, str(Path(__file__).parent / "measure_store.py"), "client", address, str(ROOM))
        node = Node(folder, "2GiB").start()
        stack.callback(node.kill)

        def adapter(over: str, turn: str) -> dict[str, Any]:
            if over.startswith("fs"):
                return {"type": over, "base_path": f"{folder}/{over}-{turn}"}
            plugin = {"module_path": "sluice.integrations.lmcache", "class_name": "SluiceLMCache",
                      "adapter_params": {"address": node.address, "salt": turn}}
            if over == "Mooncake":
                plugin = {"module_path": "measure_lmcache", "class_name": "MooncakeChunks",
                          "adapter_params": {"address": address, "salt": turn}}
            of = {"type": "native_plugin", **plugin}
            return of if over != "fault_inject" else {"type": over, "inner": of, "rate": 0.25}

        for n, size in enumerate(SIZES):
            took: dict[str, dict[str, list[float]]] = {}
            for turn in range(turns):
                for over in ("sluice", "fs", "fs_native", "Mooncake", "fault_inject"):
                    said = bench(adapter(over, f"{n}.{turn}.{over}"), size)
                    for what, rounds in said.items():
                        took.setdefault(over, {}).setdefault(what, []).extend(rounds)
                    shutil.rmtree(f"{folder}/{over}-{n}.{turn}.{over}", ignore_errors=True)
            print(f"{size['flight']} x {size['keys']} chunks of {size['kib']} KiB, milliseconds, "
                  f"load {os.getloadavg()[0]:.1f}", flush=True)
            for what in WHAT:
                of = {over: statistics.median(each[what]) for over, each in took.items()}
                print(f"  {what:7}" + "".join(
                    f" {over} {ms:8.2f} ({ms / of['sluice']:.2f})" for over, ms in of.items()),
                    flush=True)


if __name__ == "__main__":
    main()
