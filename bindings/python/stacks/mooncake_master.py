# SPDX-License-Identifier: Apache-2.0
"""A master of Mooncake's wheel, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Iterator

LIMIT = 120.0  # seconds: the machine may be busy


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


@contextmanager
def master() -> Iterator[str]:
    """Its address, once it answers."""
    spec = find_spec("mooncake")
    assert spec is not None and spec.origin is not None
    port, metrics = _free_port(), _free_port()
    child = subprocess.Popen(
        [os.path.join(os.path.dirname(spec.origin), "mooncake_master"), f"--rpc_port={port}",
         f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + LIMIT
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert child.poll() is None and time.monotonic() < end, "no master"
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()
