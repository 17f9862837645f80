# SPDX-License-Identifier: Apache-2.0
"""The transfer engine, where programs for Mooncake import it from."""

from sluice.mooncake import TransferEngine, TransferNotify, TransferOpcode

Read, Write = TransferOpcode.Read, TransferOpcode.Write

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]
