# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: the same scenario as over the wheel from PyPI, and what is better."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
from conftest import HERE, LIMIT, descriptors, need
from sluice import nixl
from sluice.nixl import bindings as b
from sluice.nixl import blob, messages, places, plugins

N = 1 << 20

# What our face answers where the wheel crashes or gives memory of somebody else.
HAZARDS = {
    "item outside": "raises IndexError",
    "post after release": "raises nixlInvalidParamError",
    "state after release": "raises nixlInvalidParamError",
    "use of released": "raises nixlInvalidParamError",
}


def ports(n: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    numbers = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return numbers


def scenario(*command: str) -> list[Any]:
    result = subprocess.run([*command], capture_output=True, text=True, timeout=5 * LIMIT)
    seen = []
    for line in result.stdout.splitlines():
        try:
            name, outcome = json.loads(line)
        except ValueError:
            continue  # a log
        seen.append((name, outcome))
    assert seen and seen[-1][0] == "sent in part", result.stdout + result.stderr
    return seen


def theirs() -> str:
    """An interpreter with the wheel, which hack/python-test makes where it can."""
    for python in (os.environ.get("NIXL_PYTHON", ""), str(HERE.parents[2] / "build" / "venv-nixl" / "bin" / "python")):
        if python and subprocess.run([python, "-c", "import nixl._api"], capture_output=True).returncode == 0:
            return python
    pytest.skip("unavailable: no Python with nixl: hack/python-test makes one, or name one by NIXL_PYTHON")


def test_the_scenario_runs() -> None:
    seen = scenario(sys.executable, "-m", "sluice.nixl.shim", str(HERE / "nixl_scenario.py"), *ports(2), "hazards")
    assert {name: outcome for name, outcome in seen if name in HAZARDS} == HAZARDS
    wrong = [name for name, outcome in seen if outcome is False and name not in EXPECTED_FALSE]
    assert not wrong


EXPECTED_FALSE = {"check stranger", "check descs outside", "unequal", "of stranger", "later unknown", "forgotten"}


def test_the_same_as_the_wheel() -> None:
    python = theirs()
    wheel = scenario(python, "-W", "ignore", str(HERE / "nixl_scenario.py"), *ports(2))
    ours = scenario(sys.executable, "-m", "sluice.nixl.shim", str(HERE / "nixl_scenario.py"), *ports(2))
    differ = [(w, o) for w, o in zip(wheel, ours) if w != o]
    assert not differ and len(ours) == len(wheel)


class Two:
    """Two agents of this process that know each other."""

    def __init__(self, **config: Any) -> None:
        self.a, self.b = (nixl.nixl_agent(n, nixl.nixl_agent_config(**config)) for n in ("alpha", "beta"))
        self.x, self.y = np.zeros(N, np.uint8), np.zeros(N, np.uint8)
        self.a.register_memory([(self.x.ctypes.data, N, 0, "")], "DRAM")
        self.b.register_memory([(self.y.ctypes.data, N, 0, "")], "DRAM")
        self.a.add_remote_agent(self.b.get_agent_metadata())

    def descs(self, of: Any, *ranges: tuple[int, int]) -> Any:
        return self.a.get_xfer_descs([(of.ctypes.data + at, n, 0) for at, n in ranges], "DRAM")

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


def finish(agent: nixl.nixl_agent, handle: nixl.nixl_xfer_handle) -> None:
    end = time.monotonic() + LIMIT
    state = agent.transfer(handle)
    while state == "PROC":
        assert time.monotonic() < end
        state = agent.check_xfer_state(handle)
    assert state == "DONE"


def test_lists_of_every_shape(two: Two) -> None:
    """Random descriptors over many ranges, some overlapping, beside the same moves in numpy."""
    rng = random.Random(7)
    for cut in (0, 1000, 5000, 300000):  # ranges within the first, and beside each other
        two.a.register_memory([(two.x.ctypes.data + cut, 4096, 0, "")], "DRAM")
        two.b.register_memory([(two.y.ctypes.data + cut, 4096, 0, "")], "DRAM")
    two.a.add_remote_agent(two.b.get_agent_metadata())
    two.x[:] = np.random.default_rng(1).integers(0, 256, N, np.uint8)
    for count in (1, 2, 7, 8, 9, 300):
        for same_length in (True, False):
            want = two.y.copy()
            here, there = [], []
            for i in range(count):
                n = 656 if same_length else rng.randint(1, 900)
                at, to = rng.randrange(N - n), i * 1000 + rng.randrange(100)
                here.append((at, n))
                there.append((to, n))
                want[to : to + n] = two.x[at : at + n]
            h = two.a.initialize_xfer("WRITE", two.descs(two.x, *here), two.descs(two.y, *there), "beta")
            finish(two.a, h)
            assert (two.y == want).all()
            h.release()


def test_blocks_become_one_pattern(two: Two) -> None:
    rows = np.array([[two.x.ctypes.data + 1024 * i, 656, 0] for i in range(1000)], np.uint64)
    side = two.a.prep_xfer_dlist("", rows, "DRAM")
    assert side.at is not None and side.at.pattern is not None
    p = side.at.pick([999, 0, 3]).pattern
    assert p is not None and (p.base, p.stride, p.length, p.index.tolist()) == (0, 1024, 656, [999, 0, 3])
    rows[5, 1] = 655
    side = two.a.prep_xfer_dlist("", rows, "DRAM")
    assert side.at is not None and side.at.pattern is None


def test_past_the_region_is_refused_whatever_it_is_past_by(two: Two) -> None:
    start = two.y.ctypes.data
    for address, n in [(start + N - 8, 9), (start - 1, 8), (start, N + 1), (start + N, 1), (start, 2**64 - 1), (2**64 - 8, 16), (0, 8)]:
        bad = two.a.get_xfer_descs([(address, n, 0)], "DRAM")
        assert not two.a.check_remote_metadata("beta", bad)
        with pytest.raises(b.nixlNotFoundError):
            two.a.prep_xfer_dlist("beta", bad)
    assert not two.y.any()


def test_release_ends_the_writes(start: Any) -> None:
    """Of a target that is stopped in the middle of a transfer, and goes on after the release."""
    length = 64 << 20
    child, agent, address = begin(start, "TCP", {"plaintext": "true", "listen": "127.0.0.1:0"}, length)
    source = np.full(length, 1, np.uint8)
    agent.register_memory([(source.ctypes.data, length, 0, "")], "DRAM")
    descs = [agent.get_xfer_descs([(at, length, 0)], "DRAM") for at in (source.ctypes.data, address)]
    h = agent.initialize_xfer("WRITE", descs[0], descs[1], "target")
    finish(agent, h)
    os.kill(child.pid, signal.SIGSTOP)
    source[:] = 2
    assert agent.transfer(h) == "PROC"
    with pytest.raises(b.nixlRepostActiveError):
        agent.transfer(h)
    with pytest.raises(b.nixlRepostActiveError):
        agent.transfer(h, b"with a message")
    agent.release_xfer_handle(h)
    os.kill(child.pid, signal.SIGCONT)
    first = ask(child, "digest")
    time.sleep(0.5)  # what could land late has had its time
    assert ask(child, "digest") == first
    agent.close()


def test_a_frozen_peer_is_told_of(start: Any) -> None:
    length = 64 << 20
    child, agent, address = begin(start, "TCP", {"plaintext": "true", "listen": "127.0.0.1:0", "failure": "1s"}, length)
    source = np.zeros(length, np.uint8)
    agent.register_memory([(source.ctypes.data, length, 0, "")], "DRAM")
    descs = [agent.get_xfer_descs([(at, length, 0)], "DRAM") for at in (source.ctypes.data, address)]
    h = agent.initialize_xfer("WRITE", descs[0], descs[1], "target")
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(b.nixlRemoteDisconnectError):
        finish(agent, h)
    h.release()
    agent.close()


def begin(start: Any, backend: str, params: dict[str, str], length: int) -> tuple[Any, nixl.nixl_agent, int]:
    child = start("nixl_target.py", backend, json.dumps(params), str(length))
    metadata, address = json.loads(child.stdout.readline())
    agent = nixl.nixl_agent("initiator", nixl.nixl_agent_config(backends=[]))
    agent.create_backend(backend, params)
    assert agent.add_remote_agent(bytes.fromhex(metadata)) == b"target"
    return child, agent, address


def ask(child: Any, line: str) -> str:
    child.stdin.write(line + "\n")
    child.stdin.flush()
    answer: str = child.stdout.readline().strip()
    return answer


@pytest.mark.parametrize("backend", ["UCX", "TCP"])
def test_between_processes(start: Any, backend: str) -> None:
    params = {"plaintext": "true", "listen": "127.0.0.1:0"} if backend == "TCP" else {}
    child, agent, address = begin(start, backend, params, N)
    source = np.random.default_rng(2).integers(0, 256, N, np.uint8)
    agent.register_memory([(source.ctypes.data, N, 0, "")], "DRAM")
    h = agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs([(source.ctypes.data, N, 0)], "DRAM"),
        agent.get_xfer_descs([(address, N, 0)], "DRAM"),
        b"target",
        b"all of it",
    )
    finish(agent, h)
    assert json.loads(ask(child, "notifs")) == {"initiator": ["all of it"]}
    assert ask(child, "digest") == hashlib.sha256(source.tobytes()).hexdigest()
    child.stdin.write("meet " + agent.get_agent_metadata().hex() + "\n")
    child.stdin.flush()
    end = time.monotonic() + LIMIT
    while not agent.check_remote_xfer_done("target", b"met"):
        assert time.monotonic() < end
    child.kill()
    child.wait()
    with pytest.raises(b.nixlRemoteDisconnectError):
        while True:
            finish(agent, h)
    with pytest.raises(b.nixlRemoteDisconnectError):
        agent.check_xfer_state(h)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            agent.send_notif("target", b"anybody there?")
        except b.nixlRemoteDisconnectError:
            break
    else:
        pytest.fail("a message to a process that was killed is sent")
    agent.release_xfer_handle(h)
    agent.remove_remote_agent("target")
    agent.close()


