# SPDX-License-Identifier: Apache-2.0
"""Arrays that the two sides lay out differently, beside the same copy in numpy."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import pytest
import sluice
from conftest import LIMIT, MIB, Pair
from sluice._pattern import nest

BLOCKS, LAYERS, HEADS, TOKENS, CELL = 8, 2, 4, 16, 32


def arrays(pair: Pair, order: Sequence[int]) -> tuple[Any, Any]:
    """The same shape on both sides, the peer's in another order of its dimensions."""
    shape = (BLOCKS, LAYERS, HEADS, TOKENS, CELL)
    n = int(np.prod(shape)) * 2
    ours = np.frombuffer(pair.a.bytes, np.uint16, n // 2).reshape(shape)
    theirs = np.frombuffer(pair.b.bytes, np.uint16, n // 2).reshape([shape[i]
        for i in order]).transpose(np.argsort(order))
    ours[:] = np.random.default_rng(5).integers(0, 1 << 16, shape, np.uint16)
    return ours, theirs


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 3, 2, 1, 4),
                                   (0, 2, 1, 3, 4), (1, 0, 3, 2, 4)])
@pytest.mark.parametrize("op", ["write", "read"])
def test_other_orders(pair: Pair, order: Sequence[int], op: Any) -> None:
    ours, theirs = arrays(pair, order)
    if op == "read":
        theirs[:], ours[:] = ours.copy(), 0
    part = (slice(None), slice(None), slice(1, 3))  # two of the heads
    mine, its = ours[part], theirs[part]
    local, remote = [5, 0, 7], np.array([1, 6, 2], np.int32)
    t = pair.peer.transfer(op)
    t.add_pattern(
        pair.a.region,
        pair.remote,
        (3, *mine.shape[1:]),
        mine.itemsize,
        mine.strides,
        its.strides,
        offset=mine.ctypes.data - ours.ctypes.data,
        remote_offset=its.ctypes.data - theirs.ctypes.data,
        local=local,
        remote=remote,
    )
    t.run(LIMIT)
    for i, j in zip(local, remote.tolist()):
        assert (mine[i] == its[j]).all()
    other = theirs if op == "write" else ours
    assert not other[:, :, 0].any() and not other[:, :, 3].any()
    t.close()
    del ours, theirs, mine, its, other


def test_slots(pair: Pair) -> None:
    pair.a.bytes[:] = np.random.default_rng(6).integers(0, 256, MIB, np.uint8).tobytes()
    with pair.peer.transfer("write") as t:
        slots = sluice.Slots(per=4, step=1000, first=3, list=[9, 2, 5])
        t.add_pattern(pair.a.region, pair.remote, (6,), 100, (4096,), (100,), local=slots)
        t.run(LIMIT)
    for i, (slot, entry) in enumerate([(9, 3), (2, 0), (2, 1), (2, 2), (2, 3), (5, 0)]):
        at = slot * 4096 + entry * 1000
        assert pair.b.bytes[100 * i : 100 * i + 100] == pair.a.bytes[at : at + 100]


def test_what_lies_together_is_one_run() -> None:
    p = nest((3, 4, 5, 6), 2, (1000, 60, 12, 2), (2000, 60, 12, 2))
    assert (p.count, p.run, p.loops_count, p.local.stride, p.remote.stride) == (3, 240, 0, 1000,
        2000)
    p = nest((3, 4, 5, 1, 6), 2, (1000, 100, 20, 7, 2), (2000, 200, 40, 9, 2))
    assert (p.run, p.loops_count, p.loops[0].n, p.loops[0].local, p.loops[0].remote) == (12, 1, 20,
        20, 40)


def test_refused(pair: Pair) -> None:
    with pair.peer.transfer("write") as t:
        add = t.add_pattern
        region, remote = pair.a.region, pair.remote
        with pytest.raises(sluice.ArgumentError, match="at most 3"):
            add(region, remote, (2, 2, 2, 2, 2), 1, (64, 29, 13, 5, 2), (64, 29, 13, 5, 2))
        with pytest.raises(sluice.ArgumentError, match="dimensions"):
            add(region, remote, (2, 2), 1, (16, 8), (16,))
        with pytest.raises(sluice.BoundsError, match="is -8"):
            add(region, remote, (2, 2), 1, (16, -8), (16, 8))
        with pytest.raises(sluice.BoundsError, match="empty"):
            add(region, remote, (2, 0), 1, (16, 8), (16, 8))
        with pytest.raises(ValueError, match="3 are wanted"):
            add(region, remote, (3, 8), 1, (16, 2), (16, 1), local=[1])
        with pytest.raises(sluice.BoundsError):
            add(region, remote, (2, 2), 8, (MIB, 8), (16, 8))
        with pytest.raises(sluice.BoundsError, match="nothing is listed"):
            t.post()
