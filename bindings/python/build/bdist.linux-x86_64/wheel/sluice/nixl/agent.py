# SPDX-License-Identifier: Apache-2.0
"""The agent: NIXL's calls over an engine."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Iterable, Optional

from .. import __version__
from . import listening, lists, plugins
from .backends import logger, nixl_backend_handle
from .bindings import (DEFAULT_COMM_PORT, NIXL_READ, NIXL_WRITE, as_text,
                       nixl_thread_sync_t)
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


def _captures(config: bool) -> bool:
    """NIXL's variable wins, where it says something: as NIXL takes it, in any case of letters."""
    said = os.environ.get("NIXL_TELEMETRY_ENABLE", "").lower()
    if said in {"y", "yes", "on", "1", "true", "enable"}:
        return True
    return config and said not in {"n", "no", "off", "0", "false", "disable"}


class nixl_agent(Transfers, Notifications):
    """Registers memory, meets other agents, and moves bytes between its memory and theirs."""

    def __init__(self, agent_name: str, nixl_conf: Optional[nixl_agent_config] = None,
                 instantiate_all: bool = False) -> None:
        if not as_text(agent_name):
            raise ValueError("an agent needs a name")
        super().__init__(agent_name)
        self._listener: Optional[listening.Listener] = None
        config = nixl_conf or nixl_agent_config()
        self._telemetry = _captures(config.capture_telemetry)
        self.agent = self._lower(config)
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

    def _lower(self, config: nixl_agent_config) -> Any:
        """The same agent by NIXL's lower calls, which those of nixl_agent do not go by. It is made
        as NIXL's own agent makes it: a program may have put a constructor of its own in the place
        of nixl._bindings.nixlAgent.
        """
        from . import lower  # which imports this

        bind: Any = sys.modules.get("nixl._bindings")
        if getattr(bind, "_lower", None) is not lower:  # NIXL's own, or none
            bind = lower
        c = bind.nixlAgentConfig()
        c.useProgThread, c.useListenThread = config.enable_pthread, config.enable_listen
        c.listenPort, c.captureTelemetry = config.port, config.capture_telemetry
        c.syncMode = config.sync_mode or (
            nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if config.enable_listen
            else nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE)
        c.pthrDelay, c.lthrDelay = 0, 100000
        c._over = weakref.proxy(self)
        return bind.nixlAgent(self.name, c)

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