def test_an_agent_that_was_started_anew(two: Two) -> None:
    two.b.close()
    again = nixl.nixl_agent("beta")
    z = np.zeros(100, np.uint8)
    again.register_memory([(z.ctypes.data, 100, 0, "")], "DRAM")
    two.a.add_remote_agent(again.get_agent_metadata())
    assert not two.a.check_remote_metadata("beta", two.descs(two.y, (0, 8)))
    two.x[:100] = 3
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, 100)), two.descs(z, (0, 100)), "beta")
    finish(two.a, h)
    assert (z == 3).all()
    h.release()
    again.close()


def test_deregistered_memory_is_out_of_reach(two: Two) -> None:
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, 100)), two.descs(two.y, (0, 100)), "beta")
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
    a.register_memory(np.array([[z.ctypes.data + 4096 * i, 4096, 0] for i in range(2048)], np.uint64), "DRAM")
    assert len(a.get_agent_metadata()) < 90_000  # what the wheel's takes
    a.close()


def test_lists_are_data_and_no_pickle(two: Two) -> None:
    made = two.a.get_reg_descs([(4096, 10, 0, b"\xff\0")], "DRAM")
    assert made is not None
    data = two.a.get_serialized_descs(made)
    assert two.b.deserialize_descs(data) == made and two.b.deserialize_descs(data)[0] == (4096, 10, 0, b"\xff\0")
    assert pickle.loads(pickle.dumps(made)) == made  # programs that pickle them themselves
    for bad in (b"", data[:-3], data[:20], pickle.dumps([1]), b"x" * 100):
        with pytest.raises(b.nixlMismatchError):
            two.a.deserialize_descs(bad)


