# SPDX-License-Identifier: Apache-2.0
"""Seconds of Python and nanoseconds of sluice.h."""

from __future__ import annotations

import socket
import threading
import time
from typing import Callable, Optional, TypeVar

from ._library import PENDING

FOREVER = -1

_T = TypeVar("_T")
_K = TypeVar("_K")

# Python runs the handlers of signals, Ctrl-C among them, between calls into the
# library: one that waits for longer comes back as often as this.
SLICE_NS = 200_000_000


def nanoseconds(seconds: Optional[float]) -> int:
    """None is no limit. At least 0, and at most 292 years, which is what 64 bits hold."""
    return FOREVER if seconds is None else max(0, int(min(seconds * 1e9, 2.0**63 - 1024)))


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


def beside(call: Callable[[], _T], undo: Callable[[_T], object],
           keep: Callable[[_T], _K]) -> _K:
    """What `keep` makes of what a call returns that may take long and cannot be sliced: a thread
    makes it, so that an interrupt is heard meanwhile. The call then goes on to its end, and what
    it returned is undone.
    """
    answers: list[_T] = []
    errors: list[BaseException] = []
    ended, turn, given_up = threading.Event(), threading.Lock(), False

    def run() -> None:
        try:
            answer = call()
        except BaseException as e:
            errors.append(e)
        else:
            with turn:
                answers.append(answer)
                late = given_up
            if late:
                undo(answer)
        ended.set()

    try:
        threading.Thread(target=run, name="sluice", daemon=True).start()
        while not ended.wait(SLICE_NS / 1e9):  # Ctrl-C just before a wait is heard behind it
            pass
        for error in errors:
            raise error
        return keep(answers[0])
    except BaseException:
        with turn:
            given_up = True
            late = list(answers)
        for answer in late:
            undo(answer)
        raise
