# SPDX-License-Identifier: Apache-2.0
"""`sluice cache serve` for the tests of stacks that keep KV cache there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 120.0  # seconds: the machine may be busy
PATIENT = {"timeout": LIMIT, "lookup_timeout": LIMIT, "start_timeout": LIMIT}


def serve(folder: str) -> subprocess.Popen[str]:
    """Serves 64 MiB at the folder's "socket", once clients may come."""
    config = Path(folder, "cache.toml")
    config.write_text(f'socket = "{folder}/socket"\n[memory]\npath = "{folder}/memory"\n'
                      f'bytes = "64MiB"\n')
    child = subprocess.Popen(
        [sys.executable, "-c", "from sluice._command import main; main()", "cache", "serve",
         "--config", str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    assert folder in line, line
    return child


def end(child: subprocess.Popen[str]) -> None:
    """Kills it, as by kill -9."""
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()
