# SPDX-License-Identifier: Apache-2.0
"""How long the faces of other makers' packages wait. Those have no limits of their own, and
programs count on it that a process which its host keeps off the processors is waited for.
"""

from __future__ import annotations

import os

CONNECT = 120.0  # seconds, also for the answer of a peer
SLOW = 10.0  # seconds after which the log says once that a transfer is late


def transfer_timeout() -> float:
    """Seconds that a transfer may go without progress: SLUICE_TRANSFER_TIMEOUT, or 120."""
    said = os.environ.get("SLUICE_TRANSFER_TIMEOUT", "")
    try:
        seconds = float(said or 120)
        if not 0 < seconds <= 86400:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"SLUICE_TRANSFER_TIMEOUT is {said!r}, want seconds, at most a day") from None
    return seconds