def test_tensors(two: Two) -> None:
    torch = need("torch", "pip install torch --index-url https://download.pytorch.org/whl/cpu")
    t = torch.zeros(4, 8)
    one, many, reg = two.a.get_xfer_descs(t), two.a.get_xfer_descs([t, t]), two.a.get_reg_descs([t])
    assert one is not None and many is not None and reg is not None
    assert one[0] == (t.data_ptr(), 128, 0) and many.descCount() == 2 and reg[0] == (t.data_ptr(), 128, 0, b"")
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
                op, a.get_xfer_descs([(address + card, n, 0)], "VRAM"), a.get_xfer_descs([(file, n, f.fileno())], "FILE"), "gds"
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


def test_plugins_open_what_is_needed() -> None:
    def names(chosen: dict[str, dict[str, str]], cards: list[int]) -> list[str]:
        return [x.name + ("?" if x.optional else "") for x in plugins.backends(chosen, cards)]

    assert names({"UCX": {}}, []) == ["shm", "rdma?", "ucx?"]
    assert names({"UCX": {}}, [3, 1, 3]) == ["shm", "cuda", "rdma?", "ucx?"]
    assert names({"POSIX": {}}, []) == ["posix"]
    assert names({"GDS": {}, "UCX": {}}, [0]) == ["shm", "cuda", "rdma?", "ucx?", "posix"]
    opened = plugins.backends({"UCX": {"ucx_devices": "mlx5_0:1"}, "TCP": {"plaintext": "true"}}, [1, 0])
    assert {x.name: x.options for x in opened} == {
        "shm": [], "cuda": ["devices=0", "devices=1"], "rdma": [], "ucx": ["devices=mlx5_0:1"], "tcp": ["plaintext=true"],
    }  # fmt: skip


