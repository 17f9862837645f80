# SPDX-License-Identifier: Apache-2.0
"""An exception between any two steps of the package leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Iterator, Optional

import pytest
import sluice
from conftest import LIMIT, until
from ports import ports
from sluice import nixl
from sluice._clock import SLICE_NS, beside
from sluice._library import lib
from sluice.errors import HandleError, UnprovenError
from sluice.nixl import places

PACKAGE = os.path.dirname(sluice.__file__)
MOST = 16
LONG = 4 * LIMIT


class Interrupt(BaseException):
    """What a handler of a signal raises."""


def ends(frame: Optional[FrameType]) -> bool:
    """Whether it is part of a __del__, out of which no exception comes."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Calls it with an exception before its instruction of that number within the package; False:
    it has none.
    """
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Optional[Any]:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PACKAGE) or ends(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def everywhere(call: Callable[[], Any]) -> Iterator[int]:
    """Interrupts it at each instruction, one after the other."""
    at = 1
    while interrupted(call, at):
        yield at
        at += 1
    assert at > 20


@pytest.fixture
def engine() -> Iterator[sluice.Engine]:
    few = sluice.Limits(transfers=MOST, regions=MOST, leases=MOST)
    with sluice.Engine("a", ["mem"], limits=few, connect_timeout=LONG,
                       handshake_timeout=LONG) as e:
        yield e


def test_regions(engine: sluice.Engine) -> None:
    numbers = itertools.count()
    left = [at for at in everywhere(lambda: engine.register(str(next(numbers)), bytearray(4096)))
            if engine.stats()["regions"]]
    assert len(left) <= 1  # between the last instruction and the caller's next
    assert len(engine._holds) == len(engine._regions) == engine.stats()["regions"] <= 2


def test_leases(engine: sluice.Engine) -> None:
    region = engine.register("data", bytearray(4096))
    for at in everywhere(lambda: region.lease(0, 64, ttl=100)):
        assert engine.stats()["leases"] == 0, at


def test_a_lease_that_nobody_holds_ends(engine: sluice.Engine) -> None:
    region = engine.register("data", bytearray(4096))
    token = region.lease(0, 64).token()
    gc.collect()
    assert engine.stats()["leases"] == 0 and token
    region.close()


def test_connects(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    with sluice.Engine("a", ["mem"]) as a, sluice.Engine("b", ["mem"]) as b, b.serve(address):
        described, known = b.describe(), 0
        for connect in (lambda: a.connect(described, LIMIT), lambda: a.dial(address, LIMIT)):
            for _ in everywhere(connect):
                for thread in threading.enumerate():
                    if thread.name == "sluice":  # it goes on to the end of the call, and undoes it
                        thread.join(60)
                assert a.stats()["peers"] == len(a._peers)
            # Three frames return it to the caller, who is not interrupted the last time.
            assert len(a._peers) <= known + 3 + 1
            known = len(a._peers)


def test_transfers(engine: sluice.Engine) -> None:
    region = engine.register("data", bytearray(4096))
    me = engine.self_peer()
    remote = me.remote("data")

    def move() -> None:
        with me.transfer("write") as t:
            t.add_pages(region, remote, 16, [1, 2, 3], [4, 5, 6])
            t.run(60)

    for _ in everywhere(move):
        pass
    kept = [me.transfer("write") for _ in range(MOST)]  # all that there may be
    assert len(kept) == MOST


def test_memory(engine: sluice.Engine) -> None:
    def mapped() -> int:
        return sum("memfd:" in line for line in open("/proc/self/maps"))

    with sluice.Engine("b", ["shm"]) as shm:
        shm.alloc(4096).close()
        before = mapped()
        for at in everywhere(lambda: shm.alloc(4096)):
            assert mapped() == before, at


def interrupt_after(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Has Ctrl-C come once, while a function of the library is about to return what it did."""
    real = getattr(lib, name)

    def call(*args: Any) -> Any:
        code = real(*args)
        if code == 0:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return code

    monkeypatch.setattr(lib, name, call)


def test_an_engine_that_was_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    tcp = sluice.Backend("tcp", plaintext=True, listen=f"127.0.0.1:{ports(1)[0]}")
    interrupt_after(monkeypatch, "open")
    with pytest.raises(KeyboardInterrupt):
        sluice.Engine("b", [tcp])
    sluice.Engine("b", [tcp]).close()  # the port is free


