# SPDX-License-Identifier: Apache-2.0
"""A process that is written to: it says where it serves, then answers a line with the digest of its
region.
"""

from __future__ import annotations

import hashlib
import json
import sys

import sluice
from patience import LIMIT


def main() -> None:
    settings = json.loads(sys.argv[1])
    config = settings["config"]
    if "identity" in config:
        config["identity"] = sluice.Identity(*config["identity"])
    backend = sluice.Backend(settings["backend"], **settings["options"])
    with sluice.Engine("target", [backend], **config) as engine:
        memory = engine.alloc(1 << 20)
        engine.register("data", memory)
        with engine.serve(settings["address"]) as listener:
            print(listener.address, flush=True)
            peer = engine.accept(LIMIT)
            for line in sys.stdin:
                if line == "message\n":
                    note = engine.receive(LIMIT)
                    assert note.sender == peer
                    print(note.data.decode(), flush=True)
                    peer.notify(b"thanks", LIMIT)
                elif line == "lost\n":  # which is said once all that came from the peer is read
                    while not engine.receive(LIMIT).lost:
                        pass
                    print("lost", flush=True)
                elif line == "origin\n":
                    print(peer.about()["origin"], flush=True)
                else:
                    print(hashlib.sha256(memory.view).hexdigest(), flush=True)


main()
