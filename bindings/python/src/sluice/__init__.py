# SPDX-License-Identifier: Apache-2.0
"""sluice moves KV cache and weights between HBM, DRAM and files: one-sided, in batches.

    with sluice.Engine("decode") as engine: ...

An `Engine` registers memory as regions, describes them to peers, and connects to theirs. A
`Transfer` reads from or writes to a peer; it is made once and posted many times.
"""

from ._config import Backend, Identity, Limits
from ._pattern import Slots
from ._region import Lease, Memory, Region
from ._segments import DeviceMemory, File, HostMemory
from .engine import Engine, Listener, Notification
from .errors import (
    AbortedError,
    ArgumentError,
    BoundsError,
    BusyError,
    ClosedError,
    CorruptError,
    Error,
    FaultError,
    ForkError,
    FullError,
    HandleError,
    MissingError,
    NoRouteError,
    NotSupportedError,
    OperatingSystemError,
    PeerLostError,
    ReadOnlyError,
    RevokedError,
    TimeoutError,
    TokenError,
    UnavailableError,
    UnprovenError,
    VersionError,
    WaitTimeout,
)
from .peer import Peer, Remote
from .transfer import Transfer

__version__ = "0.1.0.dev0"  # of the library, too

__all__ = [
    "AbortedError", "ArgumentError", "Backend", "BoundsError", "BusyError", "ClosedError",
    "CorruptError", "DeviceMemory",
    "Engine", "Error", "FaultError", "File", "ForkError", "FullError", "HandleError", "HostMemory",
    "Identity",
    "Lease", "Limits", "Listener", "Memory",
    "MissingError", "NoRouteError", "NotSupportedError", "Notification", "OperatingSystemError",
    "Peer", "PeerLostError", "ReadOnlyError", "Region",
    "Remote", "RevokedError", "Slots", "TimeoutError", "TokenError", "Transfer", "UnavailableError",
    "UnprovenError", "VersionError",
    "WaitTimeout",
]  # fmt: skip
