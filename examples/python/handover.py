# SPDX-License-Identifier: Apache-2.0
"""Moves pages of a numpy array from one process to another, with asyncio. In two terminals:

python handover.py decode /tmp/kv.sock
python handover.py prefill /tmp/kv.sock
"""

import asyncio
import sys

import numpy as np
import sluice

BLOCKS, WORDS = 256, 1024  # a cache of 256 blocks of 4 KiB


def cache_of(engine: sluice.Engine) -> tuple[np.ndarray, sluice.Region]:
    """Memory that peers reach with one copy; an array of one's own will do, too."""
    memory = engine.alloc(BLOCKS * WORDS * 4)
    return np.frombuffer(memory.view, np.float32).reshape(BLOCKS, WORDS), engine.register("kv",
        memory)


async def decode(engine: sluice.Engine, socket: str) -> None:
    """Lends its cache to a peer that dials, and is told of each layer that has come."""
    cache, _ = cache_of(engine)
    with engine.serve("unix:" + socket):  # only processes of this user are answered
        print("serving", flush=True)
        for _ in range(3):
            note = await asyncio.wait_for(engine.next_notification(), 60)
            first = int(note.data)
            # visible before the message is
            print(f"blocks from {first} on begin with", cache[first : first + 3, 0].tolist())


async def prefill(engine: sluice.Engine, socket: str) -> None:
    """Writes blocks 7, 3 and 5, layer by layer, to places that follow each other, and says so
    behind the bytes.
    """
    cache, region = cache_of(engine)
    peer = engine.dial("unix:" + socket, timeout=60)
    with peer.transfer("write") as transfer:  # filled once, posted many times
        blocks = np.array([7, 3, 5], np.uint32)  # read in place, until reset
        for layer in range(3):
            cache[:] = np.arange(BLOCKS, dtype=np.float32)[:, None] + 1000 * layer
            places = 200 + 3 * layer + np.arange(3, dtype=np.uint32)
            transfer.add_pages(region, peer.remote("kv"), WORDS * 4, blocks, places)
            transfer.message(str(places[0]).encode())
            transfer.post()
            await transfer  # other coroutines run meanwhile
            transfer.reset()


async def main(role: str, socket: str) -> None:
    with sluice.Engine(role) as engine:
        await {"decode": decode, "prefill": prefill}[role](engine, socket)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("decode", "prefill"):
        sys.exit("usage: handover.py decode|prefill socket")
    asyncio.run(main(*sys.argv[1:]))
