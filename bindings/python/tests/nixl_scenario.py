# SPDX-License-Identifier: Apache-2.0
"""One program against the NIXL agent API, which prints a line for each thing seen.

It runs over the wheel `nixl` from PyPI and over sluice's face alike; test_nixl.py compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any, Callable

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

if "sluice" in sys.modules:
    import patience  # noqa: F401

LIMIT = 60.0
N = 1 << 20
HAZARDS = "hazards" in sys.argv[1:]


def say(name: str, seen: Any) -> None:
    # at once: another thread may log meanwhile
    sys.stdout.write(json.dumps([name, seen], default=repr) + "\n")
    sys.stdout.flush()


def outcome(name: str, call: Callable[[], Any], keep: bool = True) -> Any:
    """The result, or the name of the exception's class."""
    try:
        result = call()
    except Exception as e:
        say(name, "raises " + type(e).__name__)
        return None
    say(name, result if keep else type(result).__name__)
    return result


def hazard(name: str, call: Callable[[], Any]) -> None:
    """What the wheel answers with a crash, or with memory of somebody else: only for us."""
    if HAZARDS:
        outcome(name, call, keep=False)


def finish(agent: Any, handle: Any, state: str) -> str:
    end = time.monotonic() + LIMIT
    while state == "PROC" and time.monotonic() < end:
        state = agent.check_xfer_state(handle)
    return state


def notifs(agent: Any, peer: str) -> list[str]:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        got = agent.get_new_notifs()
        if got:
            return sorted((k if isinstance(k, str) else k.decode()) + ":" + m.decode() for k,
                          v in got.items() for m in v)
    return []


class Two:
    """Two agents that know each other, each with an array registered."""

    def __init__(self, **config: Any) -> None:
        self.a, self.b = (nixl_agent(n, nixl_agent_config(backends=["UCX"], **config))
                          for n in ("alpha", "beta"))
        self.x, self.y = np.zeros(N, np.uint8), np.zeros(N, np.uint8)
        self.reg_x = self.a.register_memory([(self.x.ctypes.data, N, 0, "x")], "DRAM")
        self.reg_y = self.b.register_memory([(self.y.ctypes.data, N, 0, "y")], "DRAM")
        self.met = (self.a.add_remote_agent(self.b.get_agent_metadata()),
                    self.b.add_remote_agent(self.a.get_agent_metadata()))

    def here(self, *ranges: tuple[int, int]) -> Any:
        return self.a.get_xfer_descs([(self.x.ctypes.data + at, n, 0) for at, n in ranges], "DRAM")

    def there(self, *ranges: tuple[int, int]) -> Any:
        return self.b.get_xfer_descs([(self.y.ctypes.data + at, n, 0) for at, n in ranges], "DRAM")


def meeting(two: Two) -> None:
    say("add_remote_agent", [n if isinstance(n, str) else n.decode() for n in two.met])
    say("type of its result", type(two.met[0]).__name__)
    say("check known", two.a.check_remote_metadata("beta"))
    say("check stranger", two.a.check_remote_metadata("nobody"))
    say("check descs", two.a.check_remote_metadata("beta", two.there((0, 100))))
    say("check descs outside", two.a.check_remote_metadata("beta",
                                                           two.b.get_xfer_descs([(8, 100, 0)],
                                                               "DRAM")))
    say("metadata is", type(two.a.get_agent_metadata()).__name__)
    outcome("add garbage", lambda: two.a.add_remote_agent(b"garbage"))
    outcome("add nothing", lambda: two.a.add_remote_agent(b""))
    outcome("remove stranger", lambda: two.a.remove_remote_agent("nobody"))
    outcome("make_connection", lambda: two.a.make_connection("beta"))
    outcome("make_connection to stranger", lambda: two.a.make_connection("nobody"))


