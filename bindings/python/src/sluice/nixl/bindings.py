# SPDX-License-Identifier: Apache-2.0
"""The constants, exceptions and lists of descriptors that programs for NIXL name."""

from __future__ import annotations

import array
import itertools
import json
import struct
from enum import Enum
from functools import lru_cache
from typing import Any, Iterable, Optional, Sequence, Union

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint64]


class nixl_mem_t(Enum):
    DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = range(5)

    __hash__ = object.__hash__  # Enum's is slow, and thousands of ranges are looked up by it


class nixl_xfer_op_t(Enum):
    NIXL_READ, NIXL_WRITE = range(2)


class nixl_cost_t(Enum):
    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixl_thread_sync_t(Enum):
    """Accepted and of no effect: any thread may call an agent at any time."""

    NIXL_THREAD_SYNC_NONE, NIXL_THREAD_SYNC_STRICT, NIXL_THREAD_SYNC_RW = range(3)
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_status_t(Enum):
    """What calls of nixlAgent answer. A failure is an exception instead, but for NOT_FOUND."""

    NIXL_IN_PROG, NIXL_SUCCESS = 1, 0
    NIXL_ERR_NOT_POSTED, NIXL_ERR_INVALID_PARAM, NIXL_ERR_BACKEND = -1, -2, -3
    NIXL_ERR_NOT_FOUND, NIXL_ERR_MISMATCH, NIXL_ERR_NOT_ALLOWED = -4, -5, -6
    NIXL_ERR_REPOST_ACTIVE, NIXL_ERR_UNKNOWN, NIXL_ERR_NOT_SUPPORTED = -7, -8, -9


DRAM_SEG, VRAM_SEG, BLK_SEG = nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG, nixl_mem_t.BLK_SEG
OBJ_SEG, FILE_SEG = nixl_mem_t.OBJ_SEG, nixl_mem_t.FILE_SEG
NIXL_READ, NIXL_WRITE = nixl_xfer_op_t.NIXL_READ, nixl_xfer_op_t.NIXL_WRITE
NIXL_COST_ANALYTICAL_BACKEND = nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND
NIXL_THREAD_SYNC_NONE = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
NIXL_THREAD_SYNC_STRICT = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
NIXL_THREAD_SYNC_RW = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
NIXL_THREAD_SYNC_DEFAULT = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT
NIXL_IN_PROG, NIXL_SUCCESS = nixl_status_t.NIXL_IN_PROG, nixl_status_t.NIXL_SUCCESS
NIXL_ERR_NOT_POSTED = nixl_status_t.NIXL_ERR_NOT_POSTED
NIXL_ERR_INVALID_PARAM = nixl_status_t.NIXL_ERR_INVALID_PARAM
NIXL_ERR_BACKEND = nixl_status_t.NIXL_ERR_BACKEND
NIXL_ERR_NOT_FOUND = nixl_status_t.NIXL_ERR_NOT_FOUND
NIXL_ERR_MISMATCH = nixl_status_t.NIXL_ERR_MISMATCH
NIXL_ERR_NOT_ALLOWED = nixl_status_t.NIXL_ERR_NOT_ALLOWED
NIXL_ERR_REPOST_ACTIVE = nixl_status_t.NIXL_ERR_REPOST_ACTIVE
NIXL_ERR_UNKNOWN = nixl_status_t.NIXL_ERR_UNKNOWN
NIXL_ERR_NOT_SUPPORTED = nixl_status_t.NIXL_ERR_NOT_SUPPORTED
NIXL_INIT_AGENT = ""
DEFAULT_COMM_PORT = 8888


class nixlNotPostedError(Exception):
    """The transfer was never posted."""


class nixlInvalidParamError(Exception):
    """A call that makes no sense."""


class nixlBackendError(Exception):
    """What moves the bytes has failed."""


class nixlNotFoundError(Exception):
    """An agent, a backend, or memory that is not registered."""


class nixlMismatchError(Exception):
    """Metadata that is not what it claims to be."""


class nixlNotAllowedError(Exception):
    """Not in this state: in use, or read-only."""


class nixlRepostActiveError(Exception):
    """The transfer is under way."""


class nixlUnknownError(Exception):
    """None of the others."""


class nixlNotSupportedError(Exception):
    """Nothing at hand can do this; the text says so."""


class nixlRemoteDisconnectError(Exception):
    """The peer is lost."""


class nixlCancelledError(Exception):
    """The transfer was aborted."""


