# SPDX-License-Identifier: Apache-2.0
"""Seconds of Python and nanoseconds of sluice.h."""

from __future__ import annotations

import socket
import time
from typing import Callable, Optional

from ._library import PENDING

FOREVER = -1

# Python runs the handlers of signals, Ctrl-C among them, between calls into the
# library: one that waits for longer comes back as often as this.
SLICE_NS = 200_000_000


def nanoseconds(seconds: Optional[float]) -> int:
    """None is no limit. At least 0."""
    return FOREVER if seconds is None else max(0, int(seconds * 1e9))


def hurry(s: socket.socket, end: float) -> None:
    """Gives a socket's next step the time that is left until an end of time.monotonic()."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other side is too slow")
    s.settimeout(left)


def in_slices(wait: Callable[[int], int], timeout: Optional[float]) -> int:
    """Calls what returns PENDING when its time is over, until the whole time is."""
    if timeout is not None and timeout * 1e9 <= SLICE_NS:
        return wait(nanoseconds(timeout))
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_NS if end is None else min(SLICE_NS, nanoseconds(end - time.monotonic()))
        code = wait(left)
        if code != PENDING or (end is not None and time.monotonic() >= end):
            return code
