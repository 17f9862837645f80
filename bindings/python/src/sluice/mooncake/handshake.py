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
import time
from typing import Callable, NamedTuple

from .. import _callers
from .._clock import hurry

_GET, _PROBE = b"sluice-mooncake get\n", b"sluice-mooncake probe\n"
_MOST = 256 << 20  # bytes of an answer
_WHOLE = 20.0  # seconds in which an answer is received, however it drips


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
    with socket.create_connection(parse(session), timeout=_callers.LIMIT) as s:
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
    word, end = b"", time.monotonic() + _callers.LIMIT
    while len(word) < 64 and not word.endswith(b"\n"):
        hurry(s, end)
        part = s.recv(64 - len(word))
        if not part:
            break
        word += part
    s.settimeout(_callers.LIMIT)
    return word


class Server(_callers.Callers):
    """Answers at a port until it is closed."""

    def __init__(self, offer: Callable[[], Offer]) -> None:
        def answer(caller: socket.socket) -> None:
            word = _word(caller)
            if word == _GET:
                mine = offer()
                text = {"description": base64.b64encode(mine.description).decode(),
                        "ranges": mine.ranges}
                caller.sendall(json.dumps(text).encode())
            elif word == _PROBE:
                caller.sendall(b"here")

        super().__init__(0, "sluice-mooncake", answer)
