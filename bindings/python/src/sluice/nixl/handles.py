# SPDX-License-Identifier: Apache-2.0
"""Prepared lists and transfers, as programs hold them."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Container, Iterator, Optional, Protocol, Union

from .. import errors
from .._library import PENDING, lib
from .._patience import SLOW
from ..peer import is_lost
from ..transfer import Transfer
from . import bindings as b
from .places import Located, Runs

if TYPE_CHECKING:
    from .backends import Backends

logger = logging.getLogger("sluice.nixl")

_CLASSES = (
    (errors.PeerLostError, b.nixlRemoteDisconnectError),
    (errors.AbortedError, b.nixlCancelledError),
    (errors.BusyError, b.nixlNotAllowedError),
    (errors.ReadOnlyError, b.nixlNotAllowedError),
    (errors.RevokedError, b.nixlNotFoundError),
    (errors.TokenError, b.nixlNotFoundError),
    (errors.NotSupportedError, b.nixlNotSupportedError),
    (errors.UnavailableError, b.nixlNotSupportedError),
    (errors.NoRouteError, b.nixlNotFoundError),
    (errors.VersionError, b.nixlMismatchError),
    (errors.CorruptError, b.nixlMismatchError),
    (errors.BoundsError, b.nixlInvalidParamError),
    (errors.ArgumentError, b.nixlInvalidParamError),
    (errors.ClosedError, b.nixlInvalidParamError),
)


class Late(b.nixlRemoteDisconnectError):
    """A lost agent has not answered yet, and is being connected anew beside the program."""


@contextmanager
def translated() -> Iterator[None]:
    """Has errors of sluice come as those of NIXL, with sluice's text."""
    try:
        yield
    except errors.Error as e:
        raise as_nixl(e) from e


def as_nixl(e: errors.Error) -> Exception:
    for ours, theirs in _CLASSES:
        if isinstance(e, ours):
            return theirs(str(e))
    return b.nixlBackendError(str(e))


class nixl_prepped_dlist_handle:
    """Descriptors that were looked up, for make_prepped_xfer."""

    def __init__(self, agent: str, at: Union[Located[Any], Runs[Any], None], files: bool,
                 backends: list[str]) -> None:
        self.agent, self.at, self.files, self.backends = agent, at, files, backends
        self._released = False

    def release(self) -> None:
        """Forgets them. Transfers that were made of them go on."""
        self.at, self._released = None, True

    def __repr__(self) -> str:
        return f"nixl_prepped_dlist_handle(agent={self.agent!r}, released={self._released})"


class Make(Protocol):
    """Makes a transfer by the peer as it is connected then, and names the ranges of our own that it
    lists. It does without those that end; with `revoked` one of the peer's that it used before has
    ended, too. nixlNotFoundError where no others hold the bytes.
    """

    def __call__(self, ending: Container[str] = (),
                 revoked: bool = False) -> tuple[Transfer, set[str]]: ...


