# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: what moves, between agents and between processes, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT
from nixl_agents import N, Two, ask, begin, finish
from sluice.nixl import bindings as b


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
            h = two.a.initialize_xfer("WRITE", two.descs(two.x, *here), two.descs(two.y, *there), "beta")
            finish(two.a, h)
            assert (two.y == want).all()
            h.release()


def test_blocks_become_one_pattern(two: Two) -> None:
    rows = np.array([[two.x.ctypes.data + 1024 * i, 656, 0] for i in range(1000)], np.uint64)
    side = two.a.prep_xfer_dlist("", rows, "DRAM")
    assert side.at is not None and side.at.pattern is not None
    p = side.at.pick([999, 0, 3]).pattern
    assert p is not None and (p.base, p.stride, p.length, p.index.tolist()) == (0, 1024, 656, [999, 0, 3])
    rows[5, 1] = 655
    side = two.a.prep_xfer_dlist("", rows, "DRAM")
    assert side.at is not None and side.at.pattern is None


def test_past_the_region_is_refused_whatever_it_is_past_by(two: Two) -> None:
    start = two.y.ctypes.data
    for address, n in [(start + N - 8, 9), (start - 1, 8), (start, N + 1), (start + N, 1), (start, 2**64 - 1), (2**64 - 8, 16), (0, 8)]:
        bad = two.a.get_xfer_descs([(address, n, 0)], "DRAM")
        assert not two.a.check_remote_metadata("beta", bad)
        with pytest.raises(b.nixlNotFoundError):
            two.a.prep_xfer_dlist("beta", bad)
    assert not two.y.any()


def test_release_ends_the_writes(start: Any) -> None:
    """Of a target that is stopped in the middle of a transfer, and goes on after the release."""
    length = 64 << 20
    child, agent, address = begin(start, "TCP", {"plaintext": "true", "listen": "127.0.0.1:0"}, length)
    source = np.full(length, 1, np.uint8)
    agent.register_memory([(source.ctypes.data, length, 0, "")], "DRAM")
    descs = [agent.get_xfer_descs([(at, length, 0)], "DRAM") for at in (source.ctypes.data, address)]
    h = agent.initialize_xfer("WRITE", descs[0], descs[1], "target")
    finish(agent, h)
    os.kill(child.pid, signal.SIGSTOP)
    source[:] = 2
    assert agent.transfer(h) == "PROC"
    with pytest.raises(b.nixlRepostActiveError):
        agent.transfer(h)
    with pytest.raises(b.nixlRepostActiveError):
        agent.transfer(h, b"with a message")
    agent.release_xfer_handle(h)
    os.kill(child.pid, signal.SIGCONT)
    first = ask(child, "digest")
    time.sleep(0.5)  # what could land late has had its time
    assert ask(child, "digest") == first
    agent.close()


def test_a_frozen_peer_is_told_of(start: Any) -> None:
    length = 64 << 20
    child, agent, address = begin(start, "TCP", {"plaintext": "true", "listen": "127.0.0.1:0", "failure": "1s"}, length)
    source = np.zeros(length, np.uint8)
    agent.register_memory([(source.ctypes.data, length, 0, "")], "DRAM")
    descs = [agent.get_xfer_descs([(at, length, 0)], "DRAM") for at in (source.ctypes.data, address)]
    h = agent.initialize_xfer("WRITE", descs[0], descs[1], "target")
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(b.nixlRemoteDisconnectError):
        finish(agent, h)
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
    end = time.monotonic() + LIMIT
    while not agent.check_remote_xfer_done("target", b"met"):
        assert time.monotonic() < end
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
    assert (how == "ANALYTICAL_BACKEND" and duration > 0 and margin >= 0) or (duration, margin, how) == (0, 0, "UNKNOWN")
    h.release()
    with pytest.raises(b.nixlInvalidParamError):
        two.a.estimate_xfer_cost(h)
