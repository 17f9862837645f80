# SPDX-License-Identifier: Apache-2.0
"""The agent, where programs for NIXL import it from."""

from sluice.nixl import *  # noqa: F401,F403

from . import _bindings as nixlBind  # noqa: F401
