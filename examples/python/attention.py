# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over a pool of hot entries: python attention.py

All latent entries of some sequences lie in host memory, 656 bytes each, as DeepSeek-V3.2 keeps
them: 512 numbers of 8 bits, four scales, and 64 numbers of 16 bits for positions. Each step of
decode appends an entry and attends to the top-k, which are mostly those of the step before. The
same step over the pool and over all entries gives the same numbers, to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sluice
from sluice.sparse import Pool

SEQUENCES, CONTEXT, STEPS, TOP_K, SLOTS = 2, 4096, 24, 256, 800
ENTRY, BLOCK = 656, 64
BLOCKS = CONTEXT // BLOCK  # of a sequence

random = np.random.default_rng(1)


def eighths() -> Any:
    """The value of each byte, as float8_e4m3fn; NaN is 0 here."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    value[(bits & 127) == 127] = 0
    return np.where(bits > 127, -value, value).astype(np.float32)


VALUES = eighths()


def attend(query: Any, entries: Any) -> Any:
    """What queries of 576 numbers get from entries: weights by all numbers, sums of the 512."""
    scales = np.ascontiguousarray(entries[..., 512:528]).view(np.float32)
    latent = VALUES[entries[..., :512]] * np.repeat(scales, 128, axis=-1)
    places = np.ascontiguousarray(entries[..., 528:]).view(np.uint16)
    rope = (places.astype(np.uint32) << 16).view(np.float32)  # bfloat16
    keys = np.concatenate([latent, rope], axis=-1)
    weights = np.einsum("sd,skd->sk", query, keys) / np.sqrt(np.float32(576))
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    return np.einsum("sk,skd->sd", weights / weights.sum(axis=1, keepdims=True), latent)


def some_entries(*shape: int) -> Any:
    entries = random.integers(0, 256, (*shape, ENTRY), np.uint8)
    entries[..., 512:528] = random.random((*shape, 4), np.float32).view(np.uint8)
    rope = random.standard_normal((*shape, 64), np.float32)
    entries[..., 528:] = (rope.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return entries


def main() -> None:
    with sluice.Engine("decode", ["mem"]) as engine:
        host = engine.alloc(SEQUENCES * CONTEXT * ENTRY)
        near = engine.alloc(SEQUENCES * SLOTS * ENTRY)  # on a card: memory of the card
        engine.register("all", host)
        everything = np.frombuffer(host.view, np.uint8).reshape(-1, ENTRY)
        hot = np.frombuffer(near.view, np.uint8).reshape(-1, ENTRY)
        everything[:] = some_entries(SEQUENCES * CONTEXT)
        # as a paged allocator leaves them
        blocks = random.permutation(SEQUENCES * BLOCKS).astype(np.uint32).reshape(SEQUENCES, -1)
        rows = np.arange(SEQUENCES)[:, None]

        def all_of(entries: Any) -> Any:
            return everything[blocks[rows, entries // BLOCK] * BLOCK + entries % BLOCK]

        pool = Pool(engine.register("hot", near), entry=ENTRY, sets=SEQUENCES, slots=SLOTS)
        step = pool.step(engine.self_peer().remote("all"))
        length = CONTEXT - STEPS
        top = np.stack([random.choice(length, TOP_K, replace=False) for _ in range(SEQUENCES)])
        top = top.astype(np.uint32)
        step.warm(top[None], blocks, block=BLOCK)
        step.fetch(0)
        step.wait(timeout=60)
        moved = 0
        for _ in range(STEPS):
            # the new entry: into its slot, and from there to all others
            new = np.full((SEQUENCES, 1), length, np.uint32)
            length += 1
            found = step.lookup(new, blocks, block=BLOCK)
            hot[found.slots] = some_entries(SEQUENCES, 1)
            step.store(0)
            step.wait(timeout=60)

            # the indexer's choice: the new entry, and a few others than before
            top[:, random.integers(0, TOP_K, 12)] = random.integers(0, length, (SEQUENCES, 12))
            top[:, 0] = new[:, 0]
            found = step.lookup(top, blocks, block=BLOCK)
            moved += len(found.missed)
            step.fetch(0)
            step.wait(timeout=60)
            query = random.standard_normal((SEQUENCES, 576), np.float32)
            pooled, whole = attend(query, hot[found.slots]), attend(query, all_of(top))
            assert pooled.tobytes() == whole.tobytes()
        step.close()
        pool.close()
        del everything, hot
    share = moved / (STEPS * SEQUENCES * TOP_K)
    print(f"{STEPS} steps of {SEQUENCES} sequences, the same to the bit; moved {share:.0%}")


if __name__ == "__main__":
    main()
