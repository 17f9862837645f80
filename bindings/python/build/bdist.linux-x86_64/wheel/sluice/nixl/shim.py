# SPDX-License-Identifier: Apache-2.0
"""Runs a program that imports `nixl` over sluice.

`python -m sluice.nixl.shim program.py …`, or `-m module …`.

`path()` is the folder of the package `nixl` that it gets: `PYTHONPATH=$(python -m
sluice.nixl.shim)` does the same for processes that the program starts.
"""

from __future__ import annotations

import os

from .. import _shims


def path() -> str:
    """The folder in front of sys.path that has a package `nixl`."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_shim")


def install() -> None:
    """Has this process, and those that it starts, import sluice's face as `nixl`."""
    _shims.install("nixl", path())


if __name__ == "__main__":
    _shims.main("nixl", path())
