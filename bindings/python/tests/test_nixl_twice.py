# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: memory that is registered twice, overlapping, or in parts. As long as one
registration holds the bytes, transfers of them go on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
from conftest import until
from nixl_agents import finish
from sluice import nixl
from sluice.nixl import bindings as b
from sluice.nixl import memory

K = 1 << 12


class Pair:
    """An agent that writes from one array to another agent's. Nothing is registered yet."""

    def __init__(self) -> None:
        self.user, self.owner = nixl.nixl_agent("user"), nixl.nixl_agent("owner")
        self.source, self.target = np.full(64 * K, 9, np.uint8), np.zeros(64 * K, np.uint8)

    def side(self, name: str) -> tuple[nixl.nixl_agent, Any]:
        return (self.user, self.source) if name == "user" else (self.owner, self.target)

    def register(self, name: str, at: int = 0, length: int = 64 * K) -> Any:
        agent, of = self.side(name)
        return agent.register_memory([(of.ctypes.data + at, length, 0, "")], "DRAM")

    def meet(self) -> None:
        self.user.add_remote_agent(self.owner.get_agent_metadata())

    def lists(self, at: int, length: int, count: int) -> list[Any]:
        """Every second block, so that many are a pattern."""
        n = length // count // 2
        return [self.user.get_xfer_descs([(of.ctypes.data + at + 2 * i * n, n, 0)
                                          for i in range(count)], "DRAM")
                for of in (self.source, self.target)]

    def handle(self, at: int, length: int, count: int = 1) -> nixl.nixl_xfer_handle:
        here, there = self.lists(at, length, count)
        return self.user.initialize_xfer("WRITE", here, there, "owner")

    def lands(self, h: nixl.nixl_xfer_handle, message: bytes = b"") -> None:
        self.target[:] = 0
        if self.user.transfer(h, message) != "DONE":
            until(lambda: self.user.check_xfer_state(h) == "DONE")
        assert int((self.target == 9).sum()) == h.total


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.user.close()
    made.owner.close()


SPANS = {
    "twice": ([(0, 8 * K), (0, 8 * K)], (0, 8 * K)),
    "overlapping": ([(0, 8 * K), (4 * K, 8 * K)], (5 * K, 3 * K)),
    "whole and part": ([(0, 16 * K), (2 * K, 4 * K)], (2 * K, 4 * K)),
    "parts and whole": ([(0, 4 * K), (4 * K, 4 * K), (0, 8 * K)], (0, 4 * K)),
}


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("side", ["user", "owner"])
@pytest.mark.parametrize("spans", SPANS)
def test_one_of_several_ends(pair: Pair, spans: str, side: str, which: int, count: int) -> None:
    listed = [pair.register(side, *span) for span in SPANS[spans][0]]
    pair.register("owner" if side == "user" else "user")
    pair.meet()
    place = SPANS[spans][1]
    h = pair.handle(*place, count)
    pair.lands(h)
    here, there = (pair.user.prep_xfer_dlist(agent, descs) for agent, descs
                   in zip(("", "owner"), pair.lists(*place, count)))
    prepared = pair.user.make_prepped_xfer("WRITE", here, range(count), there, range(count))
    agent, _ = pair.side(side)
    agent.deregister_memory(listed.pop(which))
    pair.lands(h)
    pair.lands(prepared)
    pair.lands(pair.user.make_prepped_xfer("WRITE", here, range(count), there, range(count)))
    pair.lands(pair.handle(*place, count))
    if side == "owner":
        pair.meet()  # by metadata that tells of the others alone
        pair.lands(h)
        pair.lands(pair.user.make_prepped_xfer("WRITE", here, range(count), there, range(count)))


@pytest.mark.parametrize("spans", SPANS)
def test_the_last_one_ends(pair: Pair, spans: str) -> None:
    listed = [pair.register("owner", *span) for span in SPANS[spans][0]]
    pair.register("user")
    pair.meet()
    h = pair.handle(*SPANS[spans][1])
    for one in listed:
        pair.lands(h)
        pair.owner.deregister_memory(one)
    pair.target[:] = 0
    with pytest.raises(b.nixlNotFoundError):
        finish(pair.user, h)
    assert not pair.target.any()
    with pytest.raises(b.nixlNotFoundError):
        pair.owner.deregister_memory(listed[0])
    assert pair.owner._engine is not None
    assert len(pair.owner._engine._regions) == 1  # by which it is described


