# SPDX-License-Identifier: Apache-2.0
"""An agent's metadata: its name, where its memory lies, and the engine's description."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

from .bindings import nixl_mem_t, nixlMismatchError
from .places import Range

_MAGIC = b"sluice-nixl\x01"
_HEAD = struct.Struct("<BHII")  # whole, bytes of the name, ranges, bytes of the description
_RANGE = struct.Struct("<BIQQI")  # kind, device, address, length, number
_MOST = 256 << 20  # bytes when unpacked


@dataclass
class Metadata:
    """What one agent tells another. One that is whole replaces what was told before."""

    agent: str
    whole: bool
    ranges: list[Range[Any]]
    description: bytes


def encode(m: Metadata) -> bytes:
    name = m.agent.encode()
    parts = [_HEAD.pack(m.whole, len(name), len(m.ranges), len(m.description)), name]
    parts += [_RANGE.pack(r.kind.value, r.device, r.address, r.length, int(r.name))
              for r in m.ranges]
    packed = zlib.compress(b"".join([*parts, m.description]), 1)
    return _MAGIC + struct.pack("<I", zlib.crc32(packed)) + packed


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
        if len(body) != at + count * _RANGE.size + description_length:
            raise ValueError("the metadata is cut")
        ranges = []
        for i in range(count):
            kind, device, address, length, number = _RANGE.unpack_from(body, at + i * _RANGE.size)
            ranges.append(Range[Any](nixl_mem_t(kind), address, length, device, str(number), None))
        return Metadata(body[_HEAD.size : at].decode(), bool(whole), ranges,
                        body[at + count * _RANGE.size :])
    except (ValueError, struct.error, zlib.error) as e:
        raise nixlMismatchError(f"load metadata: {e}") from e