def test_not_supported(two: Two) -> None:
    remote = two.a.get_remote_descs([(1, 2, 3, "beta")], "VRAM")
    assert remote is not None and remote.descCount() == 1 and two.a.get_remote_descs(remote) is remote
    for call in (lambda: two.a.prep_mem_view(remote), lambda: two.a.release_mem_view(1)):
        with pytest.raises(b.nixlNotSupportedError):
            call()
    with pytest.raises(b.nixlNotAllowedError):
        two.a.create_backend("POSIX")
    with pytest.raises(b.nixlNotFoundError):
        two.a.register_memory([(0, 8, 0, "")], "OBJ")
    with pytest.raises(b.nixlNotFoundError):
        two.a.create_backend("OBJ")
    with pytest.raises(b.nixlNotFoundError):  # files need POSIX
        two.a.register_memory([(0, 8, 0, "")], "FILE")


def test_messages_of_strangers_are_left_out(two: Two) -> None:
    assert two.a._engine is not None
    for wrong in (b"", b"plain", messages.frame("x", b"")[:5], b"SLN\x01\xff\xffabc"):
        assert messages.unframe(wrong) is None
        two.a._engine.self_peer().notify(wrong)
    two.a.send_notif("alpha", b"")
    end = time.monotonic() + LIMIT
    got: dict[str, list[bytes]] = {}
    while not got and time.monotonic() < end:
        got = two.a.get_new_notifs()
    assert got == {"alpha": [b""]}


def test_cost_after_a_transfer(two: Two) -> None:
    h = two.a.initialize_xfer("WRITE", two.descs(two.x, (0, N)), two.descs(two.y, (0, N)), "beta")
    for _ in range(20):
        finish(two.a, h)
    duration, margin, how = two.a.estimate_xfer_cost(h)
    assert (how == "ANALYTICAL_BACKEND" and duration > 0 and margin >= 0) or (duration, margin, how) == (0, 0, "UNKNOWN")
    h.release()
    with pytest.raises(b.nixlInvalidParamError):
        two.a.estimate_xfer_cost(h)


