# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: memory of all kinds, the lists that name it, and metadata."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import need
from nixl_agents import N, Two, finish
from sluice import nixl
from sluice.nixl import bindings as b
from sluice.nixl import blob, places


def test_deregistered_memory_is_out_of_reach(two: Two) -> None:
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, 100)), two.descs(two.y, (0, 100)),
                              "beta")
    finish(two.a, h)
    two.b.deregister_memory(two.b.get_reg_descs([(two.y.ctypes.data, N, 0, "")], "DRAM"))
    two.x[:] = 9
    with pytest.raises((b.nixlNotFoundError, b.nixlBackendError)):
        finish(two.a, h)
    assert not two.y.any()
    with pytest.raises(b.nixlNotAllowedError):  # it is listed by a transfer
        two.a.deregister_memory(two.a.get_reg_descs([(two.x.ctypes.data, N, 0, "")], "DRAM"))
    h.release()
    two.a.deregister_memory(two.a.get_reg_descs([(two.x.ctypes.data, N, 0, "")], "DRAM"))


def test_metadata_that_was_altered(two: Two) -> None:
    good = two.b.get_agent_metadata()
    rng = random.Random(3)
    for _ in range(3000):
        bad = bytearray(good)
        if rng.random() < 0.5:
            del bad[rng.randrange(len(bad)) :]
        else:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        if bytes(bad) == good:
            continue
        with pytest.raises(b.nixlMismatchError):
            blob.decode(bytes(bad))
    assert blob.decode(good).agent == "beta"


def test_metadata_of_many_regions_is_small() -> None:
    a = nixl.nixl_agent("many")
    z = np.zeros(2048 * 4096, np.uint8)
    a.register_memory(np.array([[z.ctypes.data + 4096 * i, 4096, 0] for i in range(2048)],
                               np.uint64), "DRAM")
    assert len(a.get_agent_metadata()) < 90_000  # what the wheel's takes
    a.close()


def test_lists_are_data_and_no_pickle(two: Two) -> None:
    made = two.a.get_reg_descs([(4096, 10, 0, b"\xff\0")], "DRAM")
    assert made is not None
    data = two.a.get_serialized_descs(made)
    assert two.b.deserialize_descs(data) == made and two.b.deserialize_descs(data)[0] == (4096, 10,
        0, b"\xff\0")
    assert pickle.loads(pickle.dumps(made)) == made  # programs that pickle them themselves
    for bad in (b"", data[:-3], data[:20], pickle.dumps([1]), b"x" * 100):
        with pytest.raises(b.nixlMismatchError):
            two.a.deserialize_descs(bad)


def test_tensors(two: Two) -> None:
    torch = need("torch", "pip install torch --index-url https://download.pytorch.org/whl/cpu")
    t = torch.zeros(4, 8)
    one, many, reg = two.a.get_xfer_descs(t), two.a.get_xfer_descs([t, t]), two.a.get_reg_descs([t])
    assert one is not None and many is not None and reg is not None
    assert one[0] == (t.data_ptr(), 128, 0) and many.descCount() == 2 and reg[0] == (t.data_ptr(),
        128, 0, b"")
    assert two.a.get_xfer_descs(t.t()) is None and two.a.get_xfer_descs([t.t()]) is None


class Card:
    """What a tensor on a card shows."""

    def __init__(self, address: int, n: int, device: int = 0) -> None:
        self.address, self.n, self.device = address, n, device

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.n

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def get_device(self) -> int:
        return self.device


def test_cards_by_the_stand_in(standin: Any) -> None:
    a = nixl.nixl_agent("card", nixl.nixl_agent_config(backends=["UCX"]))
    a.create_backend("CUDA", {"library": standin.path, "devices": "0"})
    address = standin.alloc(65536)
    card, x = Card(address, 65536), np.arange(65536).astype(np.uint8)
    mine = a.register_memory([card])
    assert mine.getType() == b.VRAM_SEG and mine[0] == (address, 65536, 0, b"")
    a.register_memory([(x.ctypes.data, 65536, 0, "")], "DRAM")
    x_descs = a.get_xfer_descs([(x.ctypes.data, 65536, 0)], "DRAM")
    there = a.get_xfer_descs([card])
    assert x_descs is not None and there is not None
    for op in ("WRITE", "READ"):
        h = a.initialize_xfer(op, x_descs, there, "card")
        finish(a, h)
        h.release()
        if op == "WRITE":
            x[:] = 0
    assert (x == np.arange(65536).astype(np.uint8)).all()
    assert a.get_xfer_descs([card, Card(address, 8, 1)]) is None
    a.deregister_memory(mine)
    a.close()
    standin.free(address)


def test_cards_and_files(standin: Any, tmp_path: Path) -> None:
    """Under the name GDS, by way of host memory."""
    a = nixl.nixl_agent("gds", nixl.nixl_agent_config(backends=["GDS"]))
    a.create_backend("CUDA", {"library": standin.path, "devices": "0"})
    address, name = standin.alloc(65536), tmp_path / "file"
    name.write_bytes(np.random.default_rng(5).integers(0, 256, 65536, np.uint8).tobytes())
    with open(name, "r+b") as f:
        a.register_memory([(address, 65536, 0, "")], "VRAM")
        a.register_memory([(0, 65536, f.fileno(), "")], "FILE")

        def move(op: str, card: int, file: int, n: int) -> None:
            h = a.initialize_xfer(
                op, a.get_xfer_descs([(address + card, n, 0)], "VRAM"),
                a.get_xfer_descs([(file, n, f.fileno())], "FILE"), "gds"
            )
            finish(a, h)
            assert a.query_xfer_backend(h) == "GDS"
            h.release()

        move("READ", 100, 5000, 40000)
        move("WRITE", 100, 7, 3000)
    a.close()
    found = name.read_bytes()
    assert found[7:3007] == found[5000:8000]
    standin.free(address)


