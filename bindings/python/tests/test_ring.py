# SPDX-License-Identifier: Apache-2.0
"""Rings: one writer, and readers in this process and in others that are stopped and killed."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest
import sluice
from conftest import LIMIT, go_on, need, stop, until
from sluice.ring import Handle, Reader, View, Writer

SIZE = 64 << 10


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ring")


@pytest.fixture
def writer(path: str) -> Iterator[Writer]:
    with Writer(path, SIZE, sums=True, note=b"a note") as made:
        yield made


@pytest.fixture
def reader(writer: Writer) -> Iterator[Reader]:
    with Reader.join(writer.path, LIMIT) as made:
        yield made


class Other:
    """A reader in a process of its own."""

    def __init__(self, start: Any, path: str) -> None:
        self.child: "subprocess.Popen[str]" = start("ring_reader.py", path)
        assert self.hears() == "joined"

    def tell(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def hears(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def get(self, handle: Handle) -> str:
        self.tell(f"{handle.row} {handle.generation}")
        return self.hears()

    def close(self) -> str:
        self.tell("close")
        return self.hears()


def test_put_and_get(writer: Writer, reader: Reader) -> None:
    handle = writer.put("image", b"pix", bytearray(b"els"), memoryview(b""))
    assert pickle.loads(pickle.dumps(handle)) == handle == writer.find("image")
    assert "image" in writer and "other" not in writer and writer.find("other") is None
    with reader.get(handle) as view:
        assert view.memory == b"pixels" and view.memory.readonly
        view.verify()
    with writer.get(handle) as view:
        assert bytes(view.memory) == b"pixels"
    with pytest.raises(sluice.BusyError, match="there is an object of this key"):
        writer.put("image", b"other")
    with pytest.raises(sluice.BoundsError, match="reserve 65537 bytes"):
        writer.put("huge", bytes(SIZE + 1))
    with pytest.raises(sluice.MissingError):
        reader.get(Handle(handle.row, handle.generation + 1))
    with pytest.raises(sluice.BoundsError):
        reader.get(Handle(1 << 32, 1))
    with pytest.raises(LookupError, match="no object of this key"):
        writer.handle("other")
    with pytest.raises(sluice.ArgumentError, match="NUL"):
        writer.put("a\0b", b"")
    with reader.get(writer.put("nothing")) as view:
        assert view.memory == b""
    assert writer.handle("image") == handle and writer.touch("image")
    writer.end_touches()
    assert not writer.touch("other") and not writer.remove("other") and writer.remove("image")
    writer.clear()
    stats = writer.stats()
    assert (stats["objects"], stats["readers"], stats["puts"], stats["free"]) == (0, 1, 2, SIZE)
    assert reader.note == b"a note" and not reader.gone
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(reader)


def test_full(writer: Writer, reader: Reader) -> None:
    handle = writer.put("a", bytes(SIZE))
    with reader.get(handle):
        for timeout in (0, 0.3):
            with pytest.raises(sluice.FullError, match=f"holds 1 of {SIZE} bytes"):
                writer.put("b", b"b", timeout=timeout)
        assert "b" not in writer
    writer.put("b", b"b", timeout=LIMIT)
    assert writer.find("a") is None and writer.stats()["evicted"] == 1


def test_views_hold(writer: Writer, reader: Reader) -> None:
    """A view cannot be closed while something of its memory is looked at, and lets go when the last
    such thing is collected.
    """
    handle = writer.put("a", bytes(range(200)) * 2)
    view = reader.get(handle)
    part = view.memory[3:9]  # of a memoryview that is gone already
    with pytest.raises(sluice.BusyError, match="made of it still"):
        view.close()
    assert view.memory[0] == 0, "nothing has changed"
    with pytest.raises(sluice.BusyError, match="views are open"):
        reader.close()
    assert bytes(part) == bytes(range(3, 9))
    part.release()
    view.close()
    view.close()
    with pytest.raises(sluice.HandleError, match="the view is closed"):
        view.memory
    with pytest.raises(sluice.HandleError):
        view.verify()
    part = reader.get(handle).memory[:5]
    writer.remove("a")
    gc.collect()
    assert bytes(part) == bytes(range(5)) and writer.stats()["free"] < SIZE
    del part
    until(lambda: writer.stats()["free"] == SIZE)


def test_arrays(writer: Writer, reader: Reader) -> None:
    numpy = need("numpy", "pip install numpy")
    data = numpy.arange(24, dtype="int32").reshape(2, 3, 4)
    view = reader.get(writer.put("a", data))
    array = view.numpy("int32", (2, 3, 4))
    assert (array == data).all() and not array.flags.writeable
    with pytest.raises(sluice.BusyError):
        view.close()
    with pytest.raises(ValueError):
        view.numpy("int32", (5, 5))
    del view
    rows = array[1]
    del array
    writer.remove("a")
    assert (rows == data[1]).all() and writer.stats()["free"] < SIZE
    del rows
    until(lambda: writer.stats()["free"] == SIZE)
    with reader.get(writer.put("empty")) as view:
        assert view.numpy("int32").shape == (0,)


def test_writer_ends(path: str) -> None:
    with Writer(path, SIZE) as first:
        reader = Reader.join(path, LIMIT)
        handle = first.put("a", b"first")
        with pytest.raises(sluice.NotSupportedError):
            reader.get(handle).verify()
    until(lambda: reader.gone)
    with reader.get(handle) as view, Writer(path, SIZE) as second:
        assert view.memory == b"first", "what was there can be got still"
        later = second.put("a", b"second")
        with pytest.raises(sluice.MissingError, match="the writer has ended"):
            reader.get(later)
        with Reader.join(path, LIMIT) as again:
            assert again.get(later).memory == b"second"
            with pytest.raises(sluice.MissingError):
                again.get(handle)
    reader.close()
    with pytest.raises(sluice.HandleError):
        reader.get(handle)
    with pytest.raises(TimeoutError):
        Reader.join(path, 0.3)


def test_killed_reader(start: Any, path: str) -> None:
    with Writer(path, SIZE, awaited=1) as writer:
        handle = writer.put("a", bytes([7]) * SIZE)
        other = Other(start, path)
        assert other.get(handle) == "[7]"
        with pytest.raises(sluice.FullError, match=f"process {other.child.pid}"):
            writer.put("b", b"b", timeout=0)
        other.child.kill()
        writer.put("b", b"b", timeout=LIMIT)


def test_stopped_reader(start: Any, path: str) -> None:
    """It loses what it held, and is told by all that it does."""
    with Writer(path, SIZE, frozen=0.05) as writer:
        other = Other(start, path)
        handle = writer.put("a", bytes([7]) * SIZE)
        assert other.get(handle) == "[7]"
        stop(other.child)
        later = writer.put("b", bytes([8]) * SIZE, timeout=LIMIT)
        assert writer.stats()["revoked"] == 1
        go_on(other.child)
        assert other.close() == "RevokedError"
        assert other.get(later) == "RevokedError"


def _in_a_fork(view: View, told: Any) -> None:
    try:
        view.verify()
    except sluice.ForkError as e:
        told.send(str(e))


def test_fork(writer: Writer, reader: Reader) -> None:
    view = reader.get(writer.put("a", b"a"))
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(view, theirs))
    child.start()
    assert ours.poll(LIMIT) and "was forked" in ours.recv()
    child.join(LIMIT)
    assert child.exitcode == 0
    view.verify()
    view.close()
