# SPDX-License-Identifier: Apache-2.0
"""Our own engine from Python: patterns and lists made once, over memory that the program has
already.
"""

from importlib import metadata

import numpy as np

import wire

try:
    # first: a folder of that name beside this file imports as well
    VERSION = metadata.version("sluice")
    import sluice
except Exception as e:
    wire.missing("sluice", e)

LIMIT = 60.0  # of a connection; the harness has shorter ones


class Engine(wire.Peer):
    def open(self, lane, role, name, memory):
        if lane != "host":
            raise wire.Unsupported("it is for lane host")
        self.memory = memory
        self.engine = sluice.Engine(name, ["shm"], connect_timeout=LIMIT)
        self.region = self.engine.register("kv", memory)
        return (f"sluice {VERSION} from Python", "backend shm, memory of numpy, "
                "add_pages for scattered pieces and add_many for adjacent ones, made once, run",
                self.card())

    def card(self):
        return {"description": self.engine.describe()}

    def connect(self, card):
        self.peer = self.engine.connect(card["description"], LIMIT)
        self.remote = self.peer.remote("kv")

    def prepare(self, op, size, local, remote):
        t = self.peer.transfer(op)
        if adjacent(local) and adjacent(remote):
            rows = np.empty((len(local), 3), np.uint64)
            rows[:, 0], rows[:, 1], rows[:, 2] = local.astype(np.uint64) * size, remote.astype(
                np.uint64) * size, size
            t.add_many(self.region, self.remote, rows)
        else:
            t.add_pages(self.region, self.remote, size, local.astype(np.uint32),
                        remote.astype(np.uint32))
        return t

    def post(self, request):
        request.run()

    def release(self, request):
        request.close()

    def notify(self, message):
        self.peer.notify(message)

    def receive(self):
        try:
            return [self.engine.receive(0)]
        except sluice.TimeoutError:
            return []

def adjacent(slots):
    return bool((np.diff(slots) == 1).all())


if __name__ == "__main__":
    wire.serve(Engine())
