# SPDX-License-Identifier: Apache-2.0
"""A process that is written to: it says where it serves, then answers a line with the digest of its
region.
"""

from __future__ import annotations

import hashlib
import json
import sys

import sluice


def main() -> None:
    settings = json.loads(sys.argv[1])
    config = settings["config"]
    if "identity" in config:
        config["identity"] = sluice.Identity(*config["identity"])
    backend = sluice.Backend(settings["backend"], **settings["options"])
    with sluice.Engine("target", [backend], handshake_timeout=60, **config) as engine:
        memory = engine.alloc(1 << 20)
        engine.register("data", memory)
        with engine.serve(settings["address"]) as listener:
            print(listener.address, flush=True)
            peer = engine.accept(60)
            for line in sys.stdin:
                if line == "message\n":
                    note = engine.receive(60)
                    assert note.sender == peer
                    print(note.data.decode(), flush=True)
                    peer.notify(b"thanks", 60)
                elif line == "inbound\n":
                    print(json.dumps([engine.stats()["inbound"], peer.about()["origin"]]),
                          flush=True)
                else:
                    print(hashlib.sha256(memory.view).hexdigest(), flush=True)


main()
