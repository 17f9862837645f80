# SPDX-License-Identifier: Apache-2.0
"""The part of an agent that moves bytes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Container, Iterable, Optional, Union

import numpy as np

from .. import errors
from ..peer import Peer
from ..transfer import Op, Transfer
from . import bindings as b
from . import lists, messages, plugins
from .bindings import as_text
from .handles import nixl_prepped_dlist_handle, nixl_xfer_handle, translated
from .meeting import Meeting, Name
from .places import Located, Places, Range, Runs, fill, find_pattern

_OPS: dict[str, Op] = {"WRITE": "write", "READ": "read"}


class Transfers(Meeting):
    """Transfers between lists of descriptors."""

    _telemetry = False  # whether their times are kept

    def prep_xfer_dlist(
        self, agent_name: Name, xfer_list: Any, mem_type: Optional[str] = None,
        backends: Iterable[str] = ()
    ) -> nixl_prepped_dlist_handle:
        """Looks descriptors up once, for make_prepped_xfer. An agent of "" or "NIXL_INIT_AGENT" is
        the local side.
        """
        names = self._handles(backends)
        agent = as_text(agent_name)
        agent = "" if agent == "NIXL_INIT_AGENT" else agent
        at: Union[Located[Any], Runs[Any]]
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("say the type of memory of strided descriptors")
            kind = lists.MEMS[mem_type]
            at = self._runs(agent, kind, xfer_list)
        else:
            rows, kind = self._rows(xfer_list, mem_type)
            with self._lock:
                at = self._side(agent).locate(kind, rows)
            at.pattern = find_pattern(at)
        return nixl_prepped_dlist_handle(agent, at, kind in (b.FILE_SEG, b.BLK_SEG), names)

    def _runs(self, agent: str, kind: b.nixl_mem_t, descs: Any) -> Union[Located[Any], Runs[Any]]:
        """Runs as they are; those that lie in several ranges block by block."""
        strided = np.array(descs, np.uint64)
        if (strided[:, 4] > 1 << 31).any() or not 0 < int(strided[:, 4].sum()) <= 1 << 31:
            raise b.nixlInvalidParamError("strided descriptors: their count is 0 or above 2^31")
        with self._lock:
            side = self._side(agent)
            try:
                return side.locate_runs(kind, strided)
            except b.nixlNotFoundError:
                if int(strided[:, 4].sum()) > _UNROLLED_MOST:
                    raise
                return side.locate(kind, _unroll(strided))

    def _rows(self, descs: Any, mem_type: Optional[str]) -> tuple[b.Rows, b.nixl_mem_t]:
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
        """A transfer of some of the descriptors on each side, by their indices. Backends that were
        named when the sides were prepared serve it, unless others are named here.
        """
        op, names = _OPS[operation], self._handles(backends)
        names = names or _common(local_xfer_side.backends, remote_xfer_side.backends)
        if local_xfer_side.at is None or remote_xfer_side.at is None:
            raise b.nixlInvalidParamError("a list of descriptors was released")
        if local_xfer_side.agent != "" or remote_xfer_side.agent == "":
            raise b.nixlInvalidParamError('want a local side, prepared for "NIXL_INIT_AGENT", and '
                                          'a remote one, for an agent')
        here = _indices(local_indices, local_xfer_side.at.count)
        there = _indices(remote_indices, remote_xfer_side.at.count)
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
        for descs in (local_descs, remote_descs):
            if not isinstance(descs, b.nixlXferDList):
                raise TypeError(f"want a nixlXferDList, not {type(descs).__name__}")
        if local_descs.isEmpty():
            raise b.nixlInvalidParamError("the list is empty")
        with self._lock:
            remote = self._side(agent or self.name).locate(remote_descs.getType(),
                                                           remote_descs.rows)
            local = self._places.locate(local_descs.getType(), local_descs.rows)
        files = {b.FILE_SEG, b.BLK_SEG} & {local_descs.getType(), remote_descs.getType()}
        return self._make(op, local, remote, agent, notif_msg, names, bool(files))

    def _make(
        self,
        op: Op,
        local: Located[Any],
        remote: Located[Any],
        agent: str,
        message: Union[str, bytes],
        names: list[str],
        files: bool,
    ) -> nixl_xfer_handle:
        if local.count != remote.count:
            raise b.nixlInvalidParamError(f"{local.count} local descriptors, and {remote.count} "
                                          f"remote ones")
        if not local.matches(remote):
            raise b.nixlInvalidParamError("descriptors of a pair differ in length")
        plugin = self._plugin(names, files)

        without: set[str] = set()  # ranges of the agent's that have ended

        def make(ending: Container[str] = (), revoked: bool = False) -> tuple[Transfer, set[str]]:
            return self._filled(op, local, remote, agent, names, ending, without, revoked)

        handle = nixl_xfer_handle(self, make, plugin, local.total, local.count)
        with self._lock:
            self._handled.add(handle)
        message = b.as_bytes(message)
        if message:
            try:
                handle.set_message(messages.frame(self.name, message))
            except BaseException:
                handle.release()
                raise
        return handle

    def _filled(self, op: Op, local: Located[Any], remote: Located[Any], agent: str,
                names: list[str], ending: Container[str], without: set[str],
                revoked: bool) -> tuple[Transfer, set[str]]:
        """What Make is, for a transfer between the two to the agent. Those of the agent's that it
        finds to have ended it adds to without.
        """
        itself = agent in ("", self.name)
        met = None if itself else self._live(agent)
        with self._lock, translated():
            peer = self._open().self_peer() if met is None else met.peer
            places = self._places if met is None else met.places
            here = self._places.again(local, ending)
            there = places.again(remote, ending if met is None else without)
            while True:
                if revoked:
                    there = _elsewhere(places, there, without)
                t = peer.transfer(op, only=plugins.alone(names))
                try:
                    fill(t, here, there if met is not None else there.at(_of_self(peer, there)))
                    break
                except errors.RevokedError:
                    t.close()
                    revoked = True
                except BaseException:
                    t.close()
                    raise
            lists = here.ranges + (there.ranges if met is None else [])
            for r in lists:
                r.used = True
        return t, {r.name for r in lists}

    def _plugin(self, names: list[str], files: bool) -> str:
        """Under which name query_xfer_backend knows a transfer."""
        want = "FILE_SEG" if files else "DRAM_SEG"
        for name in names or self.backends:
            if want in plugins.PLUGINS[name].mems and (files or plugins.PLUGINS[name].remote):
                return name
        raise b.nixlNotFoundError(f"no backend that was {'named' if names else 'created'} serves "
                                  f"such a transfer")

    def transfer(self, handle: nixl_xfer_handle, notif_msg: Union[str, bytes] = b"") -> str:
        """Posts it, for the first time or again: "DONE" or "PROC". How it failed is an exception.
        """
        if len(notif_msg):
            handle.set_message(messages.frame(self.name, notif_msg))
        return handle.post()

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """ "DONE" or "PROC". How it failed is an exception."""
        return handle.state()

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Microseconds, their margin, and how that is known: by what this agent has measured, or
        "UNKNOWN".
        """
        if req_handle.released:
            raise b.nixlInvalidParamError("the transfer was released")
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