class nixlNoTelemetryError(Exception):
    """The agent was made without capture_telemetry."""


class nixlXferTelemetry:
    """Times in microseconds. What is seen late, by check_xfer_state, counts until it was seen."""

    def __init__(self, start: float, post: float, transfer: float, total: int, count: int) -> None:
        self.startTime, self.postDuration, self.xferDuration = int(start), int(post), int(transfer)
        self.totalBytes, self.descCount = total, count


Triple = Sequence[int]


def _rows(descs: Any) -> Rows:
    """TypeError for another shape, RuntimeError for what are no whole numbers, as the wheel has it.
    """
    if isinstance(descs, np.ndarray):
        if descs.ndim != 2 or descs.shape[1] != 3:
            raise TypeError(f"descriptors: want rows of three, not shape {descs.shape}")
        if descs.dtype.kind not in "iu":
            raise RuntimeError(f"descriptors: want whole numbers, not {descs.dtype}")
        return descs.astype(np.uint64)
    if set(map(len, descs)) != {3}:
        raise TypeError("descriptors: want (address, length, device) each")
    return _numbers(itertools.chain.from_iterable(descs)).reshape(len(descs), 3)


def _numbers(of: Iterable[Any]) -> Rows:
    try:
        return np.frombuffer(array.array("Q", of), np.uint64)
    except (TypeError, OverflowError) as e:
        raise RuntimeError(f"descriptors: {e}") from None


class _List:
    """Descriptors of one type of memory: (address, length, device)."""

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        if not isinstance(type, nixl_mem_t):
            raise TypeError(f"want a nixl_mem_t, not {type!r}")
        self._type = type
        self._room: Rows = np.zeros((0, 3), np.uint64)
        self._n = 0
        if not isinstance(descs, int):
            self._extend(descs)

    @property
    def rows(self) -> Rows:
        """All of them, as they lie in memory."""
        return self._room[: self._n]

    def _extend(self, descs: Any) -> None:
        rows = _rows(descs) if len(descs) else self._room[:0]
        if self._n == 0:
            self._room, self._n = rows, len(rows)
            return
        if self._n + len(rows) > len(self._room):
            room = np.zeros((2 * (self._n + len(rows)), 3), np.uint64)
            room[: self._n] = self.rows
            self._room = room
        self._room[self._n : self._n + len(rows)] = rows
        self._n += len(rows)

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return self._n

    def isEmpty(self) -> bool:
        return self._n == 0

    def _place(self, i: int) -> int:
        if not 0 <= i < self._n:
            raise IndexError(f"descriptor {i} of {self._n}")
        return i

    def _triple(self, i: int) -> tuple[int, int, int]:
        a, n, device = self._room[self._place(i)].tolist()
        return a, n, device

    def __len__(self) -> int:
        return self._n

    def clear(self) -> None:
        self._n = 0

    def print(self) -> None:
        """Prints them."""
        print(self._type.name, self.rows.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _List) and self._state() == other._state()

    __hash__ = None  # type: ignore[assignment]

    def _state(self) -> tuple[Any, ...]:
        return type(self).__name__, self._type.value, self.rows.tobytes(), self._metas()

    def _metas(self) -> list[bytes]:
        return []

    def __reduce__(self) -> Any:
        return decode_list, (encode_list(self),)


class nixlXferDList(_List):
    """What a transfer moves."""

    def __getitem__(self, i: int) -> tuple[int, int, int]:
        return self._triple(i)

    def __setitem__(self, i: int, desc: Triple) -> None:
        self._room[self._place(i)] = _rows([desc])[0]

    def append(self, desc: Triple) -> None:
        self._extend([desc])

    addDesc = append

    def remDesc(self, i: int) -> None:
        self._room = np.delete(self.rows, self._place(i), axis=0)
        self._n -= 1

    def index(self, desc: Triple) -> int:
        found = np.flatnonzero((self.rows == _rows([desc])[0]).all(axis=1))
        if not len(found):
            raise nixlNotFoundError(f"no descriptor {tuple(desc)}")
        return int(found[0])


