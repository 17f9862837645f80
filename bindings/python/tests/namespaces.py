# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces, which stand for hosts, and what happens to connections between hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Iterator


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def hosts(network: str) -> Iterator[list[tuple[str, str]]]:
    """Names of two namespaces, with an address each in a network of 24 bits, and a cable between.

    Raises OSError or CalledProcessError where this user may make none, or iproute2 is not there.
    """
    made = [(f"sluice-{os.getpid()}-{i}", f"{network}.{i}") for i in (1, 2)]
    try:
        for name, _ in made:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "cable", "netns", made[0][0], "type", "veth", "peer", "cable",
            "netns", made[1][0])
        for name, address in made:
            run("ip", "-n", name, "address", "add", address + "/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
        yield made
    finally:
        for name, _ in made:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _established(host: str, address: str) -> str:
    return run("ip", "netns", "exec", host, "ss", "-Htn", "state", "established", "dst", address)


def reset(host: str, address: str) -> bool:
    """Ends all connections of a host to an address, as a firewall or an administrator does. False:
    this kernel ends none.
    """
    left = _established(host, address)
    assert left
    while left:
        before = left
        subprocess.run(["ip", "netns", "exec", host, "ss", "-K", "dst", address],
                       capture_output=True)
        left = _established(host, address)
        if left == before:
            return False
    return True


def forget(host: str, seconds: int) -> None:
    """Has a firewall in front of a host forget connections that were idle for some seconds: it
    drops what comes for them then.

    Raises OSError or CalledProcessError where there is no nft, or the kernel has no such firewall.
    """
    inside = ("ip", "netns", "exec", host)
    run(*inside, "nft", "add table inet idle; add chain inet idle in { type filter hook input "
        "priority 0 ; } ; add rule inet idle in ct state invalid drop")
    run(*inside, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0",
        f"net.netfilter.nf_conntrack_tcp_timeout_established={seconds}")
