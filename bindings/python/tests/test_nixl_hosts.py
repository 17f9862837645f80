# SPDX-License-Identifier: Apache-2.0
"""The face of NIXL between two hosts, which two network namespaces stand for: connections that are
reset, and agents that stand still while nothing waits for them, cost no transfer.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from typing import Any, Iterator

import pytest
from conftest import need_program
from nixl_agents import N, ask

ADDRESSES = ("10.213.8.1", "10.213.8.2")


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces with a cable between them."""
    for program in ("ip", "ss"):
        need_program(program, "apt-get install iproute2")
    names = [f"sluice-{os.getpid()}-{i}" for i in range(2)]
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "cable",
                "netns", names[1])
            for name, address in zip(names, ADDRESSES):
                run("ip", "-n", name, "address", "add", address + "/24", "dev", "cable")
                run("ip", "-n", name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as e:
            pytest.skip(f"unavailable: network namespaces, which root may make: {e.stderr}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Side:
    """An agent on a host of its own."""

    def __init__(self, start: Any, host: str, name: str) -> None:
        self.host, self.name = host, name
        self.child = start("nixl_target.py", "UCX", "{}", str(N), name,
                           before=("ip", "netns", "exec", host))
        metadata, self.address = json.loads(self.child.stdout.readline())
        self.metadata: str = metadata

    def fill(self, other: Side, value: int) -> None:
        """Writes to the other, which must go well at the first try."""
        assert ask(self.child, f"fill {value} {other.address} {other.name}") == "DONE"
        assert json.loads(ask(other.child, "notifs")) == {self.name: ["filled"]}
        assert ask(other.child, "digest") == hashlib.sha256(bytes([value]) * N).hexdigest()


@pytest.fixture
def sides(start: Any, hosts: list[str]) -> list[Side]:
    """Two agents that know each other."""
    made = [Side(start, host, name) for host, name in zip(hosts, ("here", "there"))]
    for one, other in (made, made[::-1]):
        assert ask(one.child, "know " + other.metadata) == other.name
        one.fill(other, 1)
    return made


def established(host: str, address: str) -> str:
    return run("ip", "netns", "exec", host, "ss", "-Htn", "state", "established", "dst", address)


def reset(host: str, address: str) -> bool:
    """Ends all connections of a host to an address, as a firewall or an administrator does. False:
    this kernel ends none.
    """
    left = established(host, address)
    assert left
    while left:
        before = left
        subprocess.run(["ip", "netns", "exec", host, "ss", "-K", "dst", address],
                       capture_output=True)
        left = established(host, address)
        if left == before:
            return False
    return True


def test_connections_are_reset(sides: list[Side]) -> None:
    for i, by in enumerate((0, 1, 0, 1, 1, 0)):
        one, other = sides if i % 2 else sides[::-1]
        ended = reset(sides[by].host, ADDRESSES[1 - by])
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
    os.kill(sides[who].child.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(sides[who].child.pid, signal.SIGCONT)
    for one, other in (sides, sides[::-1]):
        one.fill(other, 3 + who)
