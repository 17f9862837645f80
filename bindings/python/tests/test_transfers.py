# SPDX-License-Identifier: Apache-2.0
"""Lists, patterns, messages and outcomes within one process."""

from __future__ import annotations

import array
import threading
from typing import Any

import numpy as np
import pytest
import sluice
from conftest import LIMIT, MIB, Pair
from sluice import transfer


def fill(view: memoryview) -> None:
    view[:] = (np.arange(len(view), dtype=np.uint64) * 7 % 251).astype(np.uint8).tobytes()


def test_write_with_message_again_and_again(pair: Pair) -> None:
    fill(pair.a.bytes)
    t = pair.write((4096, 100, 65536))
    t.message(b"layer\x000")
    for _ in range(3):
        pair.b.bytes[:] = bytes(MIB)
        t.post()
        t.wait(LIMIT)
        assert t.test() and t.done
        note = pair.b.engine.receive(LIMIT)
        assert (note.data, note.lost, note.sender) == (b"layer\x000", False, None)
        assert pair.b.bytes[100:65636] == pair.a.bytes[4096:69632]
        assert not any(pair.b.bytes[:100]) and not any(pair.b.bytes[65636:70000])
    t.run(LIMIT)
    assert pair.b.engine.receive(LIMIT).data == b"layer\x000"


def test_read(pair: Pair) -> None:
    fill(pair.b.bytes)
    with pair.write((7, 5, 1000), op="read") as t:
        t.run(LIMIT)
    assert pair.a.bytes[7:1007] == pair.b.bytes[5:1005] and not any(pair.a.bytes[:7])


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "int32", "uint32", "int64", "int16",
                                  "every other", "tensor"])
def test_pages_by_lists_of_any_kind(pair: Pair, kind: str) -> None:
    fill(pair.a.bytes)
    local, there = [5, 0, 900, 17], [3, 999, 1, 0]
    makers: dict[str, Any] = {
        "list": list, "tuple": tuple, "array": lambda v: array.array("I", v),
        "int32": lambda v: np.array(v, np.int32),
        "uint32": lambda v: np.array(v, np.uint32), "int64": lambda v: np.array(v, np.int64),
        "int16": lambda v: np.array(v, np.int16),
        "every other": lambda v: np.repeat(np.array(v, np.int32), 2)[::2], "tensor": Tensor,
    }  # fmt: skip
    make = makers[kind]
    t = pair.peer.transfer("write")
    t.add_pages(pair.a.region, pair.remote, 656, make(local), make(there), stride=1024, base=8,
                remote_base=64)
    t.run(LIMIT)
    for i, j in zip(local, there):
        assert pair.b.bytes[64 + j * 656 : 64 + j * 656 + 656] == pair.a.bytes[
            8 + i * 1024 : 8 + i * 1024 + 656]


class Tensor:
    """What a tensor of torch is to lists: an array that is asked for."""

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, np.int64)

    def __array__(self, *_: object) -> Any:
        return self.values

    def numpy(self) -> Any:
        return self.values


def test_pages_by_names(pair: Pair) -> None:
    fill(pair.a.bytes)
    t = pair.peer.transfer("write")
    t.add_pages(pair.a.region, pair.remote, entry_length=16, local=[3], remote=[9])
    t.run(LIMIT)
    assert pair.b.bytes[9 * 16 : 10 * 16] == pair.a.bytes[3 * 16 : 4 * 16]


def test_pages_are_not_copied(pair: Pair) -> None:
    fill(pair.a.bytes)
    local, there = array.array("i", [3, 1]), np.array([9, 7], np.int32)
    t = pair.peer.transfer("write")
    t.add_pages(pair.a.region, pair.remote, 16, local, there)
    addresses = [held.address for held in t._keep if hasattr(held, "address")]
    assert addresses == [local.buffer_info()[0], there.ctypes.data]
    with pytest.raises(BufferError):  # what is in use does not move
        local.append(2)
    t.run(LIMIT)
    assert pair.b.bytes[9 * 16 : 10 * 16] == pair.a.bytes[3 * 16 : 4 * 16]
    t.reset()
    local.append(2)


