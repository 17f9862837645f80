# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: files by their paths."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
from nixl_agents import finish
from sluice import _library, nixl
from sluice._library import lib
from sluice.nixl import bindings as b


@pytest.fixture
def files() -> Iterator[nixl.nixl_agent]:
    agent = nixl.nixl_agent("files", nixl.nixl_agent_config(backends=["POSIX"]))
    yield agent
    agent.close()


def write(agent: nixl.nixl_agent, data: Any, listed: Any) -> None:
    agent.register_memory([(data.ctypes.data, len(data), 0, "")], "DRAM")
    here = agent.get_xfer_descs([(data.ctypes.data, len(data), 0)], "DRAM")
    h = agent.initialize_xfer("WRITE", here, listed.trim(), "files")
    finish(agent, h)
    h.release()


def test_file_by_its_path(files: nixl.nixl_agent, tmp_path: Path) -> None:
    other, target = tmp_path / "other", tmp_path / "target"
    other.write_bytes(b"V" * 8192)
    # something of the program's own, whose descriptor the number happens to be
    fd = os.open(other, os.O_RDWR)
    listed = files.register_memory([(4096, 4096, fd, f"rw,create,direct:{target}")], "FILE")
    write(files, np.full(4096, ord("K"), np.uint8), listed)
    assert other.read_bytes() == b"V" * 8192
    assert target.read_bytes() == bytes(4096) + b"K" * 4096
    files.deregister_memory(listed)
    # the number is free again
    files.deregister_memory(files.register_memory([(0, 4096, fd, f"rw:{other}")], "FILE"))
    os.close(fd)


def test_past_the_page_cache_where_asked(files: nixl.nixl_agent, tmp_path: Path) -> None:
    files.register_memory([(np.zeros(4096, np.uint8).ctypes.data, 4096, 0, "")], "DRAM")
    with open(tmp_path / "by-number", "w+b") as f:
        listed = [(0, 4096, f.fileno(), ""), (0, 4096, 1000, f"rw,create:{tmp_path}/plain"),
                  (0, 4096, 1001, f"rw,create,direct:{tmp_path}/direct")]
        files.register_memory(listed, "FILE")
    assert files._engine is not None
    itself = files._engine.self_peer()
    host, *there = [r.what for r in files._places.all()]
    told = [itself.explain(host, itself.remote(r.name)) for r in there]
    assert ["as its registration asked" in text for text in told] == [True, True, False]


def test_a_filesystem_without_direct(files: nixl.nixl_agent, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened with O_DIRECT is opened without."""
    opened = os.open

    def refusing(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    target = tmp_path / "target"
    listed = files.register_memory([(0, 4096, 1, f"rw,create,direct:{target}")], "FILE")
    write(files, np.full(4096, ord("K"), np.uint8), listed)
    assert target.read_bytes() == b"K" * 4096


def test_edges_of_a_file_that_is_open_with_direct(files: nixl.nixl_agent, tmp_path: Path) -> None:
    """What is no whole block needs the file to be opened once more."""
    target = tmp_path / "target"
    listed = files.register_memory([(100, 5000, 1, f"rw,create,direct:{target}")], "FILE")
    write(files, np.full(5000, ord("K"), np.uint8), listed)
    assert target.read_bytes() == bytes(100) + b"K" * 5000


@pytest.mark.parametrize("by_path", [True, False])
def test_a_write_makes_a_file_longer(files: nixl.nixl_agent, tmp_path: Path, by_path: bool) -> None:
    """What was made and never written, as by a writer that died, is not read as zeros."""
    target = tmp_path / "target"
    with open(target, "w+b") as f:
        number, meta = (1, f"rw,create:{target}") if by_path else (f.fileno(), "")
        listed = files.register_memory([(0, 4096, number, meta)], "FILE")
        assert target.stat().st_size == 0
        data = np.full(4096, 7, np.uint8)
        files.register_memory([(data.ctypes.data, 4096, 0, "")], "DRAM")
        here = files.get_xfer_descs([(data.ctypes.data, 4096, 0)], "DRAM")
        h = files.initialize_xfer("READ", here, listed.trim(), "files")
        with pytest.raises(b.nixlBackendError):
            finish(files, h)
        h.release()
        h = files.initialize_xfer("WRITE", here, listed.trim(), "files")
        finish(files, h)
        h.release()
        assert target.read_bytes() == data.tobytes()
        files.deregister_memory(listed)
        # without a length it is all that is ever written
        listed = files.register_memory([(0, 0, number, meta)], "FILE")
        there = files.get_xfer_descs([(8192, 4096, number)], "FILE")
        h = files.initialize_xfer("WRITE", here, there, "files")
        finish(files, h)
        h.release()
        assert target.stat().st_size == 12288


def test_paths_that_are_refused(files: nixl.nixl_agent, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(bytes(4096))
    left = set()
    for meta, error in (
        (f"rw:{tmp_path}/missing", b.nixlBackendError),
        (f"rw,createe:{there}", b.nixlInvalidParamError),
        (f"ro,create:{there}", b.nixlInvalidParamError),
        ("rw:", b.nixlInvalidParamError),
        (f"rw:{there}\0x", b.nixlInvalidParamError),
    ):
        with pytest.raises(error):  # and what came before it in the list is taken back
            files.register_memory([(0, 4096, 1, f"ro:{there}"), (0, 4096, 2, meta)], "FILE")
        assert files._engine is not None
        left.add(files._engine.stats()["regions"])
    assert len(left) == 1
    listed = files.register_memory([(0, 4096, 1, f"ro:{there}")], "FILE")
    (tmp_path / "second").write_bytes(bytes(4096))
    with pytest.raises(b.nixlInvalidParamError, match="number of its own"):
        files.register_memory([(0, 4096, 1, f"rw:{tmp_path}/second")], "FILE")
    with pytest.raises(b.nixlNotAllowedError):
        write(files, np.ones(4096, np.uint8), listed)
    assert there.read_bytes() == bytes(4096)


def test_calls_do_not_grow_with_files(files: nixl.nixl_agent, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """To register files, to move them and to let them go takes as many calls of the library for
    many as for few.
    """
    data = np.arange(64 * 4096, dtype=np.uint64).view(np.uint8)
    files.register_memory([(data.ctypes.data, len(data), 0, "")], "DRAM")
    calls = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*arguments)

        return call

    def once(count: int) -> int:
        nonlocal calls
        before, opened = calls, len(os.listdir("/proc/self/fd"))
        listed = files.register_memory([(0, 4096, i + 1, f"rw,create:{tmp_path}/{count}-{i}")
                                        for i in range(count)], "FILE")
        here = files.get_xfer_descs([(data.ctypes.data + i * 4096, 4096, 0)
                                     for i in range(count)], "DRAM")
        h = files.initialize_xfer("WRITE", here, listed.trim(), "files")
        finish(files, h)
        h.release()
        files.deregister_memory(listed)
        assert len(os.listdir("/proc/self/fd")) == opened
        for i in range(count):
            there = (tmp_path / f"{count}-{i}").read_bytes()
            assert there == data[i * 4096 : (i + 1) * 4096].tobytes()
        return calls - before

    once(2)  # makes what is made once
    for name in _library._FUNCTIONS:
        if name != "test":  # which is asked until it is done
            monkeypatch.setattr(lib, name, counted(getattr(lib, name)))
    few = once(4)
    assert 0 < once(64) == few
