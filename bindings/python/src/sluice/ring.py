# SPDX-License-Identifier: Apache-2.0
"""Immutable objects of one process that others of its host and user read where they lie.
docs/ring.md has what is promised.

    writer = Writer("/run/user/1000/images", 4 << 30, awaited=4)  # in the frontend
    handle = writer.put("sha256 of the image", pixels)  # small: pickle it, send it any way

    reader = Reader.join("/run/user/1000/images", timeout=30)  # in each worker
    with reader.get(handle) as view:
        image = view.numpy("uint8", (3, 1024, 1024))  # no copy; read-only
        ...
        del image

Times are seconds, None without a limit. Any thread may call anything; the interpreter's lock is
released in every call of the library.
"""

from __future__ import annotations

import ctypes
import json
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Sequence, Union

from . import _library
from ._buffers import Held
from ._clock import FOREVER, in_slices, nanoseconds
from ._library import PENDING, lib
from ._region import Closing, grow
from ._words import number, octets, text
from .errors import BusyError, FullError, HandleError, MissingError, TimeoutError, check

if TYPE_CHECKING:
    import numpy
    import torch


class Handle(NamedTuple):
    """Names an object of one writer, for its readers."""

    row: int
    generation: int


def _found(handle: _library.RingHandle) -> Handle:
    return Handle(handle.row, handle.generation)


class _Open(Closing):
    """What a handle of the library names, until `close`."""

    def __init__(self) -> None:
        self._out = ctypes.c_uint64()  # the library writes here: no interrupt comes between

    @property
    def _handle(self) -> int:
        return self._out.value

    def _end(self, call: Callable[[int], int]) -> None:
        if self._handle:
            code = call(self._handle)
            if code != HandleError.code:  # else an interrupt took the answer of an earlier close
                check(code)
            self._out.value = 0

    def get(self, handle: Handle) -> View:
        """Holds an object where it lies. MissingError: it has gone, or the handle is of another
        ring. RevokedError: this reader was stopped for too long, or its connection has ended, and
        it has lost its seat; join again.
        """
        return View(self, handle)


class View(Closing):
    """An object that stays where it is until `close`, or until nothing holds this view nor anything
    made of it any more.
    """

    def __init__(self, of: _Open, handle: Handle) -> None:
        self._out = ctypes.c_uint64()  # as for _Open
        at, length = ctypes.c_void_p(), ctypes.c_uint64()
        named = _library.RingHandle(row=number(handle[0], "row", 32),
                                    generation=number(handle[1], "generation"))
        check(lib.ring_get(of._handle, ctypes.byref(named), ctypes.byref(at), ctypes.byref(length),
                           ctypes.byref(self._out)))
        self._code = [0]  # what letting go returned
        try:
            kind: Any = ctypes.c_ubyte * length.value
            block = kind.from_address(at.value) if length.value else kind()
            setattr(block, "of", of)  # whose memory it is
            self._end = weakref.finalize(block, _let_go, self._out.value, self._code)
            self._end.atexit = False  # what lives until then may be looked at still
        except BaseException:
            lib.ring_view_close(self._out.value)
            raise
        self._block: Any = block

    def _bytes(self) -> Any:
        """What carries the memory: all that is made of the view holds it."""
        block = self._block
        if block is None:
            raise HandleError("the view is closed: it has no bytes any more")
        return block

    @property
    def memory(self) -> memoryview:
        """Its bytes, which numpy.frombuffer and all else take that knows buffers."""
        block = self._bytes()
        return (memoryview(block).cast("B") if len(block) else memoryview(b"")).toreadonly()

    def numpy(self, dtype: Any = "uint8",
              shape: Optional[Union[int, Sequence[int]]] = None) -> "numpy.ndarray[Any, Any]":
        """An array on these bytes, which is read-only."""
        import numpy

        block = self._bytes()
        array = numpy.frombuffer(self.memory, dtype) if len(block) else numpy.empty(0, dtype)
        return array if shape is None else array.reshape(shape)

    def torch(self, dtype: Any = None, shape: Optional[Sequence[int]] = None) -> "torch.Tensor":
        """A tensor on these bytes. torch knows none that is read-only: a program that writes to
        this one, in place, ends by SIGSEGV.
        """
        import torch

        block, dtype = self._bytes(), dtype or torch.uint8
        tensor = torch.frombuffer(block, dtype=dtype) if len(block) else torch.empty(0, dtype=dtype)
        return tensor if shape is None else tensor.view(*shape)

    def verify(self) -> None:
        """Compares the CRC-32C of the bytes with that of the put. CorruptError: it is another one.
        NotSupportedError: the ring has none.
        """
        check(lib.ring_verify(self._out.value))

    def close(self) -> None:
        """Lets the object go. BusyError: arrays, tensors or memoryviews of it are there still, and
        nothing has changed. RevokedError: its bytes may have changed while they were held; it has
        gone all the same.
        """
        block, self._block = self._block, None
        if block is None:
            return
        del block
        if self._end.alive:
            found = self._end.peek()
            if found is not None:
                self._block = found[0]
                raise BusyError("the view has arrays, tensors or memoryviews made of it still: let "
                                "go of those first")
        check(self._code[0])


def _let_go(handle: int, code: list[int]) -> None:
    code[0] = lib.ring_view_close(handle)