class nixl_xfer_handle:
    """A transfer. `release` ends it: when that returns, no byte of it lands any more."""

    def __init__(self, agent: Backends, make: Make, plugin: str, total: int, count: int) -> None:
        self.agent, self.plugin, self.total, self.count = agent, plugin, total, count
        self._make = make
        self._lock = threading.RLock()  # guards what follows; the agent's comes after it
        self._transfer: Optional[Transfer] = None
        self._lists: set[str] = set()
        self._unmade = False  # its peer is lost, and was not connected anew yet
        try:
            self._transfer, self._lists = make()
        except Late:
            self._unmade = True
        self._patience = 0.0  # until when a post waits for a lost peer; 0: it does not
        self._message = b""
        self._gone = ""  # why the last post could not begin: its peer is gone
        self._posted = False
        # by the clock that never goes back; _lasted is 0 until it is seen done
        self._began = self._took = self._lasted = 0.0
        self._slow = False  # the log has said so of this post

    @property
    def released(self) -> bool:
        return self._transfer is None and not self._unmade

    @property
    def transfer(self) -> Transfer:
        if self._transfer is None:
            raise b.nixlInvalidParamError("the transfer was released")
        return self._transfer

    def set_message(self, message: bytes) -> None:
        with self._lock:
            try:
                if not self._unmade:
                    self.transfer.message(message)
            except errors.BusyError as e:
                raise b.nixlRepostActiveError(str(e)) from e
            self._message = message

    def _anew(self, ending: Container[str] = (), revoked: bool = False) -> Transfer:
        """Makes it once more, in the place of what it was."""
        t, lists = self._make(ending, revoked)
        if self._message:
            t.message(self._message)
        former, self._transfer, self._lists = self._transfer, t, lists
        self._unmade = False
        if former is not None:
            former.close()
        return t

    def _usable(self) -> Transfer:
        """The transfer; made anew where its peer was lost since, unless it is under way. From then
        on the outcome of a former post is none of this one.
        """
        if not self._unmade:
            t = self.transfer
            if not is_lost(t.peer) or self._is_under_way():
                return t
        self._posted, self._lasted = False, 0.0
        with translated():
            return self._anew()

    def _is_under_way(self) -> bool:
        try:
            return self._posted and not self._lasted and not self.transfer.test()
        except errors.Error:
            return False

    def leave(self, gone: set[str], ending: set[str]) -> bool:
        """Goes by others than the ranges that are to go, where others that do not end hold the
        bytes. False where none do, where its last post is not done, or where a thread uses it.
        """
        if self._lists.isdisjoint(gone):
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._transfer is not None:
                if self._posted and not self._seen_done():
                    return False
                self._anew(ending)
            return True
        except (errors.Error, b.nixlNotFoundError, b.nixlInvalidParamError,
                b.nixlRemoteDisconnectError):
            return False
        finally:
            self._lock.release()

    def _seen_done(self) -> bool:
        return not is_lost(self.transfer.peer) and self._state() == "DONE"

    def post(self) -> str:
        """Starts it. Where its peer was lost before, it is connected anew first: with a message,
        which may come once alone, that is asked before, else only where the post ends so at once.
        While a peer that was lost does not answer, it is "PROC", for up to SLOW.
        """
        with self._lock:
            self._gone, self._patience = "", 0.0
            try:
                try:
                    return self._start(self._usable() if self._message or self._unmade
                                       else self.transfer)
                except Exception as e:  # a peer that was lost twice was closed
                    lost = self._transfer is not None and is_lost(self._transfer.peer)
                    if self._message or not (lost or isinstance(e, b.nixlRemoteDisconnectError)):
                        raise
                return self._start(self._usable())
            except Late:
                self._posted, self._began, self._lasted = True, perf_counter(), 0.0
                self._patience = time.monotonic() + SLOW
                return "PROC"
            except b.nixlRemoteDisconnectError as e:
                self._gone = str(e)
                raise

    def _start_late(self) -> bool:
        """Whether a post that has waited for its peer is begun. nixlRemoteDisconnectError: its peer
        is gone, or has not answered within SLOW. After an error it waits no more.
        """
        try:
            self._start(self._usable())
        except Exception as e:
            if isinstance(e, Late) and time.monotonic() < self._patience:
                return False
            self._patience = 0.0
            if isinstance(e, b.nixlRemoteDisconnectError):
                self._gone = str(e)
            raise
        self._patience = 0.0
        return True

    def _start(self, t: Transfer) -> str:
        """Posts it, and copies a first piece of what is not done at once. In one call, whose error
        may be that of the post or of its outcome: this is what programs do most.
        """
        self._posted, self._slow, self._lasted = True, False, 0.0
        self._began = began = perf_counter()
        while True:
            code = lib.post_and_wait(t._handle, 0)
            if code >= 0:
                break
            e = errors.failure(code)
            if isinstance(e, errors.RevokedError):
                t = self._elsewhere(e)
                continue
            if isinstance(e, errors.BusyError):
                raise b.nixlRepostActiveError(str(e)) from e
            raise as_nixl(e) from e
        self._took = took = perf_counter() - began
        if code == PENDING:
            return "PROC"
        self._lasted = took
        return "DONE"

    def _elsewhere(self, why: errors.RevokedError) -> Transfer:
        """The same by another range of the peer's that holds the bytes."""
        try:
            with translated():
                return self._anew(revoked=True)
        except b.nixlNotFoundError:
            raise as_nixl(why) from why

    def state(self) -> str:
        if self._lasted and self._transfer is not None and not self._gone:
            return "DONE"
        with self._lock:
            return self._state()

    def _state(self) -> str:
        if self._patience and not self._start_late():
            return "PROC"
        if not self._unmade:
            self.transfer  # one that was released has no state
        if self._gone:
            raise b.nixlRemoteDisconnectError(self._gone)
        if not self._posted:
            raise b.nixlNotPostedError("the transfer was not posted")
        if self._lasted:
            return "DONE"
        try:
            if not self.transfer.test():
                self._tell()
                return "PROC"
        except errors.RevokedError as e:
            began = self._began
            try:
                state = self._start(self._elsewhere(e))
            except Late:  # the agent is lost by now
                self._patience = time.monotonic() + SLOW
                return "PROC"
            self._began = began
            return state
        except errors.Error as e:
            raise as_nixl(e) from e
        self._lasted = perf_counter() - self._began
        return "DONE"

    def _tell(self) -> None:
        """Says once that a transfer takes long: nothing has failed."""
        if not self._slow and perf_counter() - self._began > SLOW:
            self._slow = True
            logger.warning("a transfer of %d bytes by %s is under way for %.0f s: its peer answers "
                           "late, as a process does that is kept off its processors", self.total,
                           self.plugin, SLOW)

    def telemetry(self) -> b.nixlXferTelemetry:
        if not self._lasted:
            raise b.nixlNotPostedError("the transfer is not done, or was not seen done")
        began = time.time() - (perf_counter() - self._began)
        return b.nixlXferTelemetry(began * 1e6, self._took * 1e6, self._lasted * 1e6,
                                   self.total, self.count)

    def release(self) -> None:
        """Aborts it where it is under way, and gives it back."""
        with self._lock, translated():
            self._unmade, self._patience = False, 0.0
            if self._transfer is not None:
                self._transfer.close()
                self._transfer = None

    def __repr__(self) -> str:
        return (f"nixl_xfer_handle({self.plugin}, {self.total} bytes, "
                f"released={self.released})")
