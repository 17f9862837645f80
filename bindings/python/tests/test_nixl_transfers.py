# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: what moves, between agents and between processes, and what is refused."""

from __future__ import annotations

import hashlib
import json
import random
import time
from typing import Any, Callable

import numpy as np
import pytest
from conftest import LIMIT, go_on, stop, until
from nixl_agents import N, Two, ask, begin, finish
from sluice import nixl
from sluice.nixl import bindings as b
from sluice.nixl import places
from sluice.transfer import Transfer


def test_lists_of_every_shape(two: Two) -> None:
    """Random descriptors over many ranges, some overlapping, beside the same moves in numpy."""
    rng = random.Random(7)
    for cut in (0, 1000, 5000, 300000):  # ranges within the first, and beside each other
        two.a.register_memory([(two.x.ctypes.data + cut, 4096, 0, "")], "DRAM")
        two.b.register_memory([(two.y.ctypes.data + cut, 4096, 0, "")], "DRAM")
    two.a.add_remote_agent(two.b.get_agent_metadata())
    two.x[:] = np.random.default_rng(1).integers(0, 256, N, np.uint8)
    for count in (1, 2, 7, 8, 9, 300):
        for same_length in (True, False):
            want = two.y.copy()
            here, there = [], []
            for i in range(count):
                n = 656 if same_length else rng.randint(1, 900)
                at, to = rng.randrange(N - n), i * 1000 + rng.randrange(100)
                here.append((at, n))
                there.append((to, n))
                want[to : to + n] = two.x[at : at + n]
            h = two.a.initialize_xfer("WRITE", two.descs(two.x, *here), two.descs(two.y, *there),
                                      "beta")
            finish(two.a, h)
            assert (two.y == want).all()
            h.release()


def test_blocks_become_one_pattern(two: Two) -> None:
    rows = np.array([[two.x.ctypes.data + 1024 * i, 656, 0] for i in range(1000)], np.uint64)
    side = two.a.prep_xfer_dlist("", rows, "DRAM")
    assert isinstance(side.at, places.Located) and side.at.pattern is not None
    p = side.at.pick([999, 0, 3]).pattern
    assert p is not None and (p.base, p.stride, p.length, p.index.tolist()) == (0, 1024, 656,
        [999, 0, 3])
    rows[5, 1] = 655
    side = two.a.prep_xfer_dlist("", rows, "DRAM")
    assert isinstance(side.at, places.Located) and side.at.pattern is None


