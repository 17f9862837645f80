# SPDX-License-Identifier: Apache-2.0
"""The part of an agent that registers memory, and the lists that name it."""

from __future__ import annotations

import ctypes
import itertools
import os
import stat
import weakref
from contextlib import suppress
from typing import Any, Iterable, Optional

import numpy as np

from .. import _library, errors
from .._region import Region
from .._segments import DeviceMemory, Located, host, locate
from ..engine import Engine
from . import bindings as b
from . import lists, paths, plugins
from .backends import Backends, logger
from .handles import nixl_xfer_handle, translated
from .places import Kind, Places, Range

_COVERED_MOST = 1024
_NOTHING_KEPT = host(1, 1)  # memory by its address stays where it is by the program's word


class Memory(Backends):
    """Ranges that are registered, and where they lie."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._places: Places[Region] = Places()
        # Those whose registration has ended, while others hold all their bytes: peers and
        # transfers that name them go on. The oldest first, and no more than _COVERED_MOST.
        self._covered: dict[str, Range[Region]] = {}
        # by kind and number of a file: how it is named, by registration
        self._files: dict[Kind, dict[str, Optional[paths.Named]]] = {}
        self._numbers = itertools.count(1)
        self._handled: weakref.WeakSet[nixl_xfer_handle] = weakref.WeakSet()

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
            rows, metas = descs.rows.tolist(), descs._metas()
            again = self._again(kind, rows)
            if again:
                fresh = [i for i in range(len(rows)) if i not in again]
                rows, metas = [rows[i] for i in fresh], [metas[i] for i in fresh]
            names = [str(n) for n in itertools.islice(self._numbers, len(rows))]
            back = list(again.values())
            try:
                with translated():
                    if kind == b.DRAM_SEG:
                        regions = _register_host(engine, names, rows)
                    else:
                        regions = engine._register_many([
                            (name, self._segment(kind, address, length, device, meta, name))
                            for name, (address, length, device), meta in zip(names, rows, metas)])
                if kind == b.DRAM_SEG:
                    made = [Range(kind, address, length, device, name, region, length)
                            for name, region, (address, length, device)
                            in zip(names, regions, rows)]
                else:
                    made = [Range(kind, address, region.length, device, name, region, length,
                                  region.writable)
                            for name, region, (address, length, device)
                            in zip(names, regions, rows)]
                self._places.put(*made, *back)
                for r in back:
                    del self._covered[r.name]
            except BaseException:  # also a file that cannot be opened, and an interrupt
                self._covered.update({r.name: r for r in back})
                left = [*names, *[r.name for r in back]]
                self._places.drop(*[name for name in left if name in self._places])
                engine.close_many([engine._regions[name] for name in names
                                   if name in engine._regions])
                for name, (_, _, device) in zip(names, rows):
                    self._forget_file(kind, device, name)
                raise
        return descs

    def _again(self, kind: b.nixl_mem_t, rows: list[list[int]]) -> dict[int, Range[Region]]:
        """By row: memory that is registered once more, and whose region is there still."""
        left = {(r.address, r.length, r.device): r for r in self._covered.values()
                if r.kind == kind and kind in (b.DRAM_SEG, b.VRAM_SEG)}
        found = {}
        if left:
            for i, (address, length, device) in enumerate(rows):
                known = left.pop((address, length, device), None)
                if known is not None:
                    found[i] = known
        return found

    def _segment(self, kind: b.nixl_mem_t, address: int, length: int, device: int, meta: bytes,
                 name: str) -> Located:
        """What the engine registers. A file is noted under the name."""
        if kind == b.VRAM_SEG:
            return locate(DeviceMemory(address, length, device))
        if kind not in (b.FILE_SEG, b.BLK_SEG):
            raise errors.NotSupportedError(f"there is no backend for {kind.name}")
        named = paths.parse(meta)
        self._check_number(kind, device, named)
        located = paths.file(device, named, address, length)
        self._files.setdefault((kind, device), {})[name] = named
        return located

    def _check_number(self, kind: b.nixl_mem_t, device: int, named: Optional[paths.Named]) -> None:
        """One number stands for one file: a path, or the descriptor of that number."""
        path = None if named is None else named.path
        for other in self._files.get((kind, device), {}).values():
            theirs = None if other is None else other.path
            if theirs != path:
                raise errors.ArgumentError(f"device {device} stands for {_called(theirs)} already: "
                                           f"give each path a number of its own")
            break  # all of them are alike

    def _forget_file(self, kind: b.nixl_mem_t, device: int, name: str) -> None:
        files = self._files.get((kind, device), {})
        files.pop(name, None)
        if not files:
            self._files.pop((kind, device), None)

    def deregister_memory(self, dereg_list: b.nixlRegDList, backends: Iterable[str] = ()) -> None:
        """Ends registrations: no peer reaches them any more when this returns, but for bytes that
        others hold. Transfers of such bytes go on.

        nixlNotAllowedError while a transfer that was not released lists one, and no other
        registration holds the bytes, or it is under way and none holds the whole range.
        """
        self._handles(backends)
        with self._lock:
            ending = self._registered(dereg_list)
            if not ending or self._engine is None:
                return
            names = {r.name for r in ending}
            kept = self._places.covered([r for r in ending if r.used], names)
            names_kept = {r.name for r in kept}
            gone = [r for r in ending if r.name not in names_kept]
            if self._covered:
                places = {(r.kind, r.device) for r in ending}
                former = [r for r in self._covered.values() if (r.kind, r.device) in places]
                stay = {r.name for r in self._places.covered(former, names)}
                gone += [r for r in former if r.name not in stay]
            self._leave({r.name for r in gone}, names)
            self._end(gone)
            for r in kept:
                self._places.drop(r.name)
                self._covered[r.name] = r
            for r in list(self._covered.values())[:-_COVERED_MOST]:
                with suppress(b.nixlNotAllowedError, b.nixlBackendError):  # a transfer lists it
                    self._end([r])

    def _leave(self, gone: set[str], ending: set[str]) -> None:
        """Has transfers go by other ranges than those that are to go. nixlNotAllowedError, and none
        has gone, where one cannot.
        """
        for handle in list(self._handled):
            if not handle.leave(gone, ending):
                raise b.nixlNotAllowedError("release the transfers that list it first: no other "
                                            "registration holds their bytes, or they are under way")

    def _end(self, ranges: list[Range[Region]]) -> None:
        """Closes regions, and forgets those that could be closed."""
        assert self._engine is not None
        try:
            with translated():
                self._engine.close_many([r.what for r in ranges])
        finally:
            ended = [r for r in ranges if not r.what._out.value]
            self._places.drop(*[r.name for r in ended if r.name not in self._covered])
            for r in ended:
                self._covered.pop(r.name, None)
                if r.kind in (b.FILE_SEG, b.BLK_SEG):
                    self._forget_file(r.kind, r.device, r.name)

    def _registered(self, descs: b.nixlRegDList) -> list[Range[Region]]:
        """The ranges of a list, each once. One that is listed twice and registered twice is both.
        """
        kind, found = descs.getType(), {}
        if kind in (b.DRAM_SEG, b.VRAM_SEG):
            exact = self._places.exactly(kind, descs.rows)
            if exact is not None:
                return list({r.name: r for r in exact}.values())
        metas = descs._metas() if kind in (b.FILE_SEG, b.BLK_SEG) else [b""] * descs.descCount()
        for i, (row, meta) in enumerate(zip(descs.rows.tolist(), metas)):
            alike = self._places.alike(kind, *row)
            if not alike:
                raise b.nixlNotFoundError(f"descriptor {i} is not registered as this range")
            r = alike[0]
            if len(alike) > 1:
                files = self._files.get((kind, row[2]), {})
                r = min(alike, key=lambda r: (r.name in found, bool(meta)
                                              and files[r.name] != paths.parse(meta)))
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
        return [_query(path) for path in descs._metas()]


def _register_host(engine: Engine, names: list[str], rows: list[list[int]]) -> list[Region]:
    """Host memory by rows of its address and length, without an object of C for each."""
    if not rows:
        return []
    segments = (_library.Segment * len(rows))()
    fields = np.frombuffer(memoryview(segments).cast("B"), np.dtype(_library.Segment))
    fields["size"], fields["kind"] = ctypes.sizeof(_library.Segment), _library.KIND_HOST
    fields["host"], fields["length"] = [row[0] for row in rows], [row[1] for row in rows]
    if not fields["length"].all():
        raise errors.ArgumentError("memory of 0 bytes cannot be registered")
    texts = ctypes.create_string_buffer("\0".join(names).encode())
    at: Any = np.cumsum([ctypes.addressof(texts)] + [len(name) + 1 for name in names[:-1]],
                        dtype=np.uint64)
    return engine._register_all((ctypes.c_char_p * len(rows)).from_buffer(at), segments, [
        Region(engine, name, _NOTHING_KEPT, row[1]) for name, row in zip(names, rows)])


def _query(path: bytes) -> Optional[dict[str, str]]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    # By their places, which is faster: the time is in whole seconds there.
    return {"size": str(found[stat.ST_SIZE]), "mode": str(found[stat.ST_MODE]),
            "mtime": str(found[stat.ST_MTIME])}


def _called(path: Optional[bytes]) -> str:
    return "that descriptor" if path is None else os.fsdecode(path)
