# SPDX-License-Identifier: Apache-2.0
"""KVCR's control channel with a proof that a source has ended, for KVCR over sluice.nixl.

KVCR's sources write into the memory of their targets. Where a source does not say how a write
ended, its target keeps the destinations for ever, as "uncertain": no answer of NIXL's ends that.
Over SHM the threads of the source make the copies, so the end of its process is the end of its
writes. This channel proves that end, and tells KVCR so as KVCR's Guard would.
"""

from __future__ import annotations

import logging
import os
import select
from typing import Any, NamedTuple, Optional

import msgspec
from kvcr.control_channels import ZmqPeerControlChannel

from ..nixl.backends import find_agent

logger = logging.getLogger("sluice.integrations.kvcr")

_SOURCES_MOST = 256  # a descriptor each
_PROBES_MOST = 1 << 16
_FIELD = "sluice_process"


class _Said(msgspec.Struct):  # type: ignore[misc]
    """What this channel reads of KVCR's messages."""

    type: str = ""
    target_agent: str = ""  # the sender's name, in all messages
    sender_control_endpoint: str = ""
    sender_incarnation: str = ""  # a name for the life of the sender
    source_incarnation: Optional[str] = None
    op_handle: int = 0
    terminal: bool = False
    sluice_process: Any = None  # _FIELD


class _Probe(NamedTuple):
    """A write that its target no longer waits for."""

    endpoint: str  # of the source
    handle: int


class ProvenControlChannel(ZmqPeerControlChannel):  # type: ignore[misc]
    """A ZmqPeerControlChannel, for sources and targets.

    It proves nothing of a source that lives, that is in another PID namespace or on another host,
    or that does not have this channel; nor where one of the two agents has backends beside SHM and
    POSIX. KVCR then keeps the destinations, as without it.
    """

    def __init__(self, bind_host: str, bind_port: int, advertise_host: str) -> None:
        super().__init__(bind_host, bind_port, advertise_host)
        # KVCR's progress thread alone uses all of them.
        self._sources: dict[str, int] = {}  # pidfds of sources by their lives
        self._latest: dict[str, str] = {}  # the life at an endpoint
        self._probes: dict[_Probe, str] = {}  # by life of the source
        self._warned = False

    def send(self, endpoint: str, message: bytes) -> bool:
        said = _read(message)
        if said.type == "target_metadata_ack" and self._is_proof(said):
            try:
                message = msgspec.msgpack.encode(
                    {**msgspec.msgpack.decode(message), _FIELD: _process(os.getpid())})
            except OSError as e:  # the message goes without
                self._warn(f"this process has nothing to be known by: {e}")
        elif said.type == "write_probe" and said.source_incarnation and self._is_proof(said):
            self._probes[_Probe(endpoint, said.op_handle)] = said.source_incarnation
            if len(self._probes) > _PROBES_MOST:  # the first has ended, most likely: nobody says so
                del self._probes[next(iter(self._probes))]
        return bool(super().send(endpoint, message))

    def recv(self) -> list[bytes]:
        messages = list[bytes]()
        for message in super().recv():
            try:
                said = _read(message)
            except (UnicodeDecodeError, RecursionError):
                continue  # KVCR's thread would end by it
            messages.append(message)
            if said.type == "target_metadata_ack":
                self._meet(said)
            elif said.type == "write_probe_ack" and said.terminal:
                self._probes.pop(_Probe(said.sender_control_endpoint, said.op_handle), None)
        return messages + self._proofs()

    def _meet(self, said: _Said) -> None:
        """Keeps hold of a source's process."""
        life = said.sender_incarnation
        self._latest.pop(said.sender_control_endpoint, None)
        self._latest[said.sender_control_endpoint] = life
        if len(self._latest) > _SOURCES_MOST:
            del self._latest[next(iter(self._latest))]
        if life in self._sources:
            return
        if len(self._sources) >= _SOURCES_MOST:
            self._forget()
        fd = _open(said.sluice_process) if len(self._sources) < _SOURCES_MOST else None
        if fd is not None:
            self._sources[life] = fd

    def _forget(self) -> None:
        """Forgets sources that have ended. A later probe of theirs has no proof."""
        waited = set(self._probes.values())
        for life in [life for life, fd in self._sources.items() if _has_ended(fd)]:
            if life not in waited:
                os.close(self._sources.pop(life))

    def _proofs(self) -> list[bytes]:
        """An answer for each probe of a source that has ended."""
        lives = set(self._probes.values()) & self._sources.keys()
        dead = {life for life in lives if _has_ended(self._sources[life])}
        ended = [(probe, life) for probe, life in self._probes.items() if life in dead]
        for probe, _ in ended:
            del self._probes[probe]
            logger.info("the source at %s has ended: nothing of operation %d lands any more",
                        probe.endpoint, probe.handle)
        return [msgspec.msgpack.encode({
            "type": "write_probe_ack", "sender_control_endpoint": probe.endpoint,
            "op_handle": probe.handle, "terminal": False, "dead_incarnation": life,
            # for what KVCR asks of this endpoint next
            "sender_incarnation": self._latest.get(probe.endpoint, life)})
            for probe, life in ended]

    def _is_proof(self, said: _Said) -> bool:
        """Whether the end of a process ends its writes by our agent, which said this."""
        agent = find_agent(said.target_agent)
        if agent is not None and agent.by_shm_alone:
            return True
        self._warn('have KVCR use the backend "SHM" of sluice.nixl, and none but "POSIX" beside it')
        return False

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("no proof that the writes of dead sources have ended: %s", why)

    def close(self) -> None:
        super().close()
        self._probes.clear()
        while self._sources:
            os.close(self._sources.popitem()[1])


def _read(message: bytes) -> _Said:
    try:
        said: _Said = msgspec.msgpack.decode(message, type=_Said)
        return said
    except msgspec.DecodeError:  # also one of another shape
        return _Said()


def _process(pid: int) -> list[Any]:
    """What one process alone says: the boot, the PID namespace, its number, and when it began."""
    with open("/proc/sys/kernel/random/boot_id") as boot, open(f"/proc/{pid}/stat") as stat:
        began = int(stat.read().rpartition(")")[2].split()[19])
        return [boot.read().strip(), os.stat("/proc/self/ns/pid").st_ino, pid, began]


def _open(process: Any) -> Optional[int]:
    """A pidfd of a process that said this; None where we do not see that process."""
    if not isinstance(process, list) or len(process) != 4 or type(process[2]) is not int:
        return None
    fd = -1
    try:
        if process[:2] == _process(os.getpid())[:2]:
            fd = os.pidfd_open(process[2])
            if _process(process[2]) == process:  # and none that has its number since
                return fd
    except (OSError, OverflowError):
        pass
    if fd >= 0:
        os.close(fd)
    return None


def _has_ended(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(what & select.POLLIN for _, what in poll.poll(0))
