# SPDX-License-Identifier: Apache-2.0
"""Two prefill ranks hand requests over to one decode rank of another layout, in two processes."""

from __future__ import annotations

import json
import select
from dataclasses import replace
from typing import Any, Iterator

import pytest
import sluice
from conftest import LIMIT, until
from handoff_sides import BLOCKS_OF_DECODE, DECODE, LAYERS, PATIENT, PREFILL, TOKENS, places
from sluice.handoff import Plan, Push, Receiver, Request, Sender

FILL = b"\x5a"  # what lay in memory before


class Decode:
    """The decode rank of this process, and the process of the prefill ranks."""

    def __init__(self, start: Any, backend: str) -> None:
        self.engine = sluice.Engine("decode-0", [backend])
        self.memory = self.engine.alloc(DECODE[0].regions[0].bytes)
        self.fill()
        self.region = self.engine.register("kv", self.memory, private=True)
        self.prefill = start("handoff_prefill.py", backend)
        said = json.loads(self.prefill.stdout.readline())
        self.tell(json.dumps({"description": self.engine.describe().hex(),
                              "sides": [s.encode() for s in DECODE]}))
        peers = [self.engine.connect(bytes.fromhex(d), LIMIT) for d in said["descriptions"]]
        self.receiver = Receiver(self.engine, Plan(said["sides"], DECODE), 0, [self.region], peers,
                                 **PATIENT)

    def fill(self) -> None:
        self.memory.view[:] = FILL * len(self.memory.view)

    def tell(self, line: str) -> None:
        self.prefill.stdin.write(line + "\n")
        self.prefill.stdin.flush()

    def done(self, line: str) -> None:
        self.tell(line)
        assert self.prefill.stdout.readline() == "done\n"

    def begin(self, n: int) -> Request:
        return self.receiver.begin(n, [BLOCKS_OF_DECODE], TOKENS)


@pytest.fixture(params=["shm", "tcp"])
def decode(request: pytest.FixtureRequest, start: Any) -> Iterator[Decode]:
    made = Decode(start, request.param)
    yield made
    made.engine.close()
    made.memory.close()


def test_every_byte(decode: Decode) -> None:
    """Twice, the second time begun by the prefill before it is by the decode."""
    for n in (7, 8):
        decode.fill()
        if n == 8:
            decode.done(f"begin {n}")
        request = decode.begin(n)
        if n == 7:
            decode.done(f"begin {n}")
        assert not request.done
        for layer in reversed(range(LAYERS)):
            with pytest.raises(sluice.WaitTimeout):
                request.wait(0)
            decode.done(f"layer {layer}")
        decode.done("wait")
        request.wait(LIMIT)
        readable = select.poll()
        readable.register(request.fd, select.POLLIN)
        assert readable.poll(0)
        request.close()
        want = bytearray(FILL * len(decode.memory.view))
        for v in DECODE[0].views:  # zeros behind the last token
            at = v.base + BLOCKS_OF_DECODE[-1] * v.block
            for head in range(v.count):
                some = slice(at + head * v.unit + TOKENS % v.tokens * v.token,
                             at + head * v.unit + v.tokens * v.token)
                want[some] = bytes(some.stop - some.start)
        for place in places(DECODE[0], BLOCKS_OF_DECODE):
            want[place.at:place.at + len(place.bytes)] = place.bytes
        assert decode.memory.view == want
    stats = decode.receiver.stats()
    assert stats["finished"] == 2 and not stats["ended"]
    decode.receiver.close()
    with pytest.raises(sluice.WaitTimeout):  # the messages are the program's again
        decode.engine.receive(0)


def test_a_killed_prefill(decode: Decode) -> None:
    """The request ends with what happened, and nothing lands in the blocks any more."""
    request = decode.begin(7)
    decode.done("begin 7")
    decode.done("layer 0")
    decode.prefill.kill()
    with pytest.raises(sluice.PeerLostError, match="request 7 with peer prefill-"):
        request.wait(LIMIT)
    request.abort(LIMIT)
    decode.fill()
    request.close()
    with pytest.raises(sluice.PeerLostError):
        decode.begin(8).wait(LIMIT)
    decode.receiver.close()
    decode.region.close()  # which no lease keeps
    assert decode.memory.view == FILL * len(decode.memory.view)


