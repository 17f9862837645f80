# SPDX-License-Identifier: Apache-2.0
"""The part of an agent that registers memory, and the lists that name it."""

from __future__ import annotations

import itertools
import os
from typing import Any, Iterable, Optional

from .. import errors
from .._region import Region
from .._segments import DeviceMemory, Located, host, locate
from . import bindings as b
from . import lists, paths, plugins
from .backends import Backends, logger
from .handles import translated
from .places import Kind, Places, Range


class Memory(Backends):
    """Ranges that are registered, and where they lie."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._places: Places[Region] = Places()
        # by kind and number of a file: its path, by registration
        self._files: dict[Kind, dict[str, Optional[bytes]]] = {}
        self._numbers = itertools.count(1)

    def get_xfer_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        """A list for transfers of tuples (address, length, device), rows of them, or tensors; None
        for anything else.
        """
        return lists.xfer_list(descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        """A list for registering of tuples (address, length, device, meta), rows of the first
        three, or tensors.
        """
        return lists.reg_list(descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: Optional[str] = None) -> Optional[
        b.nixlRemoteDList]:
        """A list of tuples (address, length, device, agent)."""
        if isinstance(descs, b.nixlRemoteDList):
            return descs
        if mem_type is None or not isinstance(descs[0], tuple) or len(descs[0]) != 4:
            logger.error("want a type of memory and tuples (address, length, device, agent)")
            return None
        return b.nixlRemoteDList(lists.MEMS[mem_type], descs)

    def get_serialized_descs(self, descs: Any) -> bytes:
        """Bytes of a list, which deserialize_descs of any agent takes. They are data, and no
        pickle.
        """
        return b.encode_list(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """The list again."""
        return b.decode_list(serialized_descs)

    def register_memory(self, reg_list: Any, mem_type: Optional[str] = None,
                        backends: Iterable[str] = ()) -> b.nixlRegDList:
        """Registers ranges, tensors or a list; the list that it returns is what deregister_memory
        takes.
        """
        descs: Optional[b.nixlRegDList] = self.get_reg_descs(reg_list, mem_type)
        self._handles(backends)
        if descs is None:
            raise TypeError("register_memory: this is no list of memory")
        kind = descs.getType()
        if not any(kind.name in plugins.PLUGINS[name].mems for name in backends or self.backends):
            raise b.nixlNotFoundError(f"no backend of this agent serves {kind.name}")
        with self._lock:
            engine = self._open(descs.rows[:, 2].tolist() if kind == b.VRAM_SEG else ())
            rows, names = descs.rows.tolist(), []
            named: list[tuple[str, Located]] = []
            try:
                with translated():
                    for (address, length, device), meta in zip(rows, descs._metas()):
                        names.append(str(next(self._numbers)))
                        named.append((names[-1], self._segment(kind, address, length, device, meta,
                                                               names[-1])))
                    regions = engine._register_many(named)
            except BaseException:  # also a file that cannot be opened, and an interrupt
                for name, (_, _, device) in zip(names, rows):
                    self._forget_file(kind, device, name)
                raise
            for region, (address, _, device) in zip(regions, rows):
                self._places.put(Range(kind, address, region.length, device, region.name, region))
        return descs

    def _segment(self, kind: b.nixl_mem_t, address: int, length: int, device: int, meta: bytes,
                 name: str) -> Located:
        """What the engine registers. A file is noted under the name."""
        if kind == b.DRAM_SEG:
            return host(address, length)
        if kind == b.VRAM_SEG:
            return locate(DeviceMemory(address, length, device))
        if kind not in (b.FILE_SEG, b.BLK_SEG):
            raise errors.NotSupportedError(f"there is no backend for {kind.name}")
        path = paths.parse(meta)
        self._check_number(kind, device, path)
        located = paths.file(device, path, address, length)
        self._files.setdefault((kind, device), {})[name] = None if path is None else path.path
        return located

    def _check_number(self, kind: b.nixl_mem_t, device: int, named: Optional[paths.Named]) -> None:
        """One number stands for one file: a path, or the descriptor of that number."""
        path = None if named is None else named.path
        for other in self._files.get((kind, device), {}).values():
            if other != path:
                raise errors.ArgumentError(f"device {device} stands for {_called(other)} already: "
                                           f"give each path a number of its own")
            break  # all of them are alike

    def _forget_file(self, kind: b.nixl_mem_t, device: int, name: str) -> None:
        files = self._files.get((kind, device), {})
        files.pop(name, None)
        if not files:
            self._files.pop((kind, device), None)

    def deregister_memory(self, dereg_list: b.nixlRegDList, backends: Iterable[str] = ()) -> None:
        """Ends registrations: no peer reaches them any more when this returns.

        nixlNotAllowedError while a transfer that was not released lists one.
        """
        self._handles(backends)
        kind = dereg_list.getType()
        with self._lock:
            found = self._registered(dereg_list)
            if not found or self._engine is None:
                return
            try:
                with translated():
                    self._engine.close_many([r.what for r in found])
            finally:
                for r in found:
                    if not r.what._handle:
                        self._places.drop(r.name)
                        self._forget_file(kind, r.device, r.name)

    def _registered(self, descs: b.nixlRegDList) -> list[Range[Region]]:
        """The ranges of a list, each once."""
        kind, found = descs.getType(), {}
        for i, row in enumerate(descs.rows.tolist()):
            r = self._places.exact(kind, *row)
            if r is None:
                raise b.nixlNotFoundError(f"descriptor {i} is not registered as this range")
            found[r.name] = r
        return list(found.values())

    def query_memory(self, reg_list: Any, backend: str, mem_type: Optional[str] = None) -> list[
        Optional[dict[str, str]]]:
        """For files named by their paths: size, mode and time of change, or None for one that is
        not there.
        """
        descs: Optional[b.nixlRegDList] = self.get_reg_descs(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"there is no backend {backend!r}: there are {list(self.backends)}")
        if descs is None:
            raise TypeError("query_memory: this is no list of memory")
        if "FILE_SEG" not in plugins.PLUGINS[backend].mems:
            raise b.nixlNotSupportedError(f"{backend} knows nothing of memory")
        return [_query(descs[i][3]) for i in range(descs.descCount())]


def _query(path: bytes) -> Optional[dict[str, str]]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return {"size": str(found.st_size), "mode": str(found.st_mode),
            "mtime": str(int(found.st_mtime))}


def _called(path: Optional[bytes]) -> str:
    return "that descriptor" if path is None else os.fsdecode(path)
