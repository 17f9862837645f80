# SPDX-License-Identifier: Apache-2.0
"""Pools: the bytes in the slots are compared with those of the entries that were looked up."""

from __future__ import annotations

import gc
import select
import weakref
from typing import Any, Iterator

import numpy as np
import pytest
import sluice
from conftest import LIMIT
from sluice._library import lib
from sluice.sparse import NONE, Found, Pool

BLOCK, PER_SET, STRIDE = 16, 1024, 672


class Node:
    """A pool in one region, and all entries of its sets in another, where each set's blocks lie in
    descending order."""

    def __init__(self, entry: int = 656, sets: int = 2, slots: int = 64, stride: int = 0,
                 layers: int = 1) -> None:
        self.entry, self.sets, self.layers = entry, sets, layers
        self.engine = sluice.Engine("node", ("mem",))
        total = layers * sets * PER_SET
        everything = self.engine.alloc(total * STRIDE)
        room = self.engine.alloc(layers * sets * (slots + 31) * (stride or entry) + 256)
        self.engine.register("all", everything)
        self.region = self.engine.register("near", room)
        self.all = np.frombuffer(everything.view, np.uint8).reshape(total, STRIDE)
        self.near = np.frombuffer(room.view, np.uint8)
        self.random = np.random.default_rng(entry)
        self.all[:] = self.random.integers(0, 256, self.all.shape, np.uint8)
        self.blocks = np.arange(sets * PER_SET // BLOCK, dtype=np.uint32)[::-1].reshape(sets, -1)
        self.pool = Pool(self.region, entry=entry, sets=sets, slots=slots, stride=stride, base=256,
                         layers=layers)
        self.step = self.pool.step(self.engine.self_peer().remote("all"), STRIDE)
        self.bases = [layer * sets * PER_SET * STRIDE for layer in range(layers)]

    def lookup(self, entries: Any) -> Found:
        return self.step.lookup(entries, self.blocks, block=BLOCK)

    def run(self, entries: Any) -> Found:
        found = self.lookup(entries)
        self.step.fetch(*self.bases)
        self.step.wait(LIMIT)
        self.check(entries, found)
        return found

    def places(self, entries: Any) -> Any:
        """Where entries lie among all of a layer."""
        rows = np.arange(self.sets)[:, None]
        return self.blocks[rows, entries // BLOCK].astype(np.int64) * BLOCK + entries % BLOCK

    def check(self, entries: Any, found: Found) -> None:
        asked = entries != NONE
        assert (found.slots[~asked] == NONE).all()
        assert (found.slots // self.pool.slots == np.arange(self.sets)[:, None])[asked].all()
        for layer in range(self.layers):
            at = self.pool.at(found.slots[asked], layer)[:, None] + np.arange(self.entry)
            want = self.all[layer * self.sets * PER_SET:][
                self.places(np.where(asked, entries, 0))[asked], : self.entry]
            assert np.array_equal(self.near[at.astype(np.int64)], want)

    def some(self, n: int) -> Any:
        return self.random.integers(0, PER_SET, (self.sets, n), np.uint32)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


@pytest.mark.parametrize("entry, stride, layers", [(656, 0, 1), (584, 592, 1), (576, 0, 2),
                                                   (132, 0, 3), (128, 0, 1), (4, 0, 1)])
def test_steps(entry: int, stride: int, layers: int) -> None:
    node = Node(entry, 3, 320, stride, layers)
    entries, moved = node.some(128), 0
    for turn in range(30):
        entries[:, 0] = NONE
        found = node.run(entries)
        assert found.counts.sum() == len(found.missed) and found.slots.shape == entries.shape
        moved += len(found.missed) if turn else 0
        entries[:, node.random.integers(0, 128, 8)] = node.some(8)
    assert 0 < moved <= 29 * 3 * 8
    assert node.pool.slots == 320 and node.pool.at(7) == 256 + 7 * (stride or entry)
    node.close()


def test_lists(node: Node) -> None:
    """-1 of signed lists is NONE; sets may be named, and blocks lie in one list."""
    entries = np.array([[5, 9, 5, -1]], np.int32)
    blocks = node.blocks.reshape(-1)
    starts = np.array([PER_SET // BLOCK, 2 * PER_SET // BLOCK], np.uint32)
    found = node.step.lookup(entries, blocks, block=BLOCK, sets=np.array([1], np.int32),
                             starts=starts)
    assert found.missed.tolist() == [0, 1] and found.counts.tolist() == [2]
    assert found.slots[0, 0] == found.slots[0, 2] and found.slots[0, 3] == NONE
    assert (found.slots[0, :3] // node.pool.slots == 1).all()
    again = node.step.lookup(entries, blocks, block=BLOCK, sets=np.array([1], np.int32),
                             starts=starts)
    assert again.missed.tolist() == [0, 1], "what was not brought is missed again"
    assert np.shares_memory(again.slots, found.slots)


def test_pages() -> None:
    """The layers of a block lie one behind the other in a page of it."""
    node = Node(layers=2)
    pages, page = node.all.reshape(-1, 2, BLOCK, STRIDE), 2 * BLOCK * STRIDE
    entries = node.some(32)
    found = node.step.lookup(entries, node.blocks, block=BLOCK, page=page)
    node.step.fetch(0, BLOCK * STRIDE)
    node.step.wait(LIMIT)
    chosen = node.blocks[np.arange(2)[:, None], entries // BLOCK]
    for layer in range(2):
        at = node.pool.at(found.slots, layer)[..., None] + np.arange(656)
        want = pages[chosen, layer, entries % BLOCK, :656]
        assert np.array_equal(node.near[at.astype(np.int64)], want)
    assert node.step.warm(entries[None], node.blocks, block=BLOCK, page=page) == 0
    with pytest.raises(sluice.BoundsError, match="pages of 2147483649 bytes"):
        node.step.lookup(entries, node.blocks, block=BLOCK, page=(1 << 31) + 1)
    node.close()


def test_lists_of_another_thread(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that the library writes to live until its call returns, whatever other threads call.
    """
    step, batch, warm = node.step, node.step._batch, lib.sparse_warm
    written = list[Any]()

    def beside(*words: Any) -> Any:
        made = batch(*words)
        written.append(step._found)
        step._room((1, 3))  # as another thread's lookup does
        return made

    monkeypatch.setattr(step, "_batch", beside)
    found = node.lookup(node.some(16))
    assert found.slots is written[0].slots

    def warming(*words: Any) -> Any:
        assert step._found is not None
        there = weakref.ref(step._found.slots)
        step._room((1, 4))
        gc.collect()
        assert there() is not None
        return warm(*words)

    monkeypatch.setattr(step, "_batch", batch)
    monkeypatch.setattr(lib, "sparse_warm", warming)
    assert step.warm(node.some(8)[None], node.blocks, block=BLOCK) > 0


def test_far_slots(node: Node) -> None:
    """The address of a slot does not overflow where its number is a uint32 of numpy."""
    pool = node.pool
    assert pool.at(np.uint32(7 << 20)) == pool.at(7 << 20) == 256 + (7 << 20) * 656
    assert pool.at(np.array([7 << 20], np.uint32)).tolist() == [256 + (7 << 20) * 656]


def test_store(node: Node) -> None:
    entries = np.array([[7, 9], [7, 9]], np.uint32)
    found = node.lookup(entries)
    assert len(found.missed) == 4
    at = node.pool.at(found.slots.reshape(-1)[found.missed]).astype(np.int64)
    node.near[at[:, None] + np.arange(656)] = np.array([[0xA0], [0xA1], [0xA2], [0xA3]], np.uint8)
    node.step.store(0)
    node.step.wait(LIMIT)
    node.check(entries, found)
    assert (node.all[node.places(entries)[1, 0], :656] == 0xA2).all()


def test_warm() -> None:
    node = Node(slots=320)
    windows = np.stack([node.some(100) for _ in range(2)])
    assert node.step.warm(windows, node.blocks, block=BLOCK) > 200
    node.step.fetch(*node.bases)
    node.step.wait(LIMIT)
    assert len(node.run(windows[1]).missed) == 0
    node.pool.reset(1)
    found = node.lookup(windows[1])
    assert found.counts[0] == 0 and found.counts[1] > 80
    node.close()


def test_fd(node: Node) -> None:
    fd = node.step.fd
    assert fd == node.step.fd and not select.select([fd], [], [], 0)[0]
    for _ in range(2):  # the second misses nothing
        node.lookup(np.array([[1], [2]], np.uint32))
        node.step.fetch(0)
        assert select.select([fd], [], [], LIMIT)[0]
        node.step.wait(LIMIT)


def test_abort(node: Node) -> None:
    entries = node.some(16)
    missed = len(node.lookup(entries).missed)
    node.step.fetch(0)
    node.step.abort(LIMIT)
    assert len(node.run(entries).missed) == missed
    with pytest.raises(sluice.BoundsError, match="2 bases"):
        node.lookup(node.some(16))
        node.step.fetch(0, 0)


def test_refused(node: Node) -> None:
    with pytest.raises(sluice.BoundsError, match="multiple of 4"):
        Pool(node.region, entry=655, sets=1, slots=32)
    with pytest.raises(sluice.BoundsError):
        Pool(node.region, entry=656, sets=1 << 20, slots=32)
    with pytest.raises(sluice.BoundsError, match="slots is -1"):
        Pool(node.region, entry=656, sets=1, slots=-1)
    frozen = node.engine.register("frozen", bytes(4096))
    with pytest.raises(sluice.ReadOnlyError):
        Pool(frozen, entry=4, sets=1, slots=32)
    good = node.some(8)
    with pytest.raises(sluice.BoundsError, match="entry 1024 of set 1 lies behind"):
        node.lookup(np.array([[0], [PER_SET]], np.uint32))
    with pytest.raises(sluice.BoundsError):
        node.lookup(node.some(65))
    for wrong in (good.astype(np.int64), good[0], good.astype(np.float32), good.astype(">u4")):
        with pytest.raises(TypeError, match="2 dimensions of 32-bit integers"):
            node.lookup(wrong)
    with pytest.raises(sluice.ArgumentError, match="power of two"):
        node.step.lookup(good, node.blocks, block=24)
    with pytest.raises(sluice.ArgumentError, match="1 rows, entries 2"):
        node.step.lookup(good, node.blocks[:1], block=BLOCK)
    flat = node.blocks.reshape(-1)
    with pytest.raises(sluice.ArgumentError, match="want 2 and 3"):
        node.step.lookup(good, flat, starts=np.array([0, 1], np.uint32))
    with pytest.raises(sluice.ArgumentError, match="starts ends at 999"):
        node.step.lookup(good, flat, starts=np.array([0, 1, 999], np.uint32))
    with pytest.raises(sluice.BoundsError):
        node.step.lookup(good, node.blocks, sets=np.array([1, 0], np.uint32))
    with pytest.raises(sluice.BoundsError):
        node.pool.reset(2)


def test_ends(node: Node) -> None:
    with pytest.raises(sluice.BusyError, match="it has 1 steps"):
        node.pool.close()
    with node.pool.step(node.step.remote) as other:
        assert len(other.lookup(node.some(4), node.blocks, block=BLOCK).missed) > 4
        with pytest.raises(sluice.BusyError, match="another step"):
            node.lookup(node.some(4))
        with pytest.raises(sluice.BusyError):
            node.pool.reset(1)
    with pytest.raises(sluice.HandleError):
        other.wait(0)
    other.close()
    node.step.close()
    node.pool.close()
    node.pool.close()
    pool = Pool(node.region, entry=656, sets=1, slots=32)
    step = pool.step(node.step.remote)
    gone = weakref.ref(pool)
    del pool, step
    gc.collect()
    assert gone() is None
    last = Pool(node.region, entry=656, sets=1, slots=32)
    node.engine.close()
    with pytest.raises(sluice.HandleError):
        last.reset(0)
    last.close()
