# SPDX-License-Identifier: Apache-2.0
"""Ranges that are lent and taken back."""

from __future__ import annotations

import time

import pytest
import sluice
from conftest import LIMIT, MIB, Pair

OVER = (sluice.RevokedError, sluice.TokenError)


def test_a_range_until_it_is_revoked(pair: Pair) -> None:
    lease = pair.b.region.lease(4096, 4096)
    leased = pair.peer.lease(lease.token())
    assert leased.length == 4096
    pair.a.bytes[:4096] = b"l" * 4096
    t = pair.peer.transfer("write")
    with pytest.raises(sluice.BoundsError):
        t.add(pair.a.region, 0, leased, 1, 4096)
    t.add(pair.a.region, 0, leased, 0, 4096)
    t.run(LIMIT)
    assert pair.b.bytes[4095:4097] == b"\0l" and pair.b.bytes[8191:8193] == b"l\0"
    with pytest.raises(sluice.BusyError):
        pair.b.region.close()
    token = lease.token()
    assert not lease.ended
    lease.revoke(LIMIT)
    lease.revoke(LIMIT)
    assert lease.ended
    pair.b.bytes[:] = bytes(MIB)
    with pytest.raises(sluice.RevokedError):
        t.run(LIMIT)
    assert not any(pair.b.bytes)
    with pytest.raises(OVER):
        pair.peer.lease(token)
    with pytest.raises(sluice.BoundsError):
        pair.b.region.lease(MIB, 1)
    t.close()


def test_tokens_that_were_altered(pair: Pair) -> None:
    with pair.b.region.lease(0, 8) as lease:
        token = lease.token()
        for wrong in (b"", token[:-1], token[:10] + bytes([token[10] ^ 1]) + token[11:],
                      b"x" * len(token)):
            with pytest.raises(sluice.Error):
                pair.peer.lease(wrong)


def test_read_only(pair: Pair) -> None:
    with pair.b.region.lease(0, 8, read_only=True) as lease:
        leased = pair.peer.lease(lease.token())
        with pytest.raises(sluice.ReadOnlyError):
            pair.peer.transfer("write").add(pair.a.region, 0, leased, 0, 8)
        with pair.peer.transfer("read") as t:
            t.add(pair.a.region, 0, leased, 0, 8)
            t.run(LIMIT)


def test_a_lease_that_ends_by_itself(pair: Pair) -> None:
    lease = pair.b.region.lease(0, 8, ttl=0.001)
    token, end = lease.token(), time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            pair.peer.lease(token).close()
        except OVER:
            break
    with pytest.raises(OVER):
        pair.peer.lease(token)
    while not lease.ended and time.monotonic() < end:
        time.sleep(0.001)
    assert lease.ended
    lease.revoke(LIMIT)
