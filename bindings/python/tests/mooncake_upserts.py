# SPDX-License-Identifier: Apache-2.0
"""Upserts one object again and again, until it is killed: each value is one byte many times, and
of another length. It says how often it has.
"""

from __future__ import annotations

import sys

from sluice.mooncake.store import MooncakeDistributedStore

said, which = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup("here", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", said) == 0
number = 0
while True:
    number += 1
    byte = bytes([2 * (number % 100) + int(which) + 2])
    assert store.upsert("a", byte * (1 + number * 99_991 % 5_000_000)) == 0
    print(number, flush=True)
