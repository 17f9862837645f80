# SPDX-License-Identifier: Apache-2.0
"""A peer that moves bytes by files that both ends map: what the loop in Python is tested with."""

import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "drivers"))
import wire


class Fake(wire.Peer):
    def open(self, lane, role, name, memory):
        if lane != "host":
            raise wire.Unsupported("one host alone")
        self.memory, self.progressed = memory, 0
        self.fd = os.memfd_create("fake")
        os.ftruncate(self.fd, memory.nbytes)
        shared = np.memmap(os.fdopen(os.dup(self.fd), "r+b"), np.uint8, "r+", shape=memory.shape)
        shared[:] = memory
        self.memory = shared
        return "fake 1", "numpy", {"pid": os.getpid(), "fd": self.fd, "bytes": memory.nbytes,
                                   "metadata": b"\x00\xff"}

    def connect(self, card):
        assert card["metadata"] == b"\x00\xff"
        self.other = np.memmap(f"/proc/{card['pid']}/fd/{card['fd']}", np.uint8, "r+",
                               shape=(card["bytes"],))

    def prepare(self, op, size, local, remote):
        return op, size, local, remote

    def post(self, request):
        op, size, local, remote = request
        for here, there in zip(local.tolist(), remote.tolist()):
            ours, theirs = self.memory[here * size:(here + 1) * size], self.other[
                there * size:(there + 1) * size]
            if op == "write":
                theirs[:] = ours
            else:
                ours[:] = theirs

class Server(wire.Server):
    """The memory that peers reach is the one that was opened."""

    def do_open(self, r):
        answer = super().do_open(r)
        self.memory = self.peer.memory
        return answer


Server(Fake(), False).run()
