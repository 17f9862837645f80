# SPDX-License-Identifier: Apache-2.0
"""The command that comes with the package."""

import subprocess
import sys
from pathlib import Path

import sluice


def test_the_command_is_of_the_same_version() -> None:
    command = Path(sys.executable).with_name("sluice")
    out = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert out.split()[0] == "sluice"
    assert "version" in out
    refused = subprocess.run([command, "nothing"], capture_output=True, check=False)
    assert refused.returncode == 2
    assert sluice.__version__