def test_pages_by_count(pair: Pair) -> None:
    fill(pair.a.bytes)
    t = pair.peer.transfer("write")
    t.add_pages(pair.a.region, pair.remote, 100, count=10, remote_stride=200)
    t.run(LIMIT)
    assert pair.b.bytes[9 * 200 : 9 * 200 + 100] == pair.a.bytes[900:1000]


def test_pages_refused(pair: Pair) -> None:
    t = pair.peer.transfer("write")
    add = t.add_pages
    region, remote = pair.a.region, pair.remote
    with pytest.raises(sluice.BoundsError):
        add(region, remote, 656, np.array([0, MIB], np.int32), count=2)
    with pytest.raises(sluice.BoundsError):
        add(region, remote, 656, np.array([-1], np.int32))
    with pytest.raises(ValueError):
        add(region, remote, 656, np.array([-1], np.int64))
    with pytest.raises(ValueError):
        add(region, remote, 656, [1, 2], [1])
    with pytest.raises(ValueError):
        add(region, remote, 656)
    with pytest.raises(TypeError):
        add(region, remote, 656, np.array([1.0]))
    with pytest.raises(TypeError):
        add(region, remote, 656, np.zeros((2, 2), np.int32))
    with pytest.raises(sluice.BoundsError, match="nothing is listed"):
        t.post()


@pytest.mark.parametrize("make", [lambda d: d, iter, lambda d: np.array(d, np.uint64),
                                  lambda d: np.array(d, np.int64)])
def test_many(pair: Pair, make: Any) -> None:
    fill(pair.a.bytes)
    descs = [(i * 1000, (99 - i) * 2000, 656) for i in range(100)]
    t = pair.peer.transfer("write")
    t.add_many(pair.a.region, pair.remote, make(descs))
    t.run(LIMIT)
    for here, there, n in descs:
        assert pair.b.bytes[there : there + n] == pair.a.bytes[here : here + n]


def test_many_refused(pair: Pair) -> None:
    t = pair.peer.transfer("write")
    with pytest.raises(sluice.BoundsError, match=r"descs\[1\]"):
        t.add_many(pair.a.region, pair.remote, [(0, 0, 8), (0, MIB - 1, 2)])
    with pytest.raises(TypeError):
        t.add_many(pair.a.region, pair.remote, np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError):
        t.add_many(pair.a.region, pair.remote, [(1, 2)])


def test_length_past_the_region_is_refused_and_nothing_changes(pair: Pair) -> None:
    t = pair.peer.transfer("write")
    for offset, there, n in [(0, 1, MIB), (1, 0, MIB), (0, 2**64 - 1, 8), (2**63, 0, 8), (0, 0, 0)]:
        with pytest.raises(sluice.BoundsError):
            t.add(pair.a.region, offset, pair.remote, there, n)
    t.add(pair.a.region, 0, pair.remote, MIB - 8, 8)
    t.run(LIMIT)


def test_misuse(narrow: Pair) -> None:
    idle = narrow.write((0, 0, 8))
    for wrong in (idle.test, lambda: idle.done, lambda: idle.wait(LIMIT)):
        with pytest.raises(sluice.BusyError):
            wrong()
    t = narrow.stuck()
    for wrong in (t.post, t.reset, narrow.a.region.close, narrow.remote.close):
        with pytest.raises(sluice.BusyError):
            wrong()
    assert not t.test() and not t.done
    with pytest.raises(TimeoutError) as e:
        t.wait(0.01)
    assert isinstance(e.value, sluice.WaitTimeout)
    with pytest.raises(sluice.WaitTimeout):
        t.wait(0.3)
    with pytest.raises(sluice.WaitTimeout):
        t.wait(0)
    t.abort(LIMIT)
    with pytest.raises(sluice.AbortedError):
        t.test()
    assert t.done
    t.close()
    t.close()
    with pytest.raises(sluice.ClosedError):
        t.post()
    with pytest.raises(sluice.ArgumentError):
        narrow.peer.transfer("copy")
    with pytest.raises(sluice.NoRouteError):
        narrow.peer.transfer("write", only="rdma")


