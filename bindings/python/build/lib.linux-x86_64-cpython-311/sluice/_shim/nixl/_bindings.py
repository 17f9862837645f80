# SPDX-License-Identifier: Apache-2.0
"""The constants, exceptions and lists, where programs for NIXL import them from."""

from sluice.nixl import lower as _lower  # noqa: F401
from sluice.nixl.bindings import *  # noqa: F401,F403
from sluice.nixl.lower import nixlAgent, nixlAgentConfig  # noqa: F401

HAVE_UCX_GPU_DEVICE_API = False