def test_neighbours_are_listed_as_runs(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []  # how many copies, of each transfer that has no pattern
    add = Transfer._add_copies

    def count(t: Transfer, regions: Any, remotes: Any, copies: Any) -> None:
        listed.append(len(copies))
        add(t, regions, remotes, copies)

    monkeypatch.setattr(Transfer, "_add_copies", count)
    n = 1000
    two.x[:] = np.random.default_rng(5).integers(0, 256, N, np.uint8)
    table = [[two.x.ctypes.data, n, 0, n, N // n]]
    rows = [(two.x.ctypes.data + n * i, n, 0) for i in range(N // n)]
    for strided in (True, False):
        sides = []
        for name, of in (("", two.x), ("beta", two.y)):
            at = np.array(table if strided else rows, np.uint64)
            at[:, 0] += np.uint64(of.ctypes.data - two.x.ctypes.data)
            sides.append(two.a.prep_xfer_dlist(name, at, "DRAM"))
        up = np.arange(300)
        for here, there, want in (
            (up, up + 7, [1]),
            (np.r_[up, 900:1000, 17:317], np.r_[up, 300:400, 500:800], [3]),
            (np.r_[100:108, 90], np.r_[200:208, 190], [2]),
            (up[::-1], up[::-1], []),  # each before its neighbour
            (up, up * 2, []),
        ):
            listed.clear()
            two.y[:] = 0
            expect = two.y.copy()
            for i, j in zip(here.tolist(), there.tolist()):
                expect[n * j : n * (j + 1)] = two.x[n * i : n * (i + 1)]
            h = two.a.make_prepped_xfer("WRITE", sides[0], here, sides[1], there)
            finish(two.a, h)
            assert listed == want
            assert (two.y == expect).all()
            h.release()


def test_blocks_at_odd_places(two: Two) -> None:
    two.x[:] = np.random.default_rng(4).integers(0, 256, N, np.uint8)
    here, there = [(1000 * i + i % 7, 656) for i in range(20)], [(2000 * i + i % 3, 656)
        for i in range(20)]
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, *here), two.descs(two.y, *there), "beta")
    finish(two.a, h)
    for (at, n), (to, _) in zip(here, there):
        assert (two.y[to : to + n] == two.x[at : at + n]).all()
    h.release()


def test_strided_rows_stay_runs(two: Two) -> None:
    x, y = two.x.ctypes.data, two.y.ctypes.data
    two.x[:] = np.random.default_rng(3).integers(0, 256, N, np.uint8)
    here = np.array([[x, 64, 0, 64, 4096], [x + 500_000, 64, 0, 100, 1000], [x, 64, 0, 0, 0],
                     [x + 7, 64, 0, 0, 2]], np.uint64)
    there = np.array([[y, 64, 0, 128, 5098]], np.uint64)
    local, remote = two.a.prep_xfer_dlist("", here, "DRAM"), two.a.prep_xfer_dlist("beta", there,
        "DRAM")
    assert isinstance(local.at, places.Runs) and local.at.count == 5098 and len(
        local.at.strides) == 3
    chosen = np.array([0, 1, 4095, 4096, 4097, 5095, 5096, 5097, 17])
    places_of = [0, 64, 4095 * 64, 500_000, 500_100, 500_000 + 999 * 100, 7, 7, 17 * 64]
    h = two.a.make_prepped_xfer("WRITE", local, chosen, remote, chosen)
    finish(two.a, h)
    for index, at in zip(chosen.tolist(), places_of):
        assert (two.y[128 * index : 128 * index + 64] == two.x[at : at + 64]).all()
    h.release()
    with pytest.raises(b.nixlInvalidParamError):
        two.a.make_prepped_xfer("WRITE", local, [5098], remote, [0])
    for row in ([x, 64, 0, 64, N // 64 + 1], [x, 64, 0, 1 << 62, 8], [x, 64, 0, 1 << 63, 3],
                [x + N, 1, 0, 0, 1]):
        with pytest.raises(b.nixlNotFoundError):
            two.a.prep_xfer_dlist("", np.array([row], np.uint64), "DRAM")
    for count in (0, 1 << 40):
        with pytest.raises(b.nixlInvalidParamError):
            two.a.prep_xfer_dlist("", np.array([[x, 64, 0, 0, count]], np.uint64), "DRAM")


def test_strided_rows_over_several_ranges() -> None:
    table: places.Places[str] = places.Places()
    table.put(places.Range(b.DRAM_SEG, 1000, 100, 0, "1", "low"))
    table.put(places.Range(b.DRAM_SEG, 1100, 100, 0, "2", "high"))
    with pytest.raises(b.nixlNotFoundError):
        table.locate_runs(b.DRAM_SEG, np.array([[1000, 10, 0, 10, 20]], np.uint64))
    runs = table.locate_runs(b.DRAM_SEG, np.array([[1000, 10, 0, 10, 10], [1100, 10, 0, 10, 10]],
                                                  np.uint64))
    found = runs.pick(np.array([9, 10, 19]))
    assert found.which is not None
    assert [(found.ranges[w].what, o) for w, o in zip(found.which.tolist(),
                                                      found.offsets.tolist())] == [("low", 90),
                                                          ("high", 0), ("high", 90)]


def test_thousands_of_live_handles(two: Two) -> None:
    here, there = two.a.prep_xfer_dlist("", two.descs(two.x, (0, 64))), two.a.prep_xfer_dlist(
        "beta", two.descs(two.y, (0, 64)))
    kept = [two.a.make_prepped_xfer("WRITE", here, [0], there, [0]) for _ in range(5000)]
    finish(two.a, kept[-1])
    for h in kept:
        h.release()


def test_past_the_region_is_refused_whatever_it_is_past_by(two: Two) -> None:
    start = two.y.ctypes.data
    for address, n in [(start + N - 8, 9), (start - 1, 8), (start, N + 1), (start + N, 1),
                       (start, 2**64 - 1), (2**64 - 8, 16), (0, 8)]:
        bad = two.a.get_xfer_descs([(address, n, 0)], "DRAM")
        assert not two.a.check_remote_metadata("beta", bad)
        with pytest.raises(b.nixlNotFoundError):
            two.a.prep_xfer_dlist("beta", bad)
    assert not two.y.any()


@pytest.mark.parametrize("step", [0, 64])
def test_what_has_no_bytes_is_refused(two: Two, step: int) -> None:
    here, there = (two.descs(of, *((i * step, 0) for i in range(places.PATTERN_LEAST)))
                   for of in (two.x, two.y))
    with pytest.raises(b.nixlInvalidParamError, match="0 bytes"):
        two.a.initialize_xfer("WRITE", here, there, "beta")


def test_release_ends_the_writes(start: Any) -> None:
    """Of a target that is stopped in the middle of a transfer, and goes on after the release."""
    length = 64 << 20
    child, agent, address = begin(start, "TCP", {"plaintext": "true", "listen": "127.0.0.1:0"},
                                  length)
    source = np.full(length, 1, np.uint8)
    agent.register_memory([(source.ctypes.data, length, 0, "")], "DRAM")
    descs = [agent.get_xfer_descs([(at, length, 0)], "DRAM") for at in (source.ctypes.data,
        address)]
    h = agent.initialize_xfer("WRITE", descs[0], descs[1], "target")
    finish(agent, h)
    stop(child)
    source[:] = 2
    assert agent.transfer(h) == "PROC"
    with pytest.raises(b.nixlRepostActiveError):
        agent.transfer(h)
    with pytest.raises(b.nixlRepostActiveError):
        agent.transfer(h, b"with a message")
    time.sleep(0.3)  # so that bytes are on their way, mostly
    agent.release_xfer_handle(h)
    lost = not agent.check_remote_metadata("target")
    go_on(child)
    if lost:  # the release had to end the connection: the target reads all that came, and its end
        assert ask(child, "alone") == "alone"
    else:  # the target has read all that came before this write
        source[0] = 1
        one = [agent.get_xfer_descs([(at, 1, 0)], "DRAM") for at in (source.ctypes.data, address)]
        finish(agent, agent.initialize_xfer("WRITE", one[0], one[1], "target"))
    assert ask(child, "digest") == hashlib.sha256(bytes([1]) * length).hexdigest()
    agent.close()


@pytest.mark.timed
def test_a_frozen_peer_is_told_of(start: Any, monkeypatch: pytest.MonkeyPatch,
                                  caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SLUICE_TRANSFER_TIMEOUT", "12")
    length = 64 << 20
    child, agent, address = begin(start, "TCP", {"plaintext": "true", "listen": "127.0.0.1:0"},
                                  length)
    source = np.zeros(length, np.uint8)
    agent.register_memory([(source.ctypes.data, length, 0, "")], "DRAM")
    descs = [agent.get_xfer_descs([(at, length, 0)], "DRAM") for at in (source.ctypes.data,
        address)]
    h = agent.initialize_xfer("WRITE", descs[0], descs[1], "target")
    stop(child)
    with pytest.raises(b.nixlBackendError):  # its host answers: it is late, and not gone
        finish(agent, h)
    assert caplog.text.count("is under way for 10 s") == 1
    h.release()
    agent.close()


@pytest.mark.parametrize("backend", ["UCX", "TCP"])
def test_between_processes(start: Any, backend: str) -> None:
    params = {"plaintext": "true", "listen": "127.0.0.1:0"} if backend == "TCP" else {}
    child, agent, address = begin(start, backend, params, N)
    source = np.random.default_rng(2).integers(0, 256, N, np.uint8)
    agent.register_memory([(source.ctypes.data, N, 0, "")], "DRAM")
    h = agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs([(source.ctypes.data, N, 0)], "DRAM"),
        agent.get_xfer_descs([(address, N, 0)], "DRAM"),
        b"target",
        b"all of it",
    )
    finish(agent, h)
    assert json.loads(ask(child, "notifs")) == {"initiator": ["all of it"]}
    assert ask(child, "digest") == hashlib.sha256(source.tobytes()).hexdigest()
    child.stdin.write("meet " + agent.get_agent_metadata().hex() + "\n")
    child.stdin.flush()
    until(lambda: agent.check_remote_xfer_done("target", b"met"))
    child.kill()
    child.wait()
    with pytest.raises(b.nixlRemoteDisconnectError):
        while True:
            finish(agent, h)
    with pytest.raises(b.nixlRemoteDisconnectError):
        agent.check_xfer_state(h)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            agent.send_notif("target", b"anybody there?")
        except b.nixlRemoteDisconnectError:
            break
    else:
        pytest.fail("a message to a process that was killed is sent")
    agent.release_xfer_handle(h)
    agent.remove_remote_agent("target")
    agent.close()


def test_cost_after_a_transfer(two: Two) -> None:
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, N)), two.descs(two.y, (0, N)), "beta")
    for _ in range(20):
        finish(two.a, h)
    duration, margin, how = two.a.estimate_xfer_cost(h)
    assert (how == "ANALYTICAL_BACKEND" and duration > 0 and margin >= 0) or (duration, margin,
        how) == (0, 0, "UNKNOWN")
    h.release()
    with pytest.raises(b.nixlInvalidParamError):
        two.a.estimate_xfer_cost(h)


@pytest.mark.parametrize("wrong", [5, 1.5, None, True, [1, 2], (1,), memoryview(b"x"),
                                   np.zeros(2, np.uint8), "\udc80"])
def test_types_of_arguments_as_the_wheel_checks_them(two: Two, wrong: Any) -> None:
    """What nixl 1.5.1 answers; nothing is sent."""
    descs, at = two.descs(two.x, (0, 64)), two.x.ctypes.data
    a: Any = two.a
    bad: list[Callable[[], Any]] = [
           lambda: a.send_notif(wrong, b"x"),
           lambda: a.initialize_xfer("WRITE", descs, descs, wrong),
           lambda: a.initialize_xfer("WRITE", wrong, descs, "beta"),
           lambda: a.remove_remote_agent(wrong), lambda: a.check_remote_metadata(wrong),
           lambda: a.add_remote_agent(wrong), lambda: a.prep_xfer_dlist(wrong, descs),
           lambda: a.deserialize_descs(wrong), lambda: b.nixlXferDList(wrong, [(1, 1, 1)]),
           lambda: nixl.nixl_agent(wrong, nixl.nixl_agent_config(backends=[])),
           lambda: a.send_notif("beta", wrong)]
    if wrong is not None:
        bad.append(lambda: a.create_backend("POSIX", wrong))
    for call in bad:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(RuntimeError):
        a.get_reg_descs([(at, 64, 0, wrong)], "DRAM")
    if not isinstance(wrong, int):
        with pytest.raises(RuntimeError):
            a.get_xfer_descs([(wrong, 64, 0)], "DRAM")
    a.send_notif("beta", b"end")
    until(two.b.update_notifs)
    assert two.b.notifs == {"alpha": [b"end"]}


def test_names_as_long_as_the_wheel_takes_them() -> None:
    names = ["é" * 300, "n" * 65535]
    one, other = (nixl.nixl_agent(name) for name in names)
    x = np.zeros(64, np.uint8)
    for agent in (one, other):
        agent.register_memory([(x.ctypes.data, 64, 0, "")], "DRAM")
    assert one.add_remote_agent(other.get_agent_metadata()) == names[1].encode()
    one.send_notif(names[1], b"here")
    until(other.update_notifs)
    assert other.notifs == {names[0]: [b"here"]}
    for agent in (one, other):
        agent.close()
    with pytest.raises(b.nixlInvalidParamError):
        nixl.nixl_agent("n" * 65536)
