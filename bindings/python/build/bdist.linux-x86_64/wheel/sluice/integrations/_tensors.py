# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of many tensors or arrays lie: in which storages, at which offsets, and which are
better packed.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Sequence

# bytes of a storage that is copied where there are more than FEW: a registration costs more
SMALL = 16 << 10
FEW = 4

Meta = Sequence["tuple[Sequence[int], Any]"]  # shape and dtype of each


class Storage(NamedTuple):
    """Memory that tensors share. `device` is the number of a card, -1 for the host."""

    address: int
    length: int
    device: int
    writable: bool = True


class Piece(NamedTuple):
    """The bytes of one tensor, in a storage that `keep` holds in place."""

    storage: Storage
    offset: int
    length: int
    keep: Any


@dataclass
class Plan:
    """Where tensors lie.

    `where` has an index into the storages and an offset for each, in the order of the tensors.

    An index one beyond the storages is the packed buffer, which has `packed` bytes; `copies` are
    address and length of what goes there, by its offset.
    """

    storages: list[tuple[Storage, Any]] = field(default_factory=list)
    where: list[tuple[int, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # in bytes
    packed: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)

    def used(self, regions: int) -> list[tuple[int, int]]:
        """Start and end of what the tensors take of each storage, and of the packed buffer."""
        ends = [(-1, 0)] * regions
        for (i, offset), n in zip(self.where, self.lengths):
            if n:
                start, end = ends[i]
                ends[i] = (offset if start < 0 else min(start, offset), max(end, offset + n))
        return ends

    def copy_in(self, buffer: int) -> None:
        """Fills the packed buffer at this address."""
        for address, offset, length in self.copies:
            ctypes.memmove(buffer + offset, address, length)

    def copy_out(self, buffer: int) -> None:
        """Fills the tensors from the packed buffer at this address."""
        for address, offset, length in self.copies:
            ctypes.memmove(address, buffer + offset, length)


def plan(tensors: Sequence[Any]) -> Plan:
    """Finds the storages of tensors. ValueError for a tensor that is not contiguous."""
    pieces = [locate(t) for t in tensors]
    storages = {p.storage: p.keep for p in pieces if p.length}
    packed = {s for s in storages if s.length <= SMALL and s.device < 0}
    if len(packed) <= FEW:
        packed = set()
    made = Plan([(s, keep) for s, keep in storages.items() if s not in packed])
    made.lengths = [p.length for p in pieces]
    index = {s: i for i, (s, _) in enumerate(made.storages)}
    for t, p in zip(tensors, pieces):
        if p.storage not in packed or not p.length:
            made.where.append((index.get(p.storage, 0), p.offset))
            continue
        at = aligned(made.packed, item_size(t))
        made.where.append((len(made.storages), at))
        made.copies.append((p.storage.address + p.offset, at, p.length))
        made.packed = at + p.length
    return made


def aligned(offset: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-offset // unit) * unit


def item_size(t: Any) -> int:
    """Bytes of one number."""
    return int(t.element_size() if hasattr(t, "element_size") else t.itemsize)


def locate(t: Any) -> Piece:
    """The bytes of a tensor of torch, or of an array of numpy."""
    if hasattr(t, "untyped_storage"):
        if not t.is_contiguous():
            raise ValueError("a tensor is not contiguous: hand over t.contiguous()")
        whole = t.untyped_storage()
        device = t.get_device()
        storage = Storage(whole.data_ptr(), whole.nbytes(), device)
        return Piece(storage, t.data_ptr() - storage.address, t.numel() * t.element_size(), whole)
    if not t.flags.c_contiguous:
        raise ValueError("an array is not contiguous: hand over numpy.ascontiguousarray(a)")
    if t.dtype.hasobject:
        raise ValueError("an array of Python objects cannot be handed over: it has only their "
                         "addresses")
    whole = t
    while isinstance(whole.base, type(t)) and whole.base.flags.c_contiguous:
        whole = whole.base
    at = whole.ctypes.data
    return Piece(Storage(at, whole.nbytes, -1, bool(whole.flags.writeable)), t.ctypes.data - at,
                 t.nbytes, whole)


def describe(tensors: Sequence[Any]) -> Meta:
    """Shape and dtype of each. Equal ones are one object, so that pickle writes them once."""
    seen: dict[Any, Any] = {}
    return [seen.setdefault((tuple(t.shape), t.dtype), (t.shape, t.dtype)) for t in tensors]


def fresh(meta: Meta, spans: Sequence[int], device: Optional[str]) -> tuple[list[Any], Plan]:
    """New tensors of these shapes, and where they lie: those of one span of the sender's share a
    buffer.
    """
    made, sizes = Plan(), dict[int, int]()
    for (shape, dtype), span in zip(meta, spans):
        at = aligned(sizes.get(span, 0), dtype.itemsize)
        length = dtype.itemsize
        for n in shape:
            length *= n
        if length:
            sizes[span] = at + length
        made.where.append((span, at))
        made.lengths.append(length)
    torch = sys.modules["torch"] if meta and type(meta[0][1]).__module__ == "torch" else None
    none, buffers = _empty(torch, 0, device), {span: _empty(torch, n, device) for span,
                                               n in sizes.items()}
    index = {span: i for i, span in enumerate(buffers)}
    made.where = [(index.get(span, 0), at) for span, at in made.where]
    made.storages = [(p.storage, p.keep) for p in map(locate, buffers.values())]
    tensors = []
    for (shape, dtype), span, (_, at), n in zip(meta, spans, made.where, made.lengths):
        tensors.append((buffers[span][at : at + n] if n else none).view(dtype).reshape(shape))
    return tensors, made


def _empty(torch: Any, length: int, device: Optional[str]) -> Any:
    if torch is not None:
        return torch.empty(length, dtype=torch.uint8, device=device)
    import numpy

    return numpy.empty(length, numpy.uint8)
