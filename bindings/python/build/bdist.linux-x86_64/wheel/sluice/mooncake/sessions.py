# SPDX-License-Identifier: Apache-2.0
"""Peers by the names of their sessions, connected at first use and anew when they were lost."""

from __future__ import annotations

import threading
from typing import Sequence

from .. import errors
from .._patience import CONNECT
from ..engine import Engine
from ..peer import Peer, Remote
from . import handshake
from .ranges import Ranges



class Session:
    """A connected engine, and where its memory lies."""

    def __init__(self, session: str, peer: Peer, offer: handshake.Offer) -> None:
        self.session, self.peer = session, peer
        self._learning = threading.Lock()  # keeps what is fetched in order; after it comes _lock
        self._lock = threading.Lock()  # guards what follows
        self._remotes: dict[str, Remote] = {}
        self._ranges = _ranges(offer)

    def learn(self) -> None:
        """Asks the engine what it offers now. errors.Error when it is another engine than before.
        """
        with self._learning:
            offer = handshake.fetch(self.session)
            ranges = _ranges(offer)
            self.peer.refresh(offer.description)
            with self._lock:
                self._ranges = ranges
                for name in self._remotes.keys() - {name for _, _, name in ranges}:
                    _forget(self._remotes.pop(name))

    def first(self) -> int:
        """Where its first range begins, 0 where there is none."""
        return next((address for address, _, _ in self._ranges), 0)

    def find_all(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[tuple[int,
        Remote]]:
        """The ranges around these addresses. What we do not know yet we ask for once."""
        try:
            return self._find_all(addresses, lengths)
        except KeyError:
            self.learn()
            return self._find_all(addresses, lengths)

    def _find_all(self, addresses: Sequence[int], lengths: Sequence[int]) -> list[tuple[int,
        Remote]]:
        with self._lock:
            found = [self._ranges.find(a, n) for a, n in zip(addresses, lengths)]
            return [(start, self._remote(name)) for start, name in found]

    def _remote(self, name: str) -> Remote:
        if name not in self._remotes:
            self._remotes[name] = self.peer.remote(name)
        return self._remotes[name]


def _ranges(offer: handshake.Offer) -> Ranges[str]:
    ranges: Ranges[str] = Ranges()
    for name, address, length in offer.ranges:
        ranges.check(address, length)
        ranges.add(address, length, name)
    return ranges


def _forget(remote: Remote) -> None:
    try:
        remote.close()
    except errors.Error:  # a transfer lists it still: the peer's end closes it
        pass


class Sessions:
    """The sessions of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._met: dict[str, Session] = {}
        # one a name: a peer that does not answer holds up no other
        self._locks: dict[str, threading.Lock] = {}

    def meet(self, session: str, fresh: bool = False) -> Session:
        """The engine of that name. `fresh` asks it for what it offers, whatever is known of it."""
        with self._locks.setdefault(session, threading.Lock()):
            known = self._met.get(session)
            if known is not None and not known.peer.lost:
                try:
                    if fresh:
                        known.learn()
                    return known
                except errors.Error:  # another engine has this name now
                    pass
            offer = handshake.fetch(session)
            if known is not None:
                del self._met[session]
                known.peer.close()
            peer = self._engine.connect(offer.description, CONNECT)
            met = self._met[session] = Session(session, peer, offer)
            return met
