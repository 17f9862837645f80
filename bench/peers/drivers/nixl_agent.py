# SPDX-License-Identifier: Apache-2.0
"""NIXL's agent, by the API of its wheel: prepared lists, requests made once and posted again."""

import sys
import time
from importlib import metadata

import numpy as np

import wire

try:
    from nixl._api import nixl_agent, nixl_agent_config
except Exception as e:
    wire.missing("nixl", e)

SLOTS_MAX = 1 << 17  # of a prepared list; larger ones are made of the pieces that are used


class Agent(wire.Peer):
    def __init__(self, thread):
        self.thread = thread  # that makes progress, the default of the wheel

    def open(self, lane, role, name, memory):
        self.memory, self.name = memory, name
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=self.thread, backends=["UCX"]))
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self.lists = {}
        thread = "a progress thread (the wheel's default)" if self.thread else "no progress thread, the target polls"
        return (f"nixl {metadata.version('nixl')}", f"backend UCX, {thread}, prep_xfer_dlist and make_prepped_xfer",
                {"name": name, "base": memory.ctypes.data, "bytes": memory.nbytes, "metadata": self.agent.get_agent_metadata()})

    def connect(self, card):
        self.card = card
        self.remote = self.agent.add_remote_agent(card["metadata"])

    def dlist(self, agent, base, size, slots):
        """A list prepared once for all requests of a shape, as a block table is: strided where
        it covers what is used, and only what is used where slots are too many."""
        count = int(slots.max()) + 1
        if count <= SLOTS_MAX:
            rows = np.array([[base, size, 0, size, SLOTS_MAX]], np.uint64)
            rows[0][4] = min(SLOTS_MAX, self.card["bytes"] // size)
            return self.agent.prep_xfer_dlist(agent, rows, "DRAM"), slots
        rows = np.zeros((len(slots), 3), np.uint64)
        rows[:, 0], rows[:, 1] = base + slots.astype(np.uint64) * size, size
        return self.agent.prep_xfer_dlist(agent, rows, "DRAM"), np.arange(len(slots), dtype=np.int32)

    def side(self, agent, base, size, slots):
        if int(slots.max()) >= SLOTS_MAX:
            handle, slots = self.dlist(agent, base, size, slots)
            self.lists.setdefault("own", []).append(handle)
            return handle, slots
        if (agent, size) not in self.lists:
            self.lists[agent, size] = self.dlist(agent, base, size, slots)[0]
        return self.lists[agent, size], slots

    def prepare(self, op, size, local, remote):
        ours, local = self.side("NIXL_INIT_AGENT", self.memory.ctypes.data, size, local)
        theirs, remote = self.side(self.remote, self.card["base"], size, remote)
        return self.agent.make_prepped_xfer(op.upper(), ours, local, theirs, remote)

    def post(self, request):
        state = self.agent.transfer(request)
        polls = 0
        while state == "PROC":
            state = self.agent.check_xfer_state(request)
            polls += 1
            if polls % wire.POLLS_BETWEEN_CLOCKS == 0:
                self.check()
        if state != "DONE":
            raise RuntimeError(f"the transfer's state is {state}")

    def release(self, request):
        self.agent.release_xfer_handle(request)

    def finish(self):
        own = self.lists.pop("own", [])
        for handle in own + list(self.lists.values()):
            self.agent.release_dlist_handle(handle)
        self.lists = {}

    def regions(self, memory, count, size):
        begin = time.perf_counter()
        for i in range(count):
            self.agent.register_memory([(memory.ctypes.data + i * size, size, 0, "")], "DRAM")
        registered = time.perf_counter()
        described = self.agent.get_agent_metadata()
        end = time.perf_counter()
        card = {"name": self.name, "base": memory.ctypes.data, "bytes": memory.nbytes, "metadata": described}
        return registered - begin, end - registered, card, len(described)

    def notify(self, message):
        self.agent.send_notif(self.remote, message)

    def receive(self):
        return self.agent.get_new_notifs()

    def progress(self):
        self.agent.get_new_notifs()

    def null_call(self, request):
        self.agent.check_xfer_state(request)


if __name__ == "__main__":
    threaded = "polled" not in sys.argv[1:]
    wire.serve(Agent(threaded), progresses=not threaded)
