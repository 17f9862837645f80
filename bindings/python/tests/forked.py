# SPDX-License-Identifier: Apache-2.0
"""What the child of a fork gets, and that the parent goes on."""

from __future__ import annotations

import os
import sys

import sluice


def child(engine: sluice.Engine, t: sluice.Transfer) -> int:
    calls = [t.run, t.test, engine.describe, engine.stats, lambda: sluice.Engine("child", ["mem"]),
             t.close, engine.close]
    for call in calls:
        try:
            call()
        except sluice.ForkError as e:
            if "exec" in str(e):
                continue
        return 1
    return 0


def main() -> None:
    with sluice.Engine("parent", ["mem"]) as engine:
        data = bytearray(100)
        region = engine.register("data", data)
        peer = engine.self_peer()
        t = peer.transfer("write")
        t.add(region, 0, peer.remote("data"), 50, 50)
        t.run()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(engine, t)
            finally:
                sys.stdout.flush()
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        data[:50] = b"x" * 50
        t.run()
        assert data == b"x" * 100
    print("ok", flush=True)


main()
