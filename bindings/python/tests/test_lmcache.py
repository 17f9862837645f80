# SPDX-License-Identifier: Apache-2.0
"""LMCache's native plugin (sluice.integrations.lmcache), called as LMCache's adapter calls it. What
needs LMCache's classes is in stacks/test_lmcache.py.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
from conftest import LIMIT, go_on, stop, until

if sys.version_info < (3, 10):
    pytest.skip("LMCache wants Python 3.10, which has os.eventfd", allow_module_level=True)

from sluice import errors
from sluice.integrations import lmcache
from sluice.integrations.lmcache import SluiceLMCache

Serve = Callable[[], "subprocess.Popen[str]"]
UNIT = 4096
POOL = 256 * UNIT
PATIENT = {"timeout": LIMIT, "lookup_timeout": LIMIT, "start_timeout": LIMIT}


def names(n: int, first: int = 0) -> list[str]:
    return [f"org/model@{k:08x}@0@{k:032x}" for k in range(first, first + n)]


class Caller:
    """A pool of chunks, and the side of LMCache's adapter that waits for the eventfd."""

    def __init__(self, plugin: SluiceLMCache) -> None:
        self.plugin = plugin
        self.pool = mmap.mmap(-1, POOL)
        self.bytes: Any = np.frombuffer(self.pool, np.uint8)
        self.bytes[:] = np.random.default_rng(5).integers(0, 256, POOL, np.uint8)
        self.ended: dict[int, Any] = {}
        self._poll = select.poll()
        self._poll.register(plugin.event_fd(), select.POLLIN)

    def chunks(self, units: list[int], length: int = 2 * UNIT) -> list[memoryview]:
        return [memoryview(self.pool)[u * UNIT:u * UNIT + length] for u in units]

    def wait(self, number: int) -> Any:
        while number not in self.ended:
            assert self._poll.poll(LIMIT * 1e3)
            for n, well, why, done in self.plugin.drain_completions():
                assert n not in self.ended and bool(why) == (not well)
                self.ended[n] = well, done
        return self.ended[number]

    def get(self, keys: list[str], chunks: list[memoryview]) -> Any:
        return self.wait(self.plugin.submit_batch_get(keys, chunks))

    def set(self, keys: list[str], chunks: list[memoryview]) -> Any:
        return self.wait(self.plugin.submit_batch_set(keys, chunks))

    def exists(self, keys: list[str]) -> list[bool]:
        well, found = self.wait(self.plugin.submit_batch_exists(keys))
        assert well
        return list(found)


@pytest.fixture
def served(tmp_path: Path, start: Callable[..., Any]) -> Iterator[Serve]:
    def serve() -> "subprocess.Popen[str]":
        child: "subprocess.Popen[str]" = start("cache_server.py", str(tmp_path))
        assert child.stdout is not None and child.stdout.readline() == "serves\n"
        return child

    yield serve


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Caller]:
    """Of a cache of this process."""
    plugin = SluiceLMCache(path=f"{tmp_path}/memory", bytes=8 << 20, **PATIENT)
    yield Caller(plugin)
    plugin.close()


def test_chunks_outlive_the_cache(tmp_path: Path, served: Serve) -> None:
    server = served()
    plugin = SluiceLMCache(address=f"unix:{tmp_path}/socket", **PATIENT)
    caller = Caller(plugin)
    try:
        at = [7, 2, 30, 11]  # units of which chunks take two
        assert caller.exists(names(5)) == [False] * 5
        assert caller.set(names(4), caller.chunks(at)) == (True, [True] * 4)
        assert caller.set(names(4), caller.chunks(at)) == (True, [True] * 4)  # it has them
        short, long = names(2, 50)
        mixed = [*caller.chunks([41], 700), *caller.chunks([50], 3 * UNIT)]
        assert caller.set([short, long], mixed) == (True, [True] * 2)
        assert caller.exists([*names(5), short, long]) == [True] * 4 + [False] + [True] * 2

        server.kill()
        server.wait()
        until(lambda: not any(caller.exists(names(4))))
        assert caller.get(names(4), caller.chunks([60, 62, 64, 66])) == (False, [False] * 4)
        assert caller.set(names(1, 9), caller.chunks([7])) == (False, [False])
        assert caller.wait(plugin.submit_batch_delete(names(2))) == (False, [False] * 2)

        served()
        until(lambda: all(caller.exists(names(4))))
        want = caller.bytes.copy()
        for unit, there in zip(at, (103, 100, 97, 110)):
            want[there * UNIT:(there + 2) * UNIT] = want[unit * UNIT:(unit + 2) * UNIT]
        want[120 * UNIT:120 * UNIT + 700] = want[41 * UNIT:41 * UNIT + 700]
        want[130 * UNIT:133 * UNIT] = want[50 * UNIT:53 * UNIT]
        keys = [*names(4), names(1, 99)[0], short, long]
        to = [*caller.chunks([103, 100, 97, 110, 115]), *caller.chunks([120], 700),
              *caller.chunks([130], 3 * UNIT)]
        assert caller.get(keys, to) == (False, [True] * 4 + [False] + [True] * 2)
        assert np.array_equal(np.delete(caller.bytes, slice(115 * UNIT, 117 * UNIT)),
                              np.delete(want, slice(115 * UNIT, 117 * UNIT)))

        assert caller.wait(plugin.submit_batch_delete(names(2))) == (True, [True] * 2)
        assert caller.exists(names(4)) == [False] * 2 + [True] * 2
    finally:
        plugin.close()
        plugin.close()
    assert plugin.drain_completions() == []