def lists(two: Two) -> None:
    a = two.a
    d = a.get_xfer_descs([(4096, 10, 0), (8192, 20, 1)], "DRAM")
    say("xfer list", [type(d).__name__, d.descCount(), d.isEmpty(), [list(d[i]) for i in range(2)],
                      str(d.getType()).split(".")[-1]])
    r = a.get_reg_descs([(4096, 10, 0, "meta")], "DRAM")
    say("reg list", [type(r).__name__, r.descCount(), list(r[0]) if isinstance(r[0], tuple)
                     else str(r[0])])
    trimmed = r.trim()
    say("trim", [type(trimmed).__name__, list(trimmed[0])])
    say("index", d.index((8192, 20, 1)))
    outcome("index of none", lambda: d.index((1, 2, 3)))
    d.append((16384, 5, 0))
    d.addDesc((20480, 6, 0))
    say("appended", [d.descCount(), list(d[3])])
    d.remDesc(0)
    say("removed", [d.descCount(), list(d[0])])
    outcome("rem outside", lambda: d.remDesc(17))
    hazard("item outside", lambda: list(d[17]))
    say("passes along", a.get_xfer_descs(d) is d)
    say("wrong list", [a.get_xfer_descs(r), a.get_reg_descs(d)])
    say("no type", [a.get_xfer_descs([(1, 2, 3)]), a.get_xfer_descs([(1, 2, 3, "")], "DRAM"),
                    a.get_reg_descs([(1, 2, 3)], "DRAM")])
    outcome("unknown type", lambda: a.get_xfer_descs([(1, 2, 3)], "ATTIC"))
    outcome("empty list", lambda: a.get_xfer_descs([], "DRAM"))
    rows = np.array([[4096, 10, 0], [8192, 20, 1]], np.uint64)
    n = a.get_xfer_descs(rows, "DRAM")
    say("rows", [n.descCount(), list(n[1])])
    say("rows without type", a.get_xfer_descs(rows))
    say("rows of four", a.get_xfer_descs(np.zeros((2, 4), np.uint64), "DRAM"))
    outcome("signed rows", lambda: a.get_xfer_descs(rows.astype(np.int64), "DRAM").descCount())
    say("reg rows", list(a.get_reg_descs(rows, "DRAM")[1]))
    back = a.deserialize_descs(a.get_serialized_descs(n))
    say("serialized", [type(back).__name__, back == n, list(back[0])])
    back = a.deserialize_descs(a.get_serialized_descs(r))
    say("serialized reg", [type(back).__name__, back == r])
    say("unequal", n == d)
    n.clear()
    say("cleared", [n.descCount(), n.isEmpty()])


def transfers(two: Two) -> None:
    a, x, y = two.a, two.x, two.y
    x[:] = np.arange(N, dtype=np.uint64) % 251
    h = a.initialize_xfer("WRITE", two.here((0, 1000), (5000, 656)), two.there((100, 1000),
        (7000, 656)), "beta", b"first")
    outcome("state before", lambda: a.check_xfer_state(h))
    state = a.transfer(h)
    say("known state", state in ("DONE", "PROC"))
    say("ends", finish(a, h, state))
    say("still", a.check_xfer_state(h))
    say("bytes", until(lambda: bool((y[100:1100] == x[:1000]).all()
                                    and (y[7000:7656] == x[5000:5656]).all()
                                    and not y[:100].any())))
    say("notification", notifs(two.b, "alpha"))
    y[:] = 0
    say("again", finish(a, h, a.transfer(h, b"second")))
    say("bytes again", until(lambda: bool((y[100:1100] == x[:1000]).all())))
    say("its notification", notifs(two.b, "alpha"))
    outcome("backend", lambda: a.query_xfer_backend(h))
    outcome("cost", lambda: len(a.estimate_xfer_cost(h)))
    outcome("telemetry", lambda: a.get_xfer_telemetry(h), keep=False)
    outcome("release", lambda: a.release_xfer_handle(h))
    outcome("release again", lambda: a.release_xfer_handle(h))
    hazard("post after release", lambda: a.transfer(h))
    hazard("state after release", lambda: a.check_xfer_state(h))

    y[:] = np.arange(N, dtype=np.uint64) % 241
    x[:] = 0
    r = a.initialize_xfer("READ", two.here((7, 4096)), two.there((9, 4096)), "beta")
    say("read", finish(a, r, a.transfer(r)))
    say("read bytes", bool((x[7:4103] == y[9:4105]).all() and not x[:7].any()))
    r.release()

    outcome("lengths differ", lambda: a.initialize_xfer("WRITE", two.here((0, 10)),
                                                        two.there((0, 11)), "beta"), keep=False)
    outcome("counts differ", lambda: a.initialize_xfer("WRITE", two.here((0, 10)),
                                                       two.there((0, 10), (20, 10)), "beta"),
                                                       keep=False)
    outcome("no descs", lambda: a.initialize_xfer("WRITE", two.here(), two.there(), "beta"),
            keep=False)
    outcome("stranger", lambda: a.initialize_xfer("WRITE", two.here((0, 10)), two.there((0, 10)),
                                                  "nobody"), keep=False)
    outcome("unknown op", lambda: a.initialize_xfer("COPY", two.here((0, 10)), two.there((0, 10)),
                                                    "beta"), keep=False)
    outcome("unknown backend", lambda: a.initialize_xfer("READ", two.here((0, 9)),
                                                         two.there((0, 9)), "beta", b"", ["GDS"]),
                                                         keep=False)
    foreign = a.get_xfer_descs([(4096, 10, 0)], "DRAM")
    outcome("local not registered", lambda: a.initialize_xfer("WRITE", foreign, two.there((0, 10)),
        "beta"), keep=False)
    outcome("remote not registered", lambda: a.initialize_xfer("WRITE", two.here((0, 10)), foreign,
        "beta"), keep=False)
    outcome("past the region", lambda: a.initialize_xfer("WRITE", two.here((N - 8, 16)),
                                                         two.there((0, 16)), "beta"), keep=False)
    outcome("past the peer's", lambda: a.initialize_xfer("WRITE", two.here((0, 16)),
                                                         two.there((N - 8, 16)), "beta"),
                                                         keep=False)
    h = outcome("message as text", lambda: a.initialize_xfer("WRITE", two.here((0, 8)),
        two.there((0, 8)), "beta", "text"), keep=False)
    say("sent", finish(a, h, a.transfer(h)))
    say("text arrives", notifs(two.b, "alpha"))
    h.release()


