# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL: the same scenario as over the wheel from PyPI, and agents from their beginning
to their end.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sluice
from conftest import HERE, LIMIT, descriptors, no_more_descriptors
from nixl_agents import Two, finish
from ports import ports
from sluice import nixl
from sluice.nixl import bindings as b
from sluice.nixl import blob, listening, messages, plugins

# What our face answers where the wheel crashes or gives memory of somebody else.
HAZARDS = {
    "item outside": "raises IndexError",
    "post after release": "raises nixlInvalidParamError",
    "state after release": "raises nixlInvalidParamError",
    "use of released": "raises nixlInvalidParamError",
}


def scenario(*command: str, last: str = "sent in part") -> list[Any]:
    result = subprocess.run([*command], capture_output=True, text=True, timeout=5 * LIMIT)
    seen = []
    for line in result.stdout.splitlines():
        try:
            name, outcome = json.loads(line)
        except ValueError:
            continue  # a log
        seen.append((name, outcome))
    assert seen and seen[-1][0] == last, result.stdout + result.stderr
    return seen


def theirs() -> str:
    """An interpreter with the wheel, which hack/python-test makes where it can."""
    python = os.environ.get("NIXL_PYTHON", "")
    if os.path.exists(python) and subprocess.run([python, "-c", "import nixl._api"],
                                                 capture_output=True).returncode == 0:
        return python
    pytest.skip("unavailable: no Python with nixl: hack/python-test makes one, or name one by "
                "NIXL_PYTHON")


def test_the_scenario_runs() -> None:
    seen = scenario(sys.executable, "-m", "sluice.nixl.shim", str(HERE / "nixl_scenario.py"), "0",
                    "0", "hazards")
    assert {name: outcome for name, outcome in seen if name in HAZARDS} == HAZARDS
    wrong = [name for name, outcome in seen if outcome is False and name not in EXPECTED_FALSE]
    assert not wrong


EXPECTED_FALSE = {"check stranger", "check descs outside", "unequal", "of stranger",
                  "later unknown", "forgotten"}


def test_the_same_as_the_wheel() -> None:
    python = theirs()
    wheel = scenario(python, "-W", "ignore", str(HERE / "nixl_scenario.py"), *ports(2))
    ours = scenario(sys.executable, "-m", "sluice.nixl.shim", str(HERE / "nixl_scenario.py"), "0",
                    "0")
    differ = [(w, o) for w, o in zip(wheel, ours) if w != o]
    assert not differ and len(ours) == len(wheel)


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


def test_plugins_open_what_is_needed() -> None:
    def names(chosen: dict[str, dict[str, str]], cards: list[int]) -> list[str]:
        return [x.name + ("?" if x.optional else "") for x in plugins.backends(chosen, cards)]

    assert names({"UCX": {}}, []) == ["shm?", "rdma?", "tcp?"]
    assert names({"UCX": {}}, [3, 1, 3]) == ["shm?", "cuda", "rdma?", "tcp?"]
    assert names({"POSIX": {}}, []) == ["posix"]
    assert names({"GDS": {}, "UCX": {}}, [0]) == ["shm?", "cuda", "rdma?", "tcp?", "posix"]
    opened = plugins.backends({"UCX": {"ucx_devices": "mlx5_0:1"}, "TCP": {"plaintext": "true"}},
                              [1, 0])
    assert {x.name: x.options for x in opened} == {
        "shm": [], "cuda": ["devices=0", "devices=1"], "ucx": ["devices=mlx5_0:1"],
        "tcp": ["plaintext=true"],
    }  # fmt: skip


def test_not_supported(two: Two) -> None:
    remote = two.a.get_remote_descs([(1, 2, 3, "beta")], "VRAM")
    assert remote is not None and remote.descCount() == 1 and two.a.get_remote_descs(
        remote) is remote
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


def test_listeners_answer_after_nonsense(caplog: Any) -> None:
    agent = nixl.nixl_agent("listens", nixl.nixl_agent_config(True, True, 0))
    assert agent._listener is not None
    number = agent._listener.port
    with pytest.raises(b.nixlBackendError):
        nixl.nixl_agent("too", nixl.nixl_agent_config(True, True, number))
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"SLNXP\xff\xff\xff\xff",
                     b"SLNXP\x05\0\0\0hello"):
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


def told(port: int, word: bytes, data: bytes = b"") -> bytes:
    """What a listener answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as s:
        listening.send(s, word, data)
        answer = b"".join(iter(lambda: s.recv(1 << 16), b""))
        return answer[listening._HEAD.size :]


def test_a_caller_that_drips_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hung up on, and then the next one is answered."""
    agent = nixl.nixl_agent("listens", nixl.nixl_agent_config(True, True, 0))
    assert agent._listener is not None
    with monkeypatch.context() as patched:
        patched.setattr(listening, "_WHOLE", 0.5)
        with socket.create_connection(("127.0.0.1", agent._listener.port)) as slow:
            slow.sendall(b"SLNXP\0\0\0\x0c")  # and 200 MiB to come
            end = time.monotonic() + LIMIT
            with pytest.raises(ConnectionError):
                while time.monotonic() < end:
                    slow.sendall(b"x")
                    time.sleep(0.1)
    assert told(agent._listener.port, listening.GET)
    agent.close()