class nixlRegDList(_List):
    """What is registered: (address, length, device, what the backend wants to know)."""

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        self._about: list[bytes] = []
        if isinstance(descs, np.ndarray):
            super().__init__(type, descs)
            self._about = [b""] * self._n
            return
        super().__init__(type)
        if not isinstance(descs, int):
            self._append(list(map(tuple, descs)))

    def _append(self, descs: list[tuple[Any, ...]]) -> None:
        if not descs:
            return
        if set(map(len, descs)) != {4}:
            raise TypeError("want (address, length, device, meta) each")
        *columns, metas = zip(*descs)
        if set(map(type, metas)) == {str} and not any(metas):  # as mostly
            about = [b""] * len(metas)
        else:
            try:
                about = list(map(as_bytes, metas))
            except TypeError as e:
                raise RuntimeError(str(e)) from None  # as the wheel has it
        rows = np.empty((len(descs), 3), np.uint64)
        for i, column in enumerate(columns):
            rows[:, i] = _numbers(column)
        self._extend(rows)
        self._about += about

    def __getitem__(self, i: int) -> tuple[int, int, int, bytes]:
        return (*self._triple(i), self._about[i])

    def __setitem__(self, i: int, desc: Sequence[Any]) -> None:
        self._room[self._place(i)] = _rows([desc[:3]])[0]
        self._about[i] = as_bytes(desc[3])

    def append(self, desc: Sequence[Any]) -> None:
        self._append([tuple(desc)])

    addDesc = append

    def remDesc(self, i: int) -> None:
        self._room = np.delete(self.rows, self._place(i), axis=0)
        self._n -= 1
        del self._about[i]

    def index(self, desc: Sequence[Any]) -> int:
        for i in range(self._n):
            if self[i][: len(desc)] == (*map(int, desc[:3]), *map(as_bytes, desc[3:])):
                return i
        raise nixlNotFoundError(f"no descriptor {tuple(desc)}")

    def clear(self) -> None:
        super().clear()
        self._about.clear()

    def trim(self) -> nixlXferDList:
        """The same without what the backend wants to know."""
        return nixlXferDList(self._type, self.rows) if self._n else nixlXferDList(self._type)

    def _metas(self) -> list[bytes]:
        return self._about


class nixlRemoteDList:
    """Descriptors with the agent of each. Only memory views take them, which there are none of."""

    def __init__(self, type: nixl_mem_t, descs: Iterable[Sequence[Any]] = ()) -> None:
        self._type, self.descs = type, [tuple(d) for d in descs]

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self.descs)


def as_bytes(text: Union[str, bytes]) -> bytes:
    """TypeError for what is neither text nor bytes, as the wheel has it."""
    if isinstance(text, (bytes, bytearray)):
        return bytes(text)
    if not isinstance(text, str):
        raise TypeError(f"want str or bytes, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise TypeError(str(e)) from None


def as_text(name: Union[str, bytes]) -> str:
    """The same of a name."""
    if type(name) is str and name.isascii():
        return name
    return _decoded(as_bytes(name))


@lru_cache(64)
def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "replace")


_MAGIC = b"sluice-dlist\x01"


def encode_list(descs: _List) -> bytes:
    """Bytes of a list. They are data: reading them runs nothing, as reading a pickle would."""
    about = json.dumps([m.hex() for m in descs._metas()]).encode() if any(descs._metas()) else b""
    head = struct.pack("<BBI", isinstance(descs, nixlRegDList), descs._type.value, descs._n)
    return _MAGIC + head + np.ascontiguousarray(descs.rows).astype("<u8").tobytes() + about


def decode_list(data: bytes) -> Union[nixlXferDList, nixlRegDList]:
    """The list in such bytes. nixlMismatchError for all others."""
    if not isinstance(data, (bytes, bytearray)):
        raise TypeError(f"want bytes, not {type(data).__name__}")
    try:
        if not data.startswith(_MAGIC):
            raise ValueError("not a list of descriptors")
        registered, kind, n = struct.unpack_from("<BBI", data, len(_MAGIC))
        at = len(_MAGIC) + 6
        if len(data) < at + 24 * n:
            raise ValueError("it is cut")
        rows = np.frombuffer(data, "<u8", 3 * n, at).reshape(n, 3)
        about: Optional[list[bytes]] = None
        if len(data) > at + 24 * n:
            about = [bytes.fromhex(m) for m in json.loads(data[at + 24 * n :])]
        made: Union[nixlXferDList, nixlRegDList] = (nixlRegDList if registered
                                                    else nixlXferDList)(nixl_mem_t(kind), rows)
        if isinstance(made, nixlRegDList) and about is not None:
            if len(about) != n:
                raise ValueError("as many words as descriptors are wanted")
            made._about = about
        return made
    except (ValueError, struct.error, TypeError) as e:
        raise nixlMismatchError(f"deserialize: {e}") from e
