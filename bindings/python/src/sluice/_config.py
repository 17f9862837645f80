# SPDX-License-Identifier: Apache-2.0
"""What an engine is opened with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, NamedTuple, Union

from . import _library
from ._words import number, text
from .errors import ArgumentError


class Backend:
    """What moves bytes, by its name, with options as sluice.h lists them.

    `Backend("tcp", plaintext=True, listen="10.0.0.1:0")`. Durations are strings such as
    "50ms"; a list gives an option several times. An optional one is left out where it is
    unavailable.
    """

    def __init__(self, name: str, *, optional: bool = False, **options: Union[str, int, bool,
        Iterable[Union[str, int]]]) -> None:
        self.name, self.optional = name, optional
        self.options = [f"{k}={_word(v)}" for k, given in options.items() for v in _listed(given)]

    def __repr__(self) -> str:
        return f"Backend({', '.join([repr(self.name), *self.options])})"


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


DEFAULT_BACKENDS = ("shm", Backend("posix", optional=True))


@dataclass(frozen=True)
class Limits:
    """What an engine uses at most. 0 is the library's default, as sluice.h says."""

    transfers: int = 0
    regions: int = 0
    leases: int = 0
    peers: int = 0
    notifications: int = 0
    handshakes: int = 0
    staging_bytes: int = 0  # negative: no chains of backends
    description_bytes: int = 0


class Identity(NamedTuple):
    """Three files of PEM: our certificate and key, and the authority of our peers.

    They are read again when they change. docs/between-hosts.md has commands that make them.
    """

    certificate: str
    key: str
    authority: str


STREAMS = {"unix": "unix:/path", "tcp": "tcp:host:port"}
CLUSTERS = {"nodes": "nodes:a=unix:/path,b=tcp:host:port",
            "etcd": "etcd:http://host:port,http://host:port"}


def split(address: str, forms: Mapping[str, str] = STREAMS) -> tuple[bytes, bytes]:
    """The network of an address, which is one of those of the forms, and the rest."""
    network, colon, where = address.partition(":")
    if not colon or network not in forms:
        raise ArgumentError(f"address {address!r}: write "
                            + " or ".join(f'"{form}"' for form in forms.values()))
    return network.encode(), text(where, "address")


def is_cluster(address: str) -> bool:
    """Whether it names the nodes of a cluster, and no single cache."""
    return address.partition(":")[0] in CLUSTERS


def is_local(address: str) -> bool:
    """Whether all that it names is of this host: no network is needed."""
    network, _, where = address.partition(":")
    return network == "unix" or network == "nodes" and "=tcp:" not in where


def as_struct(name: str, backends: list[Backend], limits: Limits) -> tuple[_library.Config, Any]:
    """The struct of sluice.h, and what it points to."""
    named = (_library.Backend * len(backends))()
    for c, b in zip(named, backends):
        c.name = text(b.name, "backend")
        c.options = (ctypes.c_char_p * (len(b.options) + 1))(*[text(o, "option")
            for o in b.options], None)
        c.flags = _library.OPTIONAL if b.optional else 0
    made = _library.Config(name=text(name, "name"), backends=named, backends_count=len(backends))
    made.size = ctypes.sizeof(made)
    made.staging_bytes, made.description_max = limits.staging_bytes, limits.description_bytes
    for field in ("transfers", "regions", "leases", "peers", "notifications", "handshakes"):
        setattr(made, field + "_max", number(getattr(limits, field), "limits." + field, 32))
    return made, named
