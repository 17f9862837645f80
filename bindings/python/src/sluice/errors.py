# SPDX-License-Identifier: Apache-2.0
"""The errors of the engine as exceptions, one class for each code of sluice.h.

All are `Error`; where Python has a word for it, that, too: `except TimeoutError` and
`except ConnectionError` do what they say.
"""

from __future__ import annotations

import builtins
from typing import Type

from . import _library
from ._library import lib


class Error(Exception):
    """What went wrong, and what to do next where that is known. `code` is sluice.h's."""

    code = 0


class ArgumentError(Error, ValueError):
    """A call that makes no sense, whatever the state of things."""

    code = -2


class ForkError(Error, RuntimeError):
    """The child of a fork: exec, or start processes by "spawn"."""

    code = -3


class OperatingSystemError(Error, OSError):
    """The operating system refused something."""

    code = -5


class ClosedError(Error, ValueError):
    """It was closed, or its engine was."""

    code = -6


class HandleError(ClosedError):
    """It was closed before this call."""

    code = -1


class UnavailableError(Error):
    """A backend cannot work here; the text says what mends it."""

    code = -7


class NotSupportedError(Error, NotImplementedError):
    """No backend at hand can do this."""

    code = -8


class FullError(Error):
    """A limit of the engine is reached."""

    code = -9


class BusyError(Error):
    """In use: posted, listed by a transfer, or a name that is taken."""

    code = -10


class BoundsError(Error, ValueError):
    """Outside a range or a limit."""

    code = -11


class PeerLostError(Error, ConnectionError):
    """The peer is dead, frozen for too long, or closed."""

    code = -12


class AbortedError(Error):
    """Ended by `abort`."""

    code = -13


class RevokedError(Error):
    """The owner ended the lease or the region."""

    code = -14


class VersionError(Error):
    """The other side speaks another version."""

    code = -15


class NoRouteError(Error):
    """No backend serves this pair of memories, or a name is unknown."""

    code = -16


class CorruptError(Error, ValueError):
    """Bytes that are not what they claim to be."""

    code = -17


class TokenError(Error):
    """A token that is cut, altered or foreign."""

    code = -18


class UnprovenError(Error):
    """The peer may still place what it has in hand."""

    code = -19


class ReadOnlyError(Error):
    """That memory may only be read."""

    code = -20


class TimeoutError(Error, builtins.TimeoutError):
    """A deadline of the engine has passed: this is the outcome."""

    code = -21


class FaultError(Error):
    """Registered memory, of either side, was unmapped, is protected, or its file was cut."""

    code = -22


class MissingError(Error, LookupError):
    """A ring has no such object, or not any more."""

    code = -23


class WaitTimeout(TimeoutError):
    """The time for this wait is over. What was waited for goes on."""

    code = 1


BY_CODE: dict[int, Type[Error]] = {
    c.code: c
    for c in (
        ArgumentError, ForkError, OperatingSystemError, ClosedError, HandleError, UnavailableError,
        NotSupportedError, FullError,
        BusyError, BoundsError, PeerLostError, AbortedError, RevokedError, VersionError,
        NoRouteError, CorruptError, TokenError,
        UnprovenError, ReadOnlyError, TimeoutError, FaultError, MissingError,
    )
}  # fmt: skip


def failure(code: int) -> Error:
    """The exception for a code that a call on this thread has just returned."""
    if code == _library.PENDING:
        return WaitTimeout("the time for this wait is over, and what was waited for goes on")
    return BY_CODE.get(code, Error)(lib.error().decode("utf-8", "replace"))


def check(code: int) -> None:
    if code:
        raise failure(code)