class Both:
    """A prefill rank and a decode rank of one layout, in this process."""

    def __init__(self, **limits: float) -> None:
        self.engines = [sluice.Engine(name, ["mem"]) for name in ("prefill", "decode")]
        sides, limits = DECODE, {**PATIENT, **limits}
        memories = [e.alloc(sides[0].regions[0].bytes) for e in self.engines]
        regions = [e.register("kv", m) for e, m in zip(self.engines, memories)]
        a, b = self.engines
        peers = [a.connect(b.describe(), LIMIT), b.connect(a.describe(), LIMIT)]
        self.sender = Sender(a, Plan(sides, sides), 0, [regions[0]], [peers[0]], **limits)
        self.receiver = Receiver(b, Plan(sides, sides), 0, [regions[1]], [peers[1]], **limits)

    def begin(self, n: int) -> tuple[Push, Request]:
        return (self.sender.begin(n, [BLOCKS_OF_DECODE], TOKENS),
                self.receiver.begin(n, [BLOCKS_OF_DECODE], TOKENS))


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    for engine in made.engines:
        engine.close()


def test_each_side_may_end_it(both: Both) -> None:
    """Also before the other one has begun it."""
    push, request = both.begin(1)
    request.abort(LIMIT)
    with pytest.raises(sluice.AbortedError, match="cancelled by the receiver"):
        push.wait(LIMIT)
    with pytest.raises(sluice.AbortedError):
        push.layer(0)

    def begun(n: int) -> Push:
        """The decode knows of the request, and does not expect it yet."""
        push = both.sender.begin(n, [BLOCKS_OF_DECODE], TOKENS)
        until(lambda: both.receiver.stats()["begun"] == n)
        return push

    push = begun(2)
    push.abort(LIMIT)
    with pytest.raises(sluice.AbortedError):
        both.receiver.begin(2, [BLOCKS_OF_DECODE], TOKENS).wait(LIMIT)
    push = begun(3)
    with pytest.raises(sluice.BusyError, match="abort it first"):
        push.close()
    both.sender.close()
    with pytest.raises(sluice.ClosedError, match="ended by the other side"):
        both.receiver.begin(3, [BLOCKS_OF_DECODE], TOKENS).wait(LIMIT)
    with pytest.raises(sluice.HandleError):
        push.wait(0)
    push.close()


def test_misuse(both: Both) -> None:
    push, request = both.begin(1)
    push.layer(0)
    with pytest.raises(sluice.BusyError, match="layer 0 was told before"):
        push.layer(0)
    with pytest.raises(sluice.BoundsError, match="layer 9 is not on this rank"):
        push.layer(9)
    with pytest.raises(sluice.BoundsError, match="has no slot 1"):
        both.receiver.begin(2, [[0]], TOKENS).wait(LIMIT)
    with pytest.raises(sluice.BusyError, match="hand-over has the messages"):
        both.engines[0].receive(0)
    with pytest.raises(sluice.BusyError):  # one sender for these peers
        Sender(both.engines[0], Plan(DECODE, DECODE), 0, [push.rank.engine._regions["kv"]],
               list(both.engines[0]._peers.values()))


def test_what_no_plan_is(both: Both) -> None:
    def make(plan: Plan, **limits: float) -> None:
        a = both.engines[0]
        Sender(a, plan, 0, [a._regions["kv"]], list(a._peers.values()), **limits)

    with pytest.raises(sluice.ArgumentError, match="another"):
        make(Plan(PREFILL, [replace(DECODE[0], model="another")]))
    with pytest.raises(sluice.ArgumentError, match="unknown field"):
        make(Plan(DECODE, ['{"versions": 1}']))
    with pytest.raises(sluice.ArgumentError, match="there are window"):
        make(Plan(DECODE, DECODE), no_limit=1)
    with pytest.raises(sluice.BoundsError, match="has 2 ranks"):
        make(Plan(DECODE, PREFILL))


def test_a_limit() -> None:
    """A receiver without a sender waits no longer than meet_timeout."""
    both = Both(meet_timeout=0.1)
    with pytest.raises(sluice.TimeoutError, match="have not begun it within 100ms"):
        both.receiver.begin(1, [BLOCKS_OF_DECODE], TOKENS).wait(LIMIT)
    for engine in both.engines:
        engine.close()
