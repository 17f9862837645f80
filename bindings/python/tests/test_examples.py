# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/python, as somebody runs them who copies from them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from conftest import LIMIT, ROOT

EXAMPLES = ROOT / "examples" / "python"


def run(*args: str) -> str:
    result = subprocess.run([sys.executable, *args], capture_output=True, text=True,
                            timeout=5 * LIMIT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_handover(tmp_path: Path) -> None:
    program, socket = str(EXAMPLES / "handover.py"), str(tmp_path / "s")
    with subprocess.Popen([sys.executable, program, "decode", socket], stdout=subprocess.PIPE,
                          text=True) as decode:
        assert decode.stdout is not None
        try:
            assert decode.stdout.readline() == "serving\n"
            assert run(program, "prefill", socket) == ""
            seen = decode.stdout.read().splitlines()
        finally:
            decode.kill()
    places = [200, 203, 206]
    assert seen == [
        f"blocks from {first} on begin with {[1000.0 * layer + block for block in (7, 3, 5)]}"
        for layer, first in enumerate(places)
    ]


def test_nixl_switch() -> None:
    assert run(str(EXAMPLES / "nixl_switch.py")) == "DONE True True\n{'prefill': [b'layer 0']}\n"


def test_images() -> None:
    assert run(str(EXAMPLES / "images.py")) == (
        "4 workers saw 8 images that were put 8 times\n")


def test_attention() -> None:
    assert re.fullmatch(r"24 steps of 2 sequences, the same to the bit; moved [1-9]%\n",
                        run(str(EXAMPLES / "attention.py")))
