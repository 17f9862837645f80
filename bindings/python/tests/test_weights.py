# SPDX-License-Identifier: Apache-2.0
"""Weights between processes that keep other parts of them (sluice.integrations._weights), with
arrays of numpy in place of tensors. Every byte is compared with what numpy's slices say.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from typing import Any, Iterator

import numpy as np
import pytest
import sluice
from conftest import LIMIT, stop, until
from sluice.integrations import _weights
from sluice.integrations._tensors import Storage
from sluice.integrations._weights import (
    Box,
    Offer,
    Place,
    Reader,
    Serving,
    Source,
    box_of,
    last_writes,
)

TCP = sluice.Backend("tcp", listen="127.0.0.1:0")
SHAPES = {"a": (48, 40), "b": (1000,), "c": (6, 8, 10), "d": (1, 64), "e": (7, 1, 5)}


def contents(version: int) -> dict[str, Any]:
    rng = np.random.default_rng(version)
    return {name: rng.integers(0, 1 << 30, shape, np.int32) for name, shape in SHAPES.items()}


def pieces(rng: random.Random, ranks: int) -> list[dict[str, list[tuple[slice, ...]]]]:
    """Cuts each array along a dimension, unevenly, and gives each rank a part; or all to all."""
    made: list[dict[str, list[tuple[slice, ...]]]] = [{} for _ in range(ranks)]
    for name, shape in SHAPES.items():
        d = rng.randrange(len(shape))
        if rng.random() < 0.25 or shape[d] < ranks:
            parts = [tuple(slice(0, n) for n in shape)] * ranks
        else:
            cuts = [0, *sorted(rng.sample(range(1, shape[d]), ranks - 1)), shape[d]]
            parts = [tuple(slice(cuts[r], cuts[r + 1]) if k == d else slice(0, n)
                           for k, n in enumerate(shape)) for r in range(ranks)]
        for r in range(ranks):
            made[r][name] = [parts[r]]
    return made


class Rank:
    """An engine, and its parts in one array, with gaps and some of them transposed."""

    def __init__(self, name: str, parts: dict[str, list[tuple[slice, ...]]],
                 rng: random.Random, backend: Any = "shm") -> None:
        self.engine = sluice.Engine(name, [backend])
        self.buffer = np.full(200_000, 255, np.uint8)
        self.boxes, self.views, at = list[Box](), list[tuple[str, Any, Any]](), 0
        for tensor, cuts in parts.items():
            for cut in cuts:
                shape = [c.stop - c.start for c in cut]
                order = list(range(len(shape)))
                rng.shuffle(order)
                n = int(np.prod(shape)) * 4
                view = self.buffer[at : at + n].view(np.int32).reshape(
                    [shape[d] for d in order]).transpose(np.argsort(order))
                self.boxes.append(Box(tensor, tuple(c.start for c in cut), tuple(shape), 4, 0, at,
                                      view.strides))
                self.views.append((tensor, cut, view))
                at += n + 4 * rng.randrange(20)
        self.storages = {Storage(self.buffer.ctypes.data, self.buffer.nbytes, -1): self.buffer}

    def fill(self, version: int) -> None:
        whole = contents(version)
        for name, cut, view in self.views:
            view[:] = whole[name][cut]

    def check(self, version: int) -> None:
        whole, covered = contents(version), np.zeros_like(self.buffer, bool)
        for box, (name, cut, view) in zip(self.boxes, self.views):
            assert (view == whole[name][cut]).all(), name
            covered[box.offset : box.offset + view.size * 4] = True
        assert (self.buffer[~covered] == 255).all()  # and nothing else has changed

    def serve(self, groups: int = 0) -> Offer:
        self.serving = Serving(self.engine, groups)
        self.regions = self.serving.register(self.storages)
        return self.serving.publish(self.regions, self.boxes)

    def read(self, offers: list[Offer], index: int = 0) -> None:
        regions: list[sluice.Region] = []
        self.reader = Reader(self.boxes, regions, index)
        self.offer = self.serve(len(self.reader.groups))
        regions += self.regions
        self.sources = [self.source(offer, f"rank {r}") for r, offer in enumerate(offers)]

    def source(self, offer: Offer, name: str) -> Source:
        source = Source(self.engine, name)
        source.meet(offer, LIMIT)
        return source

    def update(self, version: int, peer: Any = None, limit: float = LIMIT) -> None:
        self.reader.update(self.sources, version, limit, self.serving.words, peer)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "GROUP", 4096)


@pytest.fixture
def ranks() -> Iterator[Any]:
    made: list[Rank] = []

    def make(*args: Any) -> Rank:
        made.append(Rank(*args))
        return made[-1]

    yield make
    for rank in made:
        rank.engine.close()


@pytest.mark.parametrize("seed", range(12))
def test_random_parts(ranks: Any, seed: int) -> None:
    rng, by = random.Random(seed), ["shm", TCP][seed % 2]
    trainers = [ranks(f"trainer-{r}", parts, rng, by)
                for r, parts in enumerate(pieces(rng, rng.randint(1, 3)))]
    offers = [t.serve() for t in trainers]
    workers = [ranks(f"worker-{r}", parts, rng, by)
               for r, parts in enumerate(pieces(rng, rng.randint(1, 3)))]
    for i, worker in enumerate(workers):
        worker.read(offers, i)
    for version in (1, 2):
        for t in trainers:
            t.fill(version)
            t.serving.words[0] = version
        for worker in workers:
            worker.update(version)
            worker.check(version)


def whole() -> dict[str, list[tuple[slice, ...]]]:
    return {name: [tuple(slice(0, n) for n in shape)] for name, shape in SHAPES.items()}


def test_a_peer_that_gets_its_groups_meanwhile(ranks: Any) -> None:
    """The second worker begins before the first, and reads nothing from the trainer."""
    rng = random.Random(1)
    trainer, first, second = (ranks(name, whole(), rng) for name in ("trainer", "first", "second"))
    offer = trainer.serve()
    first.read([offer])
    second.read([offer])
    peer = second.source(first.offer, "first")
    trainer.fill(1)
    trainer.serving.words[0] = 1
    thread = threading.Thread(target=second.update, args=(1, peer))
    thread.start()
    until(lambda: second.serving.words[1] == 1)  # it has begun
    first.update(1)
    thread.join(LIMIT)
    for worker in (first, second):
        worker.check(1)
    read = [(route["peer"], route["bytes"]) for route in second.engine.stats()["routes"]]
    first_sent = sum(n for name, n in read if name == "first")
    assert first_sent > 5 * sum(n for name, n in read if name != "first"), read


def test_a_peer_of_another_version_is_not_read(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "BEGIN", 0.01)
    rng = random.Random(2)
    trainer, first, second = (ranks(name, whole(), rng) for name in ("trainer", "first", "second"))
    offer = trainer.serve()
    first.read([offer])
    second.read([offer])
    trainer.fill(1)
    trainer.serving.words[0] = 1
    first.update(1)
    trainer.fill(2)
    trainer.serving.words[0] = 2
    second.update(2, second.source(first.offer, "first"))
    second.check(2)


def test_what_does_not_fit(ranks: Any) -> None:
    rng = random.Random(3)
    parts = whole()
    parts["a"] = [(slice(0, 20), slice(0, 40))]
    trainer, worker = ranks("trainer", parts, rng), ranks("worker", whole(), rng)
    worker.read([trainer.serve()])
    with pytest.raises(sluice.ArgumentError, match="a: 3200 bytes are served of the 7680"):
        worker.reader.plan(worker.sources)
    with pytest.raises(sluice.CorruptError, match="another table"):
        worker.source(Offer(trainer.serving.publish(trainer.regions, trainer.boxes).description,
                            "0" * 64), "trainer")


def test_rows_that_are_served_twice_do_not_stand_for_others(ranks: Any) -> None:
    """As many bytes are served as are wanted, and some rows of the last rank's are not."""
    rng, cuts = random.Random(5), [(slice(0, 28), slice(0, 40)), (slice(20, 40), slice(0, 40))]
    trainers = [ranks(f"trainer-{r}", {"a": [cut]}, rng) for r, cut in enumerate(cuts)]
    worker = ranks("worker", {"a": whole()["a"]}, rng)
    worker.read([t.serve() for t in trainers])
    with pytest.raises(sluice.ArgumentError, match="a: .* some are served twice and others not"):
        worker.reader.plan(worker.sources)


