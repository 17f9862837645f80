# SPDX-License-Identifier: Apache-2.0
"""The part of an agent that meets others, by metadata that it is given or fetches."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Optional, Union

from .. import errors
from .._patience import CONNECT
from .._region import Region
from ..peer import is_lost
from . import bindings as b
from . import blob, listening, plugins
from .backends import TOLD_ALWAYS, logger
from .bindings import DEFAULT_COMM_PORT, as_text
from .handles import Late, translated
from .memory import Memory
from .met import Met, Renewal
from .places import Range

Name = Union[str, bytes]

_MOMENT = 1.0  # seconds that a call waits for a lost agent


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
            return self._metadata(self._places.all(), whole=True)

    def get_partial_agent_metadata(self, descs: b.nixlRegDList, inc_conn_info: bool = False,
                                   backends: Iterable[str] = ()) -> bytes:
        """The same of some memory. How to connect is always in it."""
        self._handles(backends)
        with self._lock:
            return self._metadata(self._registered(descs), whole=False)

    def _metadata(self, ranges: list[Range[Region]], whole: bool) -> bytes:
        if not any(plugins.PLUGINS[name].remote for name in self.backends):
            raise b.nixlInvalidParamError("no backend of this agent reaches others: create UCX, "
                                          "SHM, TCP or RDMA")
        engine = self._open()
        with translated():
            description = engine.describe(engine._regions[TOLD_ALWAYS], *[r.what for r in ranges])
        for r in ranges:
            r.used = True
        return blob.encode(blob.Metadata(self.name, whole, list(ranges), description))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Meets an agent by its metadata, and learns of more memory of one that is known. Returns
        its name.
        """
        m = blob.decode(b.as_bytes(metadata))
        if m.agent == self.name:
            raise b.nixlInvalidParamError("this is our own metadata: our own memory is reached by "
                                          "our own name")
        with self._turn(m.agent), translated():
            with self._lock:
                known = self._remotes.get(m.agent)
            remote = self._meet(m, known)
            try:
                for r, at in zip(m.ranges, remote.peer.remotes([r.name for r in m.ranges])):
                    r.what = at
            except BaseException:
                if remote is not known:
                    remote.close()
                raise
            with self._lock:
                remote.learn(m.description, m.ranges, m.whole)
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
        if known is not None and not is_lost(known.peer):
            try:
                known.peer.refresh(m.description)
                return known
            except errors.Error:  # an agent of this name was started anew
                logger.info("%s is another agent than before: meeting it anew", m.agent)
        engine = self._open()
        peer = engine.connect(m.description, CONNECT)  # fails where this is of an agent that ended
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
            remote.close()

    def check_remote_metadata(self, agent: Name, descs: Optional[b.nixlXferDList] = None) -> bool:
        """Whether an agent is known and not lost, and all of a list in its memory."""
        name = as_text(agent)
        with self._lock:
            remote = self._remotes.get(name)
            if remote is None or is_lost(remote.peer):
                return False
            if descs is None or descs.isEmpty():
                return True
            try:
                remote.places.locate(descs.getType(), descs.rows)
            except b.nixlNotFoundError:
                return False
            return True

    def _live(self, agent: Name) -> Met:
        """An agent, connected anew where it was lost and lives. It waits a moment for that after a
        loss, after which it is Late, and not where the last try failed: that is
        nixlRemoteDisconnectError, while one more is made. Preconditions: the caller does not hold
        the lock.
        """
        met = self._known(agent)
        if not is_lost(met.peer):
            return met
        name = as_text(agent)
        with self._lock:
            renewal = met.renewal
            if renewal is None:
                renewal = Renewal(_MOMENT if met.failure is None else 0)
                threading.Thread(target=self._renew, args=(name, met, renewal),
                                 name="sluice-nixl-renew", daemon=True).start()
                met.renewal = renewal  # which ends with the lock, too
        renewal.wait()
        met = self._known(agent)
        if is_lost(met.peer):
            kind = Late if met.failure is None else b.nixlRemoteDisconnectError
            raise kind(f"{name} is lost, and was not connected anew: "
                       f"{met.failure or 'it has not answered yet'}")
        return met

    def _renew(self, name: str, met: Met, renewal: Renewal) -> None:
        """Connects anew by what the agent's metadata said, if it is the same agent still."""
        failure: Optional[Exception] = None
        try:
            with self._turn(name):
                engine = self._engine
                if engine is None or self._remotes.get(name) is not met or not is_lost(met.peer):
                    return
                peer, found = met.connect(engine, CONNECT)
                with self._lock:
                    if self._remotes.get(name) is met:
                        met.renew(peer, found)
                        logger.info("%s was lost, and is connected anew", name)
                    else:
                        peer.close()
        except errors.Error as e:  # it ended, or is out of reach
            failure = e
        finally:
            with self._lock:
                met.renewal, met.failure = None, failure
            renewal.done.set()

    def make_connection(self, remote_agent: Name, backends: Iterable[str] = ()) -> None:
        """Nothing for an agent that lives: add_remote_agent has connected."""
        self._handles(backends)
        self._live(remote_agent)

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
        remote = self._remotes.get(agent) if isinstance(agent, str) else None
        remote = remote or self._remotes.get(as_text(agent))
        if remote is None:
            raise b.nixlNotFoundError(f"the metadata of {as_text(agent)!r} is not loaded")
        return remote
