# SPDX-License-Identifier: Apache-2.0
"""Opening and closing: what is refused, and that nothing is left."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import re
import warnings
import weakref
from typing import Any, Callable

import numpy as np
import pytest
import sluice
from conftest import LIMIT, ROOT, End, Pair, descriptors, no_more_descriptors
from sluice import _library, errors


def test_the_longest_times() -> None:
    for seconds in (1e10, float("inf")):
        with sluice.Engine("a", ["mem"]) as a, sluice.Engine("b", ["mem"]) as b:
            assert not a.connect(b.describe(), seconds).lost
        with pytest.raises(sluice.BoundsError, match="transfer_timeout is 2562047h"):
            sluice.Engine("a", ["mem"], transfer_timeout=seconds)


def test_layout_is_that_of_the_header() -> None:
    listed = (ROOT / "bindings/c/testdata/layout.txt").read_text().splitlines()
    known = [f"SLUICE_ABI_VERSION {_library.ABI_VERSION}"]
    for name, struct in _library.STRUCTS.items():
        known.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            known.append(f"{name}.{field} {place.offset} {place.size}")
    assert known == listed[: len(known)]
    codes = {int(n): name for name, n in (line.split() for line in listed[len(known) :])
             if name.startswith("SLUICE_ERR_")}
    codes.pop(-4)  # SPACE: buffers grow
    assert set(codes) == set(errors.BY_CODE)
    for code, kind in errors.BY_CODE.items():
        words = codes[code][len("SLUICE_ERR_") :]
        plain = {"SYSTEM": "OPERATINGSYSTEM", "NO_ROUTE": "NOROUTE"}.get(words,
            words.replace("_", ""))
        assert kind.__name__.upper() == plain + "ERROR"


def test_one_version() -> None:
    header = re.search(r'#define SLUICE_VERSION "(.*)"', (ROOT / "bindings/c/sluice.h").read_text())
    assert header is not None
    assert sluice.__version__ == header[1] == _library.lib.version().decode(
    ) == importlib.metadata.version("sluice")


def test_every_function_of_the_header_is_known() -> None:
    header = (ROOT / "bindings/c/sluice.h").read_text()
    declared = set(re.findall(r"^int sluice_(\w+)\(", header, re.M))
    assert declared == set(_library._FUNCTIONS)


def test_refused() -> None:
    with pytest.raises(sluice.ArgumentError, match="there are cuda, gds, mem"):
        sluice.Engine("x", ["nothing"])
    with pytest.raises(sluice.ArgumentError, match="ring_bytes"):
        sluice.Engine("x", [sluice.Backend("shm", ring=1)])
    with pytest.raises(sluice.UnavailableError):
        sluice.Engine("x", [sluice.Backend("cuda", library="/nowhere")])
    with pytest.raises(sluice.Error):
        sluice.Engine("x" * 256, ["mem"])
    with pytest.raises(sluice.Error):
        sluice.Engine("x", [])
    with sluice.Engine("x", ["mem", sluice.Backend("cuda", library="/nowhere", optional=True)],
                       spin=0, transfer_timeout=1.5) as e:
        for wrong in ("", "udp:1", "/tmp/x"):
            with pytest.raises(sluice.ArgumentError):
                e.serve(wrong)
        with pytest.raises(OSError):
            e.dial("unix:/nowhere/at/all", 1)  # it waits so long for a server
        with pytest.raises(sluice.CorruptError):
            e.connect(b"what is this", LIMIT)
        with pytest.raises(sluice.WaitTimeout):
            e.accept(0.01)
    with pytest.raises(sluice.FullError):
        with sluice.Engine("x", ["mem"], limits=sluice.Limits(regions=1)) as e:
            e.register("a", b"1")
            e.register("b", b"1")


def test_errors_speak_python() -> None:
    """They name neither functions and fields of sluice.h nor those of Go."""
    told: list[str] = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(sluice.Error) as e:
            call()
        told.append(str(e.value))

    e = sluice.Engine("x", ["mem"])
    peer, region = e.self_peer(), e.register("data", bytearray(64))
    remote, transfer = peer.remote("data"), peer.transfer("write")
    refused(lambda: e.serve("tcp:127.0.0.1:0"))
    refused(lambda: e.register("empty", b""))
    refused(lambda: transfer.add(region, -1, remote, 0, 8))
    refused(lambda: transfer.add(region, 0, remote, 60, 8))
    refused(lambda: transfer.add_pages(region, remote, 8, count=0))
    refused(lambda: transfer.add_pages(region, remote, 8, count=1 << 40))
    refused(lambda: transfer.add_pages(region, remote, 8, [9]))
    refused(transfer.post)
    refused(transfer.test)
    refused(lambda: e.receive(0))
    refused(lambda: region.lease(0, 65))
    refused(lambda: e.alloc(1 << 60))
    refused(lambda: e.connect(b"garbage"))
    refused(lambda: sluice.Engine("x", ["mem"], limits=sluice.Limits(transfers=1 << 21)))
    refused(lambda: sluice.Engine("x", ["mem"], transfer_timeout=-1))
    refused(lambda: sluice.Engine("x", ["mem"], spin=5))
    refused(lambda: sluice.Engine("x", []))
    refused(lambda: sluice.Engine("x", [sluice.Backend("tcp", certificate="x")]))
    tcp = sluice.Backend("tcp", listen="127.0.0.1:0")
    plain = sluice.Backend("tcp", listen="127.0.0.1:0", plaintext=True)
    with sluice.Engine("open", [plain]) as owner, sluice.Engine("pinned", [tcp]) as near:
        owner.register("data", bytearray(64))
        refused(lambda: near.connect(owner.describe()))
    refused(lambda: sluice.Engine("x", ["mem", "mem"]))
    refused(lambda: sluice.Engine("x", [sluice.Backend("shm", keys_max=0, ring_bytes=5)]))
    e.close()
    refused(e.self_peer)
    refused(lambda: e.receive(0))
    refused(transfer.post)
    refused(lambda: peer.remote("data"))
    wrong = [text for text in told
             if re.search(r"sluice_|SLUICE_|\b[A-Z]\w*[a-z][A-Z]|Config|0x|18446|: closed$|: "
                          r"busy$|: out of bounds$|: corrupt$|%!", text)]
    assert not wrong, wrong
    wrong_type: Any = "text"
    for call in (lambda: e.connect(wrong_type), lambda: transfer.message(wrong_type),
                 lambda: peer.notify(wrong_type)):
        with pytest.raises(TypeError, match=r"^(description|message) is of type str: want bytes$"):
            call()
    assert "limits.transfers is 2097152, at most 1048576" in told
    assert "the engine is closed, or was never made" in told


def test_nothing_is_left() -> None:
    def once() -> "weakref.ref[sluice.Engine]":
        a, b = End("a"), End("b")
        pair = Pair(a, b)
        data = np.zeros(100, np.uint8)
        region = a.engine.register("more", data)
        t = pair.write((0, 0, 100))
        t.add(region, 0, pair.remote, 0, 100)
        t.message(b"m")
        t.run(LIMIT)
        b.engine.receive(LIMIT)
        lease = b.region.lease(0, 8)
        pair.peer.lease(lease.token())
        a.close()
        b.close()
        data.resize(200)  # nobody holds it
        return weakref.ref(a.engine)

    once()
    before, maps = descriptors(), mapped()
    for _ in range(20):
        ref = once()
        gc.collect()
        assert ref() is None
    no_more_descriptors(before)
    assert mapped() <= maps


def mapped() -> int:
    """How many ranges that engines allocated are mapped."""
    return sum("memfd:sluice" in line for line in open("/proc/self/maps"))


def test_regions_stay_while_they_are_registered(pair: Pair) -> None:
    name = "kept"
    pair.b.engine.register(name, bytearray(b"kept alive"))
    gc.collect()
    pair.peer.refresh(pair.b.engine.describe())
    with pair.peer.transfer("read") as t:
        t.add(pair.a.region, 0, pair.peer.remote(name), 0, 10)
        t.run(LIMIT)
    assert pair.a.bytes[:10] == b"kept alive"


def test_memory_is_mapped_while_somebody_looks(pair: Pair) -> None:
    view = np.frombuffer(pair.a.engine.alloc(4096).view, np.uint8)
    gc.collect()
    view[:] = 7
    assert view.sum() == 7 * 4096


def test_an_engine_that_nobody_closed_says_so() -> None:
    sluice.Engine("lost", ["mem"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        gc.collect()
        sluice.Engine("lost", ["mem"])
        gc.collect()
    assert any(issubclass(w.category, ResourceWarning) and "lost" in str(w.message) for w in seen)


def test_a_posted_transfer_that_nobody_holds(narrow: Pair) -> None:
    index = np.zeros(4, np.int32)
    t = narrow.stuck()
    del t
    t = narrow.peer.transfer("write")
    t.add_pages(narrow.a.region, narrow.remote, 8, index)
    del t
    gc.collect()
    assert narrow.a.engine.stats()["posted"] == 0
    index.resize(8)  # refused while somebody holds it


@pytest.mark.parametrize("call", ["memfd_create", "io_uring_enter"])
def test_system_calls_that_a_container_refuses(start: Any, call: str) -> None:
    child = start("refusing.py", call)
    out, _ = child.communicate(timeout=LIMIT)
    assert out.split() == ["served"]