def test_listeners_answer_after_nonsense(caplog: Any) -> None:
    number = int(ports(1)[0])
    agent = nixl.nixl_agent("listens", nixl.nixl_agent_config(True, True, number))
    with pytest.raises(b.nixlBackendError):
        nixl.nixl_agent("too", nixl.nixl_agent_config(True, True, number))
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"SLNXP\xff\xff\xff\xff", b"SLNXP\x05\0\0\0hello"):
        with socket.create_connection(("127.0.0.1", number), timeout=LIMIT) as s:
            s.sendall(nonsense)
            with suppress(OSError):  # what was not read is thrown away
                s.shutdown(socket.SHUT_WR)
                while s.recv(100):
                    pass
    other = nixl.nixl_agent("other")
    other.fetch_remote_metadata("listens", "127.0.0.1", number)
    end = time.monotonic() + LIMIT
    while not other.check_remote_metadata("listens"):
        assert time.monotonic() < end
        time.sleep(0.01)
    with caplog.at_level(logging.ERROR, "sluice.nixl"):
        other.fetch_remote_metadata("impostor", "127.0.0.1", number)
        while "listens" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert not other.check_remote_metadata("impostor")
    other.close()
    agent.close()


def test_nothing_is_left() -> None:
    def once(config: nixl.nixl_agent_config) -> None:
        a = nixl.nixl_agent("a", config)
        z = np.zeros(4096, np.uint8)
        a.register_memory([(z.ctypes.data, 4096, 0, "")], "DRAM")
        d = a.get_xfer_descs([(z.ctypes.data, 100, 0)], "DRAM")
        assert d is not None
        h = a.initialize_xfer("WRITE", d, d, "a", b"m")
        finish(a, h)  # and nobody releases or closes anything

    config = nixl.nixl_agent_config(True, True, int(ports(1)[0]))
    once(config)
    gc.collect()
    before = descriptors()
    for _ in range(5):
        once(config)
        gc.collect()
    assert descriptors() == before


def test_the_shim_is_nobodys_by_default(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import nixl, sys\nfrom nixl._api import nixl_agent\nprint(nixl_agent.__module__, sys.argv[1:])\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    plain = subprocess.run(
        [sys.executable, "-c", "import sluice.nixl, nixl; print(nixl.__file__)"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    with_shim = subprocess.run(
        [sys.executable, "-m", "sluice.nixl.shim", str(program), "x"], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert with_shim.stdout == "sluice.nixl.agent ['x']\n", with_shim.stderr
    folder = subprocess.run([sys.executable, "-m", "sluice.nixl.shim"], capture_output=True, text=True, env=environment).stdout.strip()
    by_path = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path, env=dict(environment, PYTHONPATH=folder)
    )
    assert by_path.stdout == "sluice.nixl.agent []\n", by_path.stderr
    assert "No module named 'nixl'" in plain.stderr or not plain.stdout.startswith(folder)


def test_ranges_are_found_by_address() -> None:
    table: places.Places[str] = places.Places()
    table.put(places.Range(b.DRAM_SEG, 100, 50, 0, "1", "first"))
    table.put(places.Range(b.DRAM_SEG, 100, 10, 0, "2", "short"))
    table.put(places.Range(b.DRAM_SEG, 120, 5, 0, "3", "inner"))
    table.put(places.Range(b.DRAM_SEG, 100, 50, 1, "4", "other device"))

    def find(*rows: tuple[int, int, int]) -> list[tuple[str, int]]:
        at = table.locate(b.DRAM_SEG, np.array(rows, np.uint64))
        which: Callable[[int], int] = (lambda i: 0) if at.which is None else (lambda i: int(at.which[i]))  # type: ignore[index]
        return [(at.ranges[which(i)].what, int(at.offsets[i])) for i in range(len(rows))]

    assert find((100, 50, 0)) == [("first", 0)]
    assert find((121, 4, 0)) == [("inner", 1)]
    assert find((121, 20, 0), (100, 1, 1), (149, 1, 0)) == [("first", 21), ("other device", 0), ("first", 49)]
    for bad in ((99, 2, 0), (149, 2, 0), (150, 1, 0), (100, 1, 2), (2**64 - 1, 2, 0)):
        with pytest.raises(b.nixlNotFoundError):
            find(bad)
    found = table.exact(b.DRAM_SEG, 100, 10, 0)
    assert found is not None and found.what == "short"
    assert table.exact(b.DRAM_SEG, 100, 11, 0) is None
