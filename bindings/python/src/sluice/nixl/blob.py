# SPDX-License-Identifier: Apache-2.0
"""An agent's metadata: its name, where its memory lies, and the engine's description."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bindings import nixl_mem_t, nixlMismatchError
from .places import Range

_MAGIC = b"sluice-nixl\x01"
_HEAD = struct.Struct("<BHII")  # whole, bytes of the name, ranges, bytes of the description
_RANGE = np.dtype([("kind", "u1"), ("device", "<u4"), ("address", "<u8"), ("length", "<u8"),
                   ("number", "<u4")])  # packed
_MOST = 256 << 20  # bytes when unpacked
_STORED_MOST = 0xFFFF  # bytes of a block of RFC 1951 that is not compressed


@dataclass
class Metadata:
    """What one agent tells another. One that is whole replaces what was told before."""

    agent: str
    whole: bool
    ranges: list[Range[Any]]
    description: bytes


def encode(m: Metadata) -> bytes:
    name = m.agent.encode()
    head = _HEAD.pack(m.whole, len(name), len(m.ranges), len(m.description))
    rows = np.empty(len(m.ranges), _RANGE)
    rows["kind"] = [r.kind._value_ for r in m.ranges]
    rows["device"] = [r.device for r in m.ranges]
    rows["address"] = [r.address for r in m.ranges]
    rows["length"] = [r.length for r in m.ranges]
    rows["number"] = [int(r.name) for r in m.ranges]
    packed = _packed(b"".join((head, name, rows.tobytes())), m.description)
    return _MAGIC + struct.pack("<I", zlib.crc32(packed)) + packed


def _packed(head: bytes, tail: bytes) -> bytes:
    """A stream of zlib whose tail is stored as it is: most of it are random secrets, which take
    long and become little shorter.
    """
    c = zlib.compressobj(1)
    parts = [c.compress(head), c.flush(zlib.Z_FULL_FLUSH)]
    for at in range(0, max(1, len(tail)), _STORED_MOST):
        part = tail[at : at + _STORED_MOST]
        last = at + _STORED_MOST >= len(tail)
        parts += struct.pack("<BHH", last, len(part), len(part) ^ 0xFFFF), part
    return b"".join(parts) + struct.pack(">I", zlib.adler32(tail, zlib.adler32(head)))


def decode(data: bytes) -> Metadata:
    """nixlMismatchError for what is cut, altered, or of something else."""
    try:
        if not data.startswith(_MAGIC):
            raise ValueError("this is no metadata of sluice's: both sides must run it")
        packed = data[len(_MAGIC) + 4 :]
        if zlib.crc32(packed) != struct.unpack_from("<I", data, len(_MAGIC))[0]:
            raise ValueError("the metadata is cut or altered")
        unpack = zlib.decompressobj()
        body = unpack.decompress(packed, _MOST)
        if not unpack.eof:
            raise ValueError(f"the metadata is longer than {_MOST} bytes")
        whole, name_length, count, description_length = _HEAD.unpack_from(body)
        at = _HEAD.size + name_length
        end = at + count * _RANGE.itemsize
        if len(body) != end + description_length:
            raise ValueError("the metadata is cut")
        kinds = {kind.value: kind for kind in nixl_mem_t}
        rows = np.frombuffer(body, _RANGE, count, at)
        if not set(rows["kind"].tolist()) <= kinds.keys():
            raise ValueError("a type of memory is not known")
        ranges = [Range[Any](kinds[kind], address, length, device, str(number), None)
                  for kind, device, address, length, number in rows.tolist()]
        return Metadata(body[_HEAD.size : at].decode(), bool(whole), ranges, body[end:])
    except (ValueError, struct.error, zlib.error) as e:
        raise nixlMismatchError(f"load metadata: {e}") from e
