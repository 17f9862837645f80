# SPDX-License-Identifier: Apache-2.0
"""nixlAgent, which NIXL's own agent in Python calls: the same by numbers in place of objects."""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Mapping, Optional, Union

from .agent import nixl_agent, nixl_agent_config
from .bindings import (NIXL_ERR_NOT_FOUND, NIXL_IN_PROG, NIXL_SUCCESS, nixl_cost_t, nixl_mem_t,
                       nixl_status_t, nixl_thread_sync_t, nixl_xfer_op_t, nixlInvalidParamError,
                       nixlRegDList, nixlXferDList, nixlXferTelemetry)
from .handles import nixl_prepped_dlist_handle, nixl_xfer_handle

_OPS = {nixl_xfer_op_t.NIXL_READ: "READ", nixl_xfer_op_t.NIXL_WRITE: "WRITE"}
_MEMS = {nixl_mem_t.DRAM_SEG: "DRAM", nixl_mem_t.VRAM_SEG: "VRAM", nixl_mem_t.FILE_SEG: "FILE",
         nixl_mem_t.BLK_SEG: "BLOCK", nixl_mem_t.OBJ_SEG: "OBJ"}

Numbers = Iterable[int]


class nixlAgentConfig:
    """What a nixlAgent is made with. Its threads and delays have no effect: nothing is polled."""

    def __init__(self, useProgThread: bool = False, useListenThread: bool = False,
                 listenPort: int = 0,
                 syncMode: nixl_thread_sync_t = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE,
                 num_workers: int = 1, pthrDelay: int = 0, lthrDelay: int = 100000,
                 captureTelemetry: bool = False) -> None:
        self.useProgThread, self.useListenThread = useProgThread, useListenThread
        self.listenPort, self.syncMode = listenPort, syncMode
        self.pthrDelay, self.lthrDelay = pthrDelay, lthrDelay
        self.captureTelemetry, self.etcdWatchTimeout = captureTelemetry, 5_000_000
        self._over: Optional[nixl_agent] = None  # the agent that is called by this one


