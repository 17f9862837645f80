# SPDX-License-Identifier: Apache-2.0
"""Mooncake's MooncakeDistributedStore, as its Python wheel has it, over a sluice cache."""

from __future__ import annotations

import ctypes
import enum
import json
import logging
import mmap
import os
import re
import socket
import threading
from typing import Any, Callable, Optional, Sequence, Union

from .. import errors
from .._buffers import Held
from ..cache import Found
from ..integrations._pages import Options
from . import tensors
from .objects import FAILED, INVALID, LOST, NOT_FOUND, OK, Objects, Value

logger = logging.getLogger("sluice.mooncake")

KEPT = 256 << 20  # bytes of memory of ours that stay attached, at most


class SoftPinAction(enum.IntEnum):
    """What a put does to a pin. It says nothing here."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(enum.IntEnum):
    """What an object is. It says nothing here."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicateConfig:
    """Where copies go. A cache has one copy, so nothing of it is used."""

    __slots__ = ("data_type", "dfs_replica_num", "group_ids", "nof_replica_num",
                 "prefer_alloc_in_same_node", "preferred_nof_segments", "preferred_segment",
                 "preferred_segments", "replica_num", "soft_pin_action", "soft_pin_ttl_ms",
                 "with_hard_pin")

    def __init__(self) -> None:
        self.replica_num, self.nof_replica_num, self.dfs_replica_num = 1, 0, 0
        self.soft_pin_action, self.data_type = SoftPinAction.PRESERVE, ObjectDataType.UNKNOWN
        self.soft_pin_ttl_ms: Optional[int] = None
        self.with_hard_pin = self.prefer_alloc_in_same_node = False
        self.preferred_segment, self.preferred_segments = "", list[str]()
        self.preferred_nof_segments = list[str]()
        self.group_ids: Optional[list[str]] = None


class ReplicaDescriptor:
    """In which tier of the cache an object is."""

    def __init__(self, tier: int) -> None:
        self._tier = tier

    def is_memory_replica(self) -> bool:
        return self._tier == Found.IN_MEMORY

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return self._tier == Found.ON_DISK


class MooncakeHostMemAllocator:
    """Memory of the host by its address."""

    def __init__(self) -> None:
        self._made: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        if size <= 0:
            raise RuntimeError(f"{size} bytes cannot be mapped")
        data = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        self._made[address] = data
        return address

    def free(self, address: int) -> int:
        """It is unmapped once nothing of Python has it any more."""
        return OK if self._made.pop(address, None) is not None else -1


class BufferHandle(bytearray):
    """The bytes of an object."""

    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def size(self) -> int:
        return len(self)


