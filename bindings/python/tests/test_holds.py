# SPDX-License-Identifier: Apache-2.0
"""What keeps memory in place, and what ends with what."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
import threading
from typing import Any, Callable

import numpy as np
import pytest
import sluice
from conftest import LIMIT, Pair
from sluice import _library, engine


class Tensor:
    """The part of a tensor of torch that is looked at, which may be given other memory."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def data_ptr(self) -> int:
        address: int = self.of.ctypes.data
        return address

    def numel(self) -> int:
        return int(self.of.size)

    def element_size(self) -> int:
        return 1

    def get_device(self) -> int:
        return -1

    def is_contiguous(self) -> bool:
        return True

    def detach(self) -> Tensor:
        return Tensor(self.of)


def test_memory_of_a_tensor_stays(pair: Pair) -> None:
    t = Tensor(np.zeros(4096, np.uint8))
    first = t.of
    region = pair.a.engine.register("tensor", t)
    t.of = np.zeros(4096, np.uint8)  # as `t.data = other` does
    assert region._located.keep.of is first


def test_name_that_is_used_again_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    old = pair.a.engine.register("again", bytearray(4096))
    close, late = _library.lib.region_close, []

    def overtaken(handle: int) -> int:
        code = close(handle)
        late.append(pair.a.engine.register("again", bytearray(4096)))
        return code

    monkeypatch.setattr(_library.lib, "region_close", overtaken)
    old.close()
    assert pair.a.engine._regions["again"] is late[0]
    assert id(late[0]) in pair.a.engine._holds


def test_memory_of_an_engine_that_proves_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    e = sluice.Engine("unproven", ["mem"])
    region = e.register("data", bytearray(4096))
    close = _library.lib.close

    def unproven(handle: int) -> int:
        close(handle)
        return sluice.UnprovenError.code

    monkeypatch.setattr(_library.lib, "close", unproven)
    with pytest.raises(sluice.UnprovenError):
        e.close()
    assert region._located.keep is not None
    assert e._holds in engine._OPEN.values()
    del engine._OPEN[id(e._holds)]


