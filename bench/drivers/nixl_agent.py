# SPDX-License-Identifier: Apache-2.0
"""NIXL's agent, by the API of its wheel: prepared lists, requests made once and posted again.

Run by sluice.nixl.shim it drives our face of that API, which is what a program that switches gets.
"""

import os
import sys
from importlib import metadata

import numpy as np

import wire

try:
    from nixl._api import nixl_agent, nixl_agent_config
except Exception as e:
    wire.missing("nixl", e)

SLOTS_MAX = 1 << 17  # of a prepared list; larger ones are made of the pieces that are used
BLOCK = 4096  # what pieces of a file are multiples of that go past the page cache


def faced():
    """Whether the package of that name is our shim."""
    import nixl
    return "_shim" in str(nixl.__file__)


def version():
    return f"sluice {metadata.version('sluice')}, its face of NIXL's API" if faced(
    ) else f"nixl {metadata.version('nixl')}"


class Agent(wire.Peer):
    def __init__(self, thread):
        self.thread = thread  # that makes progress, the default of the wheel

    def open(self, lane, role, name, memory):
        self.memory, self.name = memory, name
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=self.thread,
                                                        backends=["UCX"]))
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self.lists = {}
        thread = ("a progress thread (the wheel's default)" if self.thread
                  else "no progress thread, the target polls")
        if faced():
            thread = "which is shm here, and needs no progress"
        return (version(), f"backend UCX, {thread}, prep_xfer_dlist and make_prepped_xfer",
                {"name": name, "base": memory.ctypes.data, "bytes": memory.nbytes,
                 "metadata": self.agent.get_agent_metadata()})

    def connect(self, card):
        self.card = card
        self.remote = self.agent.add_remote_agent(card["metadata"])

    def dlist(self, agent, place, size, slots):
        """A list prepared once for all requests of a shape, as a block table is: strided where
        it covers what is used, and only what is used where slots are too many."""
        base, device, kind = place
        count = int(slots.max()) + 1
        if count <= SLOTS_MAX:
            ours = agent == "NIXL_INIT_AGENT"
            whole = self.memory.nbytes if ours else self.card["bytes"]
            rows = np.array([[base, size, device, size, min(SLOTS_MAX, whole // size)]], np.uint64)
            return self.agent.prep_xfer_dlist(agent, rows, kind), slots
        rows = np.zeros((len(slots), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = base + slots.astype(np.uint64) * size, size, device
        return self.agent.prep_xfer_dlist(agent, rows, kind), np.arange(len(slots), dtype=np.int32)

    def side(self, agent, place, size, slots):
        if int(slots.max()) >= SLOTS_MAX:
            handle, slots = self.dlist(agent, place, size, slots)
            self.lists.setdefault("own", []).append(handle)
            return handle, slots
        if (agent, size) not in self.lists:
            self.lists[agent, size] = self.dlist(agent, place, size, slots)[0]
        return self.lists[agent, size], slots

    def there(self, size):
        """Where the other end's bytes are: address, device and kind of memory."""
        return self.card["base"], 0, "DRAM"

    def prepare(self, op, size, local, remote):
        ours, local = self.side("NIXL_INIT_AGENT", (self.memory.ctypes.data, 0, "DRAM"), size,
                                local)
        theirs, remote = self.side(self.remote, self.there(size), size, remote)
        return self.agent.make_prepped_xfer(op.upper(), ours, local, theirs, remote)

    def post(self, request):
        state = self.agent.transfer(request)
        while state == "PROC":
            state = self.agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"the transfer's state is {state}")

    def release(self, request):
        self.agent.release_xfer_handle(request)

    def finish(self):
        own = self.lists.pop("own", [])
        for handle in own + list(self.lists.values()):
            self.agent.release_dlist_handle(handle)
        self.lists = {}

    def notify(self, message):
        self.agent.send_notif(self.remote, message)

    def receive(self):
        return self.agent.get_new_notifs()

    def progress(self):
        self.agent.get_new_notifs()

class Files(Agent):
    """The same with backend POSIX and a file, which is no other agent's: it is its own peer."""

    def __init__(self, params):
        super().__init__(False)
        self.params = params

    def open(self, lane, role, name, memory):
        self.memory, self.name, self.lists = memory, name, {}
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.agent.create_backend("POSIX", self.params)
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        params = ", ".join(f"{k}={v}" for k, v in self.params.items()) or "its defaults"
        settings = (f"backend POSIX with {params}; a descriptor with O_DIRECT, and one without "
                    "for pieces that are no blocks")
        return version(), settings, {}

    def connect(self, card):
        self.card, self.remote = card, self.name
        self.past, self.through = (os.open(card["path"], os.O_RDWR | flag) for flag in (os.O_DIRECT,
            0))
        for fd in (self.past, self.through):
            self.agent.register_memory([(0, card["bytes"], fd, "")], "FILE")

    def there(self, size):
        return 0, self.through if size % BLOCK else self.past, "FILE"

    def none(self, *_):
        raise wire.Unsupported("a file is no peer")

    notify = receive = none


def main(settings):
    if "file" in settings:
        wire.serve(Files({"use_uring": "true"} if "uring" in settings else {}))
    threaded = "polled" not in settings
    wire.serve(Agent(threaded), progresses=not threaded)


if __name__ == "__main__":
    main(sys.argv[1:])
