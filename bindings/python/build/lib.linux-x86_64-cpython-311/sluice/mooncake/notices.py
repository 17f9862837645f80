# SPDX-License-Identifier: Apache-2.0
"""Notifications that follow a transfer, and the two kinds of transfer."""

from __future__ import annotations

import enum
import struct

_HEAD = struct.Struct("<I")


class TransferOpcode(enum.IntEnum):
    """What a transfer does."""

    Read = 0
    Write = 1


class TransferNotify:
    """A name and a message, which the peer finds by `get_notifies` after the bytes of a transfer.
    """

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name, self.msg = name, msg


def encode(notify: TransferNotify) -> bytes:
    """The notification as one message."""
    name = notify.name.encode()
    return _HEAD.pack(len(name)) + name + notify.msg.encode()


def decode(data: bytes) -> TransferNotify:
    """The notification again. ValueError for bytes that are none."""
    if len(data) < _HEAD.size:
        raise ValueError("the message is too short for a notification")
    end = _HEAD.size + _HEAD.unpack_from(data)[0]
    if end > len(data):
        raise ValueError("the name goes past the end of the message")
    return TransferNotify(data[_HEAD.size : end].decode(), data[end:].decode())
