# SPDX-License-Identifier: Apache-2.0
"""What can be registered, and that its bytes are where transfers go."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sluice
from conftest import LIMIT, MIB, End, Pair, need


def moves(pair: Pair, source: Any, look: Any, n: int) -> None:
    """Writes from the object and reads into it."""
    region = pair.a.engine.register("other", source)
    assert region.length == n and region.writable
    t = pair.peer.transfer("read")
    pair.b.bytes[:n] = bytes(i * 7 % 256 for i in range(n))
    t.add(region, 0, pair.remote, 0, n)
    t.run(LIMIT)
    assert look() == bytes(pair.b.bytes[:n])
    t.close()
    region.close()
    region.close()


def test_bytearray(pair: Pair) -> None:
    data = bytearray(4096)
    region = pair.a.engine.register("busy", data)
    with pytest.raises(BufferError):
        data.append(1)  # its bytes would move
    region.close()
    data.append(1)
    moves(pair, data, lambda: bytes(data), 4097)


def test_array_of_numpy(pair: Pair) -> None:
    a = np.zeros((16, 32), np.float32)
    moves(pair, a, a.tobytes, 2048)
    fortran = np.zeros((16, 32), np.float32, order="F")
    with pytest.raises(sluice.ArgumentError, match="contiguous"):
        pair.a.engine.register("rows", a[:, ::2])
    with pytest.raises(sluice.ArgumentError, match="contiguous"):
        pair.a.engine.register("rows", fortran)
    moves(pair, a[3], a[3].tobytes, 128)


def test_mmap(pair: Pair) -> None:
    with mmap.mmap(-1, 8192) as m:
        moves(pair, m, lambda: bytes(m), 8192)


def test_ctypes(pair: Pair) -> None:
    block = (ctypes.c_char * 100)()
    moves(pair, block, lambda: block.raw, 100)
    moves(pair, sluice.HostMemory(ctypes.addressof(block), 100), lambda: block.raw, 100)


def test_memory_of_the_engine(pair: Pair) -> None:
    with pair.a.engine.alloc(8192, populate=True, huge=False) as m:
        view = np.frombuffer(m.view, np.uint8)
        moves(pair, m, view.tobytes, 8192)
        with pytest.raises(BufferError, match="view"):
            m.close()
        del view
        region = pair.a.engine.register("busy", m)
        with pytest.raises(sluice.BusyError):
            m.close()
        region.close()
    with pytest.raises(sluice.BoundsError):
        pair.a.engine.alloc(0)


def test_tensor_of_torch(pair: Pair) -> None:
    torch = need("torch", "pip install torch --index-url https://download.pytorch.org/whl/cpu")
    t = torch.zeros(64, 8, dtype=torch.bfloat16)
    moves(pair, t, lambda: t.view(torch.uint8).numpy().tobytes(), 1024)
    with pytest.raises(sluice.ArgumentError, match="contiguous"):
        pair.a.engine.register("columns", t.t())
    moves(pair, t[3], lambda: t[3].view(torch.uint8).numpy().tobytes(), 16)


class TensorLike:
    """The part of a tensor of torch that is looked at."""

    def __init__(self, of: Any, device: int = -1) -> None:
        self.of, self.device = of, device

    def data_ptr(self) -> int:
        address: int = self.of.ctypes.data
        return address

    def is_contiguous(self) -> bool:
        return bool(self.of.flags.c_contiguous)

    def numel(self) -> int:
        return int(self.of.size)

    def element_size(self) -> int:
        return int(self.of.itemsize)

    def get_device(self) -> int:
        return self.device


def test_what_looks_like_a_tensor(pair: Pair) -> None:
    a = np.zeros(100, np.float16)
    moves(pair, TensorLike(a), a.tobytes, 200)


class OnlyDLPack:
    def __init__(self, of: Any) -> None:
        self.of = of

    def __dlpack_device__(self) -> Any:
        return self.of.__dlpack_device__()

    def __dlpack__(self) -> Any:
        return self.of.__dlpack__()


def test_dlpack(pair: Pair) -> None:
    a = np.zeros((10, 10), np.int64)
    moves(pair, OnlyDLPack(a), a.tobytes, 800)
    with pytest.raises(sluice.ArgumentError, match="contiguous"):
        pair.a.engine.register("columns", OnlyDLPack(a[:, 1:3]))


def test_bytes_are_read_only(pair: Pair) -> None:
    region = pair.a.engine.register("fixed", b"constant")
    assert not region.writable
    with pytest.raises(sluice.ReadOnlyError):
        pair.peer.transfer("read").add(region, 0, pair.remote, 0, 8)
    t = pair.peer.transfer("write")
    t.add(region, 0, pair.remote, 0, 8)
    t.run(LIMIT)
    assert pair.b.bytes[:8] == b"constant"
    back = pair.b.engine.connect(pair.a.engine.describe(), LIMIT)
    with pytest.raises(sluice.ReadOnlyError):
        back.transfer("write").add(pair.b.region, 0, back.remote("fixed"), 0, 8)


def test_what_has_no_bytes(pair: Pair) -> None:
    nested = np.zeros(4, dtype=[("place", np.int32), ("what", object)])
    for wrong in (object(), 7, "text", [1, 2], np.array([object(), None]), nested):
        with pytest.raises(TypeError, match="cannot be registered"):
            pair.a.engine.register("x", wrong)
    for empty in (b"", np.zeros(0), sluice.HostMemory(4096, 0)):
        with pytest.raises(sluice.ArgumentError, match="^memory of 0 bytes cannot be registered$"):
            pair.a.engine.register("x", empty)
    named = np.zeros(4, dtype=[("Object", np.int32)])
    pair.a.engine.register("a name with an O", named).close()
    for negative in (
        sluice.HostMemory(-1, 8),
        sluice.HostMemory(4096, -1),
        sluice.DeviceMemory(4096, -1),
        sluice.DeviceMemory(4096, 8, device=-1),
        sluice.File(0, offset=-1, length=8),
        sluice.File(0, length=-1),
        sluice.File(-1, length=8),
    ):
        with pytest.raises(sluice.BoundsError, match=" is -1: want 0 or more"):
            pair.a.engine.register("x", negative)
    pair.a.engine.register("x", b"1")
    with pytest.raises(sluice.BusyError):
        pair.a.engine.register("x", b"2")


def test_private_regions_are_not_described(pair: Pair) -> None:
    pair.b.engine.register("secret", b"1", private=True)
    pair.b.engine.register("open", b"1")
    pair.peer.refresh(pair.b.engine.describe())
    pair.peer.remote("open")
    with pytest.raises(sluice.NoRouteError):
        pair.peer.remote("secret")


def test_many_at_once(pair: Pair) -> None:
    a, parts = pair.a.engine, [bytearray([i]) * 100 for i in range(50)]
    named = [(f"part-{i}", part) for i, part in enumerate(parts)]
    with pytest.raises(sluice.BusyError, match=r"segments\[50\]"):
        a.register_many([*named, ("part-7", b"x")])
    parts[3].append(0)  # none is held, so that it may be moved
    regions = a.register_many(named)
    with pytest.raises(BufferError):
        parts[3].append(0)
    self_peer = a.self_peer()
    remotes = self_peer.remotes([r.name for r in regions])
    assert [r.length for r in remotes] == [len(part) for part in parts]
    with pytest.raises(sluice.NoRouteError):
        self_peer.remotes(["part-1", "nothing"])
    t = self_peer.transfer("write")
    t.add(regions[4], 0, remotes[5], 10, 20)
    with pytest.raises(sluice.BusyError):  # and those before it are closed
        a.close_many([regions[0], regions[4], regions[1]])
    parts[0].append(0)
    for held in parts[4], parts[1]:
        with pytest.raises(BufferError):
            held.append(0)
    t.run(LIMIT)
    assert parts[5] == bytearray([5]) * 10 + bytearray([4]) * 20 + bytearray([5]) * 70
    t.close()
    a.close_many(regions)
    a.close_many(regions)
    a.register_many(named)


@pytest.mark.parametrize("options", [{}, {"path": "threads", "threads": 2}])
def test_files(tmp_path: Path, options: dict[str, Any]) -> None:
    end = End("files", ["mem", sluice.Backend("posix", **options)])
    name = tmp_path / "file"
    name.write_bytes(bytes(MIB))
    with open(name, "r+b") as f:
        end.engine.register("file", sluice.File(f, offset=4096))
        self_peer = end.engine.self_peer()
        remote = self_peer.remote("file")
        assert remote.length == MIB - 4096
        end.bytes[:] = np.random.default_rng(1).integers(0, 256, MIB, np.uint8).tobytes()
        t = self_peer.transfer("write")
        t.add(end.region, 0, remote, 0, 65536)
        t.add(end.region, 70001, remote, 70003, 999)
        t.run(LIMIT)
        found = name.read_bytes()
        assert found[4096 : 4096 + 65536] == end.bytes[:65536]
        assert found[74099 : 74099 + 999] == end.bytes[70001:71000]
        with pytest.raises(sluice.BoundsError):
            t.reset()
            t.add(end.region, 0, remote, MIB - 4096 - 1, 2)
        f.truncate(5000)
        t.close()
        t = self_peer.transfer("read")
        t.add(end.region, 0, remote, 65536, 4096)
        with pytest.raises(sluice.Error):  # the file was cut behind our back
            t.run(LIMIT)
        t.close()
        with pytest.raises(sluice.ArgumentError, match="longer"):
            end.engine.register("empty", sluice.File(f, offset=5000))
        end.close()


def test_durable_writes(tmp_path: Path) -> None:
    """To a file, ours or a peer's, and nowhere else."""
    backends = ["mem", sluice.Backend("posix")]
    with End("a", backends) as a, End("b", backends) as b:
        pair, name = Pair(a, b), tmp_path / "file"
        name.write_bytes(bytes(MIB))
        with open(name, "r+b") as f:
            b.engine.register("file", sluice.File(f))
            pair.peer.refresh(b.engine.describe())
            for i, (end, peer, only) in enumerate([(b, b.engine.self_peer(), "posix"),
                                                   (a, pair.peer, None)]):
                end.bytes[:5000] = bytes([i + 1]) * 5000
                with peer.transfer("write", only=only, durable=True) as t:
                    t.add(end.region, 0, peer.remote("file"), 3, 5000)
                    t.run(LIMIT)
                assert name.read_bytes()[:5004] == b"\0\0\0" + bytes([i + 1]) * 5000 + b"\0"
        with pair.peer.transfer("write", durable=True) as t:
            with pytest.raises(sluice.NoRouteError):
                t.add(a.region, 0, pair.remote, 0, 8)
        with pytest.raises(sluice.NotSupportedError):
            pair.peer.transfer("read", durable=True)