class MooncakeDistributedStore:
    """Objects by name in the cache of this node. Any thread may call anything.

    Calls answer with Mooncake's codes; the reason is an error of the logger `sluice.mooncake`, or
    of `sluice.pages` where the cache is lost.
    """

    def __init__(self) -> None:
        self._objects: Optional[Objects] = None
        self._host = ""
        self._lock = threading.Lock()

    def setup(self, local_hostname: Union[str, dict[str, Any]], metadata_server: str = "",
              global_segment_size: Any = 16 << 20, local_buffer_size: Any = 16 << 20,
              protocol: str = "tcp", rdma_devices: str = "", master_server_addr: str = "",
              engine: Any = None, enable_ssd_offload: bool = False, ssd_offload_path: str = "",
              tenant_id: str = "default", enable_client_http_server: bool = False,
              client_http_port: int = 9300) -> int:
        """Connects to a cache. `master_server_addr` names it: "unix:/path" or "tcp:host:port" of
        `sluice cache serve`, "etcd:URL,..." or "nodes:a=unix:/path,..." of a cluster, or a table of
        options in JSON, such as that of docs/hicache.md. Where it is an address of Mooncake's, the
        environment variable SLUICE_CACHE names the cache.

        `local_buffer_size` bounds the memory for values that lie in no registered range. The cache
        decides over the rest.
        """
        if isinstance(local_hostname, dict):
            known = {k: local_hostname[k] for k in (
                "local_hostname", "metadata_server", "local_buffer_size", "master_server_addr",
                "tenant_id") if k in local_hostname}
            if len({"local_hostname", "metadata_server"} & set(known)) < 2:
                return _failed("setup", ValueError("the table has no local_hostname or no "
                                                   "metadata_server"))
            return self.setup(**known)
        with self._lock:
            if self._objects is not None:
                return OK
            try:
                options = _options(master_server_addr)
                name = options.namespace or "mooncake.store"
                if tenant_id not in ("", "default"):
                    name += "/" + tenant_id
                objects = Objects(options, name, min(max(int(local_buffer_size), 0), KEPT))
            except (errors.Error, OSError, ValueError, TypeError) as e:
                return _failed("setup", e)
            if not objects.wait(0):
                objects.close()
                return _failed("setup", ConnectionError(
                    f"no cache at {options.address}: start `sluice cache serve`"), LOST)
            self._objects, self._host = objects, local_hostname
            return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """The same, for a program that has left the rest to a server."""
        return self.setup("localhost", "", 0, local_buffer_size, master_server_addr=server_address)

    def close(self) -> int:
        """Ends the connection. Objects stay."""
        with self._lock:
            objects, self._objects = self._objects, None
        if objects is not None:
            objects.close()
        return OK

    def __del__(self) -> None:
        try:
            self.close()
        except errors.Error:  # the child of a fork has nothing to close
            pass

    def _over(self, n: int, act: Callable[[Objects], list[int]]) -> list[int]:
        objects = self._objects
        if objects is None:
            logger.error("call setup first, and see that it returns 0")
            return [INVALID] * n
        return act(objects)

    def health_check(self) -> int:
        """0; 1 before setup; 2 where the cache is lost now."""
        if self._objects is None:
            return 1
        return 0 if self._objects.wait(0) else 2

    def get_hostname(self) -> str:
        return self._host

    # Memory

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Lets the cache read and write a range in place, which must not overlap another."""
        def act(objects: Objects) -> list[int]:
            if buffer_ptr <= 0 or size <= 0:
                raise ValueError(f"{size} bytes at {buffer_ptr:#x} are no memory")
            objects.register(buffer_ptr, size)
            return [OK]

        return self._memory("register_buffer", act)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Ends a range by its address: 0 is the proof that the cache reaches it no more."""
        def act(objects: Objects) -> list[int]:
            objects.unregister(buffer_ptr)
            return [OK]

        return self._memory("unregister_buffer", act)

    def _memory(self, what: str, act: Callable[[Objects], list[int]]) -> int:
        try:
            return self._over(1, act)[0]
        except (errors.Error, KeyError, ValueError) as e:
            return _failed(what, e)

    # By address

    def batch_put_from_multi_buffers(
            self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
            all_sizes: Sequence[Sequence[int]],
            config: Optional[ReplicateConfig] = None) -> list[int]:
        """Stores objects of several runs each. 0 for each that is there then: what a key has
        already stays.
        """
        return self._put_runs(keys, all_buffer_ptrs, all_sizes)

    def _put_runs(self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
                  all_sizes: Sequence[Sequence[int]], anew: bool = False) -> list[int]:
        """The same; with anew in place of what a key has."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID] * len(keys)
        values = [Value(at, n) if len(at) == len(n) else Value((), ())
                  for at, n in zip(all_buffer_ptrs, all_sizes)]
        return self._over(len(keys), lambda o: o.put(keys, values, anew))

    def batch_get_into_multi_buffers(
            self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]],
            all_sizes: Sequence[Sequence[int]],
            prefer_alloc_in_same_node: bool = False) -> list[int]:
        """Loads objects into several runs each, which may be longer: what lies there behind an
        object is undefined, so that runs of two must not overlap. Their sizes, or codes.
        """
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID] * len(keys)

        def into(k: int, size: int) -> Union[Value, int]:
            at, lengths = all_buffer_ptrs[k], all_sizes[k]
            good = len(at) == len(lengths) and min(lengths, default=-1) >= 0 and min(at) > 0
            return Value(at, lengths) if good and sum(lengths) >= size else INVALID

        return self._over(len(keys), lambda o: o.get(keys, into))

    def batch_put_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                       sizes: Sequence[int],
                       config: Optional[ReplicateConfig] = None) -> list[int]:
        return self.batch_put_from_multi_buffers(keys, [(at,) for at in buffer_ptrs],
                                                 [(n,) for n in sizes])

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                       sizes: Sequence[int]) -> list[int]:
        return self.batch_get_into_multi_buffers(keys, [(at,) for at in buffer_ptrs],
                                                 [(n,) for n in sizes])

    def put_from(self, key: str, buffer_ptr: int, size: int,
                 config: Optional[ReplicateConfig] = None) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def upsert_from(self, key: str, buffer_ptr: int, size: int,
                    config: Optional[ReplicateConfig] = None) -> int:
        return self._put_runs([key], [(buffer_ptr,)], [(size,)], anew=True)[0]

    # By value

    def put(self, key: str, value: Any, config: Optional[ReplicateConfig] = None) -> int:
        return self.put_parts(key, value)

    def put_parts(self, key: str, *parts: Any, config: Optional[ReplicateConfig] = None) -> int:
        """Stores the bytes of several objects behind each other."""
        return self._put([key], [parts])[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Any],
                  config: Optional[ReplicateConfig] = None) -> int:
        """0, or the first code of those that were not stored."""
        if len(keys) != len(values):
            return INVALID
        return next((c for c in self._put(keys, [(v,) for v in values]) if c), OK)

    def _put(self, keys: Sequence[str], values: Sequence[Sequence[Any]],
             anew: bool = False) -> list[int]:
        held = [[Held(_buffer(part)) for part in parts] for parts in values]
        try:
            return self._put_runs(
                keys, [[h.address for h in some if h.length] for some in held],
                [[h.length for h in some if h.length] for some in held], anew)
        finally:
            for some in held:
                for h in some:
                    h.release()

    def upsert(self, key: str, value: Any, config: Optional[ReplicateConfig] = None) -> int:
        """Stores it, in place of what the key has, which stays where this fails."""
        return self.upsert_parts(key, value)

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Any],
                     config: Optional[ReplicateConfig] = None) -> int:
        if len(keys) != len(values):
            return INVALID
        return next((c for c in self._put(keys, [(v,) for v in values], anew=True) if c), OK)

    def upsert_parts(self, key: str, *parts: Any,
                     config: Optional[ReplicateConfig] = None) -> int:
        return self._put([key], [parts], anew=True)[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[Optional[BufferHandle]]:
        """The bytes of each, None where there is none."""
        made: dict[int, BufferHandle] = {}

        def into(k: int, size: int) -> Value:
            made[k] = BufferHandle(size)
            return Value((made[k].ptr(),), (size,))

        codes = self._over(len(keys), lambda o: o.get(keys, into))
        return [made[k] if code > 0 else None for k, code in enumerate(codes)]

    def get_buffer(self, key: str) -> Optional[BufferHandle]:
        return self.batch_get_buffer([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """The bytes of each, b"" where there is none."""
        made: dict[int, bytes] = {}

        def into(k: int, size: int) -> Value:
            made[k] = _new_bytes(None, size)  # nobody else has it yet
            return Value((_address_of(made[k]),), (size,))

        codes = self._over(len(keys), lambda o: o.get(keys, into))
        return [made[k] if code > 0 else b"" for k, code in enumerate(codes)]

    def get(self, key: str) -> bytes:
        return self.get_batch([key])[0]

    # What is there

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 for each that is there with all its bytes, 0 for others."""
        return self._over(len(keys), lambda o: o.exist(keys))

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def get_size(self, key: str) -> int:
        return self._over(1, lambda o: o.sizes([key]))[0]

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """For the keys that are there, where."""
        tiers = self._over(len(keys), lambda o: o.tiers(keys))
        return {key: [ReplicaDescriptor(t)] for key, t in zip(keys, tiers) if t > 0}

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key]).get(key, [])

    def remove(self, key: str, force: bool = False) -> int:
        return self._over(1, lambda o: o.remove([key]))[0]

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many keys had a match. The pattern is one of Python's."""
        try:
            pattern = re.compile(regex_pattern)
        except re.error as e:
            return _failed("remove_by_regex", e)
        return self._over(1, lambda o: [o.remove_where(
            lambda name: pattern.search(name) is not None)])[0]

    def remove_all(self, force: bool = False) -> int:
        """How many there were."""
        return self._over(1, lambda o: [o.remove_everything()])[0]

    # Tensors

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """Stores tensors of torch, with shape and type before their bytes."""
        return self._put_tensors(keys, tensors_list)

    def _put_tensors(self, keys: Sequence[str], tensors_list: Sequence[Any],
                     anew: bool = False) -> list[int]:
        if len(keys) != len(tensors_list):
            return [INVALID] * len(keys)
        parts = [tensors.parts_of(t) for t in tensors_list]
        values = [Value(*zip(*of.runs)) if of else Value((), ()) for of in parts]
        return self._over(len(keys), lambda o: o.put(keys, values, anew))

    def put_tensor(self, key: str, tensor: Any) -> int:
        return self.batch_put_tensor([key], [tensor])[0]

    def pub_tensor(self, key: str, tensor: Any, config: Optional[ReplicateConfig] = None) -> int:
        return self.put_tensor(key, tensor)

    def batch_pub_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any],
                         config: Optional[ReplicateConfig] = None) -> list[int]:
        return self.batch_put_tensor(keys, tensors_list)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        return self._put_tensors([key], [tensor], anew=True)[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[Any]:
        """New tensors, None for a key without one."""
        return [None if b is None else tensors.tensor_in(b) for b in self.batch_get_buffer(keys)]

    def get_tensor(self, key: str) -> Any:
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                              sizes: Sequence[int]) -> list[Any]:
        """Tensors in the memory at these addresses, behind their description there."""
        codes = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [tensors.tensor_in((ctypes.c_char * n).from_address(at)) if n > 0 else None
                for at, n in zip(buffer_ptrs, codes)]

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int],
                              sizes: Sequence[int]) -> list[int]:
        """Stores what lies as batch_get_tensor_into leaves it."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID] * len(keys)
        kept = [n if tensors.described(ctypes.string_at(at, tensors.HEADER)
                                       if at > 0 and n >= tensors.HEADER else b"", n) else 0
                for at, n in zip(buffer_ptrs, sizes)]
        return self.batch_put_from(keys, buffer_ptrs, kept)

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]


def _options(address: str) -> Options:
    """The cache that an address names, or the environment."""
    variable = os.environ.get("SLUICE_CACHE", "")
    for said in (address, variable):
        if said.startswith("{"):
            return Options.read(json.loads(said))
        if said.startswith(("unix:", "tcp:", "nodes:", "etcd:http")):  # etcd:// is Mooncake's
            return Options.read({"address": said})
    raise ValueError(f"the master server is {address!r} and SLUICE_CACHE {variable!r}: one of them "
                     f"must name a cache, as unix:/path or tcp:host:port of `sluice cache serve`, "
                     f"or etcd:URL of a cluster")


def _buffer(value: Any) -> Any:
    if isinstance(value, str):
        raise TypeError("want bytes, or what has their interface, not str")
    return value


def _failed(what: str, error: Exception, code: int = INVALID) -> int:
    logger.error("%s: %s", what, error)
    return code


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = [ctypes.py_object], ctypes.c_void_p
