# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine, by the API of its wheel: batches in one call, no metadata server."""

from importlib import metadata

import wire

try:
    from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
except Exception as e:
    wire.missing("mooncake", e)

BATCH_MAX = 2048  # Mooncake's queue refuses batches that are much longer


def wheel():
    for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            pass
    return "mooncake of unknown version"


class Engine(wire.Peer):
    message_note = ("each is a write of 8 bytes with a TransferNotify, since none goes without "
                    "a transfer; get_notifies is polled")

    def open(self, lane, role, name, memory):
        if lane != "tcp":
            raise wire.Unsupported("this build's engine reaches another process of the host by TCP "
                                   "alone: see lane tcp")
        self.memory = memory
        self.engine = TransferEngine()
        self.ok("initialize", self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self.ok("register_memory", self.engine.register_memory(memory.ctypes.data, memory.nbytes))
        self.session = f"127.0.0.1:{self.engine.get_rpc_port()}"
        return (wheel(), "protocol tcp, P2PHANDSHAKE, batch_transfer_sync, address lists made "
                         "beforehand",
                {"session": self.session, "base": memory.ctypes.data})

    @staticmethod
    def ok(call, status):
        if status != 0:
            raise RuntimeError(f"{call} returned {status}")

    def connect(self, card):
        self.card = card

    def prepare(self, op, size, local, remote):
        ours = (self.memory.ctypes.data + local.astype("u8") * size).tolist()
        theirs = (self.card["base"] + remote.astype("u8") * size).tolist()
        return (TransferOpcode.Write if op == "write" else TransferOpcode.Read), ours, theirs, [
            size] * len(ours)

    def post(self, request):
        op, ours, theirs, sizes = request
        for at in range(0, len(sizes), BATCH_MAX):
            part = slice(at, at + BATCH_MAX)
            self.ok("batch_transfer_sync", self.engine.batch_transfer_sync(
                self.card["session"], ours[part], theirs[part], sizes[part], op))

    def notify(self, message):
        """Mooncake sends a notification with a transfer alone: here with a small one."""
        self.ok("transfer_sync", self.engine.transfer_sync(
            self.card["session"], self.memory.ctypes.data, self.card["base"], 8,
            TransferOpcode.Write,
            TransferNotify(self.session, message.decode())))

    def receive(self):
        return self.engine.get_notifies()

if __name__ == "__main__":
    wire.serve(Engine())
