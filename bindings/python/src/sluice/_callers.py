# SPDX-License-Identifier: Apache-2.0
"""A port at which callers are answered, each by a thread of its own."""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Callable

MOST = 64  # callers that are answered at once; others wait
LIMIT = 5.0  # seconds that a caller waits for a place, and for which one may be silent

logger = logging.getLogger("sluice")


class Callers:
    """Answers at a port of all addresses of this host, 0 for one that the kernel chooses, until it
    is closed. Peers may know the host by another address than it does itself.
    """

    def __init__(self, port: int, name: str, answer: Callable[[socket.socket], None]) -> None:
        self._answer, self._name, self._process = answer, name, os.getpid()
        self._places, self._closed = threading.Semaphore(MOST), threading.Event()
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("::", port), family=socket.AF_INET6, backlog=MOST,
                                                dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("0.0.0.0", port), backlog=MOST)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                caller, _ = self._socket.accept()
            except OSError as e:
                if not self._closed.is_set():
                    logger.warning("%s: a caller was not accepted: %s", self._name, e)
                    self._closed.wait(0.1)  # descriptors may come free
                continue
            if self._closed.is_set() or not self._places.acquire(timeout=LIMIT):
                caller.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(caller,), name=self._name,
                                 daemon=True).start()
            except RuntimeError:  # there is no room for a thread
                self._places.release()
                caller.close()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller:
                caller.settimeout(LIMIT)
                self._answer(caller)
        except Exception as e:  # whatever a caller does, the others are answered
            logger.info("%s: a caller was not served: %s", self._name, e)
        finally:
            self._places.release()

    def close(self) -> None:
        """Ends it, but for callers that are being answered. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if os.getpid() != self._process:  # the child of a fork: the port is its parent's
            self._socket.close()
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        except OSError:
            pass
        self._socket.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * LIMIT)
