# SPDX-License-Identifier: Apache-2.0
"""The face of Mooncake: between two processes, and beside the wheel in one scenario."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Iterator

import pytest
from conftest import HERE, LIMIT, ROOT
from sluice import _callers
from sluice.errors import PeerLostError
from sluice.mooncake import (TransferEngine, TransferNotify, TransferOpcode, handshake, memory,
                             notices)
from sluice.mooncake.ranges import Ranges
from sluice.transfer import Transfer

SCENARIO = str(HERE / "mooncake_scenario.py")


def scenario(*command: str) -> list[tuple[str, Any]]:
    result = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT)
    seen = [tuple(json.loads(line)) for line in result.stdout.splitlines() if line.startswith("[")]
    assert seen and seen[-1] == ("end", True), result.stdout + result.stderr
    return seen  # type: ignore[return-value]


def theirs() -> str:
    """An interpreter with the wheel, which hack/stacks makes where it can."""
    for python in (os.environ.get("MOONCAKE_PYTHON", ""),
                   str(ROOT / "build" / "stacks" / "bin" / "python")):
        if python and os.path.exists(python) and subprocess.run([python, "-c",
            "import mooncake.engine"], capture_output=True).returncode == 0:
            return python
    pytest.skip("unavailable: no Python with mooncake: hack/stacks makes one, or name one by "
                "MOONCAKE_PYTHON")


def test_callers_without_a_thread_keep_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_callers, "MOST", 1)
    server = handshake.Server(lambda: handshake.Offer(b"", []))
    with closing(server), monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", full)
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as s:
            assert s.recv(1) == b""  # hung up
        m.undo()
        handshake.probe(f"127.0.0.1:{server.port}")


def test_an_answer_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_WHOLE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        def drip() -> None:
            caller, end = server.accept()[0], time.monotonic() + LIMIT
            with caller, suppress(OSError):
                while not ended.wait(0.1) and time.monotonic() < end:
                    caller.sendall(b" ")

        ended = threading.Event()
        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TimeoutError):
            handshake.fetch(f"127.0.0.1:{server.getsockname()[1]}")
        ended.set()
        dripping.join()


def test_silent_callers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that finds no place is hung up on, while the others have theirs."""
    heard, go_on, word = threading.Semaphore(0), threading.Event(), handshake._word

    def silent(s: socket.socket) -> bytes:
        heard.release()
        assert go_on.wait(LIMIT)
        return b""

    monkeypatch.setattr(handshake, "_word", silent)
    server = handshake.Server(lambda: handshake.Offer(b"", []))
    callers = []
    for _ in range(_callers.MOST):
        callers.append(socket.create_connection(("127.0.0.1", server.port)))
        assert heard.acquire(timeout=LIMIT)
    monkeypatch.setattr(_callers, "LIMIT", 0.5)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as c, suppress(ConnectionError):
            c.settimeout(LIMIT / 2)
            assert c.recv(1) == b""
    assert not heard.acquire(blocking=False)
    monkeypatch.setattr(_callers, "LIMIT", LIMIT)
    monkeypatch.setattr(handshake, "_word", word)
    go_on.set()
    handshake.probe(f"127.0.0.1:{server.port}")
    for c in callers:
        c.close()
    server.close()


def test_a_caller_that_drips_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_callers, "LIMIT", 0.5)
    server = handshake.Server(lambda: handshake.Offer(b"", []))
    with socket.create_connection(("127.0.0.1", server.port)) as caller, pytest.raises(OSError):
        for _ in range(63):  # as many bytes as a word may have less one
            caller.sendall(b"x")
            caller.settimeout(0.3)
            with suppress(TimeoutError):
                raise ConnectionError(caller.recv(1))  # it answers nothing, or is reset
        pytest.fail("it was listened to for 19 s")
    server.close()


def listening() -> set[str]:
    """Addresses, as the kernel writes them, at which this process listens by TCP."""
    own, found = set(), set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(words[1].partition(":")[0])
    return found


