# SPDX-License-Identifier: Apache-2.0
"""Loggers by name, where programs for NIXL import them from."""

import logging


def get_logger(name: str = "sluice.nixl") -> logging.Logger:
    """A logger of the standard library, which prints what the program lets it."""
    return logging.getLogger(name)