def test_ranges_are_found_by_address() -> None:
    table: places.Places[str] = places.Places()
    table.put(places.Range(b.DRAM_SEG, 100, 50, 0, "1", "first"))
    table.put(places.Range(b.DRAM_SEG, 100, 10, 0, "2", "short"))
    table.put(places.Range(b.DRAM_SEG, 120, 5, 0, "3", "inner"))
    table.put(places.Range(b.DRAM_SEG, 100, 50, 1, "4", "other device"))

    def find(*rows: tuple[int, int, int]) -> list[tuple[str, int]]:
        at = table.locate(b.DRAM_SEG, np.array(rows, np.uint64))
        which = at.which
        if which is None:
            which = np.zeros(len(rows), np.int64)
        return [(at.ranges[int(which[i])].what, int(at.offsets[i])) for i in range(len(rows))]

    assert find((100, 50, 0)) == [("first", 0)]
    assert find((121, 4, 0)) == [("inner", 1)]
    assert find((121, 20, 0), (100, 1, 1), (149, 1, 0)) == [("first", 21), ("other device", 0),
                                                            ("first", 49)]
    for bad in ((99, 2, 0), (149, 2, 0), (150, 1, 0), (100, 1, 2), (2**64 - 1, 2, 0)):
        with pytest.raises(b.nixlNotFoundError):
            find(bad)
    def alike(length: int) -> list[str]:
        return [r.what for r in table.alike(b.DRAM_SEG, 100, length, 0)]

    assert alike(10) == ["short"] and alike(11) == []
    table.put(places.Range(b.DRAM_SEG, 100, 10, 0, "alike", "latest"))
    assert alike(10) == ["latest", "short"]
    for left in ("alike", "2"):
        table.drop(left)
    assert alike(10) == []


def test_ranges_of_one_name() -> None:
    """The last one stays, as from metadata that has a number twice."""
    table: places.Places[Any] = places.Places()
    for twice in (2, places._MANY):
        rs = [places.Range(b.DRAM_SEG, 4096 * (i + 1), 4096, 0, str(i % twice), "")
              for i in range(twice + 2)]
        table.put(*rs)
        table.put(*rs)
        assert table.all() == [rs[-2], rs[-1], *rs[2:-2]]
        assert [table.alike(b.DRAM_SEG, r.address, 4096, 0) for r in rs[:3]] == [[], [], [rs[2]]]
        table.drop(*[str(i) for i in range(twice)])
        assert not table.all() and not table._lists


def test_ranges_that_hold_another_together() -> None:
    table: places.Places[str] = places.Places()
    spans = [(0, 100), (100, 50), (140, 60), (210, 90), (0, 400)]
    for i, (address, length) in enumerate(spans):
        table.put(places.Range(b.DRAM_SEG, address, length, 0, str(i), "", writable=i != 1))

    def covered(address: int, length: int, *without: int, writable: bool = True) -> bool:
        r = places.Range(b.DRAM_SEG, address, length, 0, "", "", writable=writable)
        return table.covered([r], {str(i) for i in without}) == [r]

    assert covered(0, 400) and not covered(0, 401) and not covered(0, 400, 4)
    assert covered(0, 200, 4, writable=False) and not covered(0, 200, 4)  # a part is read alone
    assert not covered(0, 210, 4, writable=False) and not covered(200, 10, 4)
    assert covered(145, 40, 4) and not covered(145, 40, 2, 4) and covered(145, 5, 2, 4,
                                                                         writable=False)
    table.drop("4")
    assert not covered(0, 400) and covered(210, 90) and not covered(210, 90, 3)


def test_many_files_take_their_own_time_each() -> None:
    """A transfer over thousands of files looks at each range once or so, not at all for each."""
    looks = 0

    class Watched(places.Range[str]):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += name in ("kind", "device", "address")
            return super().__getattribute__(name)

    table: places.Places[str] = places.Places()
    count = 2000
    for i in range(count):
        table.put(Watched(b.FILE_SEG, 0, 4096, i, str(i), f"file {i}"))
    rows = np.array([(1024, 512, i) for i in range(count - 1, -1, -1)], np.uint64)
    at = table.locate(b.FILE_SEG, rows)
    assert at.which is not None
    found = [at.ranges[i].what for i in at.which.tolist()]
    assert found == [f"file {i}" for i in range(count - 1, -1, -1)]
    assert (at.offsets == 1024).all() and (at.lengths == 512).all()
    for i in range(count):
        assert table.alike(b.FILE_SEG, 0, 4096, i)
        table.drop(str(i))
    assert looks < 30 * count
    assert table.all() == []
    with pytest.raises(b.nixlNotFoundError):
        table.locate(b.FILE_SEG, rows)
