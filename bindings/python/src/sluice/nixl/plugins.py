# SPDX-License-Identifier: Apache-2.0
"""Which backends of sluice serve under the names of NIXL's plugins."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Iterable

from ..engine import Backend


@dataclass(frozen=True)
class Plugin:
    """The kinds of memory it serves, and what it opens, in this order."""

    mems: tuple[str, ...]
    opens: tuple[str, ...]
    remote: bool = False
    params: tuple[tuple[str, str], ...] = ()


_DRAM, _VRAM, _FILE, _BLOCK = "DRAM_SEG", "VRAM_SEG", "FILE_SEG", "BLK_SEG"

# The names in capitals beyond NIXL's are sluice's own; their parameters are the options of sluice.h.
PLUGINS = {
    "UCX": Plugin((_DRAM, _VRAM), ("shm", "cuda?", "rdma?", "ucx?"), True, (("ucx_devices", ""), ("num_workers", "1"))),
    "POSIX": Plugin((_DRAM, _FILE, _BLOCK), ("posix",)),
    "GDS": Plugin((_DRAM, _VRAM, _FILE, _BLOCK), ("cuda?", "posix")),
    "GDS_MT": Plugin((_DRAM, _VRAM, _FILE, _BLOCK), ("cuda?", "posix")),
    "SHM": Plugin((_DRAM,), ("shm",), True),
    "TCP": Plugin((_DRAM,), ("tcp",), True, (("plaintext", "false"), ("listen", ""))),
    "RDMA": Plugin((_DRAM, _VRAM), ("rdma",), True),
    "CUDA": Plugin((_DRAM, _VRAM), ("cuda",), False, (("devices", ""),)),
}

# In which order an engine has them: earlier ones win where costs are equal.
_ORDER = ("shm", "cuda", "rdma", "ucx", "tcp", "posix")


def backends(chosen: dict[str, dict[str, str]], cards: Iterable[int]) -> list[Backend]:
    """What to open for plugins with their parameters, and for these cards."""
    options: dict[str, dict[str, str]] = {}
    needed: set[str] = set()
    for name, params in chosen.items():
        for word in PLUGINS[name].opens:
            backend = word.rstrip("?")
            own = options.setdefault(backend, {})
            if len(PLUGINS[name].opens) == 1:
                own.update(params)
            if backend == "ucx" and params.get("ucx_devices"):
                own["devices"] = params["ucx_devices"]
            if not word.endswith("?"):
                needed.add(backend)
    cards = sorted(set(cards))
    if "cuda" in options and "cuda" not in needed and not cards:
        del options["cuda"]  # it would take memory of every card for nothing
    return [_backend(b, options[b], b not in needed and not (b == "cuda" and cards), cards) for b in _ORDER if b in options]


def _backend(name: str, options: dict[str, str], optional: bool, cards: list[int]) -> Backend:
    if name == "cuda":
        listed = options.pop("devices", "")
        devices = [int(d) for d in listed.split(",")] if listed else cards
        return Backend(name, optional=optional, devices=devices, **options)
    return Backend(name, optional=optional, **options)


def current_cards() -> list[int]:
    """The card that this process works with, as torch knows it where that is in use."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    return [int(cuda.current_device())]