class Writer(_Open):
    """A ring of `size` bytes, which are taken at once, with a Unix socket at a path.

    At most `objects` lie in it at a time, and at most `readers` read. `awaited` readers will come:
    what is put before waits for them as well. `sums` has `put` take CRC-32Cs, for `View.verify`.
    `note`, at most 512 bytes, is what each reader is told. An object waits for `patience` for the
    readers that have not got it; a stopped reader keeps what it holds for `frozen`, None for ever.
    """

    def __init__(self, path: str, size: int, *, objects: int = 0, readers: int = 0,
                 awaited: int = 0, sums: bool = False, note: bytes = b"", patience: float = 60,
                 frozen: Optional[float] = 30) -> None:
        super().__init__()
        self.path = path
        kept = Held(octets(note, "note"))
        config = _library.RingConfig(
            flags=_library.RING_SUMS if sums else 0, path=text(path, "a path"),
            bytes=number(size, "size"), objects=number(objects, "objects", 32),
            readers=number(readers, "readers", 32), awaited=number(awaited, "awaited", 32),
            note=kept.address, note_length=kept.length, patience_ns=max(1, nanoseconds(patience)),
            frozen_ns=max(1, nanoseconds(frozen)) if frozen is not None else FOREVER)
        config.size = ctypes.sizeof(config)
        check(lib.ring_open(ctypes.byref(config), ctypes.byref(self._out)))
        kept.release()

    def put(self, key: str, *buffers: Any, timeout: Optional[float] = None) -> Handle:
        """Copies an object into the ring, its parts one behind the other, and hands it out to each
        reader. Where the ring is full, others go that nobody holds or waits for; without such it
        waits. FullError: there was none in time; the text says who holds what. BusyError: the key
        is known. BoundsError: more than the ring has.
        """
        held = [Held(b) for b in buffers]
        parts = (_library.RingPart * len(held))(*[_library.RingPart(h.address, h.length)
                                                  for h in held])
        named, handle = text(key, "a key"), _library.RingHandle()

        def try_for(ns: int) -> int:
            code = lib.ring_put(self._handle, named, parts, len(held), ns, ctypes.byref(handle))
            return PENDING if code == FullError.code else code

        try:
            code = in_slices(try_for, timeout)
            check(FullError.code if code == PENDING else code)
        finally:
            for h in held:
                h.release()
        return _found(handle)

    def handle(self, key: str) -> Handle:
        """Hands the object of a key out to each reader once more. It ends a `touch`."""
        handle = _library.RingHandle()
        check(lib.ring_hand_out(self._handle, text(key, "a key"), ctypes.byref(handle)))
        return _found(handle)

    def find(self, key: str) -> Optional[Handle]:
        """The handle of a key, and nothing is changed: the object may go before it is got."""
        handle = _library.RingHandle()
        found = _is_there(lib.ring_find(self._handle, text(key, "a key"), ctypes.byref(handle)))
        return _found(handle) if found else None

    def __contains__(self, key: str) -> bool:
        return self.find(key) is not None

    def touch(self, key: str) -> bool:
        """Keeps the object of a key until `handle` or `end_touches`, and says whether there is one.
        """
        return _is_there(lib.ring_touch(self._handle, text(key, "a key")))

    def end_touches(self) -> None:
        """Ends each `touch`."""
        check(lib.ring_end_touches(self._handle))

    def remove(self, key: str) -> bool:
        """Has readers find the object of a key no more, and says whether there was one. Views of it
        stay as they are; its room is free behind the last.
        """
        return _is_there(lib.ring_remove(self._handle, text(key, "a key")))

    def clear(self) -> None:
        """`remove` of all objects."""
        check(lib.ring_clear(self._handle))

    def stats(self) -> dict[str, int]:
        """What the writer has and has done: "objects", "readers", "bytes" and "free" of them;
        "puts", "handles" (handed out again), "evicted", "overdue" of those, before all readers had
        got them, and "revoked", seats of stopped readers.
        """
        data = grow(lambda buffer, room, n: lib.ring_stats(self._handle, buffer, room, n), 512)
        stats: dict[str, int] = json.loads(data.rstrip(b"\0"))
        return stats

    def close(self) -> None:
        """Ends the ring. Readers keep what they hold, and get what was there. BusyError while views
        of the writer's own are open, and nothing has changed.
        """
        self._end(lib.ring_close)

    def __del__(self) -> None:
        out = getattr(self, "_out", None)
        if out is not None and out.value:
            lib.ring_close(out.value)


def _is_there(code: int) -> bool:
    if code != MissingError.code:
        check(code)
    return not code


class Reader(_Open):
    """Reads the objects of one writer: `Reader.join` makes one."""

    @classmethod
    def join(cls, path: str, timeout: Optional[float] = None) -> Reader:
        """Asks the writer at a path for a seat until the timeout is over (TimeoutError): it may
        still have to come. The child of a fork has no part in the ring.
        """
        reader, named = cls(), text(path, "a path")

        def try_for(ns: int) -> int:
            code = lib.ring_join(named, ns, ctypes.byref(reader._out))
            return PENDING if code == TimeoutError.code else code

        code = in_slices(try_for, timeout)
        check(TimeoutError.code if code == PENDING else code)
        return reader

    @property
    def note(self) -> bytes:
        """The writer's note."""
        return grow(lambda buffer, room, n: lib.ring_note(self._handle, buffer, room, n), 512)

    @property
    def gone(self) -> bool:
        """Whether the writer has ended: what it puts from then on needs another `join`."""
        gone = ctypes.c_int()
        check(lib.ring_gone(self._handle, ctypes.byref(gone)))
        return bool(gone.value)

    def close(self) -> None:
        """Leaves. BusyError while views are open, and nothing has changed."""
        self._end(lib.ring_leave)

    def __del__(self) -> None:
        out = getattr(self, "_out", None)
        if out is not None and out.value:
            lib.ring_leave(out.value)
