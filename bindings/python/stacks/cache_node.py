# SPDX-License-Identifier: Apache-2.0
"""A `sluice cache serve` of its own, for tests that stop and kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional

LIMIT = 120.0  # seconds: the machine may be busy
PATIENT = {"timeout": LIMIT, "lookup_timeout": LIMIT, "start_timeout": LIMIT}


class Node:
    """The cache of a folder, at its "socket". What it says of errors goes to the test's own. A node
    of a cluster has a name.
    """

    def __init__(self, folder: str, size: str = "64MiB", name: str = "") -> None:
        Path(folder).mkdir(exist_ok=True)
        self.address, self._config = f"unix:{folder}/socket", Path(folder, "cache.toml")
        named = f'name = "{name}"\n' if name else ""
        self._config.write_text(f'{named}socket = "{folder}/socket"\n[memory]\n'
                                f'path = "{folder}/memory"\nbytes = "{size}"\n')
        self._child: Optional[subprocess.Popen[str]] = None

    def start(self) -> Node:
        """Returns once clients may come."""
        self._child = subprocess.Popen(
            [sys.executable, "-c", "from sluice._command import main; main()", "cache", "serve",
             "--config", str(self._config)], stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert "socket" in line, line
        return self

    def freeze(self) -> None:
        """It stands still when this returns."""
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self._child.pid, os.WUNTRACED)[1])

    def thaw(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """By SIGKILL. A second call does nothing."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            assert self._child.stdout is not None
            self._child.stdout.close()
            self._child = None


class Cluster:
    """Nodes "a" and "b"."""

    def __init__(self, folder: str) -> None:
        self.nodes = {name: Node(f"{folder}/{name}", name=name).start() for name in "ab"}
        self.address = "nodes:" + ",".join(f"{k}={n.address}" for k, n in self.nodes.items())

    def kill(self) -> None:
        for node in self.nodes.values():
            node.kill()
