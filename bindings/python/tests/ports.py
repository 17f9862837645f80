# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that are told which to listen at."""

from __future__ import annotations

import random
import socket


def ports(n: int) -> list[str]:
    """Ports that are free, below the range that the kernel gives out by itself, so that no
    connection of another process takes one before it is listened at.
    """
    found: list[str] = []
    while len(found) < n:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as s:
            try:
                s.bind(("0.0.0.0", port))
            except OSError:
                continue
        if str(port) not in found:
            found.append(str(port))
    return found
