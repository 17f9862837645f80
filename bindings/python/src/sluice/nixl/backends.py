# SPDX-License-Identifier: Apache-2.0
"""The part of an agent that has backends, and the engine over them."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any, Iterable, Optional

from .. import errors
from .._config import Backend, Limits
from .._patience import CONNECT, transfer_timeout
from ..engine import Engine
from . import bindings as b
from . import plugins
from .handles import translated

logger = logging.getLogger("sluice.nixl")

nixl_backend_handle = int

TOLD_ALWAYS = "0"  # the name of a region of one byte, by which an agent without memory is described
_NAME_MOST = 65535  # in metadata, and before each message
_LIMITS = Limits(transfers=1 << 20, peers=65536, notifications=65536)

_AGENTS: weakref.WeakValueDictionary[str, Backends] = weakref.WeakValueDictionary()


def find_agent(name: str) -> Optional[Backends]:
    """The agent of this process that was made last under the name."""
    return _AGENTS.get(name)


class Backends:
    """Backends by NIXL's names. The engine opens when it is first needed, and has them all."""

    def __init__(self, name: str) -> None:
        self.name = b.as_text(name)
        if len(self.name.encode()) > _NAME_MOST:
            raise b.nixlInvalidParamError(f"the name of an agent has at most {_NAME_MOST} bytes")
        # what errors and statistics of sluice say: an engine's name has 255 bytes at most
        self._called = self.name.encode()[:255].decode("utf-8", "ignore")
        self.backends: dict[str, nixl_backend_handle] = {}
        self._lock = threading.RLock()  # guards what follows, and what the other parts keep
        self._engine: Optional[Engine] = None
        self._params: dict[str, dict[str, str]] = {}
        _AGENTS[self.name] = self

    @property
    def by_shm_alone(self) -> bool:
        """Whether it reaches others, and they it, by SHM and nothing else. A card does so too, and
        a copy from there may be one that the engine of its target ends.
        """
        opens = {word.rstrip("?") for name in self.backends for word in plugins.PLUGINS[name].opens}
        return "shm" in opens and opens <= {"shm", "posix"}

    def get_plugin_list(self) -> list[str]:
        """Names that create_backend takes."""
        return list(plugins.PLUGINS)

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        """The types of memory that a plugin serves."""
        return list(plugins.PLUGINS[backend].mems) if backend in plugins.PLUGINS else _nothing(
            backend, [])

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        """Parameters of a plugin and their defaults."""
        return dict(plugins.PLUGINS[backend].params) if backend in plugins.PLUGINS else _nothing(
            backend, {})

    def get_backend_mem_types(self, backend: str) -> list[str]:
        """The types of memory that a backend of this agent serves."""
        return list(plugins.PLUGINS[backend].mems) if backend in self.backends else _nothing(
            backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        """What a backend of this agent was made with."""
        return dict(self._params[backend]) if backend in self.backends else _nothing(backend, {})

    def create_backend(self, backend: str, initParams: Optional[dict[str, str]] = None) -> None:
        """Adds a backend. Before the first registration: an engine has its backends from the
        beginning.
        """
        if initParams is not None and not isinstance(initParams, dict):
            raise TypeError(f"create_backend: want a dict, not {type(initParams).__name__}")
        with self._lock:
            if backend not in plugins.PLUGINS:
                raise b.nixlNotFoundError(
                    f"there is no {backend}: there are {', '.join(plugins.PLUGINS)}")
            if backend in self.backends:
                raise b.nixlInvalidParamError(f"{backend} was created before")
            if self._engine is not None:
                raise b.nixlNotAllowedError(f"create {backend} before memory is registered or an "
                                            f"agent is met")
            params = plugins.known(backend, {k: str(v) for k, v in (initParams or {}).items()})
            with translated():
                self._try(backend, plugins.trials(backend, params))
            self._params[backend] = params
            self.backends[backend] = len(self.backends) + 1
        logger.info("Backend %s was instantiated", backend)

    def _try(self, backend: str, trials: list[Backend]) -> None:
        """Opens each for a moment, and logs those that do not open. It raises if none opens."""
        failed: list[tuple[Backend, errors.Error]] = []
        for one in trials:
            try:
                Engine(self._called, [one]).close()
            except errors.Error as e:
                failed.append((one, e))
        if failed and len(failed) == len(trials):
            raise failed[0][1]
        for one, why in failed:
            logger.warning("%s: %r: %s", backend, one, why)

    def _open(self, cards: Iterable[int] = ()) -> Engine:
        """The engine, which is opened when the cards are known that it serves."""
        with self._lock:
            if self._engine is None:
                chosen = plugins.backends(self._params, [*cards, *plugins.current_cards()])
                with translated():
                    engine = Engine(self._called, chosen, limits=_LIMITS,
                                    transfer_timeout=transfer_timeout(),
                                    connect_timeout=CONNECT)
                    engine.register(TOLD_ALWAYS, b"\0")
                self._engine = engine
            return self._engine

    def _handles(self, names: Iterable[str]) -> list[str]:
        """Names of backends, each of which must have been created."""
        return [name for name in names if self.backends[name]]


def _nothing(backend: str, empty: Any) -> Any:
    logger.warning("%s is not there to be asked", backend)
    return empty
