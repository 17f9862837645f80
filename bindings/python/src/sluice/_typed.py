# SPDX-License-Identifier: Apache-2.0
"""What comes as JSON from the library, by its fields."""

from __future__ import annotations

from typing import Dict, List, Literal, TypedDict


class RouteStats(TypedDict):
    """The transfers to one peer over one backend."""

    peer: str
    engine: str  # of the peer: tells two of one name apart
    backend: str
    transfers: int
    bytes: int
    errors: Dict[str, int]
    p50_ns: int
    p99_ns: int
    rate: float  # bytes a second; 0: not known yet


class Stats(TypedDict):
    """Counters of an engine."""

    posted: int
    regions: int
    peers: int
    leases: int
    stray: int  # completions that no transfer waited for
    notifications: int  # that wait to be received
    routes: List[RouteStats]


class RegionInfo(TypedDict):
    """A region of a peer's."""

    name: str
    kind: Literal["dram", "hbm", "file"]
    length: int
    read_only: bool


class PeerInfo(TypedDict):
    """A peer."""

    name: str
    origin: str  # address and certificate of a peer that dialled; else empty
    same_host: bool
    message_max: int  # bytes; 0: no backend to it carries messages
    regions: List[RegionInfo]
