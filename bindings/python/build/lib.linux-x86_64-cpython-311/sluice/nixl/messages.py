# SPDX-License-Identifier: Apache-2.0
"""Notifications with the name of the sender, since a receiver need not know the sender."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Optional, Union

from .bindings import as_bytes

_HEAD = struct.Struct("<4sH")
_MAGIC = b"SLN\x01"


@lru_cache(64)
def _head(sender: str) -> bytes:
    name = sender.encode()
    return _HEAD.pack(_MAGIC, len(name)) + name


def frame(sender: str, message: Union[str, bytes]) -> bytes:
    return _head(sender) + as_bytes(message)


def unframe(data: bytes) -> Optional[tuple[str, bytes]]:
    """None for what no agent has sent."""
    if len(data) < _HEAD.size:
        return None
    magic, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or len(data) < _HEAD.size + length:
        return None
    return data[_HEAD.size : _HEAD.size + length].decode("utf-8",
                                                         "replace"), data[_HEAD.size + length :]