@pytest.mark.parametrize("lie", [
    lambda box: box._replace(region=1), lambda box: box._replace(offset=-4),
    lambda box: box._replace(offset=1 << 80), lambda box: box._replace(starts=("x", 0)),
    lambda box: box._replace(strides=(4,)), lambda box: box[:4],
])
def test_a_table_that_is_made_up(ranks: Any, lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours, so that a worker does without a peer that lies."""
    rng = random.Random(6)
    trainer, worker = ranks("trainer", whole(), rng), ranks("worker", whole(), rng)
    worker.read([trainer.serve()])
    offer = trainer.serving.publish(trainer.regions, [lie(trainer.boxes[0])])
    source = Source(worker.engine, "rank 0")
    with pytest.raises(sluice.CorruptError, match="rank 0 has a table that is none"):
        source.meet(offer, LIMIT)
    monkeypatch.setattr(_weights, "TABLE_MAX", 64)
    with pytest.raises(sluice.CorruptError, match="rank 0: its table has .* want 64 or less"):
        source.meet(offer, LIMIT)
    source.leave()


def test_reads_end_at_the_same_time() -> None:
    """All are told to end before anybody waits for one."""
    said: list[tuple[str, bool]] = []

    class Read:
        def __init__(self, name: str) -> None:
            self.name, self.transfer = name, self

        def abort(self, timeout: float) -> None:
            said.append((self.name, timeout > 0))
            if timeout == 0:
                raise sluice.WaitTimeout("not yet")

    reads: Any = [Read("a"), Read("b")]
    _weights._abort(reads)
    assert said == [("a", False), ("b", False), ("a", True), ("b", True)]


@pytest.mark.parametrize("lie", [
    lambda box: box._replace(offset=1 << 61), lambda box: box._replace(strides=(1 << 61, 4)),
    lambda box: box._replace(offset=200_000 - 4),
])
def test_a_table_of_what_lies_outside(ranks: Any, lie: Any) -> None:
    rng = random.Random(7)
    trainer, worker = ranks("trainer", whole(), rng), ranks("worker", whole(), rng)
    worker.read([trainer.serve()])
    boxes = [lie(trainer.boxes[0]), *trainer.boxes[1:]]
    source = worker.source(trainer.serving.publish(trainer.regions, boxes), "rank 0")
    with pytest.raises(sluice.Error):
        worker.reader.plan([source])


def test_a_version_that_is_not_there(ranks: Any) -> None:
    rng = random.Random(4)
    trainer, worker = ranks("trainer", whole(), rng), ranks("worker", whole(), rng)
    worker.read([trainer.serve()])
    with pytest.raises(sluice.VersionError, match="rank 0 does not hold version 1"):
        worker.update(1)
    assert worker.serving.words[0] == 0
    trainer.fill(1)
    trainer.serving.words[0] = 1
    worker.update(1)
    worker.check(1)
    trainer.serving.close()
    with pytest.raises(sluice.Error, match="rank 0: "):
        worker.update(2)


@pytest.mark.timed
def test_a_peer_that_stands_still_in_a_group(ranks: Any, start: Any,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said that it has the group. The rest comes from the trainer, within the limit."""
    child, rng = start("test_weights.py"), random.Random(8)
    offer = Offer(*json.loads(child.stdout.readline()))
    trainer, worker = ranks("trainer", whole(), rng, TCP), ranks("worker", whole(), rng, TCP)
    worker.read([trainer.serve()])
    trainer.fill(1)
    trainer.serving.words[0] = 1
    peer, has = worker.source(offer, "peer"), worker.reader._has

    def stops(peer: Source, version: int, group: int, *more: Any) -> bool:
        said: bool = has(peer, version, group, *more)
        if group == 1:
            stop(child)
        return said

    monkeypatch.setattr(worker.reader, "_has", stops)
    worker.update(1, peer, 20)
    worker.check(1)


@pytest.mark.parametrize(("full", "take", "box"), [
    ((8, 4), (slice(2, 6), slice(None)), ((2, 0), (4, 4))),
    ((8, 4), (slice(None), slice(1, 3)), ((0, 1), (8, 2))),
    ((8, 4), (slice(3, 4), slice(2, 3)), ((3, 2), (1, 1))),
    ((8, 4), (slice(None, None, 2), slice(None)), None),
    ((2, 3, 4), (slice(1, 2), slice(None), slice(0, 2)), ((1, 0, 0), (1, 3, 2))),
    ((5, 1, 3), (slice(1, 4), slice(None), slice(None)), ((1, 0, 0), (3, 1, 3))),
])
def test_boxes_of_views(full: Any, take: Any, box: Any) -> None:
    whole = np.arange(int(np.prod(full)), dtype=np.int64).reshape(full)
    part = whole[take]
    steps = [n // 8 for n in part.strides]
    offset = (part.ctypes.data - whole.ctypes.data) // 8
    for flat in (part.shape, (-1,)):  # as a loader sees it, and as one that has made it flat
        target = np.zeros(part.shape, np.int64).reshape(flat)
        view = part.reshape(flat)
        if not np.shares_memory(view, whole):
            continue
        steps, to = [n // 8 for n in view.strides], [n // 8 for n in target.strides]
        found = box_of(full, offset, zip(view.shape, steps, to))
        assert (found and found[:2]) == box


if __name__ == "__main__":  # a peer that has version 1
    _weights.GROUP = 4096
    peer = Rank("peer", whole(), random.Random(9), TCP)
    peer.fill(1)
    told = peer.serve(_weights.GROUPS_MAX)
    peer.serving.words[:] = 1
    print(json.dumps(told), flush=True)
    sys.stdin.read()


@pytest.mark.parametrize("seed", range(200))
def test_writes_of_one_place(seed: int) -> None:
    """The last write of a place is kept, and writes that overlap in another way are refused."""
    rng, whole = random.Random(seed), np.zeros((6, 8), np.int32)
    places, views = list[Place](), list[Any]()
    while len(places) < 4:
        rows, columns = (sorted(rng.sample(range(n + 1), 2)) for n in whole.shape)
        view = whole[slice(*rows), slice(*columns)]
        offset = (view.ctypes.data - whole.ctypes.data) // 4
        for _ in range(rng.choice([1, 1, 2])):
            places.append(Place(rng.choice([1, 1, 2]), offset, view.shape,
                                tuple(by // 4 if n > 1 else 0
                                      for n, by in zip(view.shape, view.strides))))
            views.append(view)
    overlap = False
    for k, place in enumerate(places):
        whole[:] = 0
        for other, view in zip(places[:k], views):
            if other.storage == place.storage and other != place:
                view[:] = 1
        overlap = overlap or bool(views[k].any())
    if overlap:
        with pytest.raises(ValueError, match="overlap"):
            last_writes(places)
        return
    assert last_writes(places) == [k for k, p in enumerate(places) if p not in places[k + 1:]]


def test_a_storage_that_was_freed() -> None:
    Box("w", (0,), (0, 4), 4, 0, 0, (16, 4)).check(0)
    box = Box("w", (0, 0), (2, 4), 4, 0, 16, (32, 4))
    box.check(box.end())
    assert box.end() == 16 + 32 + 16
    for length in (0, box.end() - 1):
        with pytest.raises(sluice.ArgumentError, match="gather it before"):
            box.check(length)
