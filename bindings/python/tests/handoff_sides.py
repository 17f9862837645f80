# SPDX-License-Identifier: Apache-2.0
"""A small model's KV, as a prefill of two ranks and a decode of one lay it out."""

from __future__ import annotations

import hashlib
from typing import Iterator, NamedTuple, Sequence

from patience import LIMIT
from sluice.handoff import Area, Group, Side, View

PATIENT = {f"{what}_timeout": LIMIT
           for what in ("meet", "idle", "layer", "taken", "revoke", "notify")}
LAYERS, HEADS, CELL = 3, 4, 32


def side(rank: int, ranks: int, tokens: int, blocks: int, heads_outside: bool) -> Side:
    """Blocks of so many tokens, with tokens outside heads or the other way."""
    heads = HEADS // ranks
    size = tokens * heads * CELL
    unit, token = (tokens * CELL, CELL) if heads_outside else (CELL, heads * CELL)
    views = [View(layer, part, "bytes", CELL, HEADS, rank * heads, heads, tokens,
                  (2 * layer + p) * blocks * size, size, unit, token)
             for layer in range(LAYERS) for p, part in enumerate("kv")]
    return Side("small", rank, [Area("kv", 2 * LAYERS * blocks * size)], [Group(blocks)], views)


PREFILL = [side(rank, 2, 16, 8, False) for rank in range(2)]
DECODE = [side(0, 1, 32, 4, True)]
BLOCKS_OF_PREFILL, BLOCKS_OF_DECODE, TOKENS = [5, 1, 4, 0], [2, 0], 50


class Place(NamedTuple):
    """One cell of a request."""

    layer: int
    at: int  # in its region
    bytes: bytes


def places(of: Side, table: Sequence[int]) -> Iterator[Place]:
    """Where this rank has which bytes of the request."""
    for v in of.views:
        for head in range(v.count):
            for t in range(TOKENS):
                name = f"{v.layer} {v.part} {v.first + head} {t}"
                yield Place(v.layer, v.base + table[t // v.tokens] * v.block + head * v.unit +
                            t % v.tokens * v.token, hashlib.sha256(name.encode()).digest())