class nixlAgent:
    """An agent whose backends, lists and transfers are numbers."""

    def __init__(self, name: str, config: Optional[nixlAgentConfig] = None) -> None:
        c = config or nixlAgentConfig()
        self._over = c._over if c._over is not None else nixl_agent(name, nixl_agent_config(
            enable_listen_thread=c.useListenThread, listen_port=c.listenPort,
            capture_telemetry=c.captureTelemetry, backends=[]))
        self._numbers = itertools.count(1)
        self._handles: dict[int, Union[nixl_prepped_dlist_handle, nixl_xfer_handle]] = {}

    def _keep(self, handle: Union[nixl_prepped_dlist_handle, nixl_xfer_handle]) -> int:
        number = next(self._numbers)
        self._handles[number] = handle
        return number

    def _list(self, number: int) -> nixl_prepped_dlist_handle:
        found = self._handles.get(number)
        if not isinstance(found, nixl_prepped_dlist_handle):
            raise nixlInvalidParamError(f"{number} is no prepared list of this agent")
        return found

    def _transfer(self, number: int) -> nixl_xfer_handle:
        found = self._handles.get(number)
        if not isinstance(found, nixl_xfer_handle):
            raise nixlInvalidParamError(f"{number} is no transfer of this agent")
        return found

    def _names(self, backends: Numbers) -> list[str]:
        return [self._name(number) for number in backends]

    def _name(self, number: int) -> str:
        for name, known in self._over.backends.items():
            if known == number:
                return name
        raise nixlInvalidParamError(f"{number} is no backend of this agent")

    # Backends.

    def getAvailPlugins(self) -> list[str]:
        """Names that createBackend takes."""
        return self._over.get_plugin_list()

    def getPluginParams(self, plugin: str) -> tuple[dict[str, str], list[str]]:
        """Parameters and their defaults, and the types of memory."""
        return self._over.get_plugin_params(plugin), self._over.get_plugin_mem_types(plugin)

    def createBackend(self, name: str, params: Optional[Mapping[str, str]] = None) -> int:
        """Makes a backend."""
        self._over.create_backend(name, dict(params or {}))
        return self._over.backends[name]

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        """What a backend was made with, and the types of memory that it serves."""
        name = self._name(backend)
        return self._over.get_backend_params(name), self._over.get_backend_mem_types(name)

    # Memory.

    def registerMem(self, descs: nixlRegDList, backends: Numbers = ()) -> nixl_status_t:
        """Registers a list."""
        self._over.register_memory(descs, backends=self._names(backends))
        return NIXL_SUCCESS

    def deregisterMem(self, descs: nixlRegDList, backends: Numbers = ()) -> nixl_status_t:
        """Ends the registrations of a list."""
        self._over.deregister_memory(descs, self._names(backends))
        return NIXL_SUCCESS

    def queryMem(self, descs: nixlRegDList, backend: int) -> list[Optional[dict[str, str]]]:
        """As nixl_agent.query_memory."""
        return self._over.query_memory(descs, self._name(backend))

    # Other agents.

    def getLocalMD(self) -> bytes:
        """What other agents need to reach all memory."""
        return self._over.get_agent_metadata()

    def getLocalPartialMD(self, descs: nixlRegDList, inc_conn_info: bool = False,
                          backends: Numbers = ()) -> bytes:
        """The same of some memory."""
        return self._over.get_partial_agent_metadata(descs, inc_conn_info, self._names(backends))

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        """Meets an agent, and returns its name."""
        return self._over.add_remote_agent(metadata)

    def invalidateRemoteMD(self, agent: str) -> nixl_status_t:
        """Forgets an agent."""
        known = agent in self._over._remotes
        self._over.remove_remote_agent(agent)
        return NIXL_SUCCESS if known else NIXL_ERR_NOT_FOUND

    def checkRemoteMD(self, agent: str, descs: nixlXferDList) -> nixl_status_t:
        """Whether an agent is known, and a list in its memory."""
        there = self._over.check_remote_metadata(agent, descs)
        return NIXL_SUCCESS if there else NIXL_ERR_NOT_FOUND

    def makeConnection(self, agent: str, backends: Numbers = ()) -> nixl_status_t:
        """Nothing: loadRemoteMD has connected."""
        self._over.make_connection(agent, self._names(backends))
        return NIXL_SUCCESS

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        """Sends all metadata to the agent that listens there."""
        self._over.send_local_metadata(ip_addr, port)

    def sendLocalPartialMD(self, descs: nixlRegDList, inc_conn_info: bool = False,
                           backends: Numbers = (), ip_addr: str = "", port: int = 0,
                           label: str = "") -> None:
        """Sends metadata of some memory likewise."""
        self._over.send_partial_agent_metadata(descs, inc_conn_info, self._names(backends),
                                               ip_addr, port, label)

    def fetchRemoteMD(self, agent: str, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        """Asks the agent that listens there for its metadata."""
        self._over.fetch_remote_metadata(agent, ip_addr, port, label)

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        """Has the agent that listens there forget us."""
        self._over.invalidate_local_metadata(ip_addr, port)

    # Transfers.

    def prepXferDlist(self, agent: str, descs: Any, mem_type: Any = None,
                      backends: Numbers = ()) -> int:
        """Looks descriptors up: a list, or rows with their type of memory."""
        if isinstance(descs, nixlXferDList):  # the third argument is backends then
            names = self._names(mem_type or backends)
            return self._keep(self._over.prep_xfer_dlist(agent, descs, backends=names))
        return self._keep(self._over.prep_xfer_dlist(agent, descs, _MEMS.get(mem_type, mem_type),
                                                     self._names(backends)))

    def makeXferReq(self, operation: nixl_xfer_op_t, local_side: int, local_indices: Any,
                    remote_side: int, remote_indices: Any, notif_msg: Union[str, bytes] = "",
                    backend: Numbers = (), skip_desc_merg: bool = False) -> int:
        """A transfer of some descriptors of two prepared lists."""
        return self._keep(self._over.make_prepped_xfer(
            _OPS[operation], self._list(local_side), local_indices, self._list(remote_side),
            remote_indices, notif_msg, self._names(backend), skip_desc_merg))

    def createXferReq(self, operation: nixl_xfer_op_t, local_descs: nixlXferDList,
                      remote_descs: nixlXferDList, remote_agent: str,
                      notif_msg: Union[str, bytes] = "", backend: Numbers = ()) -> int:
        """A transfer between two lists."""
        return self._keep(self._over.initialize_xfer(
            _OPS[operation], local_descs, remote_descs, remote_agent, notif_msg,
            self._names(backend)))

    def postXferReq(self, reqh: int, notif_msg: Union[str, bytes] = "") -> nixl_status_t:
        """Posts a transfer. How it failed is an exception."""
        return _told(self._over.transfer(self._transfer(reqh), notif_msg))

    def getXferStatus(self, reqh: int) -> nixl_status_t:
        """NIXL_SUCCESS or NIXL_IN_PROG. How it failed is an exception."""
        return _told(self._over.check_xfer_state(self._transfer(reqh)))

    def getXferTelemetry(self, reqh: int) -> nixlXferTelemetry:
        """Times and bytes of the last post."""
        return self._over.get_xfer_telemetry(self._transfer(reqh))

    def estimateXferCost(self, req_handle: int) -> tuple[int, int, Any]:
        """Microseconds, their margin, and how that is known."""
        took, margin, _ = self._over.estimate_xfer_cost(self._transfer(req_handle))
        return took, margin, nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND

    def queryXferBackend(self, reqh: int) -> int:
        """The backend that serves it."""
        return self._over.backends[self._over.query_xfer_backend(self._transfer(reqh))]

    def releaseXferReq(self, reqh: int) -> nixl_status_t:
        """Ends a transfer: no byte of it lands any more."""
        self._transfer(reqh).release()
        del self._handles[reqh]
        return NIXL_SUCCESS

    def releasedDlistH(self, handle: int) -> nixl_status_t:
        """Forgets a prepared list."""
        self._list(handle).release()
        del self._handles[handle]
        return NIXL_SUCCESS

    def prepMemView(self, dlist: Any, backends: Numbers = ()) -> int:
        """Not supported."""
        return self._over.prep_mem_view(dlist)

    def releaseMemView(self, mvh: int) -> None:
        """Not supported."""
        self._over.release_mem_view(mvh)

    # Notifications.

    def genNotif(self, remote_agent: str, msg: Union[str, bytes],
                 backends: Union[int, Numbers] = ()) -> nixl_status_t:
        """Sends a notification without a transfer."""
        names = self._names([backends] if isinstance(backends, int) else backends)
        self._over.send_notif(remote_agent, msg, *names[:1])
        return NIXL_SUCCESS

    def getNotifs(self, notif_map: dict[str, list[bytes]], backends: Numbers = ()) -> dict[
            str, list[bytes]]:
        """Adds what has come to the map."""
        return self._over._collect(notif_map, self._names(backends))


def _told(state: str) -> nixl_status_t:
    return NIXL_SUCCESS if state == "DONE" else NIXL_IN_PROG
