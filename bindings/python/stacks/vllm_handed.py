# SPDX-License-Identifier: Apache-2.0
"""Made servers (vllm_made.py) that hand requests over. As a program it is a prefill of two ranks,
which computes a prompt up to the middle of its layers and stands still there.
"""

from __future__ import annotations

import functools
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import vllm_made as made
from ports import ports
from sluice import _callers
from sluice.handoff import Receiver, Sender
from sluice.integrations import vllm_handoff
from vllm_server import LIMIT

# This process may stand still for longer than theirs.
_callers.LIMIT = vllm_handoff.MEETING = LIMIT
PATIENT = {"revoke_timeout": LIMIT, "notify_timeout": LIMIT}
vllm_handoff.Sender = functools.partial(Sender, **PATIENT)
vllm_handoff.Receiver = functools.partial(Receiver, **PATIENT)

CONNECTOR = {"kv_connector": "SluiceHandoffConnector",
             "kv_connector_module_path": "sluice.integrations.vllm_handoff"}


def doors(ranks: int) -> int:
    """The first of so many ports in a row that are free."""
    while True:
        first = int(ports(1)[0])
        try:
            for k in range(ranks):
                socket.create_server(("0.0.0.0", first + k)).close()
            return first
        except OSError:
            continue


class Handed(made.Made):
    """A server that hands requests over, or takes them."""

    def __init__(self, folder: Path, role: str, port: int = 0, timeout: float = 10 * LIMIT,
                 **more: Any) -> None:
        self.port = port
        super().__init__(folder, "", transfer={
            **CONNECTOR, "kv_role": role, "kv_connector_extra_config": {
                "sluice_handoff": {"host": "127.0.0.1", "port": port or 1,
                                   "timeout": timeout}}},
            enable_prefix_caching=False, **more)

    def _hits(self, step: Any) -> int:
        return sum(load.tokens - load.first for load in step.loads)

    def ask_only(self, name: str, prompt: list[int]) -> Any:
        """What a prefill says of a prompt for the decode, which it has not handed over yet."""
        self.add(name, prompt, 1, kv={"do_remote_decode": True})
        while name not in self.kv:
            self.step()
        return self.kv[name]

    def number(self, n: int) -> dict[str, Any]:
        """What a decode is told before this prefill has answered."""
        return {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": self.port,
                "tp_size": self.ranks, "sluice_number": n}


def together(*servers: made.Made) -> None:
    """Steps all of them until none has anything to do."""
    end = time.monotonic() + LIMIT
    while any([one.busy for one in servers]):
        for one in servers:
            one.step()
        assert time.monotonic() < end, "requests do not end"
        time.sleep(0.001)


def main() -> None:
    folder, port, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    prompt = json.loads(sys.stdin.readline())
    one = Handed(folder, "kv_producer", port, ranks=2)
    print("opened", flush=True)
    second = one.workers[0]

    def stand_still(name: str, layer: Any, metadata: Any) -> None:
        if name != "layers.0":
            print("half", flush=True)
            time.sleep(10 * LIMIT)
        type(second).save_kv_layer(second, name, layer, metadata)

    second.save_kv_layer = stand_still
    until_wanted(one, number)
    one.add("a", prompt, 1, kv={"do_remote_decode": True, "sluice_number": number})
    one.run()


def until_wanted(one: Handed, number: int) -> None:
    """A decode's ranks all expect the request."""
    end = time.monotonic() + LIMIT
    for worker in one.workers:
        side = worker._prefill
        while (number not in side._wants or len(side._wants[number].ranks)
               < side._met[side._wants[number].group].ranks):
            assert time.monotonic() < end, "no decode wants it"
            time.sleep(0.001)


if __name__ == "__main__":
    main()
