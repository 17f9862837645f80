# SPDX-License-Identifier: Apache-2.0
"""How a program gets a package of ours in place of another maker's."""

from __future__ import annotations

import importlib
import os
import runpy
import sys


def install(package: str, folder: str) -> None:
    """Has this process, and those that it starts, import the package from the folder."""
    loaded = sys.modules.get(package)
    if loaded is not None and not str(loaded.__file__).startswith(folder):
        raise ImportError(f"{package} was imported before: install the shim first")
    sys.path.insert(0, folder)
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = folder + (os.pathsep + given if given else "")


def alias(name: str, package: str, *modules: str) -> None:
    """Makes a name mean the package, and its modules those of the package."""
    for module in modules:
        sys.modules[f"{name}.{module}"] = importlib.import_module(f"{package}.{module}")
    sys.modules[name] = sys.modules[package]


def main(package: str, folder: str) -> None:
    """Runs the program that the command line names, or prints the folder where it names none."""
    arguments = sys.argv[1:]
    if not arguments:
        print(folder)
        return
    if arguments[0].startswith("-") and (arguments[0] != "-m" or len(arguments) == 1):
        asked = arguments[0] in ("-h", "--help")
        print(f"usage: python -m sluice.{package}.shim [PROGRAM | -m MODULE] [ARGUMENT...]\n"
              "Without a program it prints the folder for PYTHONPATH.",
              file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    install(package, folder)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")