def test_a_listener_that_was_opened_is_closed(monkeypatch: pytest.MonkeyPatch,
                                              engine: sluice.Engine, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    interrupt_after(monkeypatch, "serve")
    with pytest.raises(KeyboardInterrupt):
        engine.serve(address)
    engine.serve(address).close()  # the name is free


def test_a_message_comes_again(monkeypatch: pytest.MonkeyPatch, engine: sluice.Engine) -> None:
    me = engine.self_peer()
    for data in (b"one", b"two"):
        me.notify(data, LIMIT)
    interrupt_after(monkeypatch, "receive")
    with pytest.raises(KeyboardInterrupt):
        engine.receive(LIMIT)
    assert [engine.receive(LIMIT).data for _ in range(2)] == [b"one", b"two"]


def test_a_peer_comes_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    with sluice.Engine("a", ["shm"]) as a, sluice.Engine("b", ["shm"]) as b, a.serve(address):
        b.dial(address, LIMIT)
        interrupt_after(monkeypatch, "accept")
        with pytest.raises(KeyboardInterrupt):
            a.accept(LIMIT)
        assert a.accept(0).name == "b"


def test_a_close_without_an_answer_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory stays held, each later close says so, and whoever waits is woken."""
    engine, memory = sluice.Engine("c", ["mem"]), bytearray(4096)
    region = engine.register("data", memory)
    interrupt_after(monkeypatch, "close")
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    for close in (engine.close, region.close):
        with pytest.raises(sluice.UnprovenError):
            close()
    assert engine.closed and engine._arrivals._closed
    with pytest.raises(BufferError):
        memory.extend(b"x")
    sluice.engine._OPEN.pop(id(engine._holds))


def test_a_view_of_closed_memory(engine: sluice.Engine) -> None:
    memory = engine.alloc(4096)
    memory.close()
    with pytest.raises(sluice.HandleError):
        memory.view


def test_what_has_come_is_received_without_waiting(engine: sluice.Engine) -> None:
    me = engine.self_peer()
    for n in range(40):
        me.notify(b"%d" % n, LIMIT)
    until(lambda: engine.stats()["notifications"] == 40)
    assert [int(engine.receive(0).data) for _ in range(40)] == list(range(40))



@contextlib.contextmanager
def interrupted_when(begun: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C in what follows, which would last LONG, once a thread has seen it begin: it ends, in
    much less.
    """
    def ring(*_: object) -> None:
        if not heard.is_set():
            heard.set()
            raise Interrupt

    def press() -> None:
        begun()
        while not heard.wait(0.05):  # one that comes just before Python waits is not heard
            signal.pthread_kill(main, signal.SIGALRM)

    heard, main, start = threading.Event(), threading.get_ident(), time.monotonic()
    presses, before = threading.Thread(target=press), signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Interrupt):
            presses.start()
            yield
            presses.join()
        assert time.monotonic() - start < LONG / 2
    finally:
        presses.join()
        signal.signal(signal.SIGALRM, before)


def test_a_dial_without_an_answer_is_interrupted(engine: sluice.Engine, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        silent.settimeout(LIMIT)
        callers: list[object] = []
        with interrupted_when(lambda: callers.append(silent.accept())):
            engine.dial(f"unix:{tmp_path}/s", timeout=LONG)
        with pytest.raises(TimeoutError):
            engine.dial(f"unix:{tmp_path}/s", timeout=0.01)


def test_a_call_beside_that_was_given_up_is_undone() -> None:
    begun, going, undone = threading.Event(), threading.Event(), queue.SimpleQueue[int]()

    def call() -> int:
        begun.set()
        going.wait(LONG)
        return 7

    with interrupted_when(lambda: begun.wait(LONG)):
        beside(call, undone.put, lambda kept: kept)
    assert undone.empty()
    going.set()
    assert undone.get(timeout=LIMIT) == 7


def test_a_revoke_is_interrupted(monkeypatch: pytest.MonkeyPatch, engine: sluice.Engine) -> None:
    with engine.alloc(4096) as memory, engine.register("r", memory) as region:
        lease = region.lease(0, 4096)
        revoke, begun, going = lib.lease_revoke, threading.Event(), threading.Event()
        main, heard = threading.get_ident(), []

        def slow(handle: int, timeout: int) -> int:
            if 0 <= timeout <= SLICE_NS:
                return UnprovenError.code
            heard.append(threading.get_ident())
            begun.set()
            going.wait(LONG)
            return revoke(handle, timeout)

        monkeypatch.setattr(lib, "lease_revoke", slow)
        with interrupted_when(lambda: begun.wait(LONG)):
            lease.revoke()
        assert main not in heard  # in a call of the library no interrupt is heard
        going.set()
        lease.revoke(LIMIT)  # also where the other call has ended it
        monkeypatch.undo()


def test_a_lease_that_is_collected_is_forgotten(engine: sluice.Engine) -> None:
    with engine.alloc(4096) as memory, engine.register("r", memory) as region:
        me = engine.self_peer()
        with region.lease(0, 4096) as lease:
            remote = me.lease(lease.token())
            with me.transfer("write") as transfer:
                transfer.add(region, 0, remote, 0, 1)
                handle = remote._handle
                del remote
                gc.collect()
                out = ctypes.c_uint64()
                assert lib.remote_length(handle, ctypes.byref(out)) == 0, "a transfer lists it"
            del transfer
            gc.collect()
            assert lib.remote_length(handle, ctypes.byref(out)) == HandleError.code


def test_lists_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is registered as a whole or not at all; what of it has not ended can be ended."""
    monkeypatch.setattr(places, "_MANY", 2)
    held = bytearray(2 * 4096)
    at = ctypes.addressof(ctypes.c_char.from_buffer(held))
    agent = nixl.nixl_agent("a")
    descs = agent.get_reg_descs([(at + 4096 * i, 4096, 0, "") for i in range(2)], "DRAM")
    agent.register_memory(descs)
    agent.deregister_memory(descs)
    engine: Any = agent._engine
    own, whole = engine.stats()["regions"], 0
    for _ in everywhere(lambda: agent.register_memory(descs)):
        known = len(agent._places.all())
        assert engine.stats()["regions"] == own + known == len(engine._regions)
        if known:
            whole += 1
            assert known == 2
            agent.deregister_memory(descs)
    assert whole <= 20  # instructions behind the last step
    agent.deregister_memory(descs)

    each = [agent.get_reg_descs([(at + 4096 * i, 4096, 0, "")], "DRAM") for i in range(2)]
    agent.register_memory(descs)
    for _ in everywhere(lambda: agent.deregister_memory(descs)):
        for one in each:
            with contextlib.suppress(nixl.bindings.nixlNotFoundError):
                agent.deregister_memory(one)
        agent.get_agent_metadata()
        assert not agent._places.all() and engine.stats()["regions"] == own == len(engine._regions)
        agent.register_memory(descs)
    agent.close()
