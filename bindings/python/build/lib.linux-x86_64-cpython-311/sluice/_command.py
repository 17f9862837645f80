# SPDX-License-Identifier: Apache-2.0
"""The command `sluice`, which the wheel carries beside the library."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Becomes the command, with the same arguments."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_lib", "sluice")
    os.execv(program, ["sluice", *sys.argv[1:]])
