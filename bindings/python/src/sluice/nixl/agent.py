# SPDX-License-Identifier: Apache-2.0
"""The agent: NIXL's calls over an engine."""

from __future__ import annotations

from typing import Iterable, Optional

from . import listening, plugins
from .backends import logger, nixl_backend_handle
from .bindings import DEFAULT_COMM_PORT, nixl_thread_sync_t
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
            raise TypeError(f"sync_mode is a {type(sync_mode).__name__}, not a nixl_thread_sync_t")
        self.enable_pthread, self.enable_listen = enable_prog_thread, enable_listen_thread
        self.port = listen_port
        self.capture_telemetry, self.num_threads = capture_telemetry, num_threads
        self.sync_mode = sync_mode
        self.backends = list(backends)


class nixl_agent(Transfers, Notifications):
    """Registers memory, meets other agents, and moves bytes between its memory and theirs."""

    def __init__(self, agent_name: str, nixl_conf: Optional[nixl_agent_config] = None,
                 instantiate_all: bool = False) -> None:
        super().__init__(agent_name)
        self._listener: Optional[listening.Listener] = None
        config = nixl_conf or nixl_agent_config()
        self._telemetry = config.capture_telemetry
        names = ["UCX", "POSIX", "GDS"] if instantiate_all and not nixl_conf else config.backends
        for name in names:
            if name in plugins.PLUGINS:
                self.create_backend(name)
            else:
                logger.warning("there is no %s here, and it is left out: there are %s", name,
                               ", ".join(plugins.PLUGINS))
        logger.info("Initialized NIXL agent: %s", agent_name)
        if config.enable_listen:
            self._listener = listening.Listener(self, config.port)

    def close(self) -> None:
        """Ends everything at once; what nobody holds any more ends so by itself. Idempotent."""
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
