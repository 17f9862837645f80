# SPDX-License-Identifier: Apache-2.0
"""The agent: NIXL's calls over an engine."""

from __future__ import annotations

import os
import weakref
from typing import Any, Iterable, Optional

from .. import __version__
from . import listening, lists, plugins
from .backends import logger, nixl_backend_handle
from .bindings import DEFAULT_COMM_PORT, NIXL_READ, NIXL_WRITE, nixl_thread_sync_t
from .handles import translated
from .notifications import Notifications
from .transfers import Transfers

__all__ = ["nixl_agent", "nixl_agent_config", "nixl_backend_handle"]


class nixl_agent_config:
    """What an agent is made with. Progress threads and the mode of synchronization have no effect:
    nothing here needs to be polled, and any thread may call anything."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Iterable[str] = ("UCX",),
        sync_mode: Optional[nixl_thread_sync_t] = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t (got "
                            f"{type(sync_mode).__name__!r})")
        self.enable_pthread, self.enable_listen = enable_prog_thread, enable_listen_thread
        self.port = listen_port
        self.capture_telemetry, self.num_threads = capture_telemetry, num_threads
        self.sync_mode = sync_mode
        self.backends = list(backends)


def _told_by_environment() -> bool:
    """As NIXL takes its variable: y, yes, on, 1, true, enable."""
    said = os.environ.get("NIXL_TELEMETRY_ENABLE", "")
    return said.lower() in {"y", "yes", "on", "1", "true", "enable"}


class nixl_agent(Transfers, Notifications):
    """Registers memory, meets other agents, and moves bytes between its memory and theirs."""

    def __init__(self, agent_name: str, nixl_conf: Optional[nixl_agent_config] = None,
                 instantiate_all: bool = False) -> None:
        if not agent_name:
            raise ValueError("an agent needs a name")
        super().__init__(agent_name)
        self._listener: Optional[listening.Listener] = None
        config = nixl_conf or nixl_agent_config()
        self._telemetry = config.capture_telemetry or _told_by_environment()
        self._lower: Any = None
        self.plugin_list = list(plugins.PLUGINS)
        self.plugin_b_options = {n: dict(p.params) for n, p in plugins.PLUGINS.items()}
        self.plugin_mem_types = {n: list(p.mems) for n, p in plugins.PLUGINS.items()}
        self.nixl_mems = dict(lists.MEMS)
        self.nixl_ops = {"WRITE": NIXL_WRITE, "READ": NIXL_READ}
        names = ["UCX", "POSIX", "GDS"] if instantiate_all and not nixl_conf else config.backends
        for name in names:
            if name in plugins.PLUGINS:
                self.create_backend(name)
            else:
                logger.warning("there is no %s here, and it is left out: there are %s", name,
                               ", ".join(plugins.PLUGINS))
        logger.info("sluice %s stands in for NIXL", __version__)
        logger.info("Initialized NIXL agent: %s", agent_name)
        if config.enable_listen:
            self._listener = listening.Listener(self, config.port)

    @property
    def agent(self) -> Any:
        """The same agent by NIXL's lower calls, or what a program has put in its place. The calls
        of nixl_agent do not go by it."""
        if self._lower is None:
            from . import lower  # which imports this

            self._lower = lower.nixlAgent(self.name, over=weakref.proxy(self))
        return self._lower

    @agent.setter
    def agent(self, other: Any) -> None:
        self._lower = other

    @property
    def backend_mems(self) -> dict[str, list[str]]:
        """The types of memory that each backend serves."""
        return {name: self.get_backend_mem_types(name) for name in self.backends}

    @property
    def backend_options(self) -> dict[str, dict[str, str]]:
        """What each backend was made with."""
        return {name: self.get_backend_params(name) for name in self.backends}

    def close(self) -> None:
        """Ends everything at once; what is garbage ends so by itself. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        self._caller.close()
        engine, self._engine = self._engine, None
        self.backends.clear()
        if engine is not None:
            with translated():
                engine.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # one that was never whole, or the child of a fork
            pass
