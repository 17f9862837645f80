# SPDX-License-Identifier: Apache-2.0
"""The type hints hold, for the package as it is installed and for these tests, which use all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sluice
from conftest import HERE


def test_hints(tmp_path: Path) -> None:
    package = Path(sluice.__file__).parent
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = true\nwarn_unused_ignores = false\n"
                        "[mypy-kvcr.*,msgspec.*,torch.*,nixl.*,ray.*,sglang.*,vllm.*]\n"
                        "ignore_missing_imports = true\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir",
               str(tmp_path)]
    environment = dict(os.environ, MYPYPATH=str(HERE))
    result = subprocess.run([*command, "-p", "sluice"], capture_output=True, text=True,
                            cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    tests = [str(p) for p in sorted(HERE.glob("test_*.py")) + [HERE / "conftest.py"]]
    command.append("--no-strict-equality")  # a memoryview equals bytes
    result = subprocess.run([*command, *tests], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (package / "py.typed").exists()


_WRONG = """
import sluice
def use(engine: sluice.Engine, peer: sluice.Peer) -> None:
    peer.transfer("wirte")
    engine.stats()["postet"]
    engine.stats()["routes"][0]["bytes"] + "x"
    peer.about()["nam"]
    peer.about()["regions"][0]["length"] + "x"
"""


def test_mistakes_are_seen(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(_WRONG)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), str(program)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    seen = {int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error:" in line}
    assert seen == {4, 5, 6, 7, 8}, result.stdout