def test_listens_at_all_addresses_and_tells_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host calls itself may be another address, or another network, for its peers."""
    opened = memory.backends
    monkeypatch.setattr(memory, "backends", lambda *of: opened(*of)[1:])  # tcp alone
    before = listening()
    with closing(TransferEngine()) as owner, closing(TransferEngine()) as user:
        assert owner.initialize("localhost", "P2PHANDSHAKE", "tcp", "") == 0
        assert user.initialize("127.0.0.1:12345", "P2PHANDSHAKE", "tcp", "") == 0
        assert {at.strip("0") for at in listening() - before} == {""}
        here, there = bytearray(b"x" * 4096), bytearray(4096)
        a, z = (ctypes.addressof(ctypes.c_ubyte.from_buffer(m)) for m in (here, there))
        assert user.register_memory(a, 4096) == 0 and owner.register_memory(z, 4096) == 0
        hosts = ["127.0.0.2"] + ["[::1]"] * socket.has_dualstack_ipv6()
        for host in hosts:
            there[:] = bytes(4096)
            assert user.transfer_sync_write(f"{host}:{owner.get_rpc_port()}", a, z, 4096) == 0
            assert there == here
    with closing(TransferEngine()) as other:  # a name that it cannot resolve itself
        assert other.initialize("nobody.invalid", "P2PHANDSHAKE", "tcp", "") == 0


def test_the_scenario_runs() -> None:
    seen = dict(scenario(sys.executable, "-m", "sluice.mooncake.shim", SCENARIO))
    good = ("read", "write", "batch write", "batch read", "empty batch", "no bytes", "ended",
            "read what is registered anew")
    assert {name: seen[name] for name in good} == dict.fromkeys(good, 0)
    assert seen["notified"] == [["name", "words"]] and seen["notified again"] == [["",
        "é"]] and seen["submitted"] == 1
    bytes_of = ("written bytes", "batch written bytes", "batch read bytes")
    assert [seen[name] for name in bytes_of] == [True, [True, True], True]
    bad = ("past the end", "unknown address", "uneven", "no such session", "read what is "
        "unregistered", "read from the dead")
    assert {name: seen[name] for name in bad} == dict.fromkeys(bad, -1)


def test_the_same_as_the_wheel() -> None:
    wheel = scenario(theirs(), SCENARIO)
    ours = scenario(sys.executable, "-m", "sluice.mooncake.shim", SCENARIO)
    assert [(w, o) for w, o in zip(wheel, ours) if w != o] == [] and len(ours) == len(wheel)


class Side:
    """An engine and its memory, in this process."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.memory = self.engine.get_engine().alloc(size)
        self.bytes = self.memory.view
        self.address = self.memory.address
        assert self.engine.register_memory(self.address, size) == 0
        self.session = f"127.0.0.1:{self.engine.get_rpc_port()}"


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    made = Side(), Side()
    yield made
    for side in made:
        side.engine.close()


def test_threads_share_an_engine(sides: tuple[Side, Side]) -> None:
    a, b = sides
    b.bytes[:] = bytes(i % 251 for i in range(len(b.bytes)))

    def move(i: int) -> int:
        at = 4096 * (i % 8)
        return a.engine.transfer_sync_read(b.session, a.address + at, b.address + at, 4096)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(move, range(400))) == {0}
    assert a.bytes[: 8 * 4096] == b.bytes[: 8 * 4096]


def test_a_peer_that_registers_more_is_asked_again(sides: tuple[Side, Side]) -> None:
    a, b = sides
    assert a.engine.transfer_sync_read(b.session, a.address, b.address, 64) == 0
    later = bytearray(b"later" * 100)
    region = b.engine.get_engine().alloc(4096)
    assert b.engine.register_memory(region.address, 4096) == 0
    region.view[: len(later)] = later
    assert a.engine.transfer_sync_read(b.session, a.address, region.address, len(later)) == 0
    assert a.bytes[: len(later)] == later


def test_one_registration_ends_beside_a_transfer_of_another(sides: tuple[Side, Side]) -> None:
    a, b = sides
    other = b.engine.get_engine().alloc(4096)
    assert b.engine.register_memory(other.address, 4096) == 0
    number = a.engine.batch_transfer_async_read(b.session, [a.address], [b.address], [1 << 16])
    assert number and b.engine.unregister_memory(other.address) == 0
    assert a.engine.get_batch_transfer_status([number]) == 0
    assert a.engine.transfer_sync_read(b.session, a.address, other.address, 64) == -1


