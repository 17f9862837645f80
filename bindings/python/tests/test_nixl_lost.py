# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: an agent whose connections were lost, and which lives, is connected anew when
it is next used."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from contextlib import suppress
from typing import Any, Iterator

import numpy as np
import pytest
import sluice
from conftest import LIMIT, go_on, stop, until
from nixl_agents import N, Two, begin, finish
from sluice import nixl
from sluice._library import PENDING
from sluice.nixl import bindings as b
from sluice.peer import Peer


@pytest.fixture
def apart() -> Iterator[Two]:
    """Two agents that reach each other over sockets alone."""
    both = Two(backends=["TCP"])
    yield both
    both.close()


def cut(agent: nixl.nixl_agent, other: str = "beta") -> Peer:
    """Shuts every connection over TCP of this process, as a reset does, and waits until the loss is
    known. Returns the peer that is lost."""
    lost = agent._remotes[other].peer
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:
                s.getpeername()  # raises for a socket without a peer
                if s.family in (socket.AF_INET, socket.AF_INET6):
                    s.shutdown(socket.SHUT_RDWR)
    until(lambda: lost.lost)
    return lost


def filled(two: Two, value: int) -> bool:
    two.x[:] = value
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, N)), two.descs(two.y, (0, N)), "beta")
    finish(two.a, h)
    h.release()
    return bool((two.y == value).all())


def test_the_next_use_connects_anew(apart: Two) -> None:
    assert filled(apart, 1)
    cut(apart.a)
    assert filled(apart, 2)
    cut(apart.a)
    apart.a.send_notif("beta", b"still here")
    until(lambda: apart.b.get_new_notifs() == {"alpha": [b"still here"]})
    assert apart.a.check_remote_metadata("beta", apart.descs(apart.y, (0, N)))


def test_lists_that_were_prepared_serve_on(apart: Two) -> None:
    z = np.zeros(N, np.uint8)  # which beta tells of later, and alone
    listed = apart.b.register_memory([(z.ctypes.data, N, 0, "")], "DRAM")
    apart.a.add_remote_agent(apart.b.get_partial_agent_metadata(listed))
    near = apart.a.prep_xfer_dlist("", apart.descs(apart.x, *((i * 64, 64) for i in range(16))))
    far = [apart.a.prep_xfer_dlist("beta", apart.descs(of, *((i * 64, 64) for i in range(16))))
           for of in (apart.y, z)]
    apart.a.add_remote_agent(apart.b.get_agent_metadata())  # all of it once more
    apart.x[:] = np.arange(N) % 251
    for of, there in zip((apart.y, z), far):
        cut(apart.a)
        h = apart.a.make_prepped_xfer("WRITE", near, [3, 1], there, [2, 5], b"done")
        finish(apart.a, h)
        h.release()
        assert (of[128:192] == apart.x[192:256]).all() and (of[320:384] == apart.x[64:128]).all()


@pytest.mark.parametrize("message", [b"", b"made with it"])
def test_a_transfer_that_was_made_before_is_posted_again(apart: Two, message: bytes) -> None:
    h = apart.a.initialize_xfer("WRITE", apart.descs(apart.x, (0, N)),
                                apart.descs(apart.y, (0, N)), "beta", message)
    finish(apart.a, h)
    for value in (7, 8):
        cut(apart.a)
        apart.x[:] = value
        finish(apart.a, h)
        assert (apart.y == value).all()
    if message:
        until(lambda: len(apart.b.update_notifs().get("alpha", [])) == 3)
    assert apart.b.update_notifs() == ({"alpha": [message] * 3} if message else {})
    h.release()


def test_what_was_under_way_fails(start: Any) -> None:
    """With the class of a lost peer, also where it is asked for after the agent was met anew. The
    other agent stands still meanwhile, so that nothing ends before.
    """
    params = {"plaintext": "true", "listen": "127.0.0.1:0", "failure": "60s"}
    child, agent, address = begin(start, "TCP", params, N)
    source = np.zeros(N, np.uint8)
    agent.register_memory([(source.ctypes.data, N, 0, "")], "DRAM")
    here, there = (agent.get_xfer_descs([(at, N, 0)], "DRAM") for at in (source.ctypes.data,
                                                                         address))
    first, *hs = [agent.initialize_xfer("WRITE", here, there, "target") for _ in range(65)]
    stop(child)
    assert {agent.transfer(h) for h in hs} == {"PROC"}
    cut(agent, "target")
    go_on(child)
    finish(agent, first)
    while hs:
        with pytest.raises(b.nixlRemoteDisconnectError):
            until(lambda: agent.check_xfer_state(hs[-1]) != "PROC")
        hs.pop().release()
    agent.close()


