# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a wait that has no limit."""

from __future__ import annotations

import signal

import sluice

signal.signal(signal.SIGINT, signal.default_int_handler)
with sluice.Engine("waits", ["mem"]) as engine:
    try:
        print("waiting", flush=True)
        engine.receive()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
