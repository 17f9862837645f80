# SPDX-License-Identifier: Apache-2.0
"""Mooncake's store, by the API of its wheel, beside a cache: the target runs its master and has
the memory of the store, the initiator reads and writes objects of it without a copy of its own."""

import atexit
import os
import socket
import subprocess
import time

import numpy as np

import wire
from mooncake_engine import BATCH_MAX, wheel

try:
    import mooncake
    from mooncake.store import MooncakeDistributedStore
except Exception as e:
    wire.missing("mooncake.store", e)

START_LIMIT = 20  # seconds for the master to listen


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Store(wire.Peer):
    def open(self, lane, role, name, memory):
        self.memory, self.store = memory, MooncakeDistributedStore()
        if role == "initiator":
            return wheel(), "batch_get_into, batch_upsert_from, batch_is_exist, TCP", {}
        port = free_port()
        self.master = subprocess.Popen(
            [os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master"),
             f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.master.kill)
        end = time.monotonic() + START_LIMIT
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            if self.master.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"mooncake_master does not listen: {self.master.poll()}")
            time.sleep(0.05)
        # what is replaced keeps its place for a while
        self.setup(port, 4 * memory.nbytes + (256 << 20))
        return wheel(), "", {"port": port}

    def setup(self, port, segment):
        self.ok("setup", self.store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", segment,
                                          16 << 20, "tcp", "", f"127.0.0.1:{port}"))

    @staticmethod
    def ok(call, status):
        if status != 0:
            raise RuntimeError(f"{call} returned {status}")

    def connect(self, card):
        if "port" not in card:
            return
        self.setup(card["port"], 0)
        self.ok("register_buffer", self.store.register_buffer(self.memory.ctypes.data,
                                                              self.memory.nbytes))

    def prepare(self, op, size, local, remote):
        """Stores the objects, clears the memory, and compares what comes back."""
        # an object that was read has a lease, under which it cannot be replaced
        keys = [f"{op}.{size}.{slot}" for slot in remote.tolist()]
        at = local.astype("i8") * size
        if op == "match":
            at[:] = 0
        request = op, keys, (self.memory.ctypes.data + at).tolist(), [size] * len(keys)
        self.post(("write",) + request[1:])
        if op == "read":
            want = [self.memory[i:i + size].copy() for i in at.tolist()]
            for i in at.tolist():
                self.memory[i:i + size] = 0
            self.post(request)
            for i, value in zip(at.tolist(), want):
                if not np.array_equal(self.memory[i:i + size], value):
                    raise RuntimeError("an object is not what was put")
        return request

    def post(self, request):
        op, *lists = request
        for at in range(0, len(lists[0]), BATCH_MAX):
            self.post_part(op, *(part[at:at + BATCH_MAX] for part in lists))

    def post_part(self, op, keys, pointers, sizes):
        if op == "match":
            answers, want = self.store.batch_is_exist(keys), 1
        elif op == "read":
            answers, want = self.store.batch_get_into(keys, pointers, sizes), sizes[0]
        else:
            answers, want = self.store.batch_upsert_from(keys, pointers, sizes), 0
        for i, answer in enumerate(answers):
            if answer != want:
                raise RuntimeError(f"{op}: object {i} of {len(keys)}: {answer}")

    def finish(self):
        self.store.remove_all()


if __name__ == "__main__":
    wire.serve(Store())
