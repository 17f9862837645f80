# SPDX-License-Identifier: Apache-2.0
"""Lists of descriptors from what programs have: tuples, rows, tensors."""

from __future__ import annotations

import logging
from typing import Any, Optional

import numpy as np

from . import bindings as b

logger = logging.getLogger("sluice.nixl")

MEMS = {
    "DRAM": b.DRAM_SEG,
    "VRAM": b.VRAM_SEG,
    "FILE": b.FILE_SEG,
    "BLOCK": b.BLK_SEG,
    "OBJ": b.OBJ_SEG,
    "cpu": b.DRAM_SEG,
    "cuda": b.VRAM_SEG,
}


def is_tensor(of: Any) -> bool:
    return callable(getattr(of, "data_ptr", None)) and callable(getattr(of, "get_device", None))


def xfer_list(descs: Any, mem: Optional[str]) -> Optional[b.nixlXferDList]:
    """None, with a word in the log, for what is no list: so programs expect it."""
    if isinstance(descs, b.nixlXferDList):
        return descs
    if isinstance(descs, b.nixlRegDList):
        logger.error("this is a list for registering: get_xfer_descs makes one for transfers")
        return None
    made = _make(b.nixlXferDList, descs, mem, 3)
    return made if isinstance(made, b.nixlXferDList) else None


def reg_list(descs: Any, mem: Optional[str]) -> Optional[b.nixlRegDList]:
    """As xfer_list, with what the backend wants to know in each."""
    if isinstance(descs, b.nixlRegDList):
        return descs
    if isinstance(descs, b.nixlXferDList):
        logger.error("this is a list for transfers: get_reg_descs makes one for registering")
        return None
    made = _make(b.nixlRegDList, descs, mem, 4)
    return made if isinstance(made, b.nixlRegDList) else None


def _make(kind: Any, descs: Any, mem: Optional[str], width: int) -> Any:
    if is_tensor(descs):
        return _of_tensors(kind, [descs])
    if is_tensor(descs[0]):
        return _of_tensors(kind, descs)
    rows = isinstance(descs, np.ndarray)
    if not rows and not isinstance(descs[0], tuple):
        return None
    if mem is None:
        return _refuse('say the type of memory: "DRAM", "VRAM", "FILE"; only tensors have one')
    if rows and not (descs.ndim == 2 and descs.shape[1] == 3):
        return _refuse(f"want an array of shape (n, 3), not {descs.shape}")
    if not rows and len(descs[0]) != width:
        return _refuse(f"want tuples of {width}, not of {len(descs[0])}")
    return kind(MEMS[mem], descs)


def _of_tensors(kind: Any, tensors: Any) -> Any:
    rows = np.zeros((len(tensors), 3), np.uint64)
    device = tensors[0].get_device()
    for row, t in zip(rows, tensors):
        if t.get_device() != device:
            return None
        if not t.is_contiguous():
            return _refuse("want contiguous tensors")
        row[:] = t.data_ptr(), t.numel() * t.element_size(), max(device, 0)
    return kind(b.DRAM_SEG if device < 0 else b.VRAM_SEG, rows)


def _refuse(why: str) -> Any:
    logger.error("%s", why)
    return None