def prepared(two: Two) -> None:
    a, x, y = two.a, two.x, two.y
    x[:] = np.arange(N, dtype=np.uint64) % 239
    y[:] = 0
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", [(x.ctypes.data + 1024 * i, 656, 0)
                                                  for i in range(64)], "DRAM")
    remote = a.prep_xfer_dlist("beta", [(y.ctypes.data + 656 * i, 656, 0) for i in range(64)],
                               "DRAM")
    say("handles", [type(local).__name__, type(remote).__name__])
    h = a.make_prepped_xfer("WRITE", local, [5, 6, 0], remote, np.array([1, 63, 0], np.int32),
                            b"prepared")
    say("handle", type(h).__name__)
    say("done", finish(a, h, a.transfer(h)))
    pairs = ((5, 1), (6, 63), (0, 0))
    right = lambda: all((y[656 * j : 656 * j + 656] == x[1024 * i : 1024 * i + 656]).all() for i,
                        j in pairs)
    say("prepared bytes", until(lambda: bool(right() and not y[1312:2000].any())))
    say("prepared notification", notifs(two.b, "alpha"))
    h.release()
    outcome("index outside", lambda: a.make_prepped_xfer("WRITE", local, [64], remote, [0]),
            keep=False)
    outcome("index negative", lambda: a.make_prepped_xfer("WRITE", local, [-1], remote, [0]),
            keep=False)
    outcome("index counts differ", lambda: a.make_prepped_xfer("WRITE", local, [1, 2], remote, [0]),
            keep=False)
    outcome("no index", lambda: a.make_prepped_xfer("WRITE", local, [], remote, []), keep=False)
    outcome("two local sides", lambda: a.make_prepped_xfer("WRITE", local, [1], local, [0]),
            keep=False)
    outcome("sides swapped", lambda: a.make_prepped_xfer("WRITE", remote, [1], local, [0]),
            keep=False)
    outcome("prep for stranger", lambda: a.prep_xfer_dlist("nobody", [(y.ctypes.data, 656, 0)],
                                                           "DRAM"), keep=False)
    outcome("prep not registered", lambda: a.prep_xfer_dlist("", [(4096, 656, 0)], "DRAM"),
            keep=False)
    outcome("prep past the peer's", lambda: a.prep_xfer_dlist("beta",
        [(y.ctypes.data + N - 8, 16, 0)], "DRAM"), keep=False)
    strided = np.array([[x.ctypes.data, 100, 0, 200, 10]], np.uint64)
    to = np.array([[y.ctypes.data + 4096, 100, 0, 100, 10]], np.uint64)
    y[:] = 0
    s = a.prep_xfer_dlist("", strided, "DRAM")
    d = a.prep_xfer_dlist("beta", to, "DRAM")
    h = a.make_prepped_xfer("WRITE", s, np.arange(10, dtype=np.int32), d,
                            np.arange(10, dtype=np.int32))
    say("strided", finish(a, h, a.transfer(h)))
    say("strided bytes",
        until(
            lambda: bool(all((y[4096 + 100 * i : 4196 + 100 * i] == x[200 * i : 200 * i + 100]).all(
            ) for i in range(10)))))
    h.release()
    outcome("strided without type", lambda: a.prep_xfer_dlist("", strided), keep=False)
    for handle in (s, d, remote):
        handle.release()
    y[:] = 0
    own = a.prep_xfer_dlist("alpha", [(x.ctypes.data + 65536, 656, 0)], "DRAM")
    h = a.make_prepped_xfer("WRITE", local, [3], own, [0], b"to myself")
    say("loopback", finish(a, h, a.transfer(h)))
    say("loopback bytes",
        until(lambda: bool((x[65536 : 65536 + 656] == x[3072 : 3072 + 656]).all())))
    say("loopback notification", notifs(a, "alpha"))
    h.release()
    outcome("release list", lambda: a.release_dlist_handle(local))
    outcome("release list again", lambda: a.release_dlist_handle(local))
    hazard("use of released", lambda: a.make_prepped_xfer("WRITE", local, [3], own, [0]))


