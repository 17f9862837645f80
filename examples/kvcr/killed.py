# SPDX-License-Identifier: Apache-2.0

"""KVCR over sluice, whose sources are killed: between fetches, and in the middle of one. As JSON,
what became of the blocks that the target waited for.

    python -m sluice.nixl.shim killed.py            # with sluice's control channel
    python -m sluice.nixl.shim killed.py kvcr       # with KVCR's own

It needs kvcr, installed without NIXL's wheel (pip install --no-deps kvcr; msgspec, pyzmq). The
target's pool has as many blocks as one fetch takes: while blocks of it wait for a source that is
dead, the next fetch of all does not succeed. KVCR's own channel has no proof of that death, so that
KVCR is right to keep them.
"""

import ctypes
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time

from kvcr import KVCR, KVCRBindings
from kvcr.config import KVCRBackendConfigs, KVCRConfig, LocalDramOptions, RemoteFWDramOptions
from kvcr.control_channels import ZmqPeerControlChannel
from kvcr.types import BlockKey, MemoryRef, PinRequestId, RegionDescriptor
from sluice.integrations.kvcr import ProvenControlChannel

BLOCK, BLOCKS = 1 << 20, 128
LIMIT = 120.0  # seconds: the machine may be busy
PINS = itertools.count(1)
CHANNELS = {"sluice": ProvenControlChannel, "kvcr": ZmqPeerControlChannel}


class Keys:
    """Block hashes of a router as KVCR's keys."""

    def encode(self, number: int) -> BlockKey:
        return BlockKey(number.to_bytes(8, "big"))

    def decode(self, key: BlockKey) -> int:
        return int.from_bytes(bytes(key), "big")


def content(block: int) -> bytes:
    return bytes([1 + block % 255]) * BLOCK


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def open_kvcr(name, port, channel, patience, **more):
    """KVCR's own runner, and what it says of writes that did not end."""
    asked, events = {}, []

    def request_pin(keys):
        number = PinRequestId(next(PINS))
        asked[number] = (f"pin {number}", {
            key: [MemoryRef(end_point_name=name, element_index=Keys().decode(key) % BLOCKS)]
            for key in keys})
        return number

    def poll_pin_results():
        return [asked.popitem() for _ in range(len(asked))]

    runner = KVCR(
        KVCRConfig(name, [("", BLOCK)], nixl_listen_port=free_port(),
                   operation_timeout_ms=patience, abandon_timeout_ms=2 * patience),
        KVCRBindings(request_pin, poll_pin_results, lambda pin: True, key_adapter=Keys(),
                     framework_control=CHANNELS[channel]("127.0.0.1", port, "127.0.0.1"),
                     on_resilience_event=lambda e: events.append(getattr(e, "state", str(e)))),
        KVCRBackendConfigs(remote_fw_dram=RemoteFWDramOptions(backend="SHM"), **more))
    return runner, events


def serve(port: int, channel: str) -> None:
    """A source, until it or its target is killed."""
    memory = mmap.mmap(-1, BLOCK * BLOCKS)
    for block in range(BLOCKS):
        memory[block * BLOCK:(block + 1) * BLOCK] = content(block)
    region = RegionDescriptor(addr=address(memory), size=BLOCK, count=BLOCKS)
    runner, _ = open_kvcr(f"source {os.getpid()}", port, channel, int(LIMIT * 1000),
                          framework_regions=[region])
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        list(runner.poll_completed())
        time.sleep(0.001)