def test_one_that_is_gone_holds_up_nobody(apart: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use waits a moment for the connection, and no later one while none can be made."""
    monkeypatch.setattr("sluice.nixl.meeting._MOMENT", 1.0)
    connect, tries, let = sluice.Engine.connect, [], threading.Event()

    def silent(self: sluice.Engine, *args: Any) -> Peer:
        tries.append(threading.get_ident())
        assert let.wait(LIMIT)
        return connect(self, *args)

    cut(apart.a)
    monkeypatch.setattr(sluice.Engine, "connect", silent)
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(b.nixlRemoteDisconnectError, match="connect"):
            apart.a.send_notif("beta", b"anyone?")
    assert time.monotonic() - began < 50 and len(tries) == 1
    let.set()
    until(lambda: apart.a.check_remote_metadata("beta"))
    assert filled(apart, 4)


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_transfer_waits_for_one_that_answers_late(apart: Two, monkeypatch: pytest.MonkeyPatch,
                                                    made: str) -> None:
    """As a process does that is kept off its processors. The program goes on meanwhile, and one
    that does not answer at all is lost.
    """
    monkeypatch.setattr("sluice.nixl.meeting._MOMENT", 0.0)
    connect, let = sluice.Engine.connect, threading.Event()

    def late(self: sluice.Engine, *args: Any) -> Peer:
        assert let.wait(LIMIT)
        return connect(self, *args)

    def make() -> nixl.nixl_xfer_handle:
        return apart.a.initialize_xfer("WRITE", apart.descs(apart.x, (0, N)),
                                       apart.descs(apart.y, (0, N)), "beta", b"here")

    h = make() if made == "before" else None
    cut(apart.a)
    with monkeypatch.context() as silent:
        silent.setattr(sluice.Engine, "connect", late)
        h = h or make()
        apart.x[:] = 5
        assert apart.a.transfer(h) == apart.a.check_xfer_state(h) == "PROC"
        with monkeypatch.context() as short:
            short.setattr("sluice.nixl.handles.SLOW", 0.0)
            other = make()
            assert apart.a.transfer(other) == "PROC"
            for _ in range(2):
                with pytest.raises(b.nixlRemoteDisconnectError, match="has not answered yet"):
                    apart.a.check_xfer_state(other)
            other.release()
        released = make()
        assert apart.a.transfer(released) == "PROC"
        released.release()
        with pytest.raises(b.nixlInvalidParamError, match="released"):
            apart.a.check_xfer_state(released)
        let.set()
        until(lambda: apart.a.check_xfer_state(h) == "DONE")
    assert (apart.y == 5).all()
    until(lambda: apart.b.get_new_notifs() == {"alpha": [b"here"]})
    h.release()


def test_a_range_that_ends_before_its_agent_is_lost(apart: Two,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that was under way goes by another range once the agent answers."""
    monkeypatch.setattr("sluice.nixl.meeting._MOMENT", 0.0)
    connect, let = sluice.Engine.connect, threading.Event()

    def late(self: sluice.Engine, *args: Any) -> Peer:
        assert let.wait(LIMIT)
        return connect(self, *args)

    def ended(_: sluice.Transfer) -> bool:
        raise sluice.RevokedError("the range has ended")

    h = apart.a.initialize_xfer("WRITE", apart.descs(apart.x, (0, N)),
                                apart.descs(apart.y, (0, N)), "beta")
    finish(apart.a, h)
    h._lasted = 0.0  # as if it were under way
    cut(apart.a)
    apart.x[:] = 9
    with monkeypatch.context() as silent:
        silent.setattr(sluice.Engine, "connect", late)
        with monkeypatch.context() as revoked:
            revoked.setattr("sluice.transfer.Transfer.test", ended)
            assert apart.a.check_xfer_state(h) == apart.a.check_xfer_state(h) == "PROC"
        let.set()
        until(lambda: apart.a.check_xfer_state(h) == "DONE")
    assert (apart.y == 9).all()
    h.release()


@pytest.mark.parametrize("message", [b"", b"with it"])
@pytest.mark.parametrize("posted", [True, False])
def test_a_transfer_of_before_two_losses(apart: Two, posted: bool, message: bytes) -> None:
    """Its peer is not lost alone, but closed."""
    h = apart.a.initialize_xfer("WRITE", apart.descs(apart.x, (0, N)),
                                apart.descs(apart.y, (0, N)), "beta")
    if posted:
        finish(apart.a, h)
    for value in (1, 2):
        cut(apart.a)
        assert filled(apart, value)
    apart.x[:] = 3
    state = apart.a.transfer(h, message)
    until(lambda: "DONE" in (state, apart.a.check_xfer_state(h)))
    assert (apart.y == 3).all()
    if message:
        until(lambda: apart.b.get_new_notifs() == {"alpha": [message]})
    h.release()


def test_a_wait_for_a_lost_peer_ends_with_the_first_error(
        apart: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was done before is not told as done again."""
    monkeypatch.setattr("sluice.nixl.meeting._MOMENT", 0.0)
    connect, let = sluice.Engine.connect, threading.Event()

    def late(self: sluice.Engine, *args: Any) -> Peer:
        assert let.wait(LIMIT)
        return connect(self, *args)

    def make() -> nixl.nixl_xfer_handle:
        return apart.a.initialize_xfer("WRITE", apart.descs(apart.x, (0, N)),
                                       apart.descs(apart.y, (0, N)), "beta", b"here")

    hs = [make(), make()]
    for h in hs:
        finish(apart.a, h)
    cut(apart.a)
    with monkeypatch.context() as silent:
        silent.setattr(sluice.Engine, "connect", late)
        hs.append(make())
        assert apart.a.estimate_xfer_cost(hs[2])[2] in ("UNKNOWN", "ANALYTICAL_BACKEND")
        assert {apart.a.transfer(h) for h in hs} == {"PROC"}
        apart.a.remove_remote_agent("beta")
        for h in hs[0], hs[2]:
            with pytest.raises(b.nixlNotFoundError):
                apart.a.check_xfer_state(h)
        with pytest.raises(b.nixlNotFoundError):
            apart.a.transfer(hs[1])
        let.set()
    apart.a.add_remote_agent(apart.b.get_agent_metadata())
    apart.x[:] = 6
    for h in hs:
        with pytest.raises(b.nixlNotPostedError):
            apart.a.check_xfer_state(h)
    assert filled(apart, 7)
    assert apart.b.get_new_notifs() == {"alpha": [b"here"] * 2}
    for h in hs:
        h.release()


def test_one_that_ended_stays_lost(apart: Two) -> None:
    lost = apart.a._remotes["beta"].peer
    apart.b.close()
    until(lambda: lost.lost)
    for _ in range(3):
        with pytest.raises(b.nixlRemoteDisconnectError):
            apart.a.send_notif("beta", b"anyone?")
        until(lambda: apart.a._remotes["beta"].renewal is None)
    apart.a.remove_remote_agent("beta")
    with pytest.raises(b.nixlNotFoundError):
        apart.a.send_notif("beta", b"anyone?")


def full(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_does_not_start_is_tried_again(apart: Two,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    cut(apart.a)
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError):
            apart.a.make_connection("beta")
    assert filled(apart, 3)


def test_a_call_without_a_thread_is_tried_again(apart: Two,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError):
            apart.a.fetch_remote_metadata("beta", "127.0.0.1", 1)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as s:
        apart.a._caller.call("127.0.0.1", s.getsockname()[1], lambda _: done.set())
        assert done.wait(LIMIT)


def test_a_notification_without_a_thread_is_an_error(apart: Two,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """And none after it waits for a thread that is not there."""
    outbox = apart.a._remotes["beta"].outbox
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", full)
        m.setattr(sluice.Transfer, "_send", lambda *_: PENDING)
        with pytest.raises(RuntimeError):
            apart.a.send_notif("beta", b"late")
    assert not outbox._sending and not outbox._waiting
