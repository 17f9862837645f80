# SPDX-License-Identifier: Apache-2.0
"""libsluice.so.1 by ctypes: the structs and functions of sluice.h, and nothing else.

ctypes lets go of the interpreter's lock during every call, so that threads which
wait hold up no others.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import (POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint32,
                    c_uint64, c_void_p)
from typing import Any, Callable

ABI_VERSION = 2

OK, PENDING = 0, 1
OPTIONAL = 1
PLAINTEXT, SCHEDULE = 1, 2
NO_HUGE, POPULATE = 1, 2
KIND_MEMORY, KIND_HOST, KIND_DEVICE, KIND_FILE = 1, 2, 3, 4
READ_ONLY, PRIVATE, DMABUF, EXTENDS, BUFFERED = 1, 2, 4, 8, 16
READ, WRITE = 1, 2
DURABLE = 1
SENDER, RECEIVER = 1, 2
RING_SUMS = 1
SPARSE_NONE = 0xFFFFFFFF
TEXT, JSON = 1, 2


class Backend(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("options", POINTER(c_char_p)),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("name", c_char_p),
        ("backends", POINTER(Backend)),
        ("backends_count", c_size_t),
        ("transfer_timeout_ns", c_int64),
        ("abort_grace_ns", c_int64),
        ("connect_timeout_ns", c_int64),
        ("handshake_timeout_ns", c_int64),
        ("spin_ns", c_int64),
        ("staging_bytes", c_int64),
        ("description_max", c_uint64),
        ("transfers_max", c_uint32),
        ("regions_max", c_uint32),
        ("leases_max", c_uint32),
        ("peers_max", c_uint32),
        ("notifications_max", c_uint32),
        ("handshakes_max", c_uint32),
        ("cert_file", c_char_p),
        ("key_file", c_char_p),
        ("ca_file", c_char_p),
    ]


class AllocOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("node", c_uint32),
        ("reserved", c_uint32),
    ]


class Segment(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("kind", c_uint32),
        ("flags", c_uint32),
        ("device", c_int32),
        ("length", c_uint64),
        ("offset", c_uint64),
        ("memory", c_uint64),
        ("host", c_void_p),
        ("device_address", c_uint64),
        ("dmabuf_offset", c_uint64),
        ("dmabuf", c_int32),
        ("file", c_int32),
    ]


class Desc(ctypes.Structure):
    _fields_ = [("local", c_uint64), ("remote", c_uint64), ("length", c_uint64)]


class Copy(ctypes.Structure):
    _fields_ = [("region", c_uint64), ("remote", c_uint64), ("desc", Desc)]


class Route(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("only", c_char_p)]


class Pages(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("count", c_uint64),
        ("entry_length", c_uint64),
        ("local_base", c_uint64),
        ("local_stride", c_uint64),
        ("remote_base", c_uint64),
        ("remote_stride", c_uint64),
        ("local", c_void_p),
        ("remote", c_void_p),
    ]


class Loop(ctypes.Structure):
    _fields_ = [("local", c_uint64), ("remote", c_uint64), ("n", c_uint32), ("reserved", c_uint32)]


class Side(ctypes.Structure):
    _fields_ = [
        ("base", c_uint64),
        ("stride", c_uint64),
        ("step", c_uint64),
        ("first", c_uint32),
        ("per", c_uint32),
        ("list", c_void_p),
    ]


class Pattern(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("count", c_uint64),
        ("run", c_uint64),
        ("loops_count", c_uint32),
        ("reserved", c_uint32),
        ("loops", Loop * 3),
        ("local", Side),
        ("remote", Side),
    ]


class Completion(ctypes.Structure):
    _fields_ = [
        ("transfer", c_uint64),
        ("word", c_uint64),
        ("status", c_int32),
        ("reserved", c_int32),
    ]


class Notification(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("status", c_int32),
        ("peer", c_uint64),
        ("length", c_uint64),
        ("more", c_uint32),
        ("reserved", c_uint32),
    ]


class LeaseOptions(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("ttl_ns", c_int64)]


class KVNamespaceOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("priority", c_uint32),
        ("memory_quota", c_uint64),
        ("disk_quota", c_uint64),
        ("geometry", c_uint8 * 32),
        ("name", c_char_p),
        ("hold_max", c_uint64),
        ("ttl_ns", c_int64),
        ("flow", c_uint32),
        ("reserved", c_uint32),
    ]


class KVHintResult(ctypes.Structure):
    _fields_ = [("applied", c_uint64), ("missing", c_uint64), ("refused", c_uint64)]


class KVEstimate(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("measured", c_uint32),
        ("memory_blocks", c_uint64),
        ("disk_blocks", c_uint64),
        ("missing", c_uint64),
        ("memory_bytes", c_uint64),
        ("disk_bytes", c_uint64),
        ("time_ns", c_int64),
    ]


class KVKey(ctypes.Structure):
    _fields_ = [("bytes", c_uint8 * 16)]


class KVAxis(ctypes.Structure):
    _fields_ = [("by", c_uint64), ("n", c_uint32), ("reserved", c_uint32)]


class KVPlace(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("loops_count", c_uint32),
        ("region", c_uint64),
        ("base", c_uint64),
        ("stride", c_uint64),
        ("run", c_uint64),
        ("loops", KVAxis * 3),
        ("slots", c_void_p),
    ]


class HandoffConfig(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("role", c_uint32),
        ("index", c_uint32),
        ("reserved", c_uint32),
        ("plan", c_char_p),
        ("regions", POINTER(c_uint64)),
        ("peers", POINTER(c_uint64)),
        ("regions_count", c_uint32),
        ("peers_count", c_uint32),
        ("options", POINTER(c_char_p)),
    ]


class HandoffTable(ctypes.Structure):
    _fields_ = [("blocks", c_void_p), ("count", c_uint64)]


class RingConfig(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("flags", c_uint32),
        ("path", c_char_p),
        ("bytes", c_uint64),
        ("objects", c_uint32),
        ("readers", c_uint32),
        ("awaited", c_uint32),
        ("note_length", c_uint32),
        ("note", c_void_p),
        ("patience_ns", c_int64),
        ("frozen_ns", c_int64),
    ]


class RingHandle(ctypes.Structure):
    _fields_ = [("generation", c_uint64), ("row", c_uint32), ("reserved", c_uint32)]


class RingPart(ctypes.Structure):
    _fields_ = [("bytes", c_void_p), ("length", c_uint64)]


class SparseConfig(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("layers", c_uint32),
        ("region", c_uint64),
        ("base", c_uint64),
        ("entry", c_uint64),
        ("stride", c_uint64),
        ("sets", c_uint32),
        ("slots", c_uint32),
    ]


class SparseBatch(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("sets_count", c_uint32),
        ("entries_count", c_uint32),
        ("shift", c_uint32),
        ("sets", c_void_p),
        ("entries", c_void_p),
        ("blocks", c_void_p),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("missed", c_void_p),
        ("counts", c_void_p),
        ("page", c_uint64),
    ]


STRUCTS = {
    "sluice_backend": Backend,
    "sluice_config": Config,
    "sluice_alloc_options": AllocOptions,
    "sluice_segment": Segment,
    "sluice_desc": Desc,
    "sluice_copy": Copy,
    "sluice_route": Route,
    "sluice_pages": Pages,
    "sluice_loop": Loop,
    "sluice_side": Side,
    "sluice_pattern": Pattern,
    "sluice_completion": Completion,
    "sluice_notification": Notification,
    "sluice_lease_options": LeaseOptions,
    "sluice_kv_namespace_options": KVNamespaceOptions,
    "sluice_kv_axis": KVAxis,
    "sluice_kv_place": KVPlace,
    "sluice_kv_hint_result": KVHintResult,
    "sluice_kv_estimate": KVEstimate,
    "sluice_kv_key": KVKey,
    "sluice_handoff_config": HandoffConfig,
    "sluice_handoff_table": HandoffTable,
    "sluice_ring_config": RingConfig,
    "sluice_ring_handle": RingHandle,
    "sluice_ring_part": RingPart,
    "sluice_sparse_config": SparseConfig,
    "sluice_sparse_batch": SparseBatch,
}

_HANDLE, _OUT = c_uint64, POINTER(c_uint64)
_SIZE_OUT = POINTER(c_size_t)

KV_LISTED_MAX = 4096  # keys of one call of kv_list
_KV_MOVE = [_HANDLE, c_void_p, c_size_t, POINTER(KVPlace), c_int64, _OUT]

# The arguments of what returns a code.
_FUNCTIONS: dict[str, list[Any]] = {
    "open": [POINTER(Config), _OUT],
    "close": [_HANDLE],
    "stats": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "alloc": [_HANDLE, POINTER(AllocOptions), c_uint64, _OUT, POINTER(c_void_p)],
    "memory_close": [_HANDLE],
    "register": [_HANDLE, c_char_p, POINTER(Segment), _OUT],
    "register_many": [_HANDLE, POINTER(c_char_p), POINTER(Segment), c_size_t, _OUT],
    "region_close": [_HANDLE],
    "region_close_many": [_OUT, c_size_t],
    "describe": [_HANDLE, _OUT, c_size_t, c_void_p, c_size_t, _SIZE_OUT],
    "connect": [_HANDLE, c_char_p, c_size_t, c_int64, _OUT],
    "self": [_HANDLE, _OUT],
    "serve": [_HANDLE, c_char_p, c_char_p, c_char_p, c_size_t, _OUT],
    "listener_close": [_HANDLE],
    "accept": [_HANDLE, c_int64, _OUT],
    "dial": [_HANDLE, c_char_p, c_char_p, c_int64, _OUT],
    "peer_lost": [_HANDLE, POINTER(c_int)],
    "peer_about": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "peer_refresh": [_HANDLE, c_char_p, c_size_t],
    "peer_close": [_HANDLE],
    "remote_find": [_HANDLE, c_char_p, _OUT],
    "remote_find_many": [_HANDLE, POINTER(c_char_p), c_size_t, _OUT, _OUT],
    "remote_import": [_HANDLE, c_char_p, c_size_t, _OUT],
    "remote_length": [_HANDLE, POINTER(c_uint64)],
    "remote_close": [_HANDLE],
    "transfer_new": [_HANDLE, c_uint32, c_char_p, _OUT],
    "transfer_new_route": [_HANDLE, c_uint32, POINTER(Route), _OUT],
    "transfer_add": [_HANDLE, _HANDLE, _HANDLE, c_void_p, c_size_t],
    "transfer_add_many": [_HANDLE, c_void_p, c_size_t],
    "transfer_add_pages": [_HANDLE, _HANDLE, _HANDLE, POINTER(Pages)],
    "transfer_add_pattern": [_HANDLE, _HANDLE, _HANDLE, POINTER(Pattern)],
    "transfer_message": [_HANDLE, c_char_p, c_size_t],
    "transfer_watch": [_HANDLE, c_uint64],
    "post": [_HANDLE],
    "test": [_HANDLE],
    "wait": [_HANDLE, c_int64],
    "post_and_wait": [_HANDLE, c_int64],
    "send": [_HANDLE, c_char_p, c_size_t, c_int64],
    "abort": [_HANDLE, c_int64],
    "reset": [_HANDLE],
    "transfer_close": [_HANDLE],
    "completion_fd": [_HANDLE, POINTER(c_int)],
    "completions": [_HANDLE, POINTER(Completion), c_size_t, _SIZE_OUT],
    "notify": [_HANDLE, c_char_p, c_size_t, c_int64],
    "receive": [_HANDLE, POINTER(Notification), c_void_p, c_size_t, c_int64],
    "notification_fd": [_HANDLE, POINTER(c_int)],
    "lease_grant": [_HANDLE, c_uint64, c_uint64, POINTER(LeaseOptions), _OUT],
    "lease_token": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "lease_ended": [_HANDLE, POINTER(c_int)],
    "lease_revoke": [_HANDLE, c_int64],
    "kv_open": [_HANDLE, POINTER(c_char_p), c_int64, _OUT],
    "kv_dial": [_HANDLE, c_char_p, c_char_p, c_int64, _OUT],
    "kv_serve": [_HANDLE],
    "kv_close": [_HANDLE],
    "kv_stats": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "kv_drain": [_HANDLE, c_int64],
    "kv_attach": [_HANDLE, _HANDLE, c_int64],
    "kv_detach": [_HANDLE, _HANDLE, c_int64],
    "kv_namespace_open": [_HANDLE, POINTER(KVNamespaceOptions), c_int64, _OUT],
    "kv_namespace_close": [_HANDLE],
    "kv_chain": [_HANDLE, c_void_p, c_size_t, _OUT],
    "kv_match": [_HANDLE, c_void_p, c_size_t, c_int64, c_void_p, _SIZE_OUT],
    "kv_remove": [_HANDLE, c_void_p, c_size_t, c_int64],
    "kv_list": [_HANDLE, POINTER(c_uint32), c_int64, c_void_p, _SIZE_OUT],
    "kv_load": _KV_MOVE,
    "kv_store": _KV_MOVE,
    "kv_replace": _KV_MOVE,
    "kv_prefetch": [_HANDLE, c_void_p, c_size_t, c_int64, _OUT],
    "kv_hint": [_HANDLE, c_uint32, c_int64, c_void_p, c_size_t, c_int64, POINTER(KVHintResult)],
    "kv_hint_envelope": [_HANDLE, c_char_p, c_size_t, c_int64, c_void_p, c_size_t, _SIZE_OUT],
    "kv_estimate": [_HANDLE, c_void_p, c_size_t, c_int64, POINTER(KVEstimate)],
    "kv_match_pinned": [_HANDLE, c_void_p, c_size_t, c_size_t, c_int64, c_int64, _OUT, _SIZE_OUT],
    "kv_token_bytes": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "kv_token_close": [_HANDLE],
    "kv_load_pinned": [_HANDLE, c_char_p, c_size_t, c_size_t, *_KV_MOVE[1:]],
    "kv_op_fd": [_HANDLE, POINTER(c_int)],
    "kv_op_wait": [_HANDLE, c_int64, c_void_p, c_size_t],
    "kv_op_cancel": [_HANDLE],
    "kv_op_close": [_HANDLE],
    "handoff_open": [_HANDLE, POINTER(HandoffConfig), _OUT],
    "handoff_begin": [_HANDLE, c_uint64, POINTER(HandoffTable), c_size_t, c_uint64, c_uint64, _OUT],
    "handoff_layer": [_HANDLE, c_uint32],
    "handoff_fd": [_HANDLE, POINTER(c_int)],
    "handoff_wait": [_HANDLE, c_int64],
    "handoff_abort": [_HANDLE, c_int64],
    "handoff_request_close": [_HANDLE],
    "handoff_stats": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "handoff_close": [_HANDLE],
    "ring_open": [POINTER(RingConfig), _OUT],
    "ring_put": [_HANDLE, c_char_p, POINTER(RingPart), c_size_t, c_int64, POINTER(RingHandle)],
    "ring_hand_out": [_HANDLE, c_char_p, POINTER(RingHandle)],
    "ring_find": [_HANDLE, c_char_p, POINTER(RingHandle)],
    "ring_touch": [_HANDLE, c_char_p],
    "ring_end_touches": [_HANDLE],
    "ring_remove": [_HANDLE, c_char_p],
    "ring_clear": [_HANDLE],
    "ring_stats": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "ring_close": [_HANDLE],
    "ring_join": [c_char_p, c_int64, _OUT],
    "ring_note": [_HANDLE, c_void_p, c_size_t, _SIZE_OUT],
    "ring_gone": [_HANDLE, POINTER(c_int)],
    "ring_get": [_HANDLE, POINTER(RingHandle), POINTER(c_void_p), POINTER(c_uint64), _OUT],
    "ring_verify": [_HANDLE],
    "ring_view_close": [_HANDLE],
    "ring_leave": [_HANDLE],
    "sparse_open": [POINTER(SparseConfig), _OUT, POINTER(c_uint32)],
    "sparse_reset": [_HANDLE, c_uint32],
    "sparse_close": [_HANDLE],
    "sparse_step_new": [_HANDLE, _HANDLE, c_uint64, POINTER(Route), _OUT],
    "sparse_lookup": [_HANDLE, POINTER(SparseBatch), _SIZE_OUT],
    "sparse_warm": [_HANDLE, POINTER(SparseBatch), c_size_t, _SIZE_OUT],
    "sparse_fetch": [_HANDLE, POINTER(c_uint64), c_size_t],
    "sparse_store": [_HANDLE, POINTER(c_uint64), c_size_t],
    "sparse_fd": [_HANDLE, POINTER(c_int)],
    "sparse_wait": [_HANDLE, c_int64],
    "sparse_abort": [_HANDLE, c_int64],
    "sparse_step_close": [_HANDLE],
    "explain": [_HANDLE, _HANDLE, _HANDLE, c_uint32, c_void_p, c_size_t, _SIZE_OUT],
}


class Library:
    """The functions by their names without `sluice_`.

    The library is loaded when the first is called, and not with the package: a child that is
    forked before can use it.
    """

    error: Callable[[], bytes]
    version: Callable[[], bytes]
    code_name: Callable[[int], bytes]

    def __init__(self, path: str) -> None:
        self._path, self._lock = path, threading.Lock()

    def _load(self) -> None:
        path = self._path
        so = ctypes.CDLL(path)
        so.sluice_abi_version.restype = c_uint32
        version = so.sluice_abi_version()
        if version != ABI_VERSION:
            raise ImportError(f"{path} has version {version} of the ABI, and this package needs "
                              f"{ABI_VERSION}: install it anew")
        for name, arguments in _FUNCTIONS.items():
            function = getattr(so, "sluice_" + name)
            function.argtypes, function.restype = arguments, c_int
            setattr(self, name, function)
        so.sluice_error.restype = so.sluice_version.restype = c_char_p
        self.version = so.sluice_version
        so.sluice_code_name.argtypes, so.sluice_code_name.restype = [c_int], c_char_p
        self.code_name = so.sluice_code_name
        self.error = so.sluice_error  # the last: it says that all are there

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in _FUNCTIONS or name in ("error", "version", "code_name"):
            with self._lock:
                if "error" not in self.__dict__:
                    self._load()
            found: Callable[..., int] = self.__dict__[name]
            return found
        raise AttributeError(name)


lib = Library(os.path.join(os.path.dirname(os.path.abspath(__file__)), "_lib", "libsluice.so.1"))