def test_a_close_beside_one_that_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library makes handles stale before its answer is here."""
    e = sluice.Engine("unproven", ["mem"])
    region = e.register("data", bytearray(4096))
    lease = e.register("lent", bytearray(64)).lease(0, 64)
    close, stale, answers = _library.lib.close, threading.Event(), []
    told = threading.Semaphore(0)

    def unproven(handle: int) -> int:
        close(handle)
        stale.set()
        for _ in others:
            assert told.acquire(timeout=LIMIT)
        return sluice.UnprovenError.code

    def tells(name: str) -> None:
        """That a call of the library was answered that the handle is stale."""
        real = getattr(_library.lib, name)

        def call(*args: Any) -> Any:
            code = real(*args)
            told.release()
            return code

        monkeypatch.setattr(_library.lib, name, call)

    def beside(end: Any) -> None:
        stale.wait()
        with pytest.raises(sluice.UnprovenError):
            end()
        answers.append(True)

    monkeypatch.setattr(_library.lib, "close", unproven)
    tells("region_close")
    tells("lease_revoke")
    others = [threading.Thread(target=beside, args=(end,)) for end in (region.close, lease.revoke)]
    for other in others:
        other.start()
    with pytest.raises(sluice.UnprovenError):
        e.close()
    for other in others:
        other.join()
    assert answers == [True, True]
    assert region._located.keep is not None
    del engine._OPEN[id(e._holds)]


def test_collected_engine_ends_before_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    e = sluice.Engine("cycle", ["mem"])
    located = e.register("data", bytearray(4096))._located
    held = []
    close = _library.lib.close

    def look(handle: int) -> int:
        held.append(located.keep is not None)
        return close(handle)

    monkeypatch.setattr(_library.lib, "close", look)
    e.itself = e  # type: ignore[attr-defined]
    with pytest.warns(ResourceWarning):
        del e
        gc.collect()
    assert held == [True]
    assert located.keep is None


def test_second_close_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    e = sluice.Engine("slow", ["mem"])
    close = _library.lib.close
    begun, let, comes, second = (threading.Event() for _ in range(4))

    def slow(handle: int) -> int:
        if not begun.is_set():
            begun.set()
            assert let.wait(LIMIT)
        return close(handle)

    monkeypatch.setattr(_library.lib, "close", slow)

    def comes_second() -> None:
        comes.set()
        e.close()
        second.set()

    threads = [threading.Thread(target=e.close), threading.Thread(target=comes_second)]
    threads[0].start()
    assert begun.wait(LIMIT)
    threads[1].start()
    assert comes.wait(LIMIT) and not second.wait(0.2)
    let.set()
    for t in threads:
        t.join(LIMIT)
    assert second.is_set()


def test_await_ends_when_another_task_closes(narrow: Pair) -> None:
    async def main() -> None:
        t = narrow.stuck()

        async def waits() -> None:
            await t

        task = asyncio.create_task(waits())
        arrivals = narrow.a.engine._arrivals
        while not arrivals._futures:
            await asyncio.sleep(0)
        t.close()
        with pytest.raises(sluice.Error):
            await asyncio.wait_for(task, LIMIT)

    asyncio.run(main())


def test_closed_peers_are_forgotten(pair: Pair) -> None:
    description = pair.b.engine.describe()
    before = len(pair.a.engine._peers)
    for _ in range(3):
        pair.a.engine.connect(description, LIMIT).close()
    assert len(pair.a.engine._peers) == before


def test_no_copies(pair: Pair) -> None:
    t = pair.write((0, 0, 64))
    for thing in (pair.a.engine, pair.a.region, pair.a.memory, pair.peer, pair.remote, t):
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="copied or pickled"):
                how(thing)
    t.run(LIMIT)


def test_names_and_numbers_are_as_given(pair: Pair) -> None:
    named: list[Callable[[], Any]] = [
        lambda: sluice.Engine("a\0b", ["mem"]),
        lambda: sluice.Engine("a", ["mem\0"]),
        lambda: pair.a.engine.register("a\0b", bytearray(1)),
        lambda: pair.peer.remote("data\0x"),
        lambda: pair.peer.transfer("read", only="mem\0x"),
    ]
    for call in named:
        with pytest.raises(sluice.ArgumentError, match="NUL"):
            call()
    t = pair.peer.transfer("write")
    for number in (-1, 1 << 64):
        numbered: list[Callable[[], Any]] = [
            lambda: t.add(pair.a.region, number, pair.remote, 0, 64),
            lambda: t.add(pair.a.region, 0, pair.remote, number, 64),
            lambda: t.add_many(pair.a.region, pair.remote, [(0, 0, number)]),
            lambda: t.add_pages(pair.a.region, pair.remote, number, count=1),
            lambda: t.add_pages(pair.a.region, pair.remote, 64, count=1, stride=number),
            lambda: pair.a.region.lease(0, number),
            lambda: pair.a.engine.alloc(number),
        ]
        for call in numbered:
            with pytest.raises(sluice.BoundsError, match="2\\^"):
                call()


_IMPORTED = """
import os, sys
import sluice, sluice.nixl
pid = os.fork()
if pid == 0:
    code = 1
    try:
        with sluice.Engine("child", ["mem"]) as e:
            e.register("data", bytearray(4096))
        code = 0
    finally:
        os._exit(code)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_child_of_a_program_that_only_imports() -> None:
    assert subprocess.run([sys.executable, "-c", _IMPORTED], timeout=LIMIT).returncode == 0


_LEFT = """
import atexit, os, sys
engines = []
atexit.register(lambda: os._exit(0 if engines[0].closed else 3))  # behind what sluice has
import sluice
pid = os.fork()
if pid == 0:
    engines.append(sluice.Engine("child", ["mem"]))
    sys.exit(1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_child_that_leaves_closes_its_engines() -> None:
    assert subprocess.run([sys.executable, "-c", _LEFT], timeout=LIMIT).returncode == 0