def test_an_outcome_is_told_once_and_holds_no_memory(sides: tuple[Side, Side]) -> None:
    a, b = sides
    number = a.engine.transfer_submit_write(b.session, a.address, b.address, 64)
    a.engine._batches[number].wait(LIMIT)
    assert a.engine.unregister_memory(a.address) == 0, "a transfer that has ended holds its memory"
    assert [a.engine.transfer_check_status(number) for _ in range(2)] == [1, -1]
    assert a.engine.get_batch_transfer_status([number]) == -1


@pytest.mark.parametrize("gone", [True, False])
def test_another_engine_at_the_same_port(sides: tuple[Side, Side], gone: bool,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loss of the first one is not known yet."""
    a, b = sides
    c = Side()
    fetch = handshake.fetch
    assert a.engine.transfer_sync_read(b.session, a.address, b.address, 64) == 0
    c.bytes[:3] = b"new"
    session = b.session
    if gone:
        b.engine.close()
    monkeypatch.setattr(handshake, "fetch", lambda name: fetch(c.session if name == session
        else name))
    assert a.engine.transfer_sync_read(session, a.address, c.address,
                                       3) == 0 and a.bytes[:3] == b"new"
    c.engine.close()


def test_a_message_that_may_have_come_is_not_sent_again(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = sides
    run = Transfer.run

    def lose(self: Transfer, *args: Any) -> None:
        run(self, *args)
        raise PeerLostError("the outcome is lost")

    monkeypatch.setattr(Transfer, "run", lose)
    assert a.engine.batch_transfer_sync(b.session, [a.address], [b.address], [64],
                                        TransferOpcode.Write, TransferNotify("n", "m")) == -1
    monkeypatch.undo()
    assert a.engine.batch_transfer_sync(b.session, [a.address], [b.address], [64],
                                        TransferOpcode.Write, TransferNotify("n", "end")) == 0
    got: list[str] = []
    end = time.monotonic() + LIMIT
    while "end" not in got and time.monotonic() < end:
        got += [n.msg for n in b.engine.get_notifies()]
    assert got == ["m", "end"]


@pytest.mark.parametrize("address, length", [(0, -1), (-1, 1), (-(1 << 40), 1 << 40)])
def test_what_no_memory_has(sides: tuple[Side, Side], address: int, length: int) -> None:
    a, b = sides
    at = a.address + address if length < 0 else address
    assert a.engine.transfer_sync_read(b.session, at, b.address, length) == -1
    assert a.engine.transfer_sync_read(b.session, a.address, at, length) == -1
    assert a.engine.register_memory(at, length) == -1


def test_what_is_no_engine(sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture) -> None:
    a, b = sides
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        answered = pool.submit(lambda: silent.accept()[0].close())
        with caplog.at_level(logging.ERROR, "sluice.mooncake"):
            assert a.engine.transfer_sync_read(f"127.0.0.1:{silent.getsockname()[1]}", a.address,
                                               b.address, 64) == -1
        answered.result(LIMIT)
    assert "transfer with 127.0.0.1" in caplog.text
    with pytest.raises(RuntimeError, match="initialize first"):
        TransferEngine().get_rpc_port()
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "nvlink", "") == -1


@pytest.mark.parametrize(
    "session, want", [("h:1", ("h", 1)), ("h", ("h", 0)), ("[::1]:2", ("::1", 2)),
                      ("[::1]", ("::1", 0)), ("::1", ("::1", 0))]
)
def test_session_names(session: str, want: tuple[str, int]) -> None:
    assert handshake.parse(session) == want


def test_notifications_are_bytes_and_back() -> None:
    got = notices.decode(notices.encode(TransferNotify("näme", "message")))
    assert (got.name, got.msg) == ("näme", "message")
    for bad in (b"", b"\xff\xff\xff\xff", b"\x01\0\0\0\xff"):
        with pytest.raises(ValueError):
            notices.decode(bad)


def test_ranges() -> None:
    ranges: Ranges[str] = Ranges()
    for start in (300, 100, 200):
        ranges.check(start, 100)
        ranges.add(start, 100, str(start))
    assert ranges.find(199, 1) == (100, "100") and ranges.find(200, 100) == (200, "200")
    for address, length in ((99, 1), (399, 2), (199, 2)):
        with pytest.raises(KeyError):
            ranges.find(address, length)
    for address, length in ((100, 1), (50, 51), (399, 5), (0, 1000)):
        with pytest.raises(KeyError):
            ranges.check(address, length)
    ranges.drop(200)
    ranges.check(200, 100)
    assert ranges.at(200) is None and ranges.at(300) == "300"
