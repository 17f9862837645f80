# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL between two hosts, which two network namespaces stand for: connections that are
reset, and agents that stand still while nothing waits for them, cost no transfer.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from typing import Any, Iterator

import namespaces
import pytest
from conftest import go_on, need_program, stop
from nixl_agents import N, ask

pytestmark = pytest.mark.timed


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces with a cable between them."""
    for program in ("ip", "ss"):
        need_program(program, "apt-get install iproute2")
    try:
        with namespaces.hosts("10.213.8") as made:
            yield made
    except subprocess.CalledProcessError as e:
        pytest.skip(f"unavailable: network namespaces, which root may make: {e.stderr}")


class Side:
    """An agent on a host of its own."""

    def __init__(self, start: Any, host: tuple[str, str], name: str) -> None:
        self.name = name
        self.child = start("nixl_target.py", "UCX", "{}", str(N), name,
                           before=("ip", "netns", "exec", host[0]))
        metadata, self.address = json.loads(self.child.stdout.readline())
        self.metadata: str = metadata

    def fill(self, other: Side, value: int) -> None:
        """Writes to the other, which must go well at the first try."""
        assert ask(self.child, f"fill {value} {other.address} {other.name}") == "DONE"
        assert json.loads(ask(other.child, "notifs")) == {self.name: ["filled"]}
        assert ask(other.child, "digest") == hashlib.sha256(bytes([value]) * N).hexdigest()


@pytest.fixture
def sides(start: Any, hosts: list[tuple[str, str]]) -> list[Side]:
    """Two agents that know each other."""
    made = [Side(start, host, name) for host, name in zip(hosts, ("here", "there"))]
    for one, other in (made, made[::-1]):
        assert ask(one.child, "know " + other.metadata) == other.name
        one.fill(other, 1)
    return made


def test_connections_are_reset(sides: list[Side], hosts: list[tuple[str, str]]) -> None:
    for i, by in enumerate((0, 1, 0, 1, 1, 0)):
        one, other = sides if i % 2 else sides[::-1]
        ended = namespaces.reset(hosts[by][0], hosts[1 - by][1])
        if not ended and i == 0:
            pytest.skip("unavailable: this kernel ends no connection of others: it needs "
                        "CONFIG_INET_DIAG_DESTROY")
        assert ended
        for side, far in (sides, sides[::-1]):
            assert ask(side.child, "lose " + far.name) == "lost"
        one.fill(other, 2 + i)
        other.fill(one, 20 + i)


@pytest.mark.parametrize("who", [0, 1])
def test_one_stands_still(sides: list[Side], who: int) -> None:
    """For five seconds between transfers, in which nothing waits for it."""
    stop(sides[who].child)
    time.sleep(5)
    go_on(sides[who].child)
    for one, other in (sides, sides[::-1]):
        one.fill(other, 3 + who)