def _of_self(peer: Peer, at: Located[Any]) -> list[Range[Any]]:
    """Ranges of our own as the engine reaches them as its own peer."""
    return [Range[Any](r.kind, r.address, r.length, r.device, r.name, remote)
            for r, remote in zip(at.ranges, peer.remotes([r.name for r in at.ranges]))]


def _elsewhere(places: Places[Any], at: Located[Any], without: set[str]) -> Located[Any]:
    """The same without one of its ranges, which may be the one that has ended."""
    for r in at.ranges:
        with suppress(b.nixlNotFoundError):
            other = places.again(at, {*without, r.name})
            without.add(r.name)
            return other
    raise b.nixlNotFoundError("a range of the agent's has ended, and no other holds the bytes")


_UNROLLED_MOST = 1 << 20  # blocks of runs that lie in several ranges


def _unroll(strided: b.Rows) -> b.Rows:
    """Rows of (address, length, device, stride, count) as one row for each block."""
    counts = strided[:, 4].astype(np.int64)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    out: b.Rows = np.repeat(strided[:, :3], counts, axis=0)
    out[:, 0] += number.astype(np.uint64) * np.repeat(strided[:, 3], counts)
    return out


def _common(local: list[str], remote: list[str]) -> list[str]:
    """The backends that both sides were prepared for; a side without names is for all."""
    both = [name for name in local or remote if name in (remote or local)]
    if not both and (local or remote):
        raise b.nixlInvalidParamError(f"the local side was prepared for {', '.join(local)}, and "
                                      f"the remote one for {', '.join(remote)}")
    return both


def _indices(given: Any, n: int) -> Any:
    indices = np.asarray(given, dtype=np.int64)
    if indices.ndim != 1 or not len(indices):
        raise b.nixlInvalidParamError("want one index or more")
    if (indices.view(np.uint64) >= n).any():  # also those below 0
        raise b.nixlInvalidParamError(f"an index is outside of the {n} descriptors")
    return indices
