# SPDX-License-Identifier: Apache-2.0
"""Stands in for the package `nixl`. It is on no path unless sluice.nixl.shim puts it there.
"""

from sluice.nixl import *  # noqa: F401,F403

from . import _api, _bindings, logging

__all__ = ["_api", "_bindings", "logging"]
