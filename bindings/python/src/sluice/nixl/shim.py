# SPDX-License-Identifier: Apache-2.0
"""Runs a program that imports `nixl` over sluice: `python -m sluice.nixl.shim program.py …`, or `-m module …`.

`path()` is the folder of the package `nixl` that it gets: `PYTHONPATH=$(python -m sluice.nixl.shim)`
does the same for processes that the program starts.
"""

from __future__ import annotations

import os
import runpy
import sys


def path() -> str:
    """The folder in front of sys.path that has a package `nixl`."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_shim")


def install() -> None:
    """Has this process, and those that it starts, import sluice's face as `nixl`."""
    if "nixl" in sys.modules and not str(sys.modules["nixl"].__file__).startswith(path()):
        raise ImportError("nixl was imported before: install the shim first")
    sys.path.insert(0, path())
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = path() + (os.pathsep + given if given else "")


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments:
        print(path())
        return
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