def test_cuda_by_the_stand_in(standin: Any) -> None:
    """Device memory by the array interface, by what looks like a tensor, by DLPack's device and by
    address.
    """
    device = standin.alloc(65536)
    end = End("cuda", ["mem", sluice.Backend("cuda", library=standin.path, devices=[0])])

    class Array:
        __cuda_array_interface__ = {"shape": (64, 256), "typestr": "<f4", "data": (device, False),
                                    "version": 3, "strides": None}

    class Tensor(TensorLike):
        def data_ptr(self) -> int:
            return int(device)

    sources = [Array(), Tensor(np.zeros(65536, np.uint8), device=0), sluice.DeviceMemory(device,
        65536)]
    for i, source in enumerate(sources):
        region = end.engine.register(f"hbm {i}", source)
        assert region.length == 65536
        peer = end.engine.self_peer()
        remote = peer.remote(f"hbm {i}")
        end.bytes[:65536] = bytes((j * 3 + i) % 256 for j in range(65536))
        with peer.transfer("write") as t:
            t.add(end.region, 0, remote, 0, 65536)
            t.run(LIMIT)
        want = bytes(end.bytes[100:1100])
        end.bytes[:65536] = bytes(65536)
        with peer.transfer("read") as t:
            t.add(end.region, 0, remote, 100, 1000)
            t.run(LIMIT)
        assert end.bytes[:1000] == want
        remote.close()
        region.close()
    Array.__cuda_array_interface__ = dict(Array.__cuda_array_interface__, strides=(2048, 4))
    with pytest.raises(sluice.ArgumentError, match="contiguous"):
        end.engine.register("holes", Array())
    end.close()
    standin.free(device)


