# SPDX-License-Identifier: Apache-2.0
"""The agent: NIXL's calls over an engine."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from typing import Any, Iterable, Optional, Union

import numpy as np

from .. import errors
from ..engine import Engine, Limits
from ..peer import Peer, Remote
from .._region import Region
from .._segments import DeviceMemory, File, HostMemory
from . import bindings as b
from . import blob, listening, lists, messages, plugins
from .bindings import DEFAULT_COMM_PORT, as_text, nixl_thread_sync_t
from .handles import as_nixl, nixl_prepped_dlist_handle, nixl_xfer_handle, translated
from .places import Located, Places, Range, fill, find_pattern

logger = logging.getLogger("sluice.nixl")

Name = Union[str, bytes]
nixl_backend_handle = int

_OPS = {"WRITE": "write", "READ": "read"}
_LIMITS = Limits(peers=65536, notifications=65536)
_CONNECT = 10.0  # seconds
_TOLD_ALWAYS = "0"  # the name of a region of one byte, by which an agent without memory is described


class nixl_agent_config:
    """What an agent is made with. Progress threads and the mode of synchronization have no effect:
    nothing here needs to be polled, and any thread may call anything."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Iterable[str] = ("UCX",),
        sync_mode: Optional[nixl_thread_sync_t] = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode is a {type(sync_mode).__name__}, not a nixl_thread_sync_t")
        self.enable_pthread, self.enable_listen, self.port = enable_prog_thread, enable_listen_thread, listen_port
        self.capture_telemetry, self.num_threads, self.sync_mode = capture_telemetry, num_threads, sync_mode
        self.backends = list(backends)


