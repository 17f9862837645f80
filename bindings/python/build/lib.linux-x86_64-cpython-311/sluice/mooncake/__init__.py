# SPDX-License-Identifier: Apache-2.0
"""The face of Mooncake's `mooncake.engine.TransferEngine` over sluice.

A program that imports `mooncake.engine` runs over it without a change: see `sluice.mooncake.shim`.
Both sides must run over sluice. Calls answer with Mooncake's return codes; the reason is an error
of the logger `sluice.mooncake`.
"""

from .engine import TransferEngine
from .notices import TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
