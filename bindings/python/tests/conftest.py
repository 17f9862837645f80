# SPDX-License-Identifier: Apache-2.0
"""Two engines of one process, and what tests of faults need."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import pytest
import sluice
from patience import LIMIT
from sluice.cache import Cache
from sluice.transfer import Op

if TYPE_CHECKING:
    from nixl_agents import Two

__all__ = ["LIMIT"]
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MIB = 1 << 20


def until(holds: Callable[[], Any]) -> None:
    """Returns when this holds, as it must."""
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


class End:
    """An engine with a region "data" of 1 MiB."""

    def __init__(self, name: str, backends: Any = ("mem",), **config: Any) -> None:
        self.engine = sluice.Engine(name, backends, **config)
        self.memory = self.engine.alloc(MIB)
        self.bytes = self.memory.view
        self.region = self.engine.register("data", self.memory)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> End:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pair:
    """a reaches b."""

    def __init__(self, a: End, b: End) -> None:
        self.a, self.b = a, b
        self.peer = a.engine.connect(b.engine.describe(), LIMIT)
        self.remote = self.peer.remote("data")

    def write(self, *descs: tuple[int, int, int], op: Op = "write") -> sluice.Transfer:
        t = self.peer.transfer(op)
        for offset, there, n in descs:
            t.add(self.a.region, offset, self.remote, there, n)
        return t

    def stuck(self) -> sluice.Transfer:
        """A transfer that stays posted, since the other side has no room for its message."""
        for _ in range(1000):
            t = self.write((0, 0, 64))
            t.message(b"m")
            t.post()
            if not ends(t):
                return t
        raise AssertionError("every message found room")


def ends(t: sluice.Transfer) -> bool:
    """Whether a copy of 64 bytes ends in its time. One of the waits may be over because this
    process stood still meanwhile: then it ends in the next.
    """
    for _ in range(3):
        try:
            t.wait(0.3)
            return True
        except sluice.WaitTimeout:
            pass
    return False


# What a shell starts in the background ignores Ctrl-C, and so would what the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = End("a"), End("b")
    yield Pair(a, b)
    a.close()
    b.close()


@pytest.fixture
def narrow() -> Iterator[Pair]:
    """A pair whose second side takes one message and no more."""
    a = End("a")
    b = End("b", [sluice.Backend("mem", batches_max=4)], limits=sluice.Limits(notifications=1))
    yield Pair(a, b)
    a.close()
    b.close()


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a program of this folder with this interpreter, and with words before that."""
    children = []

    def begin(name: str, *args: str, before: Sequence[str] = (),
              **options: Any) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [*before, sys.executable, str(HERE / name), *args], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, **options
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()


class Nodes:
    """Two nodes of a cluster, "a" and "b", and the address that names both."""

    def __init__(self, folder: Path, start: Callable[..., "subprocess.Popen[str]"]) -> None:
        self._start, self.folders = start, {name: folder / name for name in "ab"}
        self.children = {}
        for name, where in self.folders.items():
            where.mkdir()
            self.children[name] = self.started(name)
        self.address = "nodes:" + ",".join(
            f"{name}=unix:{where}/socket" for name, where in self.folders.items())

    def started(self, name: str) -> "subprocess.Popen[str]":
        child = self._start("cache_server.py", str(self.folders[name]), name)
        assert child.stdout is not None and child.stdout.readline() == "serves\n"
        return child

    def kill(self, name: str) -> None:
        self.children[name].kill()
        self.children[name].wait()

    def connect(self) -> Cache:
        """Once both are reached."""
        cache = Cache.connect(self.address, timeout=LIMIT)
        self.wait(cache, "serving")
        return cache

    def wait(self, cache: Cache, *states: str) -> None:
        until(lambda: {n["state"] for n in cache.stats()["nodes"]} == set(states))


@pytest.fixture
def nodes(tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]) -> Nodes:
    return Nodes(tmp_path, start)


def stop(child: "subprocess.Popen[str]") -> None:
    """Stops a process, and returns when it stands still."""
    os.kill(child.pid, signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def go_on(child: "subprocess.Popen[str]") -> None:
    os.kill(child.pid, signal.SIGCONT)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def no_more_descriptors(than: int) -> None:
    """Waits for what closes some in the background."""
    until(lambda: descriptors() <= than)


def need(module: str, fix: str) -> Any:
    """A module that tests can do without: skips with what to install, and on nothing else."""
    try:
        return __import__(module)
    except ModuleNotFoundError as e:
        if e.name != module:
            raise
        pytest.skip(f"unavailable: {module} is not installed: {fix}")


def need_program(name: str, fix: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"unavailable: no {name}: {fix}")
    return path


class StandIn:
    """The software stand-in of the CUDA driver, as the tests of package cuda build it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "libcuda-standin.so")
        source = ROOT / "cuda" / "testdata" / "libcuda_standin.c"
        compiler = need_program("gcc", "apt-get install gcc")
        subprocess.run([compiler, "-std=c11", "-O1", "-D_GNU_SOURCE", "-pthread", "-shared",
                        "-fPIC", "-o", self.path, str(source)], check=True)
        panel = folder / "panel"
        panel.write_bytes(bytes(4096))
        os.environ["STANDIN_PANEL"] = str(panel)
        self._library = ctypes.CDLL(self.path)
        context = ctypes.c_void_p()
        assert self._library.cuInit(0) == 0 and self._library.cuDevicePrimaryCtxRetain(
            ctypes.byref(context), 0) == 0
        assert self._library.cuCtxSetCurrent(context) == 0

    def alloc(self, length: int) -> int:
        out = ctypes.c_uint64()
        assert self._library.cuMemAlloc_v2(ctypes.byref(out), ctypes.c_size_t(length)) == 0
        return out.value

    def free(self, address: int) -> None:
        assert self._library.cuMemFree_v2(ctypes.c_uint64(address)) == 0


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """One for the process, which opens a driver once."""
    return StandIn(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def two() -> Iterator[Two]:
    """Two agents of the face of NIXL."""
    from nixl_agents import Two  # which takes LIMIT from here

    made = Two()
    yield made
    made.close()
