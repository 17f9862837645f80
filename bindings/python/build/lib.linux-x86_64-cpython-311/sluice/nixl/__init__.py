# SPDX-License-Identifier: Apache-2.0
"""The Python API of NIXL's agent over sluice, for programs that call `nixl`.

`from sluice.nixl import nixl_agent` in place of `from nixl._api import nixl_agent`, or without a
changed line: `python -m sluice.nixl.shim program.py`. It needs numpy. What is the same, what is
better and what is not supported is in docs/nixl.md.
"""

from .agent import nixl_agent, nixl_agent_config, nixl_backend_handle
from .bindings import DEFAULT_COMM_PORT, nixl_thread_sync_t
from .handles import nixl_prepped_dlist_handle, nixl_xfer_handle

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
