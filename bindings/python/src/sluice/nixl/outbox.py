# SPDX-License-Identifier: Apache-2.0
"""Notifications on their way to one peer, so that the sender does not wait for the peer."""

from __future__ import annotations

import threading
from collections import deque

from .. import errors
from ..peer import Peer
from .backends import logger
from .bindings import nixlBackendError

_MOST = 65536  # notifications that wait
_BYTES = 64 << 20  # of them
_STEP = 1.0  # seconds of one try


class Outbox:
    """A bounded queue, which a thread empties while there is something in it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._longest = peer.about()["message_max"]
        self._lock = threading.Lock()  # guards what follows
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # of what waits
        self._sending = False  # a thread is at work

    def send(self, message: bytes) -> None:
        """Sends a notification, behind those that wait. nixlBackendError where too many do."""
        with self._lock:
            # One that is too long is refused here: in the queue it would be told as sent.
            if not self._sending or len(message) > self._longest:
                try:
                    self._peer.notify(message, 0)
                    return
                except (errors.TimeoutError, errors.FullError):
                    pass
            if len(self._waiting) >= _MOST or (self._bytes and
                                               self._bytes + len(message) > _BYTES):
                raise nixlBackendError(f"{len(self._waiting)} notifications of {self._bytes} bytes "
                                       f"wait for a peer that takes none")
            self._waiting.append(message)
            self._bytes += len(message)
            if not self._sending:
                self._sending = True
                threading.Thread(target=self._work, name="sluice-nixl-notify", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._sending = False
                    return
                message = self._waiting[0]
            try:
                self._peer.notify(message, _STEP)
            except (errors.TimeoutError, errors.FullError):
                continue
            except errors.Error as e:
                with self._lock:
                    logger.warning("%d notifications are lost with their peer: %s",
                                   len(self._waiting), e)
                    self._waiting.clear()
                    self._bytes = 0
                continue
            with self._lock:
                self._waiting.popleft()
                self._bytes -= len(message)