def test_memory_that_is_registered_twice() -> None:
    """Each registration is one of its own, by its name: the end of one is none of another that
    lies over the same bytes, in part or whole.
    """
    spans = {"whole": (0, 8192), "again": (0, 8192), "part": (1024, 2048), "over": (2048, 6144)}
    for backend in ("shm", "mem"):
        with sluice.Engine("owner", [backend]) as owner, sluice.Engine("user", [backend]) as user:
            source, target = np.full(8192, 7, np.uint8), np.zeros(8192, np.uint8)
            ours = {name: user.register(name, source[at : at + n])
                    for name, (at, n) in spans.items()}
            theirs = {name: owner.register(name, target[at : at + n])
                      for name, (at, n) in spans.items()}
            peer = user.connect(owner.describe(), LIMIT)
            transfers = {name: peer.transfer("write") for name in spans}
            for name, t in transfers.items():
                t.add(ours[name], 0, peer.remote(name), 0, spans[name][1])
                t.run()
            for ended in spans:
                theirs[ended].close()
                with pytest.raises(sluice.BusyError):
                    ours[ended].close()
                with pytest.raises(sluice.RevokedError):
                    transfers[ended].run()
                transfers.pop(ended).close()
                ours[ended].close()
                for name, t in transfers.items():
                    target[:] = 0
                    t.run()
                    at, n = spans[name]
                    assert (target[at : at + n] == 7).all() and target.sum() == 7 * n
