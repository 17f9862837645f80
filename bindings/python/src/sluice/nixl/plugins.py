# SPDX-License-Identifier: Apache-2.0
"""Which backends of sluice serve under the names of NIXL's plugins."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Iterable, Optional

from .._config import Backend

logger = logging.getLogger("sluice.nixl")


@dataclass(frozen=True)
class Plugin:
    """The kinds of memory it serves, and what it opens, in this order."""

    mems: tuple[str, ...]
    opens: tuple[str, ...]
    remote: bool = False
    params: tuple[tuple[str, str], ...] = ()
    options: bool = False  # it takes the options of its backend


_DRAM, _VRAM, _FILE, _BLOCK = "DRAM_SEG", "VRAM_SEG", "FILE_SEG", "BLK_SEG"

# What backends take, as the library lists it. "path" is what NIXL's POSIX asks for by three words.
OPTIONS = {
    "posix": "path threads depth piece_max gap_max jobs_max keys_max buffered durable",
    "shm": "workers inline_max piece_max keys_max jobs_max conns_max ring_bytes grace dial_timeout "
           "failure socket_dir",
    "tcp": "certificate key authority server_name plaintext listen advertise conns flight "
           "batches_max notify_max message_max keys_max peers_max"
    " handshakes grace close_max failure handshake",
    "rdma": "library devices rails listen queue_depth slice entries flight batches_max notify_max "
            "keys_max conns_max timeout retries level"
    " traffic_class mtu spin grace packet_life failure relaxed_ordering",
    "cuda": "sms library devices streams gated batches_max keys_max peers peers_max "
            "revoke_grace sum_timeout dial_timeout",
}

# The names in capitals beyond NIXL's are sluice's own; their parameters are the options of the
# backend.
PLUGINS = {
    "UCX": Plugin((_DRAM, _VRAM), ("shm?", "cuda?", "rdma?", "tcp?"), True,
                  (("device_list", ""), ("ucx_devices", ""))),
    "POSIX": Plugin((_DRAM, _FILE, _BLOCK), ("posix",), False, (("use_uring", "true"),
        ("use_aio", "false"), ("use_posix_aio", "false")), True),
    "GDS": Plugin((_DRAM, _VRAM, _FILE, _BLOCK), ("cuda?", "posix")),
    "GDS_MT": Plugin((_DRAM, _VRAM, _FILE, _BLOCK), ("cuda?", "posix")),
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
            if PLUGINS[name].options:
                own.update(_translated(params))
            if not word.endswith("?"):
                needed.add(backend)
    named = _of_devices(chosen.get("UCX", {}))
    if named:
        for backend in {"rdma", "tcp"} - named.keys() - needed:
            del options[backend]  # which would take all NICs, or go by any network
        for backend, only in named.items():
            options[backend] = {**only, **options.get(backend, {})}
    cards = sorted(set(cards))
    if "cuda" in options and "cuda" not in needed and not cards:
        del options["cuda"]  # it would take memory of every card for nothing
    return [_backend(b, options[b], b not in needed and not (b == "cuda" and cards), cards)
            for b in _ORDER if b in options]


def _of_devices(params: dict[str, str]) -> dict[str, dict[str, str]]:
    """What serves the network devices that UCX was told to use, by the plugin's word or by UCX's
    own.
    """
    devices = (params.get("ucx_devices") or params.get("device_list") or "").replace(",",
        " ").split()
    nics = [d for d in devices if _is_rdma(d)]
    return {name: {"devices": ",".join(of)} for name, of in (("ucx", devices), ("rdma", nics))
            if of}


def _is_rdma(device: str) -> bool:
    """Whether a device of UCX's, such as mlx5_0:1, is one of RDMA: others are network interfaces.
    """
    name = device.partition(":")[0]
    return bool(name) and os.path.exists(os.path.join("/sys/class/infiniband", name))


def known(name: str, params: dict[str, str]) -> dict[str, str]:
    """The parameters that mean something here. A word in the log says which do not."""
    plugin = PLUGINS[name]
    taken = {k for k, _ in plugin.params} | set(OPTIONS[plugin.opens[0]].split() if plugin.options
                                                else ())
    kept = {k: v for k, v in params.items() if k in taken}
    for k in sorted(params.keys() - taken):
        logger.warning("%s: the parameter %s=%s is not used here", name, k, params[k])
    return kept


def _translated(params: dict[str, str]) -> dict[str, str]:
    """Parameters as options: what asks for AIO gets threads, since io_uring is what the backend
    takes by itself.
    """
    words = {k: params[k].strip().lower() in ("true", "1") for k in ("use_uring", "use_aio",
        "use_posix_aio") if k in params}
    options = {k: v for k, v in params.items() if k not in words}
    if (words.get("use_aio") or words.get("use_posix_aio")
        or words.get("use_uring") is False) and not words.get("use_uring"):
        options.setdefault("path", "threads")
    return options


def trials(name: str, params: dict[str, str]) -> list[Backend]:
    """Backends that tell at once whether the parameters of a plugin hold: one of them must open.
    None where that would cost memory of cards. Devices are tried one by one: UCX says nothing of
    one that it does not know beside one that it does.
    """
    if name == "UCX":
        return [_backend(of, {"devices": device}, False, [])
                for of, only in _of_devices(params).items()
                for device in only["devices"].split(",")]
    if not PLUGINS[name].options or name == "CUDA":
        return []
    return [_backend(PLUGINS[name].opens[0], _translated(params), False, [])]


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