def test_an_end_of_with_aborts(narrow: Pair) -> None:
    with narrow.stuck() as t:
        pass
    with pytest.raises(sluice.HandleError):
        t.test()


def test_the_lock_of_the_interpreter_is_let_go(narrow: Pair,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    t = narrow.stuck()
    monkeypatch.setattr(transfer, "SLICE", LIMIT)  # a wait is one call of the library
    errors: list[BaseException] = []

    def waits() -> None:
        try:
            t.wait(LIMIT)
        except sluice.Error as e:
            errors.append(e)

    threads = [threading.Thread(target=waits) for _ in range(4)]
    for thread in threads:
        thread.start()
    t.abort(LIMIT)  # would wait for its turn until the others have waited for LIMIT otherwise
    for thread in threads:
        thread.join(LIMIT)
    assert len(errors) == 4 and all(isinstance(e, sluice.AbortedError) for e in errors)


def test_closing_an_engine_ends_what_waits(narrow: Pair) -> None:
    t = narrow.stuck()
    seen: list[BaseException] = []

    def waits(call: Any) -> None:
        try:
            call()
        except sluice.Error as e:
            seen.append(e)

    calls = [lambda: t.wait(LIMIT), lambda: narrow.a.engine.receive(LIMIT),
             lambda: narrow.a.engine.accept(LIMIT)]
    threads = [threading.Thread(target=waits, args=(c,)) for c in calls]
    for thread in threads:
        thread.start()
    narrow.a.engine.close()
    for thread in threads:
        thread.join(LIMIT)
    assert len(seen) == 3 and all(isinstance(e, sluice.ClosedError) for e in seen), seen
    for call in (t.post, narrow.a.engine.describe, lambda: narrow.a.engine.alloc(8),
                 lambda: narrow.peer.notify(b"")):
        with pytest.raises(sluice.ClosedError):
            call()
    assert narrow.a.engine.closed
    narrow.a.engine.close()


def test_why_and_how_much(pair: Pair) -> None:
    pair.write((0, 0, 4096)).run(LIMIT)
    assert "mem" in pair.peer.explain(pair.a.region, pair.remote)
    assert pair.peer.explain_data(pair.a.region, pair.remote)["chosen"] == "mem"
    stats = pair.a.engine.stats()
    assert stats["posted"] == 0 and stats["routes"][0]["bytes"] == 4096


def test_what_a_peer_says_of_itself(pair: Pair) -> None:
    about = pair.peer.about()
    assert pair.peer.name == about["name"] == "b" and about["same_host"] and about[
        "message_max"] > 0
    assert about["regions"] == [{"name": "data", "kind": "dram", "length": MIB, "read_only": False}]
    pair.b.engine.register("fixed", bytes(64))
    pair.peer.refresh(pair.b.engine.describe())
    assert {"name": "fixed", "kind": "dram", "length": 64, "read_only": True} in pair.peer.about()[
        "regions"]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_messages_without_waiting(backend: str) -> None:
    opened = sluice.Backend("tcp", plaintext=True,
                            listen="127.0.0.1:0") if backend == "tcp" else backend
    with sluice.Engine("a", [opened]) as a, sluice.Engine("b", [opened]) as b:
        peer = a.connect(b.describe(), LIMIT)
        peer.notify(b"first", LIMIT)
        for i in range(400):
            peer.notify(b"%d" % i, timeout=0)
        assert b.receive(LIMIT).data == b"first"
        assert [b.receive(LIMIT).data for _ in range(400)] == [b"%d" % i for i in range(400)]


def test_messages_of_any_length(pair: Pair) -> None:
    pair.peer.notify(b"", LIMIT)
    assert pair.b.engine.receive(LIMIT).data == b""
    longest = 0
    with pytest.raises(sluice.BoundsError):
        pair.peer.notify(bytes((1 << 24) + 1))
    for n in (1, 1000, 60000):
        pair.peer.notify(b"n" * n, LIMIT)
        longest = max(longest, len(pair.b.engine.receive(LIMIT).data))
    assert longest == 60000
    with pytest.raises(sluice.WaitTimeout):
        pair.b.engine.receive(0)
