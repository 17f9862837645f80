# SPDX-License-Identifier: Apache-2.0
"""Agents that hand each other their metadata over a port.

As with NIXL, nothing here identifies the other end: a program that reaches the port gets the
metadata, with which this agent's memory can be reached. Keep it to a network that you trust.
"""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
import time
import weakref
from typing import TYPE_CHECKING, Callable, Optional

from .. import _callers
from .._clock import hurry
from .bindings import nixlBackendError

if TYPE_CHECKING:
    from .agent import nixl_agent

logger = logging.getLogger("sluice.nixl")

GET, PUT, FORGET = b"G", b"P", b"F"
_HEAD = struct.Struct("<4scI")
_MAGIC = b"SLNX"
_MOST = 256 << 20  # bytes of a message
_WHOLE = 20.0  # seconds in which a message is received, however it drips
_QUEUED = 1024  # exchanges that wait


def send(to: socket.socket, word: bytes, data: bytes) -> None:
    to.sendall(_HEAD.pack(_MAGIC, word, len(data)) + data)


def receive(of: socket.socket) -> tuple[bytes, bytes]:
    end = time.monotonic() + _WHOLE
    magic, word, length = _HEAD.unpack(_exactly(of, _HEAD.size, end))
    if magic != _MAGIC or length > _MOST:
        raise ConnectionError("the other side is no agent of sluice's")
    data = _exactly(of, length, end)
    of.settimeout(_callers.LIMIT)
    return word, data


def _exactly(of: socket.socket, n: int, end: float) -> bytes:
    parts = []
    while n:
        hurry(of, end)
        part = of.recv(min(n, 1 << 20))
        if not part:
            raise ConnectionError("the other side has hung up")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


class Listener(_callers.Callers):
    """Answers other agents at a port until it is closed."""

    def __init__(self, agent: nixl_agent, port: int) -> None:
        mine = weakref.ref(agent)

        def answer(caller: socket.socket) -> None:
            word, data = receive(caller)
            agent = mine()
            if agent is None:
                return
            if word == GET:
                send(caller, PUT, agent.get_agent_metadata())
            elif word == PUT:
                agent.add_remote_agent(data)
            elif word == FORGET:
                agent.remove_remote_agent(data.decode())

        try:
            super().__init__(port, "sluice-nixl-listen", answer)
        except OSError as e:
            raise nixlBackendError(f"listen on port {port}: {e}") from e


class Caller:
    """Calls other agents from a thread of its own, so that the caller does not wait."""

    def __init__(self) -> None:
        self._jobs: "queue.Queue[Optional[Callable[[], None]]]" = queue.Queue(_QUEUED)
        self._lock = threading.Lock()  # of the start
        self._thread: Optional[threading.Thread] = None

    def call(self, ip: str, port: int, exchange: Callable[[socket.socket], None]) -> None:
        def job() -> None:
            try:
                with socket.create_connection((ip, port), timeout=_callers.LIMIT) as s:
                    exchange(s)
            except Exception as e:
                # no caller waits for it: check_remote_metadata shows that nothing came
                logger.error("exchange metadata with %s port %d: %s", ip, port, e)

        with self._lock:
            if self._thread is None:
                t = threading.Thread(target=self._work, name="sluice-nixl-call", daemon=True)
                t.start()
                self._thread = t
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise nixlBackendError(f"{_QUEUED} exchanges of metadata wait already") from None

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            job()

    def close(self) -> None:
        if self._thread is None:
            return
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            return  # a daemon's thread: it ends with the process
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _callers.LIMIT)
        self._thread = None
