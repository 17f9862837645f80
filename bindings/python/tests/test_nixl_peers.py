# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: peers that do not answer."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional

import numpy as np
import pytest
import sluice
from conftest import LIMIT, go_on, stop, until
from nixl_agents import N, Two, ask, begin, finish
from sluice import nixl
from sluice._library import PENDING
from sluice.nixl import bindings as b
from sluice.nixl import backends, listening, outbox, plugins
from sluice.peer import Peer


def test_meeting_one_holds_up_no_other(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = nixl.nixl_agent("frozen")
    z = np.zeros(N, np.uint8)
    frozen.register_memory([(z.ctypes.data, N, 0, "")], "DRAM")
    metadata = frozen.get_agent_metadata()
    connect, begun, let = sluice.Engine.connect, threading.Event(), threading.Event()

    def slow(self: sluice.Engine, *args: Any) -> Peer:
        begun.set()
        assert let.wait(LIMIT)
        return connect(self, *args)

    monkeypatch.setattr(sluice.Engine, "connect", slow)
    meets = threading.Thread(target=two.a.add_remote_agent, args=(metadata,))
    meets.start()
    assert begun.wait(LIMIT)
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, 64)), two.descs(two.y, (0, 64)), "beta")
    finish(two.a, h)
    h.release()
    assert not two.a.check_remote_metadata("frozen")
    let.set()
    meets.join(LIMIT)
    assert two.a.check_remote_metadata("frozen")
    frozen.close()


