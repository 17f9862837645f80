# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache of processed images in a ring: docs/ring.md.

The classes have the names and the methods of vLLM's own, which vllm.multimodal.cache.shm uses. With
SLUICE_VLLM_RING=1 in the environment of all of vLLM's processes our wheel's plugin puts them there.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import logging
import os
import pickle
import secrets
import struct
import tempfile
from typing import Any, NamedTuple, Optional, Sequence, Union

import torch

from ..errors import BoundsError, BusyError, FullError, MissingError
from ..ring import Handle, Reader, View, Writer

logger = logging.getLogger("sluice.vllm_ring")

JOIN = 60.0  # seconds that a reader waits for the writer
PATIENCE = 3600.0  # seconds that an image waits for workers, where its room is needed
OBJECT = 64 << 10  # bytes; the ring has a row for each
ROWS = 1 << 16  # at most
LINE = 64  # bytes, to which tensors are aligned


class SingleWriterShmRingBuffer:
    """A ring that is opened, or joined, when its storage is made."""

    def __init__(self, data_buffer_size: int, name: Optional[str] = None,
                 create: bool = False) -> None:
        self.data_buffer_size, self.is_writer = data_buffer_size, create
        self.name = name or secrets.token_hex(16)
        short = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        self.path = f"{tempfile.gettempdir()}/sluice-ring-{os.getuid()}-{short}"
        self._ring: Optional[Union[Writer, Reader]] = None
        self._secret = secrets.token_bytes(32) if create else b""

    def handle(self) -> tuple[int, str]:
        return self.data_buffer_size, self.name

    def open(self, n_readers: int) -> Writer:
        """Opens the ring. What is put before the readers have come waits for them. None that is
        stopped loses what it holds: vLLM would not learn of it.
        """
        rows = min(max(self.data_buffer_size // OBJECT, 1), ROWS)
        self._ring = Writer(self.path, self.data_buffer_size, objects=rows,
                            readers=min(2 * n_readers, 64), awaited=n_readers, note=self._secret,
                            patience=PATIENCE, frozen=None)
        logger.info("sluice: images are shared by the ring at %s", self.path)
        return self._ring

    def join(self) -> Reader:
        self._ring = reader = Reader.join(self.path, JOIN)
        self._secret = reader.note
        return reader

    def get_auth_secret(self) -> bytes:
        return self._secret

    def close(self) -> None:
        """Ends it, unless tensors of this process lie in it: then behind the last."""
        ring, self._ring = self._ring, None
        if ring is not None:
            with contextlib.suppress(BusyError):
                ring.close()


class MsgpackSerde:
    """Objects as buffers, at lines of their own, behind a table of their lengths."""

    _TENSOR, _ITEM, _OTHER = range(3)

    def __init__(self) -> None:
        from vllm.multimodal.inputs import MultiModalKwargsItem
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._item = MultiModalKwargsItem
        self._encoder = MsgpackEncoder()
        self._decoders = {self._TENSOR: MsgpackDecoder(torch.Tensor, share_mem=True),
                          self._ITEM: MsgpackDecoder(MultiModalKwargsItem, share_mem=True)}

    def serialize(self, value: Any) -> list[Any]:
        """The parts of an object, one behind the other."""
        if isinstance(value, (torch.Tensor, self._item)):
            kind = self._TENSOR if isinstance(value, torch.Tensor) else self._ITEM
            buffers: Sequence[Any] = self._encoder.encode(value)
        else:
            kind, buffers = self._OTHER, [pickle.dumps(value, pickle.HIGHEST_PROTOCOL)]
        lengths = [memoryview(b).nbytes for b in buffers]
        head = struct.pack(f"<II{len(lengths)}Q", kind, len(lengths), *lengths)
        parts = [head, bytes(-len(head) % LINE)]
        for buffer, length in zip(buffers, lengths):
            parts += [buffer, bytes(-length % LINE)]
        return parts

    def deserialize(self, data: memoryview) -> Any:
        """Tensors that lie where the bytes do, but for small ones."""
        kind, count = struct.unpack_from("<II", data)
        lengths = struct.unpack_from(f"<{count}Q", data, 8)
        at, buffers = 8 + 8 * count, []
        for length in lengths:
            at += -at % LINE
            buffers.append(data[at : at + length])
            at += length
        if kind == self._OTHER:
            return pickle.loads(buffers[0])
        return self._decoders[kind].decode(buffers)


class StorageHandle(NamedTuple):
    """What another process makes a reader of."""

    max_object_size: int
    n_readers: int
    ring_buffer_handle: tuple[int, str]
    serde_class: type
    reader_lock: Any


class SingleWriterShmObjectStorage:
    """Objects by keys, for the readers of other processes, which verify by signatures that a handle
    is of the key that it comes with. A handle is two numbers: `address`, which has the row and the
    upper half of the generation, and `monotonic_id`, the lower half.
    """

    def __init__(self, max_object_size: int, n_readers: int,
                 ring_buffer: SingleWriterShmRingBuffer, serde_class: type = MsgpackSerde,
                 reader_lock: Any = None) -> None:
        self.max_object_size, self.n_readers = max_object_size, n_readers
        self.ring_buffer, self.is_writer = ring_buffer, ring_buffer.is_writer
        self.serde_class, self.ser_de = serde_class, serde_class()
        self._reader_lock = reader_lock  # of vLLM, which nothing here takes
        self._ring: Any = ring_buffer.open(n_readers) if self.is_writer else ring_buffer.join()
        # What the ring has, the next to go first; and what clear has taken from key_index, that
        # requests may be on their way with.
        self.key_index: dict[str, tuple[int, int]] = {}
        self._cleared: dict[str, tuple[int, int]] = {}
        self._clears = self._evicted = 0

    def _ring_key(self, key: str) -> str:
        return f"{self._clears} {key}"

    def clear(self) -> None:
        """Forgets all keys. What was handed out can be got until its room is needed."""
        if self.is_writer:
            self._ring.end_touches()
            self._cleared.update((self._ring_key(k), at) for k, at in self.key_index.items())
            self.key_index.clear()
            self._clears += 1

    def _forget_evicted(self) -> None:
        evicted = self._ring.stats()["evicted"]
        gone = evicted - self._evicted
        self._evicted = evicted
        for known, ring_key in ((self._cleared, str), (self.key_index, self._ring_key)):
            missing = (key for key in known if ring_key(key) not in self._ring)
            for key in list(itertools.islice(missing, gone)):
                del known[key]
                gone -= 1

    def is_cached(self, key: str) -> bool:
        return key in self.key_index

    def get_cached(self, key: str) -> tuple[int, int]:
        """Hands an object out once more, to all readers."""
        at = self.key_index.pop(key)
        self.key_index[key] = at
        self._ring.handle(self._ring_key(key))
        return at

    def put(self, key: str, value: Any) -> tuple[int, int]:
        """Stores an object, for which others go that nobody holds or waits for. ValueError: its key
        is known, or it is too large. MemoryError: there is no room.
        """
        if key in self.key_index:
            raise ValueError(f"Key '{key}' already exists in the storage.")
        parts = self.ser_de.serialize(value)
        size = sum(memoryview(p).nbytes for p in parts)
        if size > self.max_object_size:
            raise ValueError(f"Serialized object size ({size} bytes) exceeds max object size "
                             f"({self.max_object_size} bytes)")
        try:
            row, generation = self._ring.put(self._ring_key(key), *parts, timeout=0)
        except (FullError, BoundsError) as e:
            raise MemoryError(f"Not enough space in the data buffer: {e}") from e
        finally:
            self._forget_evicted()
        at = self.key_index[key] = row << 32 | generation >> 32, generation & 0xFFFFFFFF
        return at

    def free_unused(self) -> None:
        """Nothing: put takes room from whatever is unused."""

    def get(self, address: int, monotonic_id: int, signature: Optional[list[int]] = None,
            key: Optional[str] = None) -> Any:
        """An object whose tensors lie in the ring, and hold it there. They cannot be written to: a
        process that does ends by SIGSEGV.
        """
        if not self.is_writer:
            self.verify_signature(key, address, monotonic_id, signature)
        handle = Handle(address >> 32, (address & 0xFFFFFFFF) << 32 | monotonic_id)
        try:
            view: View = self._ring.get(handle)
        except MissingError as e:
            raise ValueError(f"Data for address:id '{address}:{monotonic_id}' has been modified or "
                             f"is invalid.") from e
        # Not view.memory: torch warns of buffers that are read-only.
        return self.ser_de.deserialize(memoryview(view._bytes()).cast("B"))

    def touch(self, key: str, address: int = 0, monotonic_id: int = 0,
              signature: Optional[list[int]] = None) -> None:
        """Of the writer: keeps an object until get_cached or release_touches. Of a reader: verifies
        the signature alone; get says what has gone.
        """
        if not self.is_writer:
            self.verify_signature(key, address, monotonic_id, signature)
        elif key in self.key_index:
            self.key_index[key] = self.key_index.pop(key)
            self._ring.touch(self._ring_key(key))

    def release_touches(self) -> None:
        self._ring.end_touches()

    def get_signature(self, key: str) -> list[int]:
        return list(self._sign(key, *self.key_index[key]))

    def _sign(self, key: str, address: int, monotonic_id: int) -> bytes:
        payload = hashlib.sha256(key.encode()).digest() + struct.pack("<QI", address, monotonic_id)
        return hmac.digest(self.ring_buffer.get_auth_secret(), payload, "sha256")

    def verify_signature(self, key: Optional[str], address: int, monotonic_id: int,
                         signature: Optional[list[int]]) -> None:
        """ValueError: the handle was not issued for the key or, of the writer, is not its present
        one.
        """
        wrong = ValueError("Invalid SHM handle signature for cache key.")
        if self.is_writer and self.key_index.get(str(key)) != (address, monotonic_id):
            raise wrong
        if signature is None or key is None:
            raise ValueError("Missing SHM handle signature for cache key.")
        try:
            given = bytes(signature) if isinstance(signature, list) else b""
            right = self._sign(key, address, monotonic_id)
        except (struct.error, TypeError, ValueError, AttributeError):
            raise wrong from None
        if not hmac.compare_digest(given, right):
            raise wrong

    def close(self) -> None:
        self.ring_buffer.close()

    def handle(self) -> StorageHandle:
        return StorageHandle(self.max_object_size, self.n_readers, self.ring_buffer.handle(),
                             self.serde_class, self._reader_lock)

    @staticmethod
    def create_from_handle(handle: StorageHandle) -> SingleWriterShmObjectStorage:
        return SingleWriterShmObjectStorage(
            handle.max_object_size, handle.n_readers,
            SingleWriterShmRingBuffer(*handle.ring_buffer_handle), handle.serde_class,
            handle.reader_lock)


def install() -> None:
    """Has vLLM's cache of this process use these classes."""
    from vllm.multimodal.cache import shm

    for ours in (SingleWriterShmRingBuffer, SingleWriterShmObjectStorage, MsgpackSerde):
        if not hasattr(shm, ours.__name__):
            raise ImportError(f"vllm.multimodal.cache.shm of this vLLM has no {ours.__name__}: "
                              f"unset SLUICE_VLLM_RING")
    # The frontend opens the ring before it starts the others, and a fork has no part in it.
    if os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn") == "fork":
        raise ValueError("a fork has no part in a ring: set VLLM_WORKER_MULTIPROC_METHOD=spawn, or "
                         "unset SLUICE_VLLM_RING")
    for ours in (SingleWriterShmRingBuffer, SingleWriterShmObjectStorage, MsgpackSerde):
        setattr(shm, ours.__name__, ours)