class Target:
    """A runner with a pool of its own."""

    def __init__(self, channel: str) -> None:
        self.channel, self.source_port, self.source = channel, free_port(), None
        self.pool, self.fetches, self.results = mmap.mmap(-1, BLOCK * BLOCKS), 0, {}
        self.runner, self.events = open_kvcr(
            "target", free_port(), channel, 2000,
            local_dram=LocalDramOptions([("", address(self.pool), BLOCK * BLOCKS)], backend="SHM"))

    def start_source(self) -> None:
        """A process where the one before was."""
        self.source = subprocess.Popen([sys.executable, __file__, "serve", str(self.source_port),
                                        self.channel], stdout=subprocess.PIPE, text=True)
        assert "ready\n" in iter(self.source.stdout.readline, ""), "the source has not begun"

    def kill_source(self) -> None:
        self.source.kill()
        self.source.wait()
        self.source.stdout.close()

    def begin(self):
        """Asks for as many new blocks as there is room for."""
        self.pool[:] = bytes(len(self.pool))
        self.fetches += 1
        numbers = range(self.fetches * BLOCKS, (self.fetches + 1) * BLOCKS)
        request = f"request {self.fetches}"
        payload = {"mode": "copy", "block_hashes": list(numbers),
                   "source_control_endpoint": f"tcp://127.0.0.1:{self.source_port}"}
        self.runner.submit_hint({"protocol_version": "0.1", "message_id": request, "actions": [
            {"action_id": "1", "action_type": "kv.fetch", "action_version": "1.0",
             "payload": payload}]}, request)
        return self.runner.fetch([Keys().encode(n) for n in numbers], request)

    def has_ended(self, operation) -> bool:
        self.results.update(self.runner.poll_completed())
        return operation in self.results

    def end(self, operation) -> int:
        """How many blocks have come, each of which is checked."""
        wait_for(lambda: self.has_ended(operation))
        right = 0
        for key, entry in self.results.pop(operation).items():
            if entry.success:
                at = entry.descriptors[0].element_index * BLOCK
                assert self.pool[at:at + BLOCK] == content(Keys().decode(key) % BLOCKS)
                self.runner.release([entry.release_handle])
                right += 1
        return right

    def fetch(self, limit: float = LIMIT) -> int:
        """How many blocks have come. It asks again where none has: a source that has begun anew
        refuses what was asked of the one before it.
        """
        until = time.monotonic() + limit
        while not (right := self.end(self.begin())) and time.monotonic() < until:
            time.sleep(0.1)
        return right

    def wait_for_event(self, event: str, number: int) -> None:
        def come() -> bool:
            self.results.update(self.runner.poll_completed())
            return self.events.count(event) >= number

        wait_for(come)

    def stop_in_a_write(self):
        """Begins a fetch, and has the source stand still when a part of it has come."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            operation = self.begin()
            wait_for(lambda: any(self.pool[::BLOCK]) or self.has_ended(operation), 0)
            self.source.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.source.pid, os.WSTOPPED | os.WNOWAIT)
            if any(self.pool[::BLOCK]) and not all(self.pool[BLOCK - 1::BLOCK]):
                return operation
            self.source.send_signal(signal.SIGCONT)
            self.end(operation)
        raise TimeoutError("each fetch was whole before its source stood still")


def wait_for(come, pause: float = 0.001) -> None:
    until = time.monotonic() + LIMIT
    while not come():
        if time.monotonic() > until:
            raise TimeoutError("KVCR has not answered")
        time.sleep(pause)


def main(channel: str = "sluice") -> None:
    target, said = Target(channel), {}
    target.start_source()
    said["fetched"] = target.fetch()

    target.kill_source()  # between two fetches
    said["of_a_dead_source"] = target.end(target.begin())
    target.start_source()
    said["fetched_into_the_same_memory"] = target.fetch()

    operation, number = target.stop_in_a_write(), target.events.count("uncertain") + 1
    said["of_a_stopped_source"] = target.end(operation)
    target.wait_for_event("uncertain", number)  # it could go on
    target.kill_source()
    if channel == "sluice":
        target.wait_for_event("quiesced", number)
    target.start_source()
    said["fetched_again"] = target.fetch(LIMIT if channel == "sluice" else 10)
    target.kill_source()

    try:
        target.runner.close()
        said["closed"] = True
    except RuntimeError as e:
        said["closed"] = str(e)
    print(json.dumps(said), flush=True)
    if channel == "kvcr":
        os._exit(0)  # KVCR holds the memory


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]), sys.argv[3])
    main(*sys.argv[1:])
