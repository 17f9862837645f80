# SPDX-License-Identifier: Apache-2.0
"""What a program does with mooncake.engine between two processes.

As lines of JSON: the name of a step, and its outcome.

Runs over Mooncake's wheel and over sluice's shim, which must agree. Only what the program of either
side needs is imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from typing import Any, Callable

from mooncake.engine import (  # type: ignore[import-not-found]
    TransferEngine, TransferNotify, TransferOpcode)

if "sluice" in sys.modules:
    import patience  # noqa: F401

SIZE = 1 << 20
LIMIT = 30.0


class Memory:
    def __init__(self) -> None:
        self.bytes = (ctypes.c_ubyte * SIZE)()
        self.address = ctypes.addressof(self.bytes)

    def fill(self, seed: int) -> None:
        for i in range(SIZE // 256):
            ctypes.memset(self.address + 256 * i, (seed + i) % 251, 256)

    def sum(self, at: int, n: int) -> int:
        return sum(self.bytes[at : at + n])


def started() -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def wait(until: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = until()
        if found:
            return found
        time.sleep(0.001)
    raise AssertionError("it did not come")


def target() -> None:
    """The other process: it says where it is, and then answers lines."""
    engine, memory = started(), Memory()
    memory.fill(7)
    assert engine.register_memory(memory.address, SIZE) == 0
    answer([engine.get_rpc_port(), memory.address])
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "sum":
            answer(memory.sum(int(numbers[0]), int(numbers[1])))
        elif word == "notify":
            answer([[n.name, n.msg] for n in wait(engine.get_notifies)])
        elif word == "unregister":
            answer(engine.unregister_memory(memory.address))
        elif word == "register":
            answer(engine.register_memory(memory.address, SIZE))


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


class Peer:
    def __init__(self) -> None:
        shim = ["-m", "sluice.mooncake.shim"] if "sluice" in sys.modules else []
        command = [sys.executable, *shim, os.path.abspath(__file__), "target"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        port, self.address = json.loads(self._line())
        self.session = f"127.0.0.1:{port}"

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def ask(self, *words: object) -> Any:
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())


def step(name: str, outcome: Any) -> None:
    answer([name, outcome])


def copies(e: TransferEngine, m: Memory, p: Peer) -> None:
    s, a, b = p.session, m.address, p.address
    step("read", e.transfer_sync_read(s, a, b, 4096))
    step("read bytes", m.sum(0, 4096))
    m.fill(3)
    step("write", e.transfer_sync_write(s, a + 4096, b + 8192, 4096))
    step("written bytes", p.ask("sum", 8192, 4096) == m.sum(4096, 4096))
    step("batch write", e.batch_transfer_sync_write(s, [a, a + 9000], [b + 100, b + 50000],
                                                    [10, 2000]))
    step("batch written bytes", [p.ask("sum", 100, 10) == m.sum(0, 10),
                                 p.ask("sum", 50000, 2000) == m.sum(9000, 2000)])
    many = [i * 512 for i in range(1000)]
    step("batch read", e.batch_transfer_sync_read(s, [a + n for n in many], [b + n for n in many],
                                                  [512] * 1000))
    step("batch read bytes", m.sum(0, 512000) == p.ask("sum", 0, 512000))
    step("empty batch", e.batch_transfer_sync_read(s, [], [], []))
    step("no bytes", e.transfer_sync_read(s, a, b, 0))
    step("sync read", e.transfer_sync(s, a, b, 64, TransferOpcode.Read))
    step("sync write and notify", e.transfer_sync(s, a, b, 64, TransferOpcode.Write,
                                                  TransferNotify("name", "words")))
    step("notified", p.ask("notify"))
    step("batch and notify", e.batch_transfer_sync(s, [a], [b], [64], TransferOpcode.Read,
                                                   TransferNotify("", "é")))
    step("notified again", p.ask("notify"))


def asynchronous(e: TransferEngine, m: Memory, p: Peer) -> None:
    s, a, b = p.session, m.address, p.address
    first, second = e.batch_transfer_async_write(s, [a], [b], [SIZE]), e.batch_transfer_async_read(
        s, [a], [b], [64])
    step("started", [first != 0, second != 0])
    step("ended", e.get_batch_transfer_status([first, second]))
    step("none", e.get_batch_transfer_status([]))
    one = e.transfer_submit_write(s, a, b, 4096)
    step("submitted", wait(lambda: e.transfer_check_status(one)))
    step("async uneven", e.batch_transfer_async_read(s, [a], [b, b], [64]))


def errors(e: TransferEngine, m: Memory, p: Peer) -> None:
    s, a, b = p.session, m.address, p.address
    step("register again", e.register_memory(a, SIZE))
    step("register a part", e.register_memory(a + 16, 16))
    step("register nothing", e.register_memory(a + SIZE, 0))
    step("past the end", e.transfer_sync_read(s, a, b + SIZE - 10, 64))
    step("unknown address", e.transfer_sync_read(s, a, 12345, 64))
    step("uneven", e.batch_transfer_sync_read(s, [a], [b, b], [1]))
    step("no such session", e.transfer_sync_read("127.0.0.1:1", a, b, 64))
    step("probe", e.send_probe(s))
    step("probe nothing", e.send_probe("127.0.0.1:1"))
    step("unregister unknown", e.unregister_memory(777))
    step("unregister", e.unregister_memory(a))
    step("unregister again", e.unregister_memory(a))
    step("batch register", e.batch_register_memory([a, a + 4096], [4096, 4096]))
    step("batch register uneven", e.batch_register_memory([a], [1, 2]))
    step("batch register none", e.batch_register_memory([], []))
    step("batch register twice", e.batch_register_memory([a + 8192, a + 8192], [10, 10]))
    step("batch unregister", e.batch_unregister_memory([a, a + 4096]))
    step("batch unregister again", e.batch_unregister_memory([a]))
    step("register once more", e.register_memory(a, SIZE))
    step("the peer unregisters", p.ask("unregister"))
    step("read what is unregistered", e.transfer_sync_read(s, a, b, 64))
    step("the peer registers", p.ask("register"))
    step("read what is registered anew", e.transfer_sync_read(s, a, b, 64))
    step("first buffer", e.get_first_buffer_address(s) == b)
    p.process.kill()
    p.process.wait()
    step("read from the dead", e.transfer_sync_read(s, a, b, 64))
    step("probe the dead", e.send_probe(s))
    other = TransferEngine()
    step("unknown store of metadata", other.initialize("127.0.0.1", "http://127.0.0.1:1/metadata",
                                                       "tcp", ""))


def main() -> None:
    engine, memory, peer = started(), Memory(), Peer()
    memory.fill(1)
    step("register", engine.register_memory(memory.address, SIZE))
    for part in (copies, asynchronous, errors):
        part(engine, memory, peer)
    step("end", True)
    os._exit(0)  # the wheel's threads do not always end


if sys.argv[1:] == ["target"]:
    target()
else:
    main()