class _Remote:
    """A peer, and where its memory lies."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.places: Places[Remote] = Places()


class nixl_agent:
    """Registers memory, meets other agents, and moves bytes between its memory and theirs."""

    def __init__(self, agent_name: str, nixl_conf: Optional[nixl_agent_config] = None, instantiate_all: bool = False) -> None:
        self.name = agent_name
        self._lock = threading.RLock()  # guards what follows
        self._engine: Optional[Engine] = None
        self._places: Places[Region] = Places()
        self._remotes: dict[str, _Remote] = {}
        self._numbers = itertools.count(1)
        self._caller = listening.Caller()
        self._listener: Optional[listening.Listener] = None
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, nixl_backend_handle] = {}
        self._params: dict[str, dict[str, str]] = {}
        config = nixl_conf or nixl_agent_config()
        self._telemetry = config.capture_telemetry
        names = ["UCX", "POSIX", "GDS"] if instantiate_all and not nixl_conf else config.backends
        for name in names:
            if name in plugins.PLUGINS:
                self.create_backend(name)
            else:
                logger.warning("there is no %s here, and it is left out: there are %s", name, ", ".join(plugins.PLUGINS))
        if config.enable_listen:
            self._listener = listening.Listener(self, config.port)

    # ---- backends

    def get_plugin_list(self) -> list[str]:
        """Names that create_backend takes."""
        return list(plugins.PLUGINS)

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """The types of memory that a plugin serves."""
        return list(plugins.PLUGINS[backend].mems) if backend in plugins.PLUGINS else _nothing(backend, [])

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Parameters of a plugin and their defaults."""
        return dict(plugins.PLUGINS[backend].params) if backend in plugins.PLUGINS else _nothing(backend, {})

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """The types of memory that a backend of this agent serves."""
        return list(plugins.PLUGINS[backend].mems) if backend in self.backends else _nothing(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """What a backend of this agent was made with."""
        return dict(self._params[backend]) if backend in self.backends else _nothing(backend, {})

    def create_backend(self, backend: str, initParams: Optional[dict[str, str]] = None) -> None:
        """Adds a backend. Before the first registration: an engine has its backends from the beginning."""
        with self._lock:
            if backend not in plugins.PLUGINS:
                raise b.nixlNotFoundError(f"there is no {backend}: there are {', '.join(plugins.PLUGINS)}")
            if backend in self.backends:
                raise b.nixlInvalidParamError(f"{backend} was created before")
            if self._engine is not None:
                raise b.nixlNotAllowedError(f"create {backend} before memory is registered or an agent is met")
            self._params[backend] = dict(initParams or {})
            self.backends[backend] = len(self.backends) + 1

    def _open(self, cards: Iterable[int] = ()) -> Engine:
        """The engine, which is opened when the cards are known that it serves."""
        with self._lock:
            if self._engine is None:
                chosen = plugins.backends(self._params, [*cards, *plugins.current_cards()])
                with translated():
                    engine = Engine(self.name, chosen, limits=_LIMITS)
                    engine.register(_TOLD_ALWAYS, b"\0")
                self._engine = engine
            return self._engine

    def _handles(self, names: Iterable[str]) -> list[str]:
        """Names of backends, each of which must have been created."""
        return [name for name in names if self.backends[name]]

    # ---- memory

    def register_memory(self, reg_list: Any, mem_type: Optional[str] = None, backends: Iterable[str] = ()) -> b.nixlRegDList:
        """Registers ranges, tensors or a list; the list that it returns is what deregister_memory takes."""
        descs: Optional[b.nixlRegDList] = self.get_reg_descs(reg_list, mem_type)
        self._handles(backends)
        if descs is None:
            raise TypeError("register_memory: this is no list of memory")
        kind = descs.getType()
        if not any(kind.name in plugins.PLUGINS[name].mems for name in backends or self.backends):
            raise b.nixlNotFoundError(f"no backend of this agent serves {kind.name}")
        done: list[Range[Region]] = []
        with self._lock:
            engine = self._open(descs.rows[:, 2].tolist() if kind == b.VRAM_SEG else ())
            try:
                for i in range(descs.descCount()):
                    done.append(self._register(engine, kind, *descs[i][:3]))
            except errors.Error as e:
                for r in done:
                    r.what.close()
                raise as_nixl(e) from e
            for r in done:
                self._places.put(r)
        return descs

    def _register(self, engine: Engine, kind: b.nixl_mem_t, address: int, length: int, device: int) -> Range[Region]:
        source: Any
        if kind == b.DRAM_SEG:
            source = HostMemory(address, length)
        elif kind == b.VRAM_SEG:
            source = DeviceMemory(address, length, device)
        elif kind in (b.FILE_SEG, b.BLK_SEG):
            source = File(device, address, length or None)
        else:
            raise errors.NotSupportedError(f"there is no backend for {kind.name}")
        number = next(self._numbers)
        region = engine.register(str(number), source)
        return Range(kind, address, region.length, device, str(number), region)

    def deregister_memory(self, dereg_list: b.nixlRegDList, backends: Iterable[str] = ()) -> None:
        """Ends registrations: no peer reaches them any more when this returns.

        nixlNotAllowedError while a transfer that was not released lists one.
        """
        self._handles(backends)
        kind = dereg_list.getType()
        with self._lock:
            found = [self._places.exact(kind, *dereg_list[i][:3]) for i in range(dereg_list.descCount())]
            if None in found:
                raise b.nixlNotFoundError(f"descriptor {found.index(None)} is not registered as this range")
            for r in found:
                assert r is not None
                with translated():
                    r.what.close()
                self._places.drop(r.name)

    def query_memory(self, reg_list: Any, backend: str, mem_type: Optional[str] = None) -> list[Optional[dict[str, str]]]:
        """For files named by their paths: size, mode and time of change, or None for one that is not there."""
        descs: Optional[b.nixlRegDList] = self.get_reg_descs(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"there is no backend {backend!r}: there are {list(self.backends)}")
        if descs is None:
            raise TypeError("query_memory: this is no list of memory")
        if "FILE_SEG" not in plugins.PLUGINS[backend].mems:
            raise b.nixlNotSupportedError(f"{backend} knows nothing of memory")
        return [_query(descs[i][3]) for i in range(descs.descCount())]

    # ---- metadata

    def get_agent_metadata(self) -> bytes:
        """What other agents need to reach all memory of this one. Send it over a channel that you trust."""
        with self._lock:
            ranges = [r for r in self._places.all() if r.kind in (b.DRAM_SEG, b.VRAM_SEG, b.FILE_SEG, b.BLK_SEG)]
            return self._metadata(ranges, whole=True)

    def get_partial_agent_metadata(self, descs: b.nixlRegDList, inc_conn_info: bool = False, backends: Iterable[str] = ()) -> bytes:
        """The same of some memory. How to connect is always in it."""
        self._handles(backends)
        with self._lock:
            found = [self._places.exact(descs.getType(), *descs[i][:3]) for i in range(descs.descCount())]
            if None in found:
                raise b.nixlNotFoundError(f"descriptor {found.index(None)} is not registered as this range")
            return self._metadata([r for r in found if r is not None], whole=False)

    def _metadata(self, ranges: list[Range[Region]], whole: bool) -> bytes:
        if not any(plugins.PLUGINS[name].remote for name in self.backends):
            raise b.nixlInvalidParamError("no backend of this agent reaches others: create UCX, SHM, TCP or RDMA")
        engine = self._open()
        with translated():
            description = engine.describe(engine._regions[_TOLD_ALWAYS], *[r.what for r in ranges])
        return blob.encode(blob.Metadata(self.name, whole, list(ranges), description))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Meets an agent by its metadata, and learns of more memory of one that is known. Returns its name."""
        m = blob.decode(metadata)
        if m.agent == self.name:
            raise b.nixlInvalidParamError("this is our own metadata: our own memory is reached by our own name")
        with self._lock, translated():
            remote = self._meet(m)
            if m.whole:
                remote.places = Places()
            for r in m.ranges:
                r.what = remote.peer.remote(r.name)
                remote.places.put(r)
        return m.agent.encode()

    def _meet(self, m: blob.Metadata) -> _Remote:
        known = self._remotes.get(m.agent)
        if known is not None and not known.peer.lost:
            try:
                known.peer.refresh(m.description)
                return known
            except errors.Error:  # an agent of this name was started anew
                logger.info("%s is another agent than before: meeting it anew", m.agent)
        if known is not None:
            self.remove_remote_agent(m.agent)
        remote = self._remotes[m.agent] = _Remote(self._open().connect(m.description, _CONNECT))
        return remote

    def remove_remote_agent(self, agent: Name) -> None:
        """Forgets an agent. Transfers with it that are under way fail."""
        with self._lock:
            remote = self._remotes.pop(as_text(agent), None)
        if remote is not None:
            remote.peer.close()

    def check_remote_metadata(self, agent: Name, descs: Optional[b.nixlXferDList] = None) -> bool:
        """Whether an agent is known, and all of a list in its memory."""
        with self._lock:
            remote = self._remotes.get(as_text(agent))
            if remote is None or descs is None or descs.isEmpty():
                return remote is not None
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

    def fetch_remote_metadata(self, remote_agent: Name, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = "") -> None:
        """Asks the agent that listens there for its metadata, without waiting: check_remote_metadata says when it is there."""

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

    def _known(self, agent: Name) -> _Remote:
        remote = self._remotes.get(as_text(agent))
        if remote is None:
            raise b.nixlNotFoundError(f"the metadata of {as_text(agent)!r} is not loaded")
        return remote

    # ---- lists

    def get_xfer_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        """A list for transfers of tuples (address, length, device), rows of them, or tensors; None for anything else."""
        return lists.xfer_list(descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        """A list for registering of tuples (address, length, device, meta), rows of the first three, or tensors."""
        return lists.reg_list(descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: Optional[str] = None) -> Optional[b.nixlRemoteDList]:
        """A list of tuples (address, length, device, agent)."""
        if isinstance(descs, b.nixlRemoteDList):
            return descs
        if mem_type is None or not isinstance(descs[0], tuple) or len(descs[0]) != 4:
            logger.error("want a type of memory and tuples (address, length, device, agent)")
            return None
        return b.nixlRemoteDList(lists.MEMS[mem_type], descs)

    def get_serialized_descs(self, descs: Any) -> bytes:
        """Bytes of a list, which deserialize_descs of any agent takes. They are data, and no pickle."""
        return b.encode_list(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """The list again."""
        return b.decode_list(serialized_descs)

    # ---- transfers

    def prep_xfer_dlist(
        self, agent_name: Name, xfer_list: Any, mem_type: Optional[str] = None, backends: Iterable[str] = ()
    ) -> nixl_prepped_dlist_handle:
        """Looks descriptors up once, for make_prepped_xfer. An agent of "" or "NIXL_INIT_AGENT" is the local side."""
        names = self._handles(backends)
        rows, kind = self._rows(xfer_list, mem_type)
        agent = as_text(agent_name)
        agent = "" if agent == "NIXL_INIT_AGENT" else agent
        with self._lock:
            at = self._side(agent).locate(kind, rows)
        at.pattern = find_pattern(at)
        return nixl_prepped_dlist_handle(agent, at, kind in (b.FILE_SEG, b.BLK_SEG), names)

    def _rows(self, descs: Any, mem_type: Optional[str]) -> tuple[b.Rows, b.nixl_mem_t]:
        if isinstance(descs, np.ndarray) and descs.ndim == 2 and descs.shape[1] == 5:
            if mem_type is None:
                raise ValueError("say the type of memory of strided descriptors")
            return _unroll(descs), lists.MEMS[mem_type]
        made: Optional[b.nixlXferDList] = self.get_xfer_descs(descs, mem_type)
        if made is None:
            raise TypeError("prep_xfer_dlist: this is no list of descriptors")
        if made.isEmpty():
            raise b.nixlInvalidParamError("the list is empty")
        return made.rows, made.getType()

    def _side(self, agent: str) -> Places[Any]:
        """Where the memory of an agent lies; ours for "" and for our own name."""
        return self._places if agent in ("", self.name) else self._known(agent).places

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: Union[str, bytes] = b"",
        backends: Iterable[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer of some of the descriptors on each side, by their indices."""
        op, names = _OPS[operation], self._handles(backends)
        if local_xfer_side.at is None or remote_xfer_side.at is None:
            raise b.nixlInvalidParamError("a list of descriptors was released")
        if local_xfer_side.agent != "" or remote_xfer_side.agent == "":
            raise b.nixlInvalidParamError('want a local side, prepared for "NIXL_INIT_AGENT", and a remote one, for an agent')
        here = _indices(local_indices, len(local_xfer_side.at.offsets))
        there = _indices(remote_indices, len(remote_xfer_side.at.offsets))
        files = local_xfer_side.files or remote_xfer_side.files
        local, remote = local_xfer_side.at.pick(here), remote_xfer_side.at.pick(there)
        return self._make(op, local, remote, remote_xfer_side.agent, notif_msg, names, files)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: b.nixlXferDList,
        remote_descs: b.nixlXferDList,
        remote_agent: Name,
        notif_msg: Union[str, bytes] = b"",
        backends: Iterable[str] = (),
    ) -> nixl_xfer_handle:
        """A transfer between two lists. Posting it again costs nothing that this has done."""
        op, names = _OPS[operation], self._handles(backends)
        agent = as_text(remote_agent)
        if local_descs.isEmpty():
            raise b.nixlInvalidParamError("the list is empty")
        with self._lock:
            remote = self._side(agent or self.name).locate(remote_descs.getType(), remote_descs.rows)
            local = self._places.locate(local_descs.getType(), local_descs.rows)
        files = {b.FILE_SEG, b.BLK_SEG} & {local_descs.getType(), remote_descs.getType()}
        return self._make(op, local, remote, agent, notif_msg, names, bool(files))

    def _make(
        self,
        op: str,
        local: Located[Any],
        remote: Located[Any],
        agent: str,
        message: Union[str, bytes],
        names: list[str],
        files: bool,
    ) -> nixl_xfer_handle:
        if len(local.offsets) != len(remote.offsets):
            raise b.nixlInvalidParamError(f"{len(local.offsets)} local descriptors, and {len(remote.offsets)} remote ones")
        if (local.lengths != remote.lengths).any():
            raise b.nixlInvalidParamError("descriptors of a pair differ in length")
        plugin = self._plugin(names, files)
        with self._lock, translated():
            engine = self._open()
            itself = agent in ("", self.name)
            peer = engine.self_peer() if itself else self._known(agent).peer
            if itself:
                ranges = [Range[Any](r.kind, r.address, r.length, r.device, r.name, peer.remote(r.name)) for r in remote.ranges]
                remote = Located(ranges, remote.which, remote.offsets, remote.lengths, remote.pattern)
            t = peer.transfer(op)
            try:
                count = fill(t, local, remote)
                handle = nixl_xfer_handle(self, t, plugin, int(local.lengths.sum()), count)
                if len(message):
                    handle.set_message(messages.frame(self.name, message))
            except BaseException:
                t.close()
                raise
        return handle

    def _plugin(self, names: list[str], files: bool) -> str:
        """Under which name query_xfer_backend knows a transfer."""
        want = "FILE_SEG" if files else "DRAM_SEG"
        for name in names or self.backends:
            if want in plugins.PLUGINS[name].mems and (files or plugins.PLUGINS[name].remote):
                return name
        raise b.nixlNotFoundError(f"no backend that was {'named' if names else 'created'} serves such a transfer")

    def transfer(self, handle: nixl_xfer_handle, notif_msg: Union[str, bytes] = b"") -> str:
        """Posts it, for the first time or again: "DONE" or "PROC". How it failed is an exception."""
        if len(notif_msg):
            handle.set_message(messages.frame(self.name, notif_msg))
        return handle.post()

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """ "DONE" or "PROC". How it failed is an exception."""
        return handle.state()

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Microseconds, their margin, and how that is known: by what this agent has measured, or "UNKNOWN"."""
        req_handle.transfer  # one that was released has no cost
        rates = [r for r in self._open().stats()["routes"] if r["rate"] > 0]
        if not rates:
            return 0, 0, "UNKNOWN"
        best = max(rates, key=lambda r: float(r["rate"]))
        margin = max(0, best["p99_ns"] - best["p50_ns"]) // 1000
        return int(req_handle.total / best["rate"] * 1e6), int(margin), "ANALYTICAL_BACKEND"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> b.nixlXferTelemetry:
        """Times and bytes of the last post of a transfer that is done."""
        if not self._telemetry:
            raise b.nixlNoTelemetryError("make the agent with capture_telemetry=True")
        return handle.telemetry()

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """The name of the backend that serves it."""
        return handle.plugin

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Ends a transfer, also one under way: when this returns, no byte of it lands any more."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Forgets what was prepared."""
        handle.release()

    def prep_mem_view(self, dlist: Any, *, backends: Optional[Iterable[str]] = None) -> int:
        """Not supported."""
        raise b.nixlNotSupportedError("there are no memory views for device code here")

    def release_mem_view(self, mvh: int) -> None:
        """Not supported."""
        raise b.nixlNotSupportedError("there are no memory views for device code here")

    # ---- notifications

    def get_new_notifs(self, backends: Iterable[str] = ()) -> dict[str, list[bytes]]:
        """Messages that have come since this was last asked, by the names of who sent them."""
        return self._collect({}, backends)

    def update_notifs(self, backends: Iterable[str] = ()) -> dict[str, list[bytes]]:
        """Adds new messages to those that nobody has taken, and returns all."""
        self.notifs = self._collect(self.notifs, backends)
        return self.notifs

    def _collect(self, into: dict[str, list[bytes]], backends: Iterable[str]) -> dict[str, list[bytes]]:
        self._handles(backends)
        if self._engine is None:
            return into
        while True:
            try:
                note = self._engine.receive(0)
            except errors.WaitTimeout:
                return into
            except errors.Error as e:
                raise as_nixl(e) from e
            found = None if note.lost else messages.unframe(note.data)
            if found is not None:
                into.setdefault(found[0], []).append(found[1])

    def check_remote_xfer_done(
        self, remote_agent_name: Name, lookup_tag: bytes, backends: Iterable[str] = (), tag_is_prefix: bool = True
    ) -> bool:
        """Whether a message that begins with the tag, or has it in it, has come; that one is taken then."""
        tag, kept = b.as_bytes(lookup_tag), self.update_notifs(backends).get(as_text(remote_agent_name), [])
        for i, message in enumerate(kept):
            if message.startswith(tag) if tag_is_prefix else tag in message:
                del kept[i]
                return True
        return False

    def send_notif(self, remote_agent_name: Name, notif_msg: Union[str, bytes], backend: Optional[str] = None) -> None:
        """Sends a message without a transfer."""
        self._handles([backend] if backend else [])
        name = as_text(remote_agent_name)
        with translated():
            peer = self._open().self_peer() if name == self.name else self._known(name).peer
            try:
                peer.notify(messages.frame(self.name, notif_msg))
            except errors.NoRouteError as e:  # what connected us is gone
                raise b.nixlRemoteDisconnectError(str(e)) from e

    # ---- the end

    def close(self) -> None:
        """Ends everything at once; what nobody holds any more ends so by itself. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        self._caller.close()
        engine, self._engine = self._engine, None
        self.backends.clear()
        if engine is not None:
            with translated():
                engine.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # one that was never whole, or the child of a fork
            pass


def _nothing(backend: str, empty: Any) -> Any:
    logger.warning("%s is not there to be asked", backend)
    return empty


def _query(path: bytes) -> Optional[dict[str, str]]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return {"size": str(found.st_size), "mode": str(found.st_mode), "mtime": str(int(found.st_mtime))}


def _unroll(strided: Any) -> b.Rows:
    """Rows of (address, length, device, stride, count) as one row for each block."""
    rows = np.array(strided, np.uint64)
    counts = rows[:, 4].astype(np.int64)
    if (counts < 0).any() or int(counts.sum()) > 1 << 31:
        raise b.nixlInvalidParamError("a count of strided descriptors is negative, or their sum above 2^31")
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    out = np.repeat(rows[:, :3], counts, axis=0)
    out[:, 0] += number.astype(np.uint64) * np.repeat(rows[:, 3], counts)
    return out


def _indices(given: Any, n: int) -> Any:
    indices = np.asarray(given, dtype=np.int64)
    if indices.ndim != 1 or not len(indices):
        raise b.nixlInvalidParamError("want one index or more")
    if (indices < 0).any() or (indices >= n).any():
        raise b.nixlInvalidParamError(f"an index is outside of the {n} descriptors")
    return indices
