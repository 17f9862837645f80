# SPDX-License-Identifier: Apache-2.0
"""One program against NIXL's lower calls, nixl._bindings, which prints a line for each thing seen.

It runs over the wheel `nixl` from PyPI and over sluice's face alike; test_nixl_lower.py compares.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixlBind  # type: ignore[import-not-found]
from nixl_scenario import LIMIT, N, outcome, say


def made(name: str) -> Any:
    config = nixlBind.nixlAgentConfig()
    config.useProgThread, config.useListenThread, config.listenPort = True, False, 0
    config.syncMode, config.pthrDelay, config.lthrDelay = nixlBind.NIXL_THREAD_SYNC_RW, 0, 100000
    config.captureTelemetry = True
    return nixlBind.nixlAgent(name, config)


def state(of: Any) -> str:
    return str(of).rsplit(".", maxsplit=1)[-1]


def finish(agent: Any, request: int) -> str:
    now, end = agent.postXferReq(request), time.monotonic() + LIMIT
    while now == nixlBind.NIXL_IN_PROG and time.monotonic() < end:
        now = agent.getXferStatus(request)
    return state(now)


def arrays() -> tuple[Any, Any]:
    x, y = np.arange(N, dtype=np.uint8), np.zeros(N, np.uint8)
    return x, y


def rows(array: Any, *places: tuple[int, int]) -> Any:
    return np.array([(array.ctypes.data + at, n, 0) for at, n in places], np.uint64)


def main() -> None:
    for name in ("NIXL_SUCCESS", "NIXL_IN_PROG", "NIXL_ERR_NOT_FOUND", "NIXL_READ", "NIXL_WRITE",
                 "NIXL_ERR_NOT_SUPPORTED", "NIXL_THREAD_SYNC_STRICT", "NIXL_THREAD_SYNC_DEFAULT"):
        say(name, getattr(nixlBind, name).value)
    a, b = made("alpha"), made("beta")
    say("plugins", {"UCX", "POSIX"} <= set(a.getAvailPlugins()))
    options, mems = a.getPluginParams("POSIX")
    say("of POSIX", [isinstance(options, dict), [state(m) for m in mems] == mems or "enum",
                     "FILE_SEG" in [state(m) for m in mems] or "FILE" in mems])
    ucx_a, ucx_b = a.createBackend("UCX", {}), b.createBackend("UCX", {})
    say("params", [isinstance(found, kind) for found, kind in zip(a.getBackendParams(ucx_a),
                                                                  (dict, list))])
    x, y = arrays()
    xs = nixlBind.nixlRegDList(nixlBind.DRAM_SEG, [(x.ctypes.data, N, 0, "")])
    ys = nixlBind.nixlRegDList(nixlBind.DRAM_SEG, [(y.ctypes.data, N, 0, "")])
    say("register", [state(a.registerMem(xs, [ucx_a])), state(b.registerMem(ys))])
    outcome("meet", lambda: bytes(a.loadRemoteMD(b.getLocalMD())).decode())
    outcome("meet back", lambda: bytes(b.loadRemoteMD(a.getLocalPartialMD(xs, True))).decode())
    outcome("connect", lambda: state(a.makeConnection("beta", [])))
    there = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, rows(y, (0, N)))
    outcome("check", lambda: state(a.checkRemoteMD("beta", there)))
    outcome("check stranger", lambda: state(a.checkRemoteMD("gamma", there)))
    here = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, rows(x, (0, N)))
    request = a.createXferReq(nixlBind.NIXL_WRITE, here, there, "beta", "whole", [ucx_a])
    outcome("state before", lambda: state(a.getXferStatus(request)))
    say("write", [finish(a, request), bool((x == y).all())])
    say("by", a.queryXferBackend(request) == ucx_a)
    told = a.getXferTelemetry(request)
    say("telemetry", [told.totalBytes, told.descCount])
    got: dict[str, list[bytes]] = {}
    end = time.monotonic() + LIMIT
    while not got and time.monotonic() < end:
        got = b.getNotifs(got)
    say("came", {k: [bytes(m).decode() for m in v] for k, v in got.items()})
    outcome("release", lambda: state(a.releaseXferReq(request)))
    prepared(a, x, y)
    outcome("notify", lambda: state(b.genNotif("alpha", "hello", [ucx_b])))
    while "beta" not in got and time.monotonic() < end:
        got = a.getNotifs(got)
    say("heard", [bytes(m).decode() for m in got.get("beta", [])])
    outcome("no such agent", lambda: a.createXferReq(nixlBind.NIXL_READ, here, there, "gamma"))
    outcome("no such plugin", lambda: a.createBackend("NONE", {}))
    outcome("forget", lambda: state(a.invalidateRemoteMD("beta")))
    outcome("forgotten", lambda: state(a.checkRemoteMD("beta", there)))
    outcome("deregister", lambda: state(b.deregisterMem(ys, [])))
    whole()


def prepared(a: Any, x: Any, y: Any) -> None:
    """Some of the blocks of two lists, the other way round."""
    y[:] = 0
    places = [(i * 4096, 4096) for i in range(16)]
    ours = a.prepXferDlist("", nixlBind.nixlXferDList(nixlBind.DRAM_SEG, rows(x, *places)), [])
    theirs = a.prepXferDlist("beta", nixlBind.nixlXferDList(nixlBind.DRAM_SEG, rows(y, *places)),
                             [])
    some = np.arange(0, 16, 2, dtype=np.int32)
    request = a.makeXferReq(nixlBind.NIXL_WRITE, ours, some, theirs, some[::-1].copy())
    say("prepared", finish(a, request))
    blocks, moved = x[:65536].reshape(16, 4096), y[:65536].reshape(16, 4096)
    say("blocks", bool((moved[14::-2] == blocks[::2]).all() and not moved[1::2].any()))
    outcome("release", lambda: [state(a.releaseXferReq(request)), state(a.releasedDlistH(ours)),
                                state(a.releasedDlistH(theirs))])


def whole() -> None:
    """An agent whose lower one a program replaces, as SGLang does."""
    agent = nixl_agent("delta", nixl_agent_config(backends=[]))
    agent.agent = made("delta")
    agent.plugin_list = agent.agent.getAvailPlugins()
    agent.create_backend("POSIX", {})
    say("replaced", [list(agent.backends), agent.get_plugin_list() == agent.plugin_list])
    say("mems", [agent.nixl_mems["DRAM"] == nixlBind.DRAM_SEG, list(agent.nixl_ops),
                 list(agent.backend_mems), list(agent.backend_options)])
    outcome("empty name", lambda: nixl_agent("", nixl_agent_config(backends=[])), keep=False)
    try:
        nixl_agent_config(sync_mode="strict")
    except TypeError as e:
        say("sync_mode", str(e))
    say("last", None)


main()