def messages(two: Two) -> None:
    a, b = two.a, two.b
    outcome("own metadata", lambda: a.add_remote_agent(a.get_agent_metadata()))
    outcome("send without address", lambda: a.send_local_metadata())
    outcome("fetch without address", lambda: a.fetch_remote_metadata("beta"))
    outcome("invalidate without address", lambda: a.invalidate_local_metadata())
    outcome("send to nobody", lambda: a.send_local_metadata("127.0.0.1", 1))
    outcome("mode", lambda: nixl_agent_config(sync_mode=3))  # type: ignore[arg-type]
    say("none", b.get_new_notifs())
    a.send_notif("beta", b"one")
    say("one", notifs(b, "alpha"))
    outcome("to stranger", lambda: a.send_notif("nobody", b"x"))
    a.send_notif("beta", b"req-1-done")
    a.send_notif("beta", b"req-2-done")
    end = time.monotonic() + LIMIT
    while not b.check_remote_xfer_done("alpha", b"req-2") and time.monotonic() < end:
        pass
    say("found once", [b.check_remote_xfer_done("alpha", b"req-2"),
                       b.check_remote_xfer_done("alpha", b"1-done")])
    say("by substring", b.check_remote_xfer_done("alpha", b"1-done", tag_is_prefix=False))
    say("of stranger", b.check_remote_xfer_done("nobody", b"req"))
    a.send_notif("beta", b"kept")
    while not any(b.update_notifs().values()) and time.monotonic() < end:
        pass
    say("kept", sorted(m.decode() for v in b.update_notifs().values() for m in v))
    b.send_notif("alpha", "as text")
    say("back", notifs(a, "beta"))


def memory(two: Two) -> None:
    a = two.a
    z = np.zeros(4096, np.uint8)
    outcome("deregister unknown",
            lambda: a.deregister_memory(a.get_reg_descs([(z.ctypes.data, 4096, 0, "")], "DRAM")))
    reg = a.register_memory([(z.ctypes.data, 4096, 0, "")], "DRAM")
    say("register gives", type(reg).__name__)
    outcome("register again", lambda: a.register_memory([(z.ctypes.data, 4096, 0, "")], "DRAM"),
            keep=False)
    outcome("deregister", lambda: a.deregister_memory(reg))
    outcome("register with backend",
            lambda: a.deregister_memory(a.register_memory([(z.ctypes.data, 64, 0, "")], "DRAM",
                                                          ["UCX"])))
    outcome("register with unknown backend", lambda: a.register_memory([(z.ctypes.data, 64, 0, "")],
        "DRAM", ["GDS"]), keep=False)
    outcome("register nothing", lambda: a.register_memory(None), keep=False)
    outcome("register without type", lambda: a.register_memory([(z.ctypes.data, 64, 0, "")]),
            keep=False)
    rows = np.array([[z.ctypes.data, 64, 0], [z.ctypes.data + 128, 64, 0]], np.uint64)
    outcome("register rows", lambda: a.register_memory(rows, "DRAM").descCount())
    outcome("deregister a part",
            lambda: a.deregister_memory(a.get_reg_descs([(z.ctypes.data, 32, 0, "")], "DRAM")))
    outcome("deregister rows", lambda: a.deregister_memory(a.get_reg_descs(rows, "DRAM")))
    outcome("query of unknown backend", lambda: a.query_memory([(0, 64, 0, "")], "GDS", "DRAM"),
            keep=False)
    outcome("query of UCX", lambda: a.query_memory([(z.ctypes.data, 64, 0, "")], "UCX", "DRAM"),
            keep=False)
    say("mem types", sorted(set(a.get_backend_mem_types("UCX")) & {"DRAM", "VRAM", "DRAM_SEG",
        "VRAM_SEG"}))
    say("mem types of none", [a.get_backend_mem_types("GDS"), a.get_backend_params("GDS"),
                              a.get_plugin_mem_types("NONE"), a.get_plugin_params("NONE")])
    say("params are", [type(a.get_plugin_params("UCX")).__name__,
                       type(a.get_backend_params("UCX")).__name__])
    say("UCX is there", "UCX" in a.get_plugin_list())
    outcome("unknown plugin", lambda: a.create_backend("NONE"), keep=False)
    outcome("backend twice", lambda: a.create_backend("UCX"), keep=False)


