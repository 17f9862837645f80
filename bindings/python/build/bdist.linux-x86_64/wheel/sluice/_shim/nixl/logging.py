# SPDX-License-Identifier: Apache-2.0
"""Loggers by name, where programs for NIXL import them from. They print what NIXL's do."""

import logging
import sys

_FORMAT = "%(asctime)s NIXL %(levelname)-7s %(filename)s:%(lineno)d %(message)s"


def _set_up() -> None:
    """From INFO on, to standard output, for what a program logs under `nixl` and for what sluice
    says in its place.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    for name in ("nixl", "sluice.nixl"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)
            logger.propagate = False


def get_logger(name: str = "") -> logging.Logger:
    """A logger below `nixl`."""
    return logging.getLogger(f"nixl.{name.lstrip('_')}" if name else "nixl")


_set_up()
