# SPDX-License-Identifier: Apache-2.0
"""Which backends of sluice serve under the names of NIXL's plugins."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Iterable, Optional

from ..engine import Backend


logger = logging.getLogger("sluice.nixl")


@dataclass(frozen=True)
class Plugin:
    """The kinds of memory it serves, and what it opens, in this order."""

    mems: tuple[str, ...]
    opens: tuple[str, ...]
    remote: bool = False
    params: tuple[tuple[str, str], ...] = ()
    nixl: tuple[str, ...] = ()  # parameters of NIXL's that mean nothing here
    options: bool = False  # it takes all options of its backend, as sluice.h lists them


_DRAM, _VRAM, _FILE, _BLOCK = "DRAM_SEG", "VRAM_SEG", "FILE_SEG", "BLK_SEG"

_UCX = ("num_threads", "split_batch_size", "ucx_error_handling_mode", "engine_config", "ucx_num_device_channels")
_POSIX = ("use_uring", "use_aio", "use_posix_aio", "ios_pool_size", "kernel_queue_size")
_GDS = ("batch_pool_size", "batch_limit", "max_request_size", "thread_count")

# The names in capitals beyond NIXL's are sluice's own; their parameters are the options of sluice.h.
PLUGINS = {
    "UCX": Plugin((_DRAM, _VRAM), ("shm", "cuda?", "rdma?", "ucx?"), True, (("device_list", ""), ("ucx_devices", ""), ("num_workers", "1")), _UCX),
    "POSIX": Plugin((_DRAM, _FILE, _BLOCK), ("posix",), nixl=_POSIX, options=True),
    "GDS": Plugin((_DRAM, _VRAM, _FILE, _BLOCK), ("cuda?", "posix"), nixl=_GDS),
    "GDS_MT": Plugin((_DRAM, _VRAM, _FILE, _BLOCK), ("cuda?", "posix"), nixl=_GDS),
    "SHM": Plugin((_DRAM,), ("shm",), True, options=True),
    "TCP": Plugin((_DRAM,), ("tcp",), True, (("plaintext", "false"), ("listen", "")), options=True),
    "RDMA": Plugin((_DRAM, _VRAM), ("rdma",), True, options=True),
    "CUDA": Plugin((_DRAM, _VRAM), ("cuda",), False, (("devices", ""),), options=True),
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
            devices = params.get("ucx_devices") or params.get("device_list") or ""
            if backend == "rdma" and name == "UCX":
                devices = ",".join(d for d in devices.split(",") if _is_rdma(d))
            if backend in ("rdma", "ucx") and devices:
                own["devices"] = devices
            if not word.endswith("?"):
                needed.add(backend)
    cards = sorted(set(cards))
    if "cuda" in options and "cuda" not in needed and not cards:
        del options["cuda"]  # it would take memory of every card for nothing
    return [_backend(b, options[b], b not in needed and not (b == "cuda" and cards), cards) for b in _ORDER if b in options]


def _is_rdma(device: str) -> bool:
    """Whether a device of UCX's, such as mlx5_0:1, is one of RDMA: others are network interfaces."""
    name = device.partition(":")[0]
    return bool(name) and os.path.exists(os.path.join("/sys/class/infiniband", name))


def known(name: str, params: dict[str, str]) -> dict[str, str]:
    """The parameters that mean something here. A word in the log says which do not."""
    plugin = PLUGINS[name]
    kept = {k: v for k, v in params.items() if k not in plugin.nixl and (plugin.options or k in dict(plugin.params))}
    for k in params.keys() - kept.keys():
        logger.warning("%s: the parameter %s=%s is not used here", name, k, params[k])
    return kept


def alone(names: list[str]) -> Optional[str]:
    """The one backend that serves the plugins of these names; None where they leave a choice."""
    opens = {word.rstrip("?") for name in names for word in PLUGINS[name].opens}
    return opens.pop() if len(opens) == 1 else None


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
