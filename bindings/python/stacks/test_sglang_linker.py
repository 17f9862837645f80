# SPDX-License-Identifier: Apache-2.0

"""SGLang's external linker over sluice.cache: its factory, its counter of layers and its groups of
device pools, from its wheel, unpatched. A stand-in: the device pools are tensors of the CPU, and
which of them a model has is said here.
"""

from __future__ import annotations

import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any, Iterator

import pytest

pytest.importorskip("sglang", reason="unavailable: no sglang: hack/stacks installs it")

import torch
from cache_node import LIMIT, PATIENT, Node
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sluice.integrations import sglang_linker

PAGE, PAGES, LAYERS = 4, 32, 3
KV, SWA, INDEXER = PoolName.KV, PoolName.SWA, PoolName.INDEXER


def names(n: int, first: int = 0) -> list[str]:
    return get_storage_hash_str([first + k for k in range(n * PAGE)], None, page_size=PAGE)


def indices(pages: Any) -> torch.Tensor:
    return (torch.tensor(list(pages))[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def transfer(name: Any, keys: list[str], pages: Any = None) -> PoolTransfer:
    return PoolTransfer(name, keys=keys, device_indices=None if pages is None else indices(pages),
                        hit_policy=PoolHitPolicy.TRAILING_PAGES if name == SWA
                        else PoolHitPolicy.ALL_PAGES)


class Device:
    """Pools of a model: keys and values, of which an index has a row a page, and a window."""

    def __init__(self, kv: bool = True) -> None:
        def rows(n: int, width: int) -> list[torch.Tensor]:
            return [torch.zeros(n, width, dtype=torch.uint8).random_(256) for _ in range(LAYERS)]

        def entry(name: Any, source: Any, components: Any, by_page: bool) -> DevicePoolEntry:
            return DevicePoolEntry(
                name=name, indices_from_pool=source, device_pool=None, components=components,
                layer_mapping={k: k for k in range(LAYERS)}, page_size=PAGE,
                rows_are_pages=by_page)

        self.entries = [entry(KV if kv else PoolName.DEEPSEEK_V4_C4, KV,
                              [rows(PAGES * PAGE, 24), rows(PAGES * PAGE, 16)], False),
                        entry(INDEXER, KV, [rows(PAGES, 40)], True),
                        entry(SWA, SWA, [rows(PAGES, 72)], True)]
        self.group = DevicePoolGroup(self.entries, LAYERS, PAGE)

    def page(self, name: Any, number: int) -> bytes:
        """By what SGLang's entry says of where it lies."""
        rows = PAGE if name in (KV, PoolName.DEEPSEEK_V4_C4) else 1
        return b"".join(bytes(b[number * rows:(number + 1) * rows].flatten().tolist())
                        for b in self.group.entry_map[name].kv_buffer)

    def pages(self, name: Any, numbers: Any) -> list[bytes]:
        return [self.page(name, k) for k in numbers]


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield name


@pytest.fixture
def server(folder: str) -> Iterator[list[Node]]:
    """The server, which a test may replace."""
    running = [Node(folder).start()]
    yield running
    running[0].kill()


@pytest.fixture
def link(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes linkers by SGLang's factory, and closes them."""
    made = []

    def make(device: Device, **more: Any) -> Any:
        monkeypatch.setattr(sglang_linker, "resolve_hybrid_device_pool_group",
                            lambda **_: device.group)
        args = SimpleNamespace(tp_size=1, model_path="made", enable_linker_mla_dedup=False)
        params = SimpleNamespace(
            page_size=PAGE, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None))
        made.append(create_unified_cache_linker(
            args, params, backend="dynamic", components={ComponentType.FULL, ComponentType.SWA},
            config={"linker": "SluiceLinker", "linker_module_path": sglang_linker.__name__,
                    "linker_extra_config": {"address": f"unix:{folder}/socket", **PATIENT,
                                            **more}}))
        return made[-1]

    yield make
    for linker in made:
        linker.close()


def offload(linker: Any, *transfers: PoolTransfer) -> bool:
    assert linker.offload(list(transfers))
    limit = time.monotonic() + LIMIT
    while not linker.num_completed_offloads():
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert linker.num_completed_offloads() == 1
    return bool(linker.pop_completed_offload())


def load(linker: Any, *transfers: PoolTransfer) -> bool:
    """As a forward does it, which waits for each layer."""
    assert linker.load("r", list(transfers))
    counter = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(counter)
    for layer in range(LAYERS):
        linker.layer_done_counter.wait_until(layer)
    return bool(linker.finish_layer_wise_loading(counter))


def test_prefixes_come_back_after_a_kill(folder: str, server: Any, link: Any,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_linker, "STAGE", 512)  # two pages at a time
    first, keys = Device(), names(6)
    linker = link(first)
    stored, window = [3, 9, 4, 31, 0, 17], [7, 30]
    asked = transfer(KV, keys), transfer(SWA, keys[:2])
    assert linker.lookup("r", list(asked)) == []
    assert linker.start_layer_wise_loading() == -1
    # A node of four pages with its window of two, and one of two more pages.
    assert offload(linker, transfer(KV, keys[:4], stored[:4]), transfer(SWA, keys[2:4], window))
    assert offload(linker, transfer(KV, keys[4:], stored[4:]))
    assert linker.lookup("r", list(asked)) == [4]  # where the window is there, too
    linker.close()

    server[0].kill()
    server[0] = Node(folder).start()
    second = Device()
    linker = link(second)
    assert linker.lookup("r", [transfer(KV, [*keys, *names(1, 999)]),
                               transfer(SWA, keys[:2])]) == [4]
    loaded, into = [8, 2, 30, 5], [1, 0]
    others = {name: {k: second.page(name, k) for k in range(PAGES) if k not in to}
              for name, to in ((KV, loaded), (INDEXER, loaded), (SWA, into))}
    assert load(linker, transfer(KV, keys[:4], loaded), transfer(SWA, keys[2:4], into))
    for name in (KV, INDEXER):
        assert second.pages(name, loaded) == first.pages(name, stored[:4])
    assert second.pages(SWA, into) == first.pages(SWA, window)
    for name, before in others.items():
        assert {k: second.page(name, k) for k in before} == before
    assert load(linker, transfer(SWA, keys[2:4], [20, 21]))  # a pool alone
    assert second.pages(SWA, [20, 21]) == first.pages(SWA, window)


def test_a_cache_that_dies_fails_loads_and_offloads(folder: str, server: Any, link: Any) -> None:
    device, keys = Device(), names(4)
    linker = link(device)
    assert offload(linker, transfer(KV, keys, range(4)), transfer(SWA, keys, range(4)))
    want = device.pages(KV, range(4))
    server[0].kill()
    assert not load(linker, transfer(KV, keys, range(8, 12)))
    assert not offload(linker, transfer(KV, names(1, 77), [1]))
    assert linker.lookup("r", [transfer(KV, keys), transfer(SWA, keys[:1])]) == []
    server[0] = Node(folder).start()
    limit = time.monotonic() + LIMIT
    while linker.lookup("r", [transfer(KV, keys), transfer(SWA, keys[:1])]) != [1, 2, 3, 4]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert load(linker, transfer(KV, keys, range(8, 12)))
    assert device.pages(KV, range(8, 12)) == want
    assert not load(linker, transfer(KV, [*keys, *names(1, 99)], range(8, 13)))  # one is not there


def test_what_is_queued(link: Any, server: Any) -> None:
    device, keys = Device(), names(2)
    linker = link(device)
    assert offload(linker, transfer(KV, keys, [0, 1]), transfer(SWA, keys, [0, 1]))
    before = device.pages(KV, range(PAGES))
    assert linker.load("a", [transfer(KV, keys, [4, 5])])
    assert not linker.load("b", [transfer(KV, [], [])])
    with pytest.raises(ValueError, match="queued already"):
        linker.load("a", [transfer(KV, keys, [4, 5])])
    assert linker.cancel_queued_load("a") and not linker.cancel_queued_load("a")
    assert linker.start_layer_wise_loading() == -1
    assert linker.load("a", [transfer(KV, keys, [6, 7])])
    linker.reset()
    assert linker.start_layer_wise_loading() == -1 and device.pages(KV, range(PAGES)) == before
    # Two requests of one batch, while another thread offloads.
    beside = threading.Thread(target=lambda: linker.offload([transfer(KV, names(4, 50), range(4))]))
    beside.start()
    assert linker.load("a", [transfer(KV, keys[:1], [10])])
    assert load(linker, transfer(KV, keys[1:], [11]))
    beside.join()
    assert device.pages(KV, [10, 11]) == before[:2]


def test_a_copy_that_fails_has_ended(link: Any, server: Any, monkeypatch: pytest.MonkeyPatch
                                     ) -> None:
    """Once a load has failed SGLang uses its pages for others."""
    linker, steps = link(Device()), []

    class Event:
        def record(self) -> None:
            steps.append("recorded")

        def synchronize(self) -> None:
            steps.append("ended")

    def copy(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(linker._module, "Event", Event)
    part = SimpleNamespace(stage=SimpleNamespace(copy=copy), pages=None)
    with pytest.raises(RuntimeError):
        linker._copy(part, 0, True)
    assert steps == ["recorded", "ended"]


def test_a_model_whose_pages_lie_in_pools_of_other_names(link: Any, server: Any) -> None:
    device, keys = Device(kv=False), names(3)
    linker = link(device)
    asked = transfer(KV, keys), transfer(SWA, keys[:1])
    assert linker.lookup("r", list(asked)) == []
    assert offload(linker, transfer(KV, keys, range(3)), transfer(SWA, keys[:2], [0, 1]))
    assert linker.lookup("r", list(asked)) == [1, 2]
    assert load(linker, transfer(KV, keys, range(20, 23)))
    name = PoolName.DEEPSEEK_V4_C4
    assert device.pages(name, range(20, 23)) == device.pages(name, range(3))
