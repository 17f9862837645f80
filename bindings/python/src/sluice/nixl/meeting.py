# SPDX-License-Identifier: Apache-2.0
"""The part of an agent that meets others, by metadata that it is given or fetches."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Optional, Union

from .. import errors
from .._region import Region
from ..peer import Peer, Remote
from . import bindings as b
from . import blob, listening, plugins
from .backends import TOLD_ALWAYS, logger
from .bindings import DEFAULT_COMM_PORT, as_text
from .handles import translated
from .memory import Memory
from .outbox import Outbox
from .places import Places, Range

Name = Union[str, bytes]

_CONNECT = 10.0  # seconds


def _is_lost(peer: Peer) -> bool:
    try:
        return peer.lost
    except errors.Error:  # closed meanwhile
        return True


class Met:
    """A peer, and where its memory lies."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.places: Places[Remote] = Places()
        self.outbox = Outbox(peer)


class Meeting(Memory):
    """Other agents by their names."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._remotes: dict[str, Met] = {}
        self._met = threading.Condition()  # guards _meeting; after it comes _lock
        self._meeting: set[str] = set()  # agents that are being met
        self._caller = listening.Caller()

    def get_agent_metadata(self) -> bytes:
        """What other agents need to reach all memory of this one. Send it over a channel that you
        trust.
        """
        with self._lock:
            ranges = [r for r in self._places.all() if r.kind in (b.DRAM_SEG, b.VRAM_SEG,
                b.FILE_SEG, b.BLK_SEG)]
            return self._metadata(ranges, whole=True)

    def get_partial_agent_metadata(self, descs: b.nixlRegDList, inc_conn_info: bool = False,
                                   backends: Iterable[str] = ()) -> bytes:
        """The same of some memory. How to connect is always in it."""
        self._handles(backends)
        with self._lock:
            found = [self._places.exact(descs.getType(), *descs[i][:3])
                     for i in range(descs.descCount())]
            if None in found:
                raise b.nixlNotFoundError(f"descriptor {found.index(None)} is not registered as "
                                          f"this range")
            return self._metadata([r for r in found if r is not None], whole=False)

    def _metadata(self, ranges: list[Range[Region]], whole: bool) -> bytes:
        if not any(plugins.PLUGINS[name].remote for name in self.backends):
            raise b.nixlInvalidParamError("no backend of this agent reaches others: create UCX, "
                                          "SHM, TCP or RDMA")
        engine = self._open()
        with translated():
            description = engine.describe(engine._regions[TOLD_ALWAYS], *[r.what for r in ranges])
        return blob.encode(blob.Metadata(self.name, whole, list(ranges), description))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Meets an agent by its metadata, and learns of more memory of one that is known. Returns
        its name.
        """
        m = blob.decode(metadata)
        if m.agent == self.name:
            raise b.nixlInvalidParamError("this is our own metadata: our own memory is reached by "
                                          "our own name")
        with self._turn(m.agent), translated():
            with self._lock:
                known = self._remotes.get(m.agent)
            remote = self._meet(m, known)
            try:
                for r in m.ranges:
                    r.what = remote.peer.remote(r.name)
            except BaseException:
                if remote is not known:
                    remote.peer.close()
                raise
            with self._lock:
                if m.whole:
                    remote.places = Places()
                for r in m.ranges:
                    remote.places.put(r)
                self._remotes[m.agent] = remote
        return m.agent.encode()

    @contextmanager
    def _turn(self, agent: str) -> Iterator[None]:
        """Keeps meetings with one agent in order. The lock is free meanwhile: one that does not
        answer holds up no other.
        """
        with self._met:
            self._met.wait_for(lambda: agent not in self._meeting)
            self._meeting.add(agent)
        try:
            yield
        finally:
            with self._met:
                self._meeting.discard(agent)
                self._met.notify_all()

    def _meet(self, m: blob.Metadata, known: Optional[Met]) -> Met:
        """The peer that the metadata is of, which may take its time to connect."""
        if known is not None and not known.peer.lost:
            try:
                known.peer.refresh(m.description)
                return known
            except errors.Error:  # an agent of this name was started anew
                logger.info("%s is another agent than before: meeting it anew", m.agent)
        engine = self._open()
        peer = engine.connect(m.description, _CONNECT)  # fails where this is of an agent that ended
        if peer is engine.self_peer():  # under another name: forgetting that would close it
            raise b.nixlInvalidParamError(f"{m.agent!r} has our own description: our own memory is "
                                          f"reached by our own name")
        if known is not None:
            self.remove_remote_agent(m.agent)
        return Met(peer)

    def remove_remote_agent(self, agent: Name) -> None:
        """Forgets an agent. Transfers with it that are under way fail."""
        with self._lock:
            remote = self._remotes.pop(as_text(agent), None)
        if remote is not None:
            remote.peer.close()

    def check_remote_metadata(self, agent: Name, descs: Optional[b.nixlXferDList] = None) -> bool:
        """Whether an agent is known and not lost, and all of a list in its memory."""
        with self._lock:
            remote = self._remotes.get(as_text(agent))
            if remote is None or _is_lost(remote.peer):
                return False
            if descs is None or descs.isEmpty():
                return True
            try:
                remote.places.locate(descs.getType(), descs.rows)
            except b.nixlNotFoundError:
                return False
            return True

    def make_connection(self, remote_agent: Name, backends: Iterable[str] = ()) -> None:
        """Nothing: add_remote_agent has connected."""
        self._handles(backends)
        self._known(remote_agent)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Sends all metadata to the agent that listens there, without waiting for it."""
        data = self.get_agent_metadata()
        self._call(ip_addr, port, lambda s: listening.send(s, listening.PUT, data))

    def send_partial_agent_metadata(
        self,
        descs: b.nixlRegDList,
        inc_conn_info: bool = False,
        backends: Iterable[str] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        """Sends metadata of some memory likewise."""
        data = self.get_partial_agent_metadata(descs, inc_conn_info, backends)
        self._call(ip_addr, port, lambda s: listening.send(s, listening.PUT, data))

    def fetch_remote_metadata(self, remote_agent: Name, ip_addr: str = "",
                              port: int = DEFAULT_COMM_PORT, label: str = "") -> None:
        """Asks the agent that listens there for its metadata, without waiting:
        check_remote_metadata says when it is there.
        """

        def exchange(s: Any) -> None:
            listening.send(s, listening.GET, self.name.encode())
            data = listening.receive(s)[1]
            if blob.decode(data).agent != as_text(remote_agent):
                raise ConnectionError(f"{blob.decode(data).agent!r} listens there")
            self.add_remote_agent(data)

        self._call(ip_addr, port, exchange)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has the agent that listens there forget us."""
        self._call(ip_addr, port, lambda s: listening.send(s, listening.FORGET, self.name.encode()))

    def _call(self, ip: str, port: int, exchange: Any) -> None:
        if not ip:
            raise b.nixlInvalidParamError("say ip_addr: there is no central store of metadata here")
        self._caller.call(ip, port, exchange)

    def _known(self, agent: Name) -> Met:
        remote = self._remotes.get(as_text(agent))
        if remote is None:
            raise b.nixlNotFoundError(f"the metadata of {as_text(agent)!r} is not loaded")
        return remote
