# SPDX-License-Identifier: Apache-2.0
"""What a program does with mooncake.store: as lines of JSON, the name of a step and its outcome.

Runs over Mooncake's wheel and over sluice's shim, which must agree. The first word is the address
of the master, or of the cache.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, Callable

from mooncake.store import (  # type: ignore[import-not-found]
    MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig)

SIZE = 8 << 20


def step(name: str, act: Callable[[], Any]) -> None:
    try:
        outcome = act()
    except (TypeError, RuntimeError, AttributeError) as e:
        outcome = type(e).__name__
    if isinstance(outcome, bytes):
        outcome = outcome.hex() if len(outcome) < 64 else hash_of(outcome)
    print(json.dumps([name, outcome]), flush=True)


def hash_of(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def main(address: str) -> None:
    store = MooncakeDistributedStore()
    nobody = MooncakeDistributedStore()
    step("setup of a table without a host", lambda: nobody.setup({"metadata_server": "P2PHANDSHAKE",
                                                                  "master_server_addr": address}))
    step("setup", lambda: store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 64 << 20, "tcp", "",
                                      address))
    step("setup again", lambda: store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 64 << 20,
                                            "tcp", "", address))
    step("health", store.health_check)
    step("host", lambda: store.get_hostname().partition(":")[0])
    values(store)
    addresses(store)
    runs(store)
    removal(store)
    if "torch" in sys.argv[2:]:
        tensors(store)
    memory = MooncakeHostMemAllocator()
    step("host memory", lambda: memory.free(memory.alloc(4096)))
    step("host memory of no bytes", lambda: memory.alloc(0))
    step("host memory that is none", lambda: memory.free(12345))
    table = MooncakeDistributedStore()
    step("setup of a table", lambda: table.setup({
        "local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(16 << 20), "local_buffer_size": str(16 << 20),
        "master_server_addr": address}))
    step("close of a table", table.close)
    step("remove all", lambda: store.remove_all(force=True))
    step("nothing is left", lambda: store.batch_is_exist(["a", "f", "m1", "big"]))
    step("close", store.close)
    step("close again", store.close)
    print(json.dumps(["end", True]), flush=True)


def values(store: Any) -> None:
    config = ReplicateConfig()
    fields = ("replica_num", "with_hard_pin", "preferred_segment", "preferred_segments",
              "prefer_alloc_in_same_node", "group_ids", "nof_replica_num", "dfs_replica_num")
    step("config", lambda: [getattr(config, name) for name in fields])
    step("config without such a word", lambda: setattr(config, "other", 1))
    config.group_ids, config.replica_num = ["a"], 1
    step("missing", lambda: [store.is_exist("a"), store.get_size("a"), store.get("a").hex(),
                             store.get_buffer("a")])
    step("put", lambda: store.put("a", b"hello"))
    step("there", lambda: [store.is_exist("a"), store.get_size("a"), store.get("a").hex()])
    step("put again", lambda: store.put("a", b"other bytes"))
    step("the first stays", lambda: store.get("a"))
    step("no bytes", lambda: store.put("none", b""))
    step("no bytes are there", lambda: [store.is_exist("none"), store.get("none").hex()])
    step("no name", lambda: store.put("", b"x"))
    step("no name is there", lambda: [store.is_exist(""), store.get("").hex()])
    step("text", lambda: store.put("text", "abc"))
    step("bytearray", lambda: store.put("ba", bytearray(b"abc"), config))
    step("memoryview", lambda: store.put("mv", memoryview(b"abcdef")[2:4]))
    step("what they are", lambda: store.get_batch(["ba", "mv"])[1])
    step("long name", lambda: [store.put("k" * 5000, b"long"), store.get("k" * 5000).hex()])
    step("name of another alphabet", lambda: [store.put("ключ", b"abc"), store.get("ключ").hex()])
    step("parts", lambda: store.put_parts("parts", b"abc", b"def", config=config))
    step("parts are one", lambda: store.get("parts"))
    step("put batch", lambda: store.put_batch(["b1", "b2"], [b"1", b"22"]))
    step("put batch that is uneven", lambda: store.put_batch(["b3", "b4"], [b"1"]))
    step("put batch of none", lambda: store.put_batch([], []))
    step("get batch", lambda: [b.hex() for b in store.get_batch(["b1", "nothing", "b2"])])
    step("exist batch", lambda: store.batch_is_exist(["b1", "nothing", "b2"]))
    step("exist batch of none", lambda: store.batch_is_exist([]))
    handle = store.get_buffer("a")
    step("buffer", lambda: [handle.size(), bytes(memoryview(handle)).hex(),
                            ctypes.string_at(handle.ptr(), handle.size()).hex()])
    step("buffers", lambda: [h and h.size() for h in store.batch_get_buffer(["b2", "nothing"])])
    big = bytes(range(256)) * (20 << 12)  # 20 MiB
    step("big", lambda: [store.put("big", big), store.get_size("big"), store.get("big") == big])
    step("upsert", lambda: [store.upsert("a", b"anew"), store.get("a").hex()])
    step("upsert what is not there", lambda: [store.upsert("u", b"new"), store.get("u").hex()])
    step("where", lambda: [d.is_memory_replica() for d in store.get_replica_desc("a")])
    step("where is nothing", lambda: store.get_replica_desc("nothing"))
    step("where are they", lambda: sorted(store.batch_get_replica_desc(["a", "nothing", "b1"])))


def addresses(store: Any) -> None:
    buffer = (ctypes.c_ubyte * SIZE)()
    a = ctypes.addressof(buffer)
    ctypes.memmove(a, bytes(range(256)) * (SIZE >> 9), SIZE >> 1)  # the upper half stays empty
    half = a + (SIZE >> 1)

    def seen(n: int, at: int = half) -> str:
        found = hash_of(ctypes.string_at(at, n))
        ctypes.memset(half, 0, SIZE >> 1)
        return found

    step("put from what is not registered", lambda: store.put_from("f0", a, 100))
    step("get into what is not registered", lambda: [store.get_into("f0", half, 100), seen(100)])
    step("register", lambda: store.register_buffer(a, SIZE))
    step("register again", lambda: store.register_buffer(a, SIZE))
    step("register a part", lambda: store.register_buffer(a + 4096, 4096))
    step("register nothing", lambda: [store.register_buffer(0, 4096), store.register_buffer(a, 0)])
    step("put from", lambda: store.put_from("f", a + 7, 1000))
    step("put from again", lambda: store.put_from("f", a, 1000))
    step("get into", lambda: [store.get_into("f", half, 1000), seen(1000)])
    step("get into more", lambda: [store.get_into("f", half, 3000), seen(3000)])
    step("get into less", lambda: [store.get_into("f", half, 10), seen(1000)])
    step("get nothing into", lambda: [store.get_into("nothing", half, 1000), seen(1000)])
    step("put a large one", lambda: store.put_from("large", a + 1, (4 << 20) - 1))
    step("get a large one", lambda: [store.get_into("large", half + 1, (4 << 20) - 1),
                                     seen((4 << 20) - 1, half + 1)])
    step("put batch from", lambda: store.batch_put_from(["x1", "x2"], [a, a + 100], [100, 200]))
    step("some are there", lambda: store.batch_put_from(["x1", "x3"], [a, a + 100], [100, 200]))
    step("one twice", lambda: store.batch_put_from(["d", "d"], [a, a], [100, 200]))
    step("some have no bytes", lambda: store.batch_put_from(["z0", "z1"], [a, a], [0, 5]))
    step("uneven lists", lambda: [store.batch_put_from(["x5", "x6"], [a], [100]),
                                  store.batch_get_into(["x1", "x2"], [a], [100])])
    step("empty lists", lambda: [store.batch_put_from([], [], []),
                                 store.batch_get_into([], [], [])])
    step("get batch into", lambda: [store.batch_get_into(
        ["x1", "nothing", "x2"], [half, half + 500, half + 600], [100, 100, 200]), seen(900)])
    step("get batch into more and less", lambda: store.batch_get_into(
        ["x1", "x2"], [half, half + 500], [150, 100]))
    many = [f"page {k}" for k in range(64)]
    step("pages", lambda: store.batch_put_from(many, [a + 4096 * k for k in range(64)],
                                               [4096] * 64))
    step("pages elsewhere", lambda: [store.batch_get_into(
        many[::-1], [half + 4096 * k for k in range(64)], [4096] * 64), seen(64 * 4096)])
    step("upsert from", lambda: [store.upsert_from("f", a + 1, 500), store.get_size("f")])
    step("unregister another", lambda: store.unregister_buffer(a + 5))
    step("unregister", lambda: store.unregister_buffer(a))
    step("unregister again", lambda: store.unregister_buffer(a))


def runs(store: Any) -> None:
    buffer = (ctypes.c_ubyte * SIZE)()
    a = ctypes.addressof(buffer)
    ctypes.memmove(a, bytes(range(251)) * (SIZE >> 9), 251 * (SIZE >> 9))
    half = a + (SIZE >> 1)
    step("register for runs", lambda: store.register_buffer(a, SIZE))
    put, get = store.batch_put_from_multi_buffers, store.batch_get_into_multi_buffers
    step("put runs", lambda: put(["m1", "m2"], [[a, a + 1000], [a + 2000, a + 3000]],
                                 [[100, 50], [100, 50]], ReplicateConfig()))
    step("get runs", lambda: get(["m1", "m2", "nothing"], [[half, half + 300], [half + 600,
        half + 800], [half]], [[100, 50], [100, 50], [10]]))
    step("their bytes", lambda: ctypes.string_at(half, 1000))
    step("get them in others", lambda: get(["m1"], [[half, half + 400]], [[50, 100]]))
    step("their bytes again", lambda: ctypes.string_at(half, 1000))
    step("get them in less", lambda: get(["m1"], [[half, half + 400]], [[50, 10]]))
    step("get them as one", lambda: store.get("m1"))
    step("runs that are uneven", lambda: [get(["m1"], [[half, half + 400]], [[100]]),
                                          put(["m3"], [[a, a + 1000]], [[100]]),
                                          put(["m4", "m5"], [[a]], [[100]])])
    layers, names = [[a + 65536 * n + 512 * k for n in range(8)] for k in range(16)], [
        f"layers {k}" for k in range(16)]
    step("put layers", lambda: put(names, layers, [[512] * 8] * 16))
    step("get layers", lambda: get(names, [[at + (SIZE >> 1) for at in some] for some in layers],
                                   [[512] * 8] * 16))
    step("bytes of layers", lambda: ctypes.string_at(half, 8 << 16))
    step("a layer as one", lambda: store.get("layers 3"))
    step("unregister runs", lambda: store.unregister_buffer(a))


def removal(store: Any) -> None:
    names = [f"remove {k}" for k in range(20)] + ["k" * 700 + " remove"]
    step("put what goes", lambda: store.put_batch(names, [b"x"] * len(names)))
    step("remove nothing", lambda: store.remove("nothing"))
    step("remove", lambda: [store.remove("remove 0", force=True), store.is_exist("remove 0")])
    step("remove again", lambda: store.remove("remove 0", True))
    step("put it anew", lambda: [store.put("remove 0", b"anew"), store.get("remove 0").hex()])
    step("no pattern", lambda: store.remove_by_regex("("))
    step("no match", lambda: store.remove_by_regex("^remove$", True))
    step("match", lambda: store.remove_by_regex("^remove 1", True))
    step("which are left", lambda: store.batch_is_exist(names))
    step("match inside", lambda: store.remove_by_regex("k remove", force=True))
    step("which are left then", lambda: store.batch_is_exist(names))


def tensors(store: Any) -> None:
    import torch

    made = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    step("put tensor", lambda: store.put_tensor("t", made))
    step("put tensor again", lambda: store.put_tensor("t", made + 1))
    step("its bytes", lambda: store.get("t"))
    for dtype in (torch.bfloat16, torch.int8, torch.uint16, torch.bool, torch.float8_e5m2,
                  torch.complex64):
        one = made.to(dtype)
        step(f"tensor of {dtype}", lambda: [store.put_tensor(str(dtype), one),
                                            store.get(str(dtype)).hex()])
    for name, one in (("scalar", torch.tensor(5.0)), ("empty", torch.zeros(0)),
                      ("turned", made.t()), ("wide", torch.zeros([1] * 9))):
        step(f"tensor {name}", lambda: [store.put_tensor(name, one), store.get(name).hex()])
        got = store.get_tensor(name)
        step(f"tensor {name} again", lambda: None if got is None else [got.tolist(),
                                                                       list(got.shape)])
    step("no tensor", lambda: [store.get_tensor("nothing"), store.get_tensor("a"),
                               store.put_tensor("list", [1, 2])])
    step("tensors", lambda: store.batch_put_tensor(["t1", "t2"], [made, made + 1]))
    step("tensors again", lambda: [t if t is None else t.tolist() for t in store.batch_get_tensor(
        ["t2", "nothing", "t1"])])
    step("uneven tensors", lambda: store.batch_put_tensor(["t3", "t4"], [made]))
    step("published", lambda: [store.pub_tensor("t5", made, ReplicateConfig()),
                               store.get_tensor("t5").tolist()])
    step("in place of", lambda: [store.upsert_tensor("t", made[0]), store.get_tensor("t").tolist()])
    buffer = (ctypes.c_ubyte * 8192)()
    a = ctypes.addressof(buffer)
    step("register for tensors", lambda: store.register_buffer(a, 8192))
    got = store.get_tensor_into("t1", a, 4096)
    step("tensor into", lambda: [got.tolist(), got.data_ptr() - a])
    step("tensor into less", lambda: store.get_tensor_into("t1", a, 100))
    step("tensor from", lambda: [store.put_tensor_from("t6", a, 352),
                                 store.get_tensor("t6").tolist()])
    step("tensor from what is none", lambda: store.put_tensor_from("t7", a + 4096, 352))
    step("unregister tensors", lambda: store.unregister_buffer(a))


if __name__ == "__main__":
    main(sys.argv[1])