def test_the_last_one_stays_while_a_transfer_lists_it(pair: Pair) -> None:
    first, second = pair.register("user"), pair.register("user")
    pair.register("owner")
    pair.meet()
    h = pair.handle(0, K)
    pair.user.deregister_memory(first)
    with pytest.raises(b.nixlNotAllowedError):
        pair.user.deregister_memory(second)
    pair.lands(h)
    h.release()
    pair.user.deregister_memory(second)
    with pytest.raises(b.nixlNotFoundError):
        pair.handle(0, K)


def test_both_of_one_list_end(pair: Pair) -> None:
    row = (pair.source.ctypes.data, K, 0, "")
    twice = pair.user.register_memory([row, row], "DRAM")
    pair.user.deregister_memory(twice)
    with pytest.raises(b.nixlNotFoundError):
        pair.user.deregister_memory(twice)


def test_one_ends_while_a_transfer_is_under_way(pair: Pair) -> None:
    listed = [pair.register("user") for _ in range(2)]
    theirs = [pair.register("owner") for _ in range(2)]
    pair.meet()
    h = pair.handle(0, 64 * K)
    assert pair.user.transfer(h) in ("PROC", "DONE")
    pair.user.deregister_memory(listed[0])
    pair.owner.deregister_memory(theirs[1])
    until(lambda: pair.user.check_xfer_state(h) == "DONE")
    assert (pair.target[: 32 * K] == 9).all()


def test_the_message_comes_once(pair: Pair) -> None:
    """Also where the transfer was made anew between overlapping ranges."""
    listed = [pair.register("owner", *span) for span in SPANS["overlapping"][0]]
    pair.register("user")
    pair.meet()
    h = pair.handle(*SPANS["overlapping"][1])
    for which, one in enumerate(listed):
        other = pair.register("owner", *SPANS["overlapping"][0][which])
        pair.owner.deregister_memory(one)
        del other
        pair.meet()
        pair.lands(h, b"there")
        pair.user.send_notif("owner", b"end")
        until(lambda: b"end" in pair.owner.update_notifs().get("user", []))
        assert pair.owner.notifs.pop("user") == [b"there", b"end"]


def test_what_is_kept_is_bounded(pair: Pair) -> None:
    """Of parts that come and go under a registration of all, each told to a peer."""
    pair.register("owner")
    pair.register("user")
    pair.meet()
    for _ in range(40):  # one part, again and again
        part = pair.register("owner", K, K)
        pair.meet()
        pair.owner.deregister_memory(part)
    assert len(pair.owner._covered) <= 1
    most, memory._COVERED_MOST = memory._COVERED_MOST, 8
    try:
        for i in range(40):
            part = pair.register("owner", i * K, K)
            pair.meet()
            pair.owner.deregister_memory(part)
        assert len(pair.owner._covered) == 8
    finally:
        memory._COVERED_MOST = most
    assert pair.owner._engine is not None
    assert len(pair.owner._engine._regions) == 1 + 1 + 8


def test_a_page_of_a_file(tmp_path: Path) -> None:
    a = nixl.nixl_agent("files", nixl.nixl_agent_config(backends=["POSIX"]))
    data = np.full(16 * K, 7, np.uint8)
    a.register_memory([(data.ctypes.data, len(data), 0, "")], "DRAM")
    here = a.get_xfer_descs([(data.ctypes.data, len(data), 0)], "DRAM")
    rows = [(0, len(data), 1, f"rw,create:{tmp_path}/page"),
            (0, 0, 1, f"rw:{tmp_path}/page"), (0, len(data), 1, f"ro:{tmp_path}/page")]
    (tmp_path / "page").write_bytes(bytes(len(data)))
    listed = [a.register_memory([row], "FILE") for row in rows]
    h = a.initialize_xfer("WRITE", here, a.get_xfer_descs([(0, len(data), 1)], "FILE"), "files")
    for one in listed[:2]:
        finish(a, h)
        if one is listed[0]:
            a.deregister_memory(one)
    h.release()
    a.deregister_memory(listed[1])  # of the one that may be read alone no writer is kept
    h = a.initialize_xfer("READ", here, a.get_xfer_descs([(0, len(data), 1)], "FILE"), "files")
    finish(a, h)
    with pytest.raises(b.nixlNotAllowedError):
        finish(a, a.initialize_xfer("WRITE", here, a.get_xfer_descs([(0, len(data), 1)], "FILE"),
                                    "files"))
    h.release()
    a.deregister_memory(listed[2])
    assert not a._files
    a.close()