@contextmanager
def no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Peers take no notification until the event is set, as it is at the end."""
    wait, room = sluice.Transfer.wait, threading.Event()

    def held(self: sluice.Transfer, timeout: Optional[float] = None) -> None:
        if not room.wait(0 if timeout else None):
            raise sluice.WaitTimeout("no room")
        wait(self, timeout)

    def send(self: sluice.Transfer, message: bytes, _: int) -> int:
        self.message(message)
        self.post()
        return PENDING

    monkeypatch.setattr(sluice.Transfer, "wait", held)
    monkeypatch.setattr(sluice.Transfer, "_send", send)
    yield room
    room.set()


def collect(agent: nixl.nixl_agent, n: int) -> list[bytes]:
    got: list[bytes] = []
    end = time.monotonic() + LIMIT
    while len(got) < n and time.monotonic() < end:
        got += agent.get_new_notifs().get("alpha", [])
    return got


def test_notifications_wait_for_nobody(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    with no_room(monkeypatch):
        for i in range(200):
            two.a.send_notif("beta", b"%d" % i)
    assert collect(two.b, 200) == [b"%d" % i for i in range(200)]


def test_one_call_takes_all_that_has_come() -> None:
    agent = nixl.nixl_agent("alpha")
    for i in range(40):
        agent.send_notif("alpha", b"%d" % i)
    assert agent.get_new_notifs() == {"alpha": [b"%d" % i for i in range(40)]}
    assert agent.get_new_notifs() == {}
    agent.close()


def test_notifications_that_wait_are_bounded_by_bytes(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_room(monkeypatch):
        monkeypatch.setattr(outbox, "_BYTES", 1022)
        for _ in range(2):
            two.a.send_notif("beta", bytes(500))
        with pytest.raises(b.nixlBackendError, match="2 notifications of 1022 bytes"):
            two.a.send_notif("beta", b"x")


def test_a_notification_that_is_too_long_loses_no_other(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_room(monkeypatch):
        two.a.send_notif("beta", b"before")
        with pytest.raises(b.nixlInvalidParamError):
            two.a.send_notif("beta", bytes(40 << 20))
        two.a.send_notif("beta", b"behind")
    assert collect(two.b, 2) == [b"before", b"behind"]


def test_a_peer_that_stands_still_is_not_given_up(start: Any) -> None:
    """By a notification: it would be, if that were taken back after a while."""
    params = {"plaintext": "true", "listen": "127.0.0.1:0", "failure": "60s"}
    child, agent, _ = begin(start, "TCP", params, 4096)
    agent.send_notif("target", b"first")
    assert json.loads(ask(child, "notifs")) == {"initiator": ["first"]}
    stop(child)
    for i in range(200):
        agent.send_notif("target", b"%d" % i)
    time.sleep(2.5)  # longer than the engine waits for the proof of an end
    go_on(child)
    assert agent.check_remote_metadata("target")
    got: list[str] = []
    while len(got) < 200:
        got += json.loads(ask(child, "notifs"))["initiator"]
    assert got == [str(i) for i in range(200)]
    agent.close()


def test_old_metadata_forgets_no_live_agent(two: Two) -> None:
    """Of an agent that had the name before."""
    before = nixl.nixl_agent("beta")
    old = before.get_agent_metadata()
    before.close()
    with pytest.raises(b.nixlNotFoundError):
        two.a.add_remote_agent(old)
    assert two.a.check_remote_metadata("beta")


def test_lost_agent_is_not_known(two: Two) -> None:
    assert two.a.check_remote_metadata("beta")
    peer = two.a._remotes["beta"].peer
    two.b.close()
    until(lambda: peer.lost)
    assert not two.a.check_remote_metadata("beta")
    assert not two.a.check_remote_metadata("beta", two.descs(two.y, (0, 64)))


def test_backend_that_was_named_serves(two: Two) -> None:
    two.a.close()
    both = nixl.nixl_agent("both", nixl.nixl_agent_config(backends=["UCX", "POSIX"]))
    both.register_memory([(two.x.ctypes.data, N, 0, "")], "DRAM")
    here, there = two.descs(two.x, (0, 64)), two.descs(two.x, (4096, 64))
    with pytest.raises(Exception):  # posix moves between memory and files alone
        finish(both, both.initialize_xfer("WRITE", here, there, "both", backends=["POSIX"]))
    finish(both, both.initialize_xfer("WRITE", here, there, "both", backends=["UCX"]))
    both.close()


def test_backend_that_a_list_was_prepared_for_serves() -> None:
    agent = nixl.nixl_agent("both", nixl.nixl_agent_config(backends=["SHM"]))
    agent.create_backend("TCP", {"plaintext": "true", "listen": "127.0.0.1:0"})
    x = np.zeros(4096, np.uint8)
    agent.register_memory([(x.ctypes.data, 4096, 0, "")], "DRAM")

    def sides(local: list[str], remote: list[str]) -> list[Any]:
        return [agent.prep_xfer_dlist(name, [(x.ctypes.data + at, 64, 0)], "DRAM", names)
                for name, at, names in (("", 0, local), ("both", 64, remote))]

    def moved() -> dict[str, int]:
        assert agent._engine is not None
        return {r["backend"]: r["bytes"] for r in agent._engine.stats()["routes"]}

    for local, remote, named, by in ((["TCP"], ["TCP"], [], "tcp"), ([], ["TCP"], [], "tcp"),
                                     (["TCP", "SHM"], ["SHM"], [], "shm"),
                                     (["TCP"], ["TCP"], ["SHM"], "shm")):
        here, there = sides(local, remote)
        before = moved().get(by, 0)
        h = agent.make_prepped_xfer("WRITE", here, [0], there, [0], backends=named)
        finish(agent, h)
        assert moved()[by] == before + 64
        h.release()
    here, there = sides(["SHM"], ["TCP"])
    with pytest.raises(b.nixlInvalidParamError, match="for SHM, and the remote one for TCP"):
        agent.make_prepped_xfer("WRITE", here, [0], there, [0])
    agent.close()


def test_child_that_ends_leaves_the_port() -> None:
    agent = nixl.nixl_agent("parent", nixl.nixl_agent_config(enable_listen_thread=True,
        listen_port=0))
    assert agent._listener is not None
    port = agent._listener.port
    pid = os.fork()
    if pid == 0:
        try:
            agent.close()
        except BaseException:
            pass
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as s:
        listening.send(s, listening.GET, b"x")
        s.settimeout(LIMIT)
        try:
            assert s.recv(4)
        except ConnectionError:
            raise AssertionError("the port was shut") from None
    agent.close()


def test_parameters_that_mean_nothing(caplog: pytest.LogCaptureFixture,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "trials", lambda name, params: [])  # there may be no UCX
    agent = nixl.nixl_agent("parameters", nixl.nixl_agent_config(backends=[]))
    agent.create_backend("POSIX", {"use_uring": "true", "ios_pool_size": "64", "depth": "32",
                                   "active": "true"})
    agent.create_backend("UCX", {"engine_config": "x", "ucx_devices": "lo", "num_workers": "4"})
    agent.create_backend("GDS", {"batch_limit": "9"})
    assert agent.get_backend_params("POSIX") == {"use_uring": "true", "depth": "32"}
    assert agent.get_backend_params("UCX") == {"ucx_devices": "lo"}
    for word in ("ios_pool_size", "active", "engine_config", "num_workers", "batch_limit"):
        assert f"parameter {word}=" in caplog.text
    assert "use_uring" not in caplog.text
    x = np.zeros(4096, np.uint8)
    agent.register_memory([(x.ctypes.data, 4096, 0, "")], "DRAM")
    agent.close()


def test_parameters_that_are_wrong() -> None:
    agent = nixl.nixl_agent("wrong", nixl.nixl_agent_config(backends=[]))
    with pytest.raises(b.nixlInvalidParamError, match="depth"):
        agent.create_backend("POSIX", {"depth": "many"})
    with pytest.raises(b.nixlInvalidParamError, match="authority"):
        agent.create_backend("TCP", {"certificate": "c.pem"})
    with pytest.raises(b.nixlInvalidParamError):
        agent.create_backend("TCP", {"plaintext": "true", "listen": "nonsense"})
    agent.create_backend("POSIX", {"depth": "64"})  # what was refused is not there
    agent.create_backend("TCP", {"plaintext": "true", "listen": "127.0.0.1:0"})
    x = np.zeros(4096, np.uint8)
    agent.register_memory([(x.ctypes.data, 4096, 0, "")], "DRAM")
    agent.close()


@pytest.mark.parametrize("name", sorted(plugins.OPTIONS))
def test_options_are_those_of_the_library(name: str) -> None:
    with pytest.raises(sluice.ArgumentError) as e:
        sluice.Engine("x", [sluice.Backend(name, nothing=1)])
    assert str(e.value).partition("there are ")[2].split(", ") == plugins.OPTIONS[name].split()


def test_devices_are_those_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_is_rdma", lambda device: device.startswith("mlx5_"))

    def opened(params: dict[str, str]) -> dict[str, list[str]]:
        return {x.name: x.options for x in plugins.backends({"UCX": params}, [])}

    assert opened({}) == {"shm": [], "rdma": [], "tcp": []}
    both = ["devices=mlx5_3:1,mlx5_4"]
    assert opened({"device_list": "mlx5_3:1, mlx5_4"}) == {"shm": [], "rdma": both, "ucx": both}
    assert opened({"ucx_devices": "mlx5_3,eth0"}) == {"shm": [], "rdma": ["devices=mlx5_3"],
                                                      "ucx": ["devices=mlx5_3,eth0"]}
    assert opened({"ucx_devices": "eth0"}) == {"shm": [], "ucx": ["devices=eth0"]}


@pytest.mark.parametrize("word", ["device_list", "ucx_devices"])
def test_devices_that_are_not_there(word: str) -> None:
    agent = nixl.nixl_agent("devices", nixl.nixl_agent_config(backends=[]))
    with pytest.raises(b.nixlNotSupportedError, match="ucx"):
        agent.create_backend("UCX", {word: "nothing0"})
    agent.create_backend("UCX")  # the refusal above has created none
    agent.close()


def test_a_device_that_is_not_there_beside_one_that_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opens:
        def __init__(self, name: str, of: list[sluice.Backend]) -> None:
            if "devices=nothing0" in of[0].options:
                raise sluice.UnavailableError("No such device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(backends, "Engine", Opens)
    agent = nixl.nixl_agent("devices", nixl.nixl_agent_config(backends=[]))
    agent.create_backend("UCX", {"device_list": "lo,nothing0"})
    assert "nothing0" in caplog.text and "devices=lo" not in caplog.text
    agent.close()


@pytest.mark.parametrize(
    "params, path",
    [({}, []), ({"use_uring": "true"}, []), ({"use_aio": "true"}, ["path=threads"]),
     ({"use_posix_aio": "1"}, ["path=threads"])],
)
def test_words_of_posix(params: dict[str, str], path: list[str]) -> None:
    assert plugins.backends({"POSIX": params}, [])[0].options == path
