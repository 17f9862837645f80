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


@pytest.mark.soak
def test_without_the_channel() -> None:
    """What docs/nixl.md says of KVCR's own."""
    said = run("kvcr")
    assert (said["fetched"], said["of_a_stopped_source"], said["fetched_again"]) == (128, 0, 0)
    assert said["closed"] is not True
