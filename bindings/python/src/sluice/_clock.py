# SPDX-License-Identifier: Apache-2.0
"""Seconds of Python and nanoseconds of sluice.h."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Callable, Optional, TypeVar

from ._library import PENDING

FOREVER = -1

_T = TypeVar("_T")

# Python runs the handlers of signals, Ctrl-C among them, between calls into the
# library: one that waits for longer comes back as often as this.
SLICE_NS = 200_000_000


def nanoseconds(seconds: Optional[float]) -> int:
    """None is no limit. At least 0."""
    return FOREVER if seconds is None else max(0, int(seconds * 1e9))


def hurry(s: socket.socket, end: float) -> None:
    """Gives a socket's next step the time that is left until an end of time.monotonic()."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other side is too slow")
    s.settimeout(left)


def in_slices(wait: Callable[[int], int], timeout: Optional[float]) -> int:
    """Calls what returns PENDING when its time is over, until the whole time is."""
    if timeout is not None and timeout * 1e9 <= SLICE_NS:
        return wait(nanoseconds(timeout))
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_NS if end is None else min(SLICE_NS, nanoseconds(end - time.monotonic()))
        code = wait(left)
        if code != PENDING or (end is not None and time.monotonic() >= end):
            return code


def beside(call: Callable[[], _T], undo: Callable[[_T], object]) -> _T:
    """What a call returns that may take long and cannot be sliced: a thread makes it, so that an
    interrupt is heard meanwhile. The call then goes on to its end, and what it returns is undone.
    """
    answers: queue.SimpleQueue[tuple[Optional[_T], Optional[BaseException]]] = queue.SimpleQueue()
    turn, given_up = threading.Lock(), False

    def run() -> None:
        try:
            value, error = call(), None
        except BaseException as e:
            answers.put((None, e))
            return
        with turn:
            if not given_up:
                answers.put((value, error))
                return
        undo(value)

    threading.Thread(target=run, name="sluice", daemon=True).start()
    try:
        value, error = answers.get()
    except BaseException:
        with turn:
            given_up = True
            late = not answers.empty() and answers.get()[0]
        if late:
            undo(late)
        raise
    if error is not None:
        raise error
    assert value is not None
    return value
