# SPDX-License-Identifier: Apache-2.0
"""A `sluice cache serve` of its own, for tests that kill it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional


class Node:
    def __init__(self, folder: str, size: str = "64MiB") -> None:
        self.address, self._config = f"unix:{folder}/socket", Path(folder, "cache.toml")
        self._config.write_text(f'socket = "{folder}/socket"\n[memory]\n'
                                f'path = "{folder}/memory"\nbytes = "{size}"\n')
        self._process: Optional[subprocess.Popen[str]] = None

    def start(self) -> None:
        """Returns once clients may come."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from sluice._command import main; main()", "cache", "serve",
             "--config", str(self._config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "socket" in line, line

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """By SIGKILL. A second call does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