def parts(two: Two) -> None:
    """Metadata in parts, and what forgetting a peer means."""
    c = nixl_agent("gamma", nixl_agent_config(backends=["UCX"]))
    z = np.zeros(8192, np.uint8)
    first = c.register_memory([(z.ctypes.data, 4096, 0, "")], "DRAM")
    say("partial name", as_text(two.a.add_remote_agent(c.get_partial_agent_metadata(first, True,
        ["UCX"]))))
    d = c.get_xfer_descs([(z.ctypes.data, 100, 0)], "DRAM")
    say("partial known", two.a.check_remote_metadata("gamma", d))
    second = c.register_memory([(z.ctypes.data + 4096, 4096, 0, "")], "DRAM")
    later = c.get_xfer_descs([(z.ctypes.data + 4096, 100, 0)], "DRAM")
    say("later unknown", two.a.check_remote_metadata("gamma", later))
    outcome("later refused", lambda: two.a.initialize_xfer("WRITE", two.here((0, 100)), later,
                                                           "gamma"), keep=False)
    outcome("second part",
            lambda: as_text(two.a.add_remote_agent(c.get_partial_agent_metadata(second, False,
                ["UCX"]))))
    say("later known", two.a.check_remote_metadata("gamma", later))
    two.x[:100] = 9
    h = two.a.initialize_xfer("WRITE", two.here((0, 100)), later, "gamma")
    say("to gamma", finish(two.a, h, two.a.transfer(h)))
    say("gamma's bytes", until(lambda: bool((z[4096:4196] == 9).all() and not z[:4096].any())))
    h.release()
    foreign = c.get_reg_descs([(0, 0, 0, "")], "DRAM")
    outcome("part that is not registered", lambda: c.get_partial_agent_metadata(foreign, True),
            keep=False)
    none = c.get_reg_descs([(0, 0, 0, "")], "DRAM")
    none.remDesc(0)
    outcome("connection alone",
            lambda: as_text(two.b.add_remote_agent(c.get_partial_agent_metadata(none, True))))
    outcome("forget", lambda: two.a.remove_remote_agent("gamma"))
    say("forgotten", two.a.check_remote_metadata("gamma"))
    outcome("write to forgotten", lambda: two.a.initialize_xfer("WRITE", two.here((0, 100)), later,
        "gamma"), keep=False)
    outcome("forget again", lambda: two.a.remove_remote_agent("gamma"))
    c.deregister_memory(first)
    c.deregister_memory(second)


def as_text(name: Any) -> Any:
    return name.decode() if isinstance(name, bytes) else name


