# SPDX-License-Identifier: Apache-2.0

"""SGLang's own classes over sluice in place of NIXL, from its wheel, unpatched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sluice.nixl import shim

pytest.importorskip("sglang", reason="unavailable: no sglang: hack/stacks installs it")

pytestmark = pytest.mark.soak

HICACHE = Path(__file__).parents[3] / "examples/sglang/hicache.py"
LIMIT = 240.0


def hicache(directory: Path, pages: int, rounds: int, path: str) -> dict[str, Any]:
    """The figures of HiCacheNixl over what is found on a path."""
    done = subprocess.run(
        [sys.executable, str(HICACHE), str(directory), str(pages), str(rounds)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("direct", ["0", "1"])
def test_hicache_keeps_pages_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      direct: str) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_NIXL_USE_DIRECT_IO", direct)
    found = hicache(tmp_path, 16, 2, shim.path())
    assert found["engine"] == "sluice"
    assert found["right"], found
    assert found["missing"] == [False]  # a page that was never stored is not found, and not made
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert len(files) == 2 * 2 * 16
    assert {f.stat().st_size for f in files} == {512 << 10}
