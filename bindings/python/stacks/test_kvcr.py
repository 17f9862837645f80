# SPDX-License-Identifier: Apache-2.0
"""KVCR's own runners over sluice.nixl, unpatched, whose sources are killed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("kvcr") is None:  # importing it would load NIXL's wheel
    pytest.skip("unavailable: no kvcr: hack/stacks installs it", allow_module_level=True)

EXAMPLE = str(Path(__file__).parents[3] / "examples/kvcr/killed.py")


def run(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "sluice.nixl.shim", EXAMPLE, *words],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_memory_of_dead_sources_is_used_again() -> None:
    assert run() == {
        "fetched": 128, "of_a_dead_source": 0, "fetched_into_the_same_memory": 128,
        "of_a_stopped_source": 0, "fetched_again": 128, "closed": True}


_IDENTITIES = """
import msgspec, os, subprocess, sys
from unittest import mock
from kvcr.control_channels import ZmqPeerControlChannel
from sluice.integrations import kvcr
from sluice.integrations.kvcr import ProvenControlChannel, _has_ended, _open, _process, _read
from sluice.nixl import nixl_agent, nixl_agent_config

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
said = _process(child.pid)
for other in ([["another boot", *said[1:]], [said[0], said[1] + 1, *said[2:]],
               [*said[:3], said[3] + 1], [*said[:2], os.getpid(), said[3]], said[:3], None]):
    assert _open(other) is None, other
fd = _open(said)
assert not _has_ended(fd)
child.kill()
child.wait()
assert _has_ended(fd) and _open(said) is None

channel = ProvenControlChannel("127.0.0.1", 1, "127.0.0.1")
agents = [nixl_agent(name, nixl_agent_config(backends=backends)) for name, backends in [
    ("one", ["SHM", "POSIX"]), ("two", ["UCX"]), ("three", ["SHM", "TCP"]), ("four", ["POSIX"]),
    ("six", ["SHM", "CUDA"]), ("seven", ["SHM", "GDS"])]]
proven = [channel._is_proof(_read(b"\\x81\\xactarget_agent" + bytes([0xa0 + len(name)]) + name))
          for name in (b"one", b"two", b"three", b"four", b"five", b"six", b"seven")]
assert proven == [True, *[False] * 6], proven
assert _read(b"no message") == _read(b"\\x01") == _read(b"\\x80")

# Messages that msgspec cannot decode do not hold up later ones, nor reach KVCR.
came = [b"\\x81\\xa4type\\xa1\\xff", b"\\x81\\xa1x" + b"\\x91" * 100_000 + b"\\x01", b"\\x80"]
with mock.patch.object(ZmqPeerControlChannel, "recv", lambda _: came):
    assert channel.recv() == [b"\\x80"]

# The channel remembers at most _PROBES_MOST probes, the latest ones.
with mock.patch.object(ZmqPeerControlChannel, "send", lambda *_: True), mock.patch.object(
        kvcr, "_PROBES_MOST", 2):
    for handle in range(3):
        assert channel.send("tcp://here", msgspec.msgpack.encode({
            "type": "write_probe", "target_agent": "one", "op_handle": handle,
            "source_incarnation": "a life"}))
assert [probe.handle for probe in channel._probes] == [1, 2]

assert not _has_ended(1 << 30)  # no descriptor
"""


def test_whose_end_is_a_proof(tmp_path: Path) -> None:
    program = tmp_path / "identities.py"
    program.write_text(_IDENTITIES)
    done = subprocess.run([sys.executable, "-m", "sluice.nixl.shim", str(program)],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_without_the_channel() -> None:
    """Over KVCR's own channel nothing is fetched again behind a stopped source: docs/nixl.md."""
    said = run("kvcr")
    assert (said["fetched"], said["of_a_stopped_source"], said["fetched_again"]) == (128, 0, 0)
    assert said["closed"] is not True
