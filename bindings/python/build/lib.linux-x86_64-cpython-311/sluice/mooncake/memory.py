# SPDX-License-Identifier: Apache-2.0
"""What an engine opens for a protocol of Mooncake's, which memory is of a card, and the copies of a
transfer.
"""

from __future__ import annotations

import array
import ctypes
import sys
from typing import Any, Optional, Sequence, Union

from .._config import Backend
from .._region import Region
from ..peer import Remote
from ..transfer import Transfer

_POINTER_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_MEMORY_TYPE, _DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE


def backends(host: str, protocol: str, devices: str) -> list[Union[str, Backend]]:
    """What serves a protocol. shm comes first: peers of one host need no network."""
    opened: list[Union[str, Backend]] = [Backend("shm", optional=True)]
    if _cards_in_use():
        opened.append(Backend("cuda", optional=True))
    if protocol == "tcp":
        told: dict[str, Any] = {"advertise": host} if host else {}
        return [*opened, Backend("tcp", plaintext=True, **told)]  # it listens everywhere
    if protocol == "rdma":
        own = {"devices": devices} if devices else {}
        return [*opened, Backend("rdma", optional=True, **own), Backend("ucx", optional=True,
            **own)]
    raise ValueError(f'the protocol is {protocol!r}: there are "tcp" and "rdma"')


def _cards_in_use() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def card_of(address: int, location: str) -> Optional[int]:
    """The number of the card that an address lies on, None for host memory. The driver is asked
    where "*" says nothing.
    """
    kind, _, number = location.partition(":")
    if kind == "cuda":
        return int(number)
    if kind != "*" or not _cards_in_use():
        return None
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint()
    if driver.cuPointerGetAttribute(ctypes.byref(found), _MEMORY_TYPE,
                                    ctypes.c_uint64(address)) or found.value != _DEVICE:
        return None
    if driver.cuPointerGetAttribute(ctypes.byref(found), _POINTER_ORDINAL,
                                    ctypes.c_uint64(address)):
        raise ValueError(f"the driver does not say on which card {address:#x} lies")
    return found.value


def fill(
    transfer: Transfer,
    local: Sequence[tuple[int, Region]],
    remote: Sequence[tuple[int, Remote]],
    buffers: Sequence[int],
    addresses: Sequence[int],
    lengths: Sequence[int],
) -> None:
    """Lists copies between addresses, given where the ranges around them begin."""
    lists: dict[tuple[int, int], array.array[int]] = {}
    for (start, _), (there, _), buffer, address, length in zip(local, remote, buffers, addresses,
        lengths):
        if length:
            lists.setdefault((start, there), array.array("Q")).extend((buffer - start,
                address - there, length))
    ours, theirs = dict(local), dict(remote)
    for (start, there), flat in lists.items():
        rows = memoryview(flat).cast("B").cast("Q", (len(flat) // 3, 3))
        transfer.add_many(ours[start], theirs[there], rows)
