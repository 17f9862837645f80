# SPDX-License-Identifier: Apache-2.0
"""An agent that was met, and how to connect to it anew."""

from __future__ import annotations

import threading
import time
from typing import Optional, Sequence

from ..engine import Engine
from ..peer import Peer, Remote
from .outbox import Outbox
from .places import Places, Range


class Renewal:
    """One try to connect to a lost agent anew, beside the program."""

    def __init__(self, patience: float) -> None:
        self.done = threading.Event()
        self._until = time.monotonic() + patience

    def wait(self) -> None:
        """Waits for its end, and all callers together for no longer than its patience."""
        self.done.wait(max(0.0, self._until - time.monotonic()))


class Met:
    """A peer, and where its memory lies. The lock of its agent guards all."""

    def __init__(self, peer: Peer) -> None:
        self.places: Places[Remote] = Places()
        self.told: dict[str, bytes] = {}  # by range: the description that it came with
        self.description = b""  # the latest
        self.renewal: Optional[Renewal] = None  # under way
        self.failure: Optional[Exception] = None  # of the last one
        self._former: Optional[Peer] = None
        self.peer, self.outbox = peer, Outbox(peer)

    def learn(self, description: bytes, ranges: Sequence[Range[Remote]], whole: bool) -> None:
        """Adds ranges of its memory, or puts them in the place of all. Of a range that is known the
        object stays: lists that were prepared refer to it.
        """
        known = {r.name: r for r in self.places.all()}
        if whole:
            self.places, self.told = Places(), {}
        self.description = description
        for r in ranges:
            old = known.setdefault(r.name, r)
            old.what = r.what
            self.told[r.name] = description
        self.places.put(*[known[r.name] for r in ranges])

    def connect(self, engine: Engine, timeout: float) -> tuple[Peer, dict[str, Remote]]:
        """The same agent by new connections, and the ranges of its memory by their names."""
        told: dict[bytes, list[str]] = {}
        for name, description in list(self.told.items()):
            told.setdefault(description, []).append(name)
        peer = engine.connect(self.description, timeout)
        try:
            found: dict[str, Remote] = {}
            for description, names in told.items():
                peer.refresh(description)
                found.update(zip(names, peer.remotes(names)))
        except BaseException:
            peer.close()
            raise
        return peer, found

    def renew(self, peer: Peer, found: dict[str, Remote]) -> None:
        """Goes by another peer. Lists that were prepared refer to the ranges, and serve on. The
        peer before it is closed with the next: how its transfers failed may be asked for still.
        """
        try:
            outbox = Outbox(peer)  # asks the peer, which may be lost again
        except BaseException:
            peer.close()
            raise
        for r in self.places.all():
            r.what = found[r.name]
        if self._former is not None:
            self._former.close()
        self._former = self.peer
        self.peer, self.outbox = peer, outbox

    def close(self) -> None:
        """Ends the connections, and transfers that are under way."""
        self.peer.close()
        if self._former is not None:
            self._former.close()