def files() -> None:
    a = nixl_agent("filer", nixl_agent_config(backends=["POSIX"]))
    x = np.arange(65536, dtype=np.uint64).astype(np.uint8)
    a.register_memory([(x.ctypes.data, len(x), 0, "")], "DRAM")
    with tempfile.NamedTemporaryFile() as f:
        f.truncate(1 << 20)
        reg = a.register_memory([(0, 1 << 20, f.fileno(), f.name)], "FILE")
        there = a.get_xfer_descs([(8192, 4096, f.fileno()), (20480, 8192, f.fileno())], "FILE")
        here = a.get_xfer_descs([(x.ctypes.data, 4096, 0), (x.ctypes.data + 4096, 8192, 0)], "DRAM")
        h = a.initialize_xfer("WRITE", here, there, "filer")
        say("write", finish(a, h, a.transfer(h)))
        found = np.fromfile(f.name, np.uint8)
        say("in the file", bool((found[8192:12288] == x[:4096]).all()
                                and (found[20480:28672] == x[4096:12288]).all()
                                and not found[:8192].any()))
        say("by", a.query_xfer_backend(h))
        h.release()
        want = x.copy()
        x[:] = 0
        h = a.initialize_xfer("READ", here, there, "filer")
        say("read", finish(a, h, a.transfer(h)))
        say("in memory", bool((x[:12288] == want[:12288]).all() and not x[12288:].any()))
        h.release()
        seen = a.query_memory([(0, 64, 0, f.name), (0, 64, 0, "/nowhere")], "POSIX", "FILE")
        say("query", [sorted(seen[0]), seen[0]["size"], seen[1]])
        outcome("metadata of files alone", lambda: a.get_agent_metadata(), keep=False)
        say("file types", [t for t in a.get_plugin_mem_types("POSIX") if t != "BLK_SEG"])
        a.deregister_memory(reg)


def no_backend() -> None:
    n = nixl_agent("bare", nixl_agent_config(backends=[]))
    x = np.zeros(100, np.uint8)
    outcome("its metadata", lambda: n.get_agent_metadata(), keep=False)
    outcome("its memory", lambda: n.register_memory([(x.ctypes.data, 100, 0, "")], "DRAM"),
            keep=False)
    outcome("its first backend", lambda: n.create_backend("UCX", {}))
    outcome("then its memory",
            lambda: n.deregister_memory(n.register_memory([(x.ctypes.data, 100, 0, "")], "DRAM")))


def telemetry() -> None:
    two = Two(capture_telemetry=True)
    h = two.a.initialize_xfer("WRITE", two.here((0, 1000), (2000, 1000)),
                              two.there((0, 1000), (3000, 1000)), "beta")
    finish(two.a, h, two.a.transfer(h))
    t = two.a.get_xfer_telemetry(h)
    fields = [t.totalBytes, type(t.startTime).__name__, type(t.postDuration).__name__,
              type(t.xferDuration).__name__]
    say("telemetry fields", [*fields, 1 <= t.descCount <= 2])
    h.release()


def listener(ports: list[int]) -> None:
    agents = [nixl_agent(n, nixl_agent_config(True, True, p, backends=["UCX"])) for n,
              p in zip(("one", "two"), ports)]
    one, two = agents
    z = np.zeros(4096, np.uint8)
    regs = two.register_memory([(z.ctypes.data, 4096, 0, "")], "DRAM")
    descs = two.get_xfer_descs([(z.ctypes.data, 64, 0)], "DRAM")
    # of 0, which the wheel has not
    ports = [getattr(getattr(a, "_listener", None), "port", p) for a, p in zip(agents, ports)]
    one.fetch_remote_metadata("two", "127.0.0.1", ports[1])
    say("fetched", until(lambda: one.check_remote_metadata("two", descs)))
    one.send_local_metadata("127.0.0.1", ports[1])
    say("sent", until(lambda: two.check_remote_metadata("one")))
    one.invalidate_local_metadata("127.0.0.1", ports[1])
    say("invalidated", until(lambda: not two.check_remote_metadata("one")))
    held = np.zeros(64, np.uint8)
    part = one.register_memory([(held.ctypes.data, 64, 0, "")], "DRAM")
    one.send_partial_agent_metadata(part, True, ["UCX"], "127.0.0.1", ports[1])
    say("sent in part", until(lambda: two.check_remote_metadata("one")))
    two.deregister_memory(regs)


def until(true: Callable[[], bool]) -> bool:
    """Also for bytes: over the wheel they may be seen a little after a write is said to be done."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


def main() -> None:
    two = Two()
    for part in (meeting, lists, transfers, prepared, messages, memory, parts):
        say("#", part.__name__)
        part(two)
    two.a.deregister_memory(two.reg_x)
    two.b.deregister_memory(two.reg_y)
    say("#", "files")
    files()
    say("#", "no backend")
    no_backend()
    say("#", "telemetry")
    telemetry()
    say("#", "listener")
    listener([int(p) for p in sys.argv[1:3]])


if __name__ == "__main__":
    main()