def test_a_silent_caller_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_WHOLE", 100 * LIMIT)
    agent = nixl.nixl_agent("listens", nixl.nixl_agent_config(True, True, 0))
    assert agent._listener is not None
    with socket.create_connection(("127.0.0.1", agent._listener.port)):
        assert told(agent._listener.port, listening.GET)
    agent.close()


def test_our_description_under_another_name() -> None:
    """Whoever forgets that name would close the way to our own memory."""
    agent = nixl.nixl_agent("listens", nixl.nixl_agent_config(True, True, 0))
    assert agent._listener is not None
    port = agent._listener.port
    mine = blob.decode(told(port, listening.GET))
    told(port, listening.PUT, blob.encode(blob.Metadata("x", True, [], mine.description)))
    told(port, listening.FORGET, b"x")
    assert agent._engine is not None
    agent._engine.self_peer().notify(b"still there")
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

    config = nixl.nixl_agent_config(True, True, 0)
    once(config)
    gc.collect()
    before = descriptors()
    for _ in range(5):
        once(config)
        gc.collect()
    no_more_descriptors(before)


_LOGS = """
import logging
from nixl._api import nixl_agent, nixl_agent_config
from nixl.logging import get_logger
a = nixl_agent("me", nixl_agent_config(backends=["UCX"]))
get_logger("_api").info("of the program's")
get_logger("_api").debug("too much")
"""


def test_the_shim_prints_what_nixl_prints(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_LOGS)

    def printed(*command: str) -> list[str]:
        result = subprocess.run([*command, str(program)], capture_output=True, text=True,
                                timeout=LIMIT)
        found = (re.match(r"[-0-9]+ [:0-9]+ NIXL (\w+) +\w+\.py:\d+ (.*)", line)
                 for line in result.stdout.splitlines())
        return sorted(f"{m[1]} {m[2]}" for m in found if m)

    ours = printed(sys.executable, "-m", "sluice.nixl.shim")
    assert ours == ["INFO Backend UCX was instantiated", "INFO Initialized NIXL agent: me",
                    "INFO of the program's", f"INFO sluice {sluice.__version__} stands in for NIXL"]
    assert printed(theirs()) == ours[:-1]


@pytest.mark.parametrize("name", ["rixl", "nixl_rocm"])
def test_names_for_rocm(tmp_path: Path, name: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import {name}._bindings as lower\nfrom {name}._api import nixl_agent\n"
        f"from {name} import _utils\nimport {name}, {name}.logging, nixl\n"
        f"print({name} is nixl, lower is nixl._bindings, _utils is nixl._utils,\n"
        f"      {name}.logging is nixl.logging, nixl_agent.__module__)\n")
    ran = subprocess.run([sys.executable, "-m", "sluice.nixl.shim", str(program)],
                         capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT)
    assert ran.stdout == "True True True True sluice.nixl.agent\n", ran.stderr


def test_the_shim_says_how_to_call_it() -> None:
    shim = [sys.executable, "-m", "sluice.nixl.shim"]
    for status, stream, option in (0, "stdout", "--help"), (2, "stderr", "-m"), (2, "stderr", "-x"):
        result = subprocess.run([*shim, option], capture_output=True, text=True, timeout=LIMIT)
        assert result.returncode == status
        assert getattr(result, stream).startswith("usage: python -m sluice.nixl.shim [")
        assert "Traceback" not in result.stderr


def test_the_shim_is_nobodys_by_default(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import nixl, sys\nfrom nixl._api import "
                       "nixl_agent\nprint(nixl_agent.__module__, sys.argv[1:])\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    plain = subprocess.run(
        [sys.executable, "-c", "import sluice.nixl, nixl; print(nixl.__file__)"],
        capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    with_shim = subprocess.run(
        [sys.executable, "-m", "sluice.nixl.shim", str(program), "x"], capture_output=True,
        text=True, cwd=tmp_path, env=environment
    )
    assert with_shim.stdout == "sluice.nixl.agent ['x']\n", with_shim.stderr
    folder = subprocess.run([sys.executable, "-m", "sluice.nixl.shim"], capture_output=True,
                            text=True, env=environment).stdout.strip()
    by_path = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path,
        env=dict(environment, PYTHONPATH=folder)
    )
    assert by_path.stdout == "sluice.nixl.agent []\n", by_path.stderr
    assert "No module named 'nixl'" in plain.stderr or not plain.stdout.startswith(folder)