def test_chunks_that_a_cache_cannot_have(own: Caller) -> None:
    """Each is False, and the others of its batch are not."""
    assert own.set(names(2), own.chunks([0, 2])) == (True, [True] * 2)
    before = own.bytes.copy()
    assert own.get(names(1), own.chunks([9], UNIT)) == (False, [False])  # it is longer
    assert own.get(names(1), own.chunks([9], 3 * UNIT)) == (False, [False])  # and shorter
    assert own.set(names(1), own.chunks([9], UNIT)) == (False, [False])
    assert own.set(names(2, 5), [memoryview(b"x" * 64), *own.chunks([2])]) == (
        False, [False, True])
    assert own.set(names(2, 7), [*own.chunks([3], 0), *own.chunks([2])]) == (False, [False, True])
    assert own.set(names(2, 9), own.chunks([8, 9])) == (False, [False] * 2)  # they overlap
    assert own.set(names(1, 11), [memoryview(bytearray(99))[::2]]) == (False, [False])
    assert own.set(names(3, 12), own.chunks([2])) == (False, [True, False, False])
    assert own.get([], []) == (True, []) and own.exists([]) == []
    assert np.array_equal(before, own.bytes)
    assert own.set(names(1, 20), own.chunks([2])) == (True, [True])


def test_mappings_are_bounded(own: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not used for longest is given back, and attached again where it comes again."""
    monkeypatch.setattr(lmcache, "MAPPINGS_MAX", 3)
    others = [Caller(own.plugin) for _ in range(5)]
    for turn in range(2):
        for k, other in enumerate(others):
            number = own.plugin.submit_batch_set(names(1, 10 * turn + k), other.chunks([k]))
            assert own.wait(number) == (True, [True])
    attached = own.plugin._mappings._attached
    assert len(attached) == 3 and not any(m.users for m in attached)
    assert len(own.plugin._store._pools) == 4
    own.bytes[:] = 0
    assert own.get(names(5), own.chunks([0, 2, 4, 6, 8])) == (True, [True] * 5)
    for k, other in enumerate(others):
        assert np.array_equal(own.bytes[2 * k * UNIT:][:2 * UNIT],
                              other.bytes[k * UNIT:][:2 * UNIT])
    # A batch that needs more than may be attached at a time.
    apart = [c for k, other in enumerate(others) for c in other.chunks([k])]
    assert own.set(names(5, 90), apart) == (False, [True] * 3 + [False] * 2)


def test_many_threads(own: Caller) -> None:
    lock, begun = threading.Lock(), []

    def ask(thread: int) -> None:
        for turn in range(20):
            keys = names(4, 1000 * thread + 4 * turn)
            number = own.plugin.submit_batch_set(keys, own.chunks([thread, 20, 40, 60]))
            with lock:
                begun.append(number)

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [own.wait(number) for number in begun] == [(True, [True] * 4)] * 80


def test_no_descriptor_is_used_after_its_end(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be a file's by then."""
    plugin = SluiceLMCache(path=f"{tmp_path}/memory", bytes=8 << 20, **PATIENT)
    closer, main, write = threading.Thread(target=plugin.close), threading.get_ident(), []

    def late(fd: int, value: int) -> None:
        if threading.get_ident() == main:
            closer.start()
            closer.join(1)  # it ends by then, unless it waits for this call
        write.append(os.fstat(fd))
        real(fd, value)

    real = os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", late)
    plugin.submit_batch_exists(names(1))
    closer.join()
    assert len(write) >= 2 and plugin.drain_completions() == []


def test_a_thread_that_cannot_wait_for_descriptors(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SluiceLMCache(path=f"{tmp_path}/memory", bytes=8 << 20, **PATIENT)
    try:
        own, epoll = Caller(plugin), plugin._epoll

        class Full:
            poll, close = epoll.poll, epoll.close

            def register(self, fd: int, events: int) -> None:
                raise OSError(errno.ENOSPC, "max_user_watches")

        monkeypatch.setattr(plugin, "_epoll", Full())
        assert own.set(names(1), own.chunks([3])) == (True, [True])
    finally:
        plugin.close()


def test_what_the_configuration_may_say() -> None:
    for said in ({}, {"adress": "unix:/x"}, {"address": "unix:/x", "timeout": "1"}):
        with pytest.raises(errors.ArgumentError):
            SluiceLMCache(**said)


@pytest.mark.timed
def test_a_cache_that_stands_still_writes_nothing_after_the_completion(
    tmp_path: Path, served: Serve
) -> None:
    server = served()
    plugin = SluiceLMCache(address=f"unix:{tmp_path}/socket", timeout=1.0, lookup_timeout=1.0,
                           start_timeout=LIMIT)
    caller = Caller(plugin)
    try:
        until(lambda: caller.set(names(2), caller.chunks([2, 4]))[0])
        stop(server)
        numbers = [plugin.submit_batch_get(names(2), caller.chunks([8, 10])),
                   plugin.submit_batch_set(names(1, 5), caller.chunks([12]))]
        assert caller.wait(numbers[0]) == (False, [False] * 2)
        caller.bytes[8 * UNIT:12 * UNIT] = 0  # LMCache uses the chunks again
        assert caller.wait(numbers[1]) == (False, [False])
        assert caller.exists(names(2)) == [False] * 2
        go_on(server)
        until(lambda: all(caller.exists(names(2))))
        assert not caller.bytes[8 * UNIT:12 * UNIT].any()
    finally:
        plugin.close()
