# SPDX-License-Identifier: Apache-2.0
"""NIXL's lower calls: the same scenario as over the wheel from PyPI."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
from conftest import HERE, LIMIT
from sluice import nixl
from sluice.nixl import bindings as b
from sluice.nixl import shim
from sluice.nixl.lower import nixlAgent
from test_nixl import scenario, theirs

SCENARIO = str(HERE / "nixl_lower_scenario.py")
SHIM = [sys.executable, "-m", "sluice.nixl.shim"]


def test_the_scenario_runs() -> None:
    seen = scenario(*SHIM, SCENARIO, last="last")
    assert not [name for name, outcome in seen if outcome is False]


def test_the_same_as_the_wheel() -> None:
    wheel = scenario(theirs(), "-W", "ignore", SCENARIO, last="last")
    ours = scenario(*SHIM, SCENARIO, last="last")
    assert ours == wheel


def test_numbers_are_checked() -> None:
    a = nixlAgent("a")
    for call in (a.getXferStatus, a.releaseXferReq, a.releasedDlistH, a.getBackendParams):
        with pytest.raises(b.nixlInvalidParamError):
            call(7)


def test_an_agent_whose_lower_one_was_used_is_collected() -> None:
    agent = nixl.nixl_agent("a", nixl.nixl_agent_config(backends=[]))
    assert agent.agent.getAvailPlugins() == agent.plugin_list
    gone = weakref.ref(agent)
    gc.disable()
    try:
        del agent
        assert gone() is None  # and not only when cycles are looked for
    finally:
        gc.enable()


def test_telemetry_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, asked, kept in (("y", False, True), ("n", True, False), ("NO", True, False),
                              ("", True, True), ("", False, False)):
        monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", said)
        agent = nixl.nixl_agent("a", nixl.nixl_agent_config(backends=["SHM"],
                                                            capture_telemetry=asked))
        x = np.zeros(64, np.uint8)
        agent.register_memory([(x.ctypes.data, 64, 0, "")], "DRAM")
        rows = agent.get_xfer_descs([(x.ctypes.data, 32, 0)], "DRAM")
        more = agent.get_xfer_descs([(x.ctypes.data + 32, 32, 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", rows, more, "a")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if kept:
            assert agent.get_xfer_telemetry(handle).totalBytes == 32
        else:
            with pytest.raises(b.nixlNoTelemetryError):
                agent.get_xfer_telemetry(handle)
        agent.close()


def test_a_constructor_in_the_place_of_the_lower_agents() -> None:
    """As it is in `nixl._bindings`, where NIXL's own agent looks for it."""
    text = """
import nixl._bindings as bind
from nixl._api import nixl_agent, nixl_agent_config
seen, made = [], bind.nixlAgent
def other(name, config):
    seen.append((name, config.syncMode.name))
    return made(name, config)
bind.nixlAgent = other
for name, more in (("a", {}), ("b", {"enable_listen_thread": True, "listen_port": 0}),
                   ("c", {"sync_mode": bind.NIXL_THREAD_SYNC_RW})):
    agent = nixl_agent(name, nixl_agent_config(backends=[], **more))
    assert agent.agent.getAvailPlugins() == agent.plugin_list
    agent.close()
print(*[f"{name}:{mode}" for name, mode in seen])
"""
    environment = dict(os.environ, PYTHONPATH=shim.path())
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True,
                          env=environment, timeout=LIMIT)
    assert said.returncode == 0, said.stderr
    last = said.stdout.splitlines()[-1]  # after what the agents log
    assert last.split() == ["a:NIXL_THREAD_SYNC_NONE", "b:NIXL_THREAD_SYNC_STRICT",
                            "c:NIXL_THREAD_SYNC_RW"]
