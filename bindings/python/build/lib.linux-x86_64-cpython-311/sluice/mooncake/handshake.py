# SPDX-License-Identifier: Apache-2.0
"""How engines meet by a session name.

The one that is named "host:port" answers there with how to reach its memory.

As with Mooncake's P2PHANDSHAKE, nothing here says which process is at the other end: every host
that reaches the port can read and write the registered memory. Keep it to a network that you trust.
"""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import threading
import time
from typing import Any, Callable, NamedTuple

from .._clock import hurry

_GET, _PROBE = b"sluice-mooncake get\n", b"sluice-mooncake probe\n"
_MOST = 256 << 20  # bytes of an answer
_LIMIT = 5.0  # seconds to connect, or to send
_WHOLE = 20.0  # seconds in which an answer is received, however it drips
_CALLERS = 64  # that are answered at once; others wait


class Offer(NamedTuple):
    """How to reach an engine, and its memory: name of the region, address, length."""

    description: bytes
    ranges: list[tuple[str, int, int]]


def parse(session: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". ValueError for anything else; port 0 where none
    is named.
    """
    if session.startswith("["):
        host, bracket, rest = session[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{session!r} is no address")
        return host, int(rest[1:] or 0)
    if session.count(":") > 1:
        return session, 0
    host, _, port = session.partition(":")
    return host, int(port or 0)


def fetch(session: str) -> Offer:
    """Asks the engine of that name. OSError or ValueError where none answers."""
    answer = json.loads(_ask(session, _GET))
    return Offer(base64.b64decode(answer["description"]), [(str(n), int(a), int(size)) for n, a,
                                                           size in answer["ranges"]])


def probe(session: str) -> None:
    """Returns when the engine of that name answers. OSError or ValueError where none does."""
    if _ask(session, _PROBE) != b"here":
        raise ValueError("this is no engine of sluice's, or one that too many call")


def _ask(session: str, word: bytes) -> bytes:
    with socket.create_connection(parse(session), timeout=_LIMIT) as s:
        s.sendall(word)
        answer, end = bytearray(), time.monotonic() + _WHOLE
        while True:
            hurry(s, end)
            part = s.recv(1 << 20)
            if not part:
                return bytes(answer)
            answer += part
            if len(answer) > _MOST:
                raise ValueError("the answer is too long")


def _word(s: socket.socket) -> bytes:
    """What a caller asks, in one time for all of it."""
    word, end = b"", time.monotonic() + _LIMIT
    while len(word) < 64 and not word.endswith(b"\n"):
        hurry(s, end)
        part = s.recv(64 - len(word))
        if not part:
            break
        word += part
    s.settimeout(_LIMIT)
    return word


class Server:
    """Answers at a port of all addresses of this host until it is closed: peers may know it by
    another than it does itself.
    """

    def __init__(self, offer: Callable[[], Offer]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = _LIMIT

            def handle(self) -> None:
                word = _word(self.request)
                if word == _GET:
                    mine = offer()
                    text = {"description": base64.b64encode(mine.description).decode(),
                            "ranges": mine.ranges}
                    self.wfile.write(json.dumps(text).encode())
                elif word == _PROBE:
                    self.wfile.write(b"here")

        family, everywhere = socket.AF_INET, "0.0.0.0"
        if socket.has_dualstack_ipv6():
            family, everywhere = socket.AF_INET6, "::"

        class Listening(socketserver.ThreadingTCPServer):
            address_family = family
            allow_reuse_address, daemon_threads = True, True
            places = threading.Semaphore(_CALLERS)

            def server_bind(self) -> None:
                if family == socket.AF_INET6:
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                super().server_bind()

            def process_request(self, request: Any, client_address: Any) -> None:
                if self.places.acquire(timeout=_LIMIT):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    self.places.release()

            def handle_error(self, request: object, client_address: object) -> None:
                """Nothing: a caller that hangs up, or asks too slowly, asks anew."""

        self._server = Listening((everywhere, 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="sluice-mooncake",
                                        daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
