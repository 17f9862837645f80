# SPDX-License-Identifier: Apache-2.0
"""Notifications on their way to one peer, so that the sender does not wait for the peer."""

from __future__ import annotations

import threading
from collections import deque
from typing import Optional

from .. import errors
from .._library import PENDING
from ..peer import Peer
from ..transfer import Transfer
from .backends import logger
from .bindings import nixlBackendError

_MOST = 65536  # notifications that wait
_BYTES = 64 << 20  # of them
_SOON_NS = 1_000_000  # after which a thread waits in place of the sender


class Outbox:
    """A bounded queue, which a thread empties while there is something in it. None is taken back:
    that would end the connection to a peer that only stands still for a moment.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._longest = peer.about()["message_max"]
        self._lock = threading.Lock()  # guards what follows
        self._transfer: Optional[Transfer] = None
        self._waiting: deque[bytes] = deque()  # the first is on its way
        self._bytes = 0  # of what waits
        self._sending = False  # a thread is at work

    def send(self, message: bytes) -> None:
        """Sends a notification, behind those that wait. nixlBackendError where too many do."""
        if len(message) > self._longest:  # in the queue it would be told as sent
            raise errors.BoundsError(f"notify: {len(message)} bytes, at most {self._longest}")
        with self._lock:
            if self._sending:
                self._queue(message)
                return
            t = self._transfer
            if t is None:
                t = self._transfer = self._peer.transfer("write")
            code = t._send(message, _SOON_NS)
            if code < 0:
                self._transfer = None
                raise errors.failure(code)
            if code == PENDING:
                threading.Thread(target=self._work, args=(t,), name="sluice-nixl-notify",
                                 daemon=True).start()
                self._queue(message)
                self._sending = True

    def _queue(self, message: bytes) -> None:
        if len(self._waiting) >= _MOST or (self._bytes and self._bytes + len(message) > _BYTES):
            raise nixlBackendError(f"{len(self._waiting)} notifications of {self._bytes} bytes "
                                   f"wait for a peer that takes none")
        self._waiting.append(message)
        self._bytes += len(message)

    def _work(self, t: Transfer) -> None:
        while True:
            try:
                t.wait()
                with self._lock:
                    self._bytes -= len(self._waiting.popleft())
                    if not self._waiting:
                        self._sending = False
                        return
                    t.message(self._waiting[0])
                    t.post()
            except errors.Error as e:
                with self._lock:
                    logger.warning("%d notifications are lost with their peer: %s",
                                   len(self._waiting), e)
                    self._waiting.clear()
                    self._transfer, self._bytes, self._sending = None, 0, False
                    return
