# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefill servers hand requests over to decode servers, which may have another number of
tensor parallel ranks and another layout. docs/vllm-connector.md has the configuration to paste.

    --kv-transfer-config '{"kv_connector": "SluiceHandoffConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "sluice.integrations.vllm_handoff",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"sluice_handoff": {"host": "10.0.0.1", "port": 14600}}}'

What a request needs travels in its kv_transfer_params, under NixlConnector's names: those that the
prefill's answer has go into the decode's request. Where the router gives both requests a number
("sluice_number") it need not wait for that answer: the decode allocates its blocks meanwhile, and
the layers go over while the prefill computes them.

The ranks meet once for each pair of servers. Each rank of a prefill listens at a port of its own
(`Door`). A decode's ranks ask all of them who they are, and tell them who they are themselves; then
each has the same plan, and is a rank of sluice.handoff. For each request a decode's rank begins to
expect it, and then says at those doors that it wants it (`want`), in which the prefill begins.

    Prefill   a prefill's worker: what its steps offer, and what is wanted of that
    Decode    a decode's worker: the groups that it has met, and what it expects of them
    Closings  the groups that either of them has done with
    Scheduler the side that plans, of both

A server that stands still delays its own requests alone: each prefill has threads of its own that
begin requests, and each group one that closes it.

A request whose hand-over fails is computed by the decode: its blocks are reported once nothing
lands in them any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Optional

import numpy as np

from .vllm_connector import supported  # the first: it says which vLLM it wants

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from .. import errors
from .._callers import Callers
from .._clock import hurry
from .._config import Backend
from .._segments import HostMemory
from ..engine import Engine
from ..handoff import Area, Group, Plan, Push, Receiver, Request, Sender, Side, View
from ..peer import Peer, is_lost

log = logging.getLogger("sluice.vllm")

MEETING = 30.0  # seconds for all ranks of a decode to come to a prefill
PROOF = 60.0  # seconds for the proof that blocks which are to be used again are free
AGAIN = 1.0  # seconds until a group that was closed without that proof is closed again
WORD_MAX = 16 << 20  # bytes of what is said at a door
AGAIN_MET = 0.05  # seconds until a rank of a decode asks anew whether all of its ranks have come
RANKS_MAX = 64  # of a server
GROUPS_MAX = 64  # servers that one knows, or has not done with
TOLD_MAX = 64 << 20  # bytes that a prefill keeps of what all decodes have told it
WANTS_MAX = 4096  # requests of which it knows only that they are wanted, or are not handed over
BEGINS = 8  # requests that a decode begins at once with one prefill


@dataclass(frozen=True)
class Options:
    """The table "sluice_handoff" of the configuration."""

    host: str = "127.0.0.1"  # this host's address, for the other servers
    port: int = 14600  # of a prefill's first rank; the others have the next ones
    # seconds for which a prefill keeps blocks that no decode wants, a decode waits for a prefill
    # to compute what it wants, and either waits for the other's next sign of life
    timeout: float = 60.0

    def limits(self) -> dict[str, float]:
        """Of a rank of sluice.handoff."""
        return {f"{what}_timeout": self.timeout for what in ("meet", "idle", "layer", "taken")}

    @classmethod
    def read(cls, said: Any) -> Options:
        """ArgumentError says what is wrong."""
        if not isinstance(said, Mapping) or not set(said) <= {"host", "port", "timeout"}:
            raise errors.ArgumentError(
                f'"sluice_handoff" is {said!r}: want a table such as {{"host": "10.0.0.1", '
                f'"port": 14600}}')
        options = cls(**said)
        if (not isinstance(options.host, str) or not isinstance(options.port, int)
                or not isinstance(options.timeout, (int, float)) or not options.timeout > 0):
            raise errors.ArgumentError(f'"sluice_handoff" is {said!r}: host is a text, port and '
                                       f'timeout are numbers above 0')
        return options


@dataclass
class Offer:
    """A request whose prompt a step of a prefill completes."""

    name: str
    number: int
    tokens: int  # of whole blocks
    blocks: Any  # numpy.uint32


@dataclass
class Load:
    """A request that a decode's worker is to expect."""

    name: str
    number: int
    at: tuple[str, int, int]  # the prefill's host, its first port, and how many ranks it has
    first: int  # token, of a block
    tokens: int  # behind the last block; as first: it wants none of it
    blocks: Any  # numpy.uint32


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers are to do in a step."""

    offers: list[Offer] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)  # offered; their blocks are others' now
    dropped: set[str] = field(default_factory=set)  # requests that nothing is to become of
    ended: list[int] = field(default_factory=list)  # numbers of those that were never offered


class Scheduler:
    """The side that plans. Whole blocks go over: an attention backend has an order of its own in
    the page of a head, such as all keys before all values.
    """

    def __init__(self, options: Options, role: Any, ranks: int, tokens: int) -> None:
        self._options, self._role = options, role  # vLLM's KVTransferConfig
        self._ranks, self._tokens = ranks, tokens
        self._prefills: dict[str, tuple[Any, int]] = {}  # requests to hand over, and their numbers
        self._offered: set[str] = set()
        self._moving: set[str] = set()  # blocks of which a worker is not done with
        self._next = StepMetadata()

    def new(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if self._role.is_kv_producer and params.get("do_remote_decode"):
            said = params.get("sluice_number")
            number = said if isinstance(said, int) and 0 <= said < 1 << 63 else secrets.randbits(63)
            self._prefills[request.request_id] = request, number

    def _remote(self, request: Any) -> bool:
        """Whether a prefill has it. A client may say so to a server whose workers take none."""
        params = request.kv_transfer_params or {}
        return bool(self._role.is_kv_consumer and params.get("do_remote_prefill"))

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        more = request.num_prompt_tokens - computed
        if not self._remote(request) or more <= 0:
            return 0, False
        return more, True

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        if not self._remote(request):
            return
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False  # where it fails the request is computed
        tokens = self._whole(request.num_prompt_tokens)
        first = (request.num_prompt_tokens - external) // self._tokens * self._tokens
        load = Load(request.request_id, -1, ("", 0, 0), first if external else tokens, tokens,
                    np.array(blocks.get_block_ids()[0], np.uint32))
        try:
            port, ranks, number = (int(params[key]) for key in
                                   ("remote_port", "tp_size", "sluice_number"))
            if not (0 < ranks <= RANKS_MAX and 0 < port <= (1 << 16) - ranks
                    and 0 <= number < 1 << 63):
                raise ValueError("a number is out of range")
            load.at, load.number = (str(params["remote_host"]), port, ranks), number
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            log.warning("request %s: kv_transfer_params %r: %r", request.request_id, params, e)
        self._next.loads.append(load)
        if external:
            self._moving.add(request.request_id)

    def _whole(self, tokens: int) -> int:
        return -(-tokens // self._tokens) * self._tokens

    def plan(self, step: Any) -> StepMetadata:
        made, self._next = self._next, StepMetadata()
        for name in step.preempted_req_ids or ():
            if name in self._offered:
                self._offered.discard(name)
                self._prefills.pop(name, None)
                made.preempted.add(name)
        for name in made.preempted:
            log.warning("request %s is not handed over: vLLM has preempted it", name)
        for name, tokens in step.num_scheduled_tokens.items():
            if name not in self._prefills or name in self._offered:
                continue
            request, number = self._prefills[name]
            if request.num_computed_tokens + tokens >= request.num_prompt_tokens:
                listed, = step.kv_connector_block_state.get_block_ids(name)
                self._offered.add(name)
                made.offers.append(Offer(name, number, self._whole(request.num_prompt_tokens),
                                         np.array(listed, np.uint32)))
        return made

    def finished(self, request: Any, blocks: Any) -> tuple[bool, Optional[dict[str, Any]]]:
        """Blocks that were offered stay until all workers are done with them. A request that has
        none was preempted since the last step, and no plan will say so: it is given up.
        """
        from vllm.v1.request import RequestStatus

        name = request.request_id
        _, number = self._prefills.pop(name, (None, None))
        if name in self._moving:  # a decode's, which was given up
            self._next.dropped.add(name)
        if name not in self._offered:
            if number is not None:
                self._next.ended.append(number)
            return False, None
        self._offered.discard(name)
        if not blocks:
            self._next.preempted.add(name)
            return False, None
        self._moving.add(name)
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED,
                                  RequestStatus.FINISHED_STOPPED):
            self._next.dropped.add(name)
            return True, None
        return True, {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_host": self._options.host, "remote_port": self._options.port,
            "tp_size": self._ranks, "sluice_number": number}

    def moved(self, told: Any) -> None:
        for names in told.finished_sending, told.finished_recving:
            self._moving.difference_update(names or ())

    @property
    def moving(self) -> bool:
        return bool(self._moving)


@dataclass
class Place:
    """A rank's engine, its memory, and what the others must know of it."""

    engine: Engine
    region: Any
    side: Side

    def told(self) -> dict[str, Any]:
        return {"description": self.engine.describe().hex(),  # leases alone open the region
                "side": self.side.encode()}


def place_of(engine: Engine, model: str, rank: int, shards: int, replicas: int, cache: Any,
             caches: Mapping[str, Any]) -> Place:
    """Registers the allocation in which all layers lie, and says by strides how."""
    names = cache.kv_cache_groups[0].layer_names
    first = caches[names[0]]
    if first.device.type != "cpu":
        raise errors.NotSupportedError(
            f"the KV cache lies on {first.device}, and this connector was run with memory of the "
            f"host alone: start vLLM on processors, or without it")
    whole = first.untyped_storage()
    views = []
    for k, name in enumerate(names):
        one = caches[name]  # [blocks, heads, tokens, content]
        size, strides = one.element_size(), one.stride()
        if one.untyped_storage().data_ptr() != whole.data_ptr() or strides[3] != 1:
            raise errors.NotSupportedError(
                f"the KV cache of {name} lies in another way than this connector knows: start vLLM "
                f"without it")
        _, heads, tokens, content = one.shape
        views.append(View(
            k, "kv", f"{one.dtype}, pages of {tokens}", content * size, heads * shards,
            rank // replicas * heads, heads, tokens, one.data_ptr() - whole.data_ptr(),
            strides[0] * size, strides[1] * size, strides[2] * size))
    region = engine.register("kv", HostMemory(whole.data_ptr(), whole.nbytes()), private=True)
    return Place(engine, region, Side(model, rank, [Area("kv", whole.nbytes())],
                                      [Group(first.shape[0])], views))


def write(s: socket.socket, word: dict[str, Any]) -> None:
    data = json.dumps(word).encode()
    s.sendall(struct.pack("<I", len(data)) + data)


class Unknown(ValueError):
    """A prefill does not know the decode: they are to meet anew."""


def read(s: socket.socket, end: float) -> dict[str, Any]:
    """Reads a word, until an end of time.monotonic(), however slowly it comes."""
    def whole(n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            hurry(s, end)
            some = s.recv(min(n - len(data), 1 << 20))
            if not some:
                raise ConnectionError("the other side has hung up")
            data += some
        return bytes(data)

    length, = struct.unpack("<I", whole(4))
    if length > WORD_MAX:
        raise ValueError(f"a word of {length} bytes, at most {WORD_MAX}")
    word = json.loads(whole(length))
    if not isinstance(word, dict):
        raise ValueError("a word that is no table")
    return word


def ask(host: str, port: int, word: dict[str, Any], end: float) -> dict[str, Any]:
    """Says a word at a door, and has the answer by an end of time.monotonic(). ValueError, Unknown:
    what was answered is an error.
    """
    with socket.create_connection((host, port), max(0.001, end - time.monotonic())) as s:
        hurry(s, end)
        write(s, word)
        answer = read(s, end)
    if "error" in answer:
        kind = Unknown if answer.get("unknown") else ValueError
        raise kind(f"{host}:{port}: {answer['error']}")
    return answer


class Met:
    """A server that one has met, or meets: what it has of its ranks."""

    def __init__(self, word: str, name: str) -> None:
        self.word = word  # of its own, however it is called
        self.name = name
        self.making = threading.Lock()  # held while the group is made, or closed
        self.peers: list[Peer] = []
        self.rank: Any = None  # a Sender or a Receiver

    def lost(self) -> bool:
        return any(map(is_lost, self.peers))

    def close(self) -> None:
        """UnprovenError: bytes may land still. Call it again."""
        with self.making:
            if self.rank is not None:
                self.rank.close()
            for peer in self.peers:
                peer.close()


class Closings:
    """Groups that are done with. A thread closes each, which takes as long as its peers' grace, and
    again until it is proved that nothing lands in its blocks any more. A group for which there is
    no room for a thread waits for one that has ended, or for the next call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._left: dict[Met, bool] = {}  # whether it was closed once, and there is no proof
        self._waiting: list[Met] = []  # for a thread

    def __len__(self) -> int:
        return len(self._left)

    def add(self, met: Met) -> None:
        with self._changed:
            self._left[met] = False
            self._waiting.append(met)
            self._start()

    def _start(self) -> None:
        """Precondition: the lock is held."""
        try:
            while self._waiting:
                threading.Thread(target=self._serve, name="sluice-vllm-close", daemon=True,
                                 args=(self._waiting[-1],)).start()
                self._waiting.pop()
        except RuntimeError as e:
            log.warning("%s: not closed yet: %s", self._waiting[-1].name, e)

    def _serve(self, met: Met) -> None:
        while True:
            self._close(met)
            with self._changed:
                if not self._waiting:
                    return
                met = self._waiting.pop()

    def _close(self, met: Met) -> None:
        while True:
            try:
                met.close()
                break
            except Exception as e:
                with self._changed:
                    if not self._left[met]:
                        log.warning("%s: no proof yet that nothing lands in blocks that were its "
                                    "requests', which stay theirs: %s", met.name, e)
                    self._left[met] = True
                    self._changed.notify_all()
            time.sleep(AGAIN)
        with self._changed:
            if self._left.pop(met):
                log.warning("%s: that nothing lands any more is proved", met.name)
            self._changed.notify_all()

    def _wait(self, over: Callable[[], bool], end: float) -> bool:
        with self._changed:
            while not over() and time.monotonic() < end:
                self._start()
                self._changed.wait(min(AGAIN, max(0.0, end - time.monotonic())))
            return over()

    def wait(self, word: str, end: float) -> None:
        """Until groups with that server were closed once: a rank has one at a time of the same
        peers.
        """
        self._wait(lambda: all(met.word != word or once for met, once in self._left.items()), end)

    def close(self) -> None:
        """Waits for all of them. UnprovenError names those of which there is no proof in time."""
        if not self._wait(lambda: not self._left, time.monotonic() + PROOF):
            names = ", ".join(sorted(met.name for met in list(self._left)))
            raise errors.UnprovenError(f"within {PROOF} s there was no proof that nothing "
                                       f"lands any more in blocks of requests with {names}")


class Caller(Met):
    """A decode that a prefill has met, or meets."""

    def __init__(self, word: str, ranks: int) -> None:
        super().__init__(word, word)
        self.ranks = ranks
        self.until = time.monotonic() + MEETING  # for all to come, from the first one on
        self.told: dict[int, dict[str, Any]] = {}  # by rank, until all have come
        self.error = ""  # why it is none, or none any more

    def size(self) -> int:
        return len(self.word) + sum(
            len(t["description"]) + len(t["side"]) for t in self.told.values())


@dataclass
class Want:
    """A request that ranks of a decode want."""

    group: str
    first: int
    tokens: int
    ranks: set[int]
    until: float  # when it is forgotten


@dataclass
class Offered:
    """An offer at a worker."""

    offer: Offer
    until: float = 0.0  # when its blocks are kept no longer; 0: vLLM has not ended it
    layers: list[int] = field(default_factory=list)  # that are computed
    push: Optional[Push] = None
    over: bool = False  # nobody wants it


class Prefill:
    """A prefill's worker. No call at its door waits for a rank of another decode, so that decodes
    of any number of ranks may meet it at a time.
    """

    def __init__(self, place: Place, options: Options, rank: int, ranks: int) -> None:
        self._place, self._rank, self._ranks = place, rank, ranks
        self._word = secrets.token_hex(16)
        self._timeout, self._limits = options.timeout, options.limits()
        self._layers = [v.layer for v in place.side.views]
        self._lock = threading.Lock()  # guards what follows
        self._over = False
        self._met: dict[str, Caller] = {}  # by the decode's own word
        self._wants: dict[int, Want] = {}  # by number
        self._refused: dict[int, str] = {}  # numbers of the last that are not handed over, and why
        self._refusals: list[Push] = []  # that tell so those who have asked before
        self._offers: dict[str, Offered] = {}  # by request
        self._computing: list[Offered] = []  # of this step
        self._ended: set[str] = set()  # requests that vLLM has ended
        self._closings = Closings()
        self._door = Callers(options.port + rank, "sluice-vllm-door", self._answer)

    def _answer(self, caller: socket.socket) -> None:
        word = read(caller, time.monotonic() + MEETING)
        caller.settimeout(2 * MEETING)
        try:
            answers: dict[str, Callable[..., dict[str, Any]]] = {
                "who": self._who, "meet": self._meet, "met": self._is_met, "want": self._want}
            answer = answers[word.pop("op")](**word)
        except (errors.Error, KeyError, TypeError, ValueError) as e:
            answer = {"error": f"{type(e).__name__}: {e}", "unknown": isinstance(e, Unknown)}
        write(caller, answer)

    def _who(self) -> dict[str, Any]:
        return {**self._place.told(), "rank": self._rank, "ranks": self._ranks,
                "word": self._word}

    def _meet(self, decode: str, rank: int, ranks: int, told: dict[str, Any],
              prefill: list[str]) -> dict[str, Any]:
        """A rank of a decode, which knows all sides of this prefill. The last to come has the
        group made, and the others ask whether it is (`_is_met`).
        """
        if not 0 <= rank < ranks <= RANKS_MAX or len(prefill) != self._ranks:
            raise ValueError(f"rank {rank} of {ranks}, and {len(prefill)} ranks of this prefill")
        told = {name: str(told[name]) for name in ("description", "side")}
        with self._lock:
            if self._over:
                raise ValueError("this prefill is being closed")
            for m in list(self._met.values()):
                if m.lost() or m.word == decode and (rank in m.told or ranks != m.ranks):
                    self._forget(m, "it is lost, or meets this prefill anew")
            self._forget_late()
            if decode not in self._met and len(self._met) + len(self._closings) >= GROUPS_MAX:
                raise ValueError(f"this prefill knows {GROUPS_MAX} decodes already")
            if sum(m.size() for m in self._met.values()) > TOLD_MAX:
                raise ValueError(f"decodes have told this prefill more than {TOLD_MAX} bytes")
            met = self._met.setdefault(decode, Caller(decode, ranks))
            met.told[rank] = told
            last = len(met.told) == met.ranks
        if last:
            try:
                self._make(met, prefill)
            except Exception as e:
                with self._lock:
                    self._forget(met, f"{type(e).__name__}: {e}")
            if met.error:
                raise ValueError(met.error)
        return self._is_met(decode, rank)

    def _is_met(self, decode: str, rank: int) -> dict[str, Any]:
        """The sides of a decode's ranks, once all have come; before, nothing."""
        with self._lock:
            self._forget_late()
            met = self._met.get(decode)
            if met is None or rank not in met.told:
                raise ValueError("the decode was not met: the log of this prefill says why")
            if met.rank is None:
                return {}
            return {"sides": [met.told[k]["side"] for k in range(met.ranks)]}

    def _forget_late(self) -> None:
        """Forgets decodes of which a rank has not come. Precondition: the lock is held."""
        now = time.monotonic()
        for met in list(self._met.values()):
            if len(met.told) < met.ranks and now > met.until:
                self._forget(met, f"{len(met.told)} of {met.ranks} ranks came within {MEETING} s "
                                  f"of the first")

    def _make(self, met: Caller, prefill: list[str]) -> None:
        """What it makes of a group that is forgotten meanwhile is closed with it."""
        engine, end = self._place.engine, time.monotonic() + MEETING
        told = [met.told[k] for k in range(met.ranks)]
        self._closings.wait(met.word, end)
        with met.making:
            for t in told:
                if met.error:
                    raise ValueError(met.error)
                met.peers.append(engine.connect(bytes.fromhex(t["description"]),
                                                max(0.0, end - time.monotonic())))
            plan = Plan(prefill, [t["side"] for t in told])
            met.rank = Sender(engine, plan, self._rank, [self._place.region], met.peers,
                              **self._limits)

    def _forget(self, met: Caller, why: str) -> None:
        """Has it closed, once. Precondition: the lock is held."""
        if self._met.get(met.word) is not met:
            return
        del self._met[met.word]
        met.error = why
        if met.rank is None:
            log.warning("decode %s was not met: %s", met.name, why)
        for offered in self._offers.values():
            if offered.push is not None and offered.push.rank is met.rank:
                offered.over = True
        for number in [n for n, want in self._wants.items() if want.group == met.word]:
            del self._wants[number]
        self._closings.add(met)

    def _want(self, decode: str, rank: int, number: int, first: int,
              tokens: int) -> dict[str, Any]:
        """A rank of a decode expects the request, or, of no tokens, says that none does.
        ValueError: it is not handed over.
        """
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (rank, number, first, tokens)):
            raise ValueError(f"rank {rank} wants tokens {first} to {tokens} of request {number}")
        with self._lock:
            met = self._met.get(decode)
            if met is None or met.rank is None or met.lost() or rank >= met.ranks:
                raise Unknown("this prefill does not know the decode")
            offers = [o for o in self._offers.values() if o.offer.number == number]
            if number in self._refused or any(o.over or o.push is not None for o in offers):
                return self._no(number, first, tokens)
            now = time.monotonic()
            for other in [n for n, w in self._wants.items() if now > w.until]:
                del self._wants[other]
            if number not in self._wants and len(self._wants) >= WANTS_MAX:
                raise ValueError(f"{WANTS_MAX} requests are wanted already")
            want = self._wants.setdefault(number, Want(met.word, first, tokens, set(),
                                                         now + 2 * self._timeout))
            if (want.group, want.first, want.tokens) != (decode, first, tokens):
                raise ValueError(f"others want other tokens of request {number}")
            want.ranks.add(rank)
            for offered in offers:
                self._begin(offered)
            return self._no(number, first, tokens) if number in self._refused else {}

    def _no(self, number: int, first: int, tokens: int) -> dict[str, Any]:
        """Answers a rank that wants tokens of a request that is not handed over. Precondition: the
        lock is held.
        """
        if first == tokens:
            return {}
        why = self._refused.get(number, "its blocks go, or went, to others that wanted it")
        raise ValueError(f"request {number} is not handed over: {why}")

    def _refuse(self, number: int, why: str) -> None:
        """A request is not handed over: its decode computes it at once, whether its ranks have
        asked before, as some may have, or ask later. Precondition: the lock is held.
        """
        self._refused.pop(number, None)
        self._refused[number] = why
        if len(self._refused) > WANTS_MAX:
            del self._refused[next(iter(self._refused))]
        want = self._wants.pop(number, None)
        met = self._met.get(want.group) if want else None
        if want is None or met is None or met.rank is None or want.first == want.tokens:
            return
        try:  # a hand-over of no tokens, which ends at ranks that expect some
            self._refusals.append(met.rank.begin(number, [[]], 0))
        except errors.Error as e:
            log.warning("%s expects request %d, and is not told that it does not come: %s",
                        met.name, number, e)

    def _begin(self, offered: Offered) -> None:
        """Begins a request that all ranks of a decode want, and tells the layers that are computed.
        Precondition: the lock is held.
        """
        offer = offered.offer
        want = self._wants.get(offer.number)
        met = self._met.get(want.group) if want else None
        if want is None or met is None or met.rank is None or offered.push is not None or (
                len(want.ranks) < met.ranks):
            return
        why = ""
        if not want.first < want.tokens <= offer.tokens:
            why = (f"tokens {want.first} to {want.tokens} of {offer.tokens} are wanted"
                   if want.first < want.tokens else "nobody wants any of it")
        else:
            try:
                offered.push = met.rank.begin(offer.number, [offer.blocks], want.tokens,
                                              want.first)
                del self._wants[offer.number]
            except errors.Error as e:  # whose ranks are told so by _refuse
                why = str(e)
        if why:
            offered.over = True
            self._refuse(offer.number, why)
            if want.first < want.tokens:
                log.warning("request %s is not handed over: %s", offer.name, why)
            return
        for layer in offered.layers:
            self._tell(offered, layer)

    def _tell(self, offered: Offered, layer: int) -> None:
        if offered.push is not None and not offered.over:
            try:
                offered.push.layer(layer)
            except errors.Error as e:  # it has ended: the decode computes the request
                log.info("request %s is not handed over: %s", offered.offer.name, e)

    def step(self, made: StepMetadata) -> None:
        """Before the model runs."""
        with self._lock:
            for number in made.ended:
                self._refuse(number, "it ended before its prompt was computed")
            self._computing = []
            for offer in made.offers:
                offered = self._offers[offer.name] = Offered(offer)
                self._computing.append(offered)
                self._begin(offered)
            for name in made.dropped & set(self._offers):
                self._offers[name].over = True
                self._refuse(self._offers[name].offer.number, "its client has gone")

    def preempted(self, made: StepMetadata) -> None:
        """Returns once nobody reads the blocks of requests that are preempted. UnprovenError and
        WaitTimeout: that cannot be said.
        """
        with self._lock:
            gone = [self._offers.pop(name) for name in made.preempted]
            for offered in gone:
                self._refuse(offered.offer.number, "vLLM has taken its blocks")
        pushes = [offered.push for offered in gone if offered.push is not None]
        for push in pushes:  # all end at the same time
            with contextlib.suppress(errors.Error):
                push.abort(0)
        end = time.monotonic() + PROOF
        for push in pushes:
            with contextlib.suppress(errors.HandleError):  # its group is closed: nobody reads them
                push.abort(max(0.0, end - time.monotonic()))

    def layer(self, layer: int) -> None:
        """The model has computed it, for all requests of the step."""
        with self._lock:
            for offered in self._computing:
                if layer not in offered.layers:
                    offered.layers.append(layer)
                    self._tell(offered, layer)

    def computed(self) -> None:
        """The model has run: all layers are there."""
        for layer in self._layers:
            self.layer(layer)
        with self._lock:
            self._computing = []

    def ended(self, finished: set[str]) -> set[str]:
        """Requests that vLLM has ended and whose blocks nobody reads any more."""
        done = set()
        with self._lock:
            now = time.monotonic()
            self._refusals = [push for push in self._refusals if not self._is_told(push)]
            for name in finished & set(self._offers):
                self._offers[name].until = now + self._timeout
                self._ended.add(name)
            for name in list(self._ended):
                offered = self._offers[name]
                late = now > offered.until
                if offered.push is None and not offered.over and not late:
                    continue
                if offered.push is None and not offered.over:
                    log.warning("request %s is not handed over: no decode has asked for it within "
                                "%s s", name, self._timeout)
                if offered.push is not None:
                    if not offered.over and not offered.push.done:
                        continue
                    try:
                        offered.push.abort(0)
                    except errors.WaitTimeout:
                        continue
                    except errors.HandleError:  # its group was forgotten
                        pass
                    else:
                        offered.push.close()
                del self._offers[name]
                self._refuse(offered.offer.number, "it has ended")
                self._ended.discard(name)
                done.add(name)
        return done

    def _is_told(self, refusal: Push) -> bool:
        try:
            if refusal.done:
                refusal.close()
                return True
        except errors.HandleError:  # its group was forgotten
            return True
        return False

    def close(self) -> None:
        """In a time that PROOF bounds. UnprovenError: a decode may read blocks still."""
        self._door.close()
        with self._lock:
            self._over = True
            for met in list(self._met.values()):
                self._forget(met, "this prefill is being closed")
        self._closings.close()


@dataclass
class Lane:
    """Loads of one prefill that are to be begun."""

    waiting: deque[tuple[Load, float, Future[Optional[Request]]]] = field(default_factory=deque)
    threads: int = 0  # that begin them


class Decode:
    """A decode's worker."""

    def __init__(self, place: Place, options: Options, word: str, rank: int, ranks: int,
                 tokens: int) -> None:
        self._place, self._rank, self._ranks, self._tokens = place, rank, ranks, tokens
        self._word = word  # which all ranks of this decode share
        self._timeout, self._limits = options.timeout, options.limits()
        self._closings = Closings()
        self._lock = threading.Lock()  # guards what follows, up to the empty line
        self._over = False
        self._lanes: dict[tuple[str, int, int], Lane] = {}  # that have threads
        self._known: dict[str, Future[Met]] = {}  # by the prefill's own word
        self._words: dict[tuple[str, int, int], str] = {}  # by a name that a prefill has

        self._loads: dict[str, tuple[Load, Future[Optional[Request]]]] = {}
        self._given_up: set[str] = set()
        self._failed: set[int] = set()  # blocks, not told yet

    def step(self, made: StepMetadata) -> None:
        for load in made.loads:
            future = self._queue(load, time.monotonic() + self._timeout)
            if load.first < load.tokens:
                self._loads[load.name] = load, future
        self._given_up |= made.dropped & set(self._loads)

    def _queue(self, load: Load, until: float) -> Future[Optional[Request]]:
        """Has it begun by a thread of its prefill's lane, of which there are as few as do."""
        future: Future[Optional[Request]] = Future()
        with self._lock:
            lane = self._lanes.setdefault(load.at, Lane())
            lane.waiting.append((load, until, future))
            if lane.threads == BEGINS:
                return future
            lane.threads += 1
            try:
                threading.Thread(target=self._serve, args=(load.at, lane),
                                 name="sluice-vllm-begin", daemon=True).start()
            except RuntimeError as e:
                lane.threads -= 1
                if lane.threads == 0:  # else those that there are begin it
                    del self._lanes[load.at]
                    future.set_exception(e)
        return future

    def _serve(self, at: tuple[str, int, int], lane: Lane) -> None:
        while True:
            with self._lock:
                if not lane.waiting:
                    lane.threads -= 1
                    if lane.threads == 0:
                        del self._lanes[at]
                    return
                load, until, future = lane.waiting.popleft()
            try:
                future.set_result(self._begin(load, until))
            except BaseException as e:
                future.set_exception(e)

    def _begin(self, load: Load, until: float) -> Optional[Request]:
        """Expects a request, and says so at all doors of the prefill. A prefill that has gone, or
        does not know this decode, is met again, once, and its group closed. What goes wrong in
        another way is of this request alone: a door also hangs up where it has too many callers.
        """
        host, port, ranks = load.at
        word = {"op": "want", "decode": self._word, "rank": self._rank, "number": load.number,
                "first": load.first, "tokens": load.tokens}
        for again in (True, False):
            if time.monotonic() > until:
                raise TimeoutError(f"{host}:{port} was not asked within {self._timeout} s")
            known = self._know(load.at, until)
            request: Optional[Request] = None
            try:
                if load.first < load.tokens:
                    request = known.rank.begin(load.number, [load.blocks], load.tokens, load.first)
                for k in range(ranks):
                    ask(host, port + k, word, until)
                return request
            except Exception as e:
                gone = (isinstance(e, (Unknown, errors.ClosedError, errors.HandleError))
                        or isinstance(e, ConnectionError) and known.lost())
                if gone:
                    self._forget(known)
                if request is not None and not (gone and again and self._free(request, until)):
                    log.warning("request %s is given up: %r", load.name, e)
                    self._given_up.add(load.name)  # _look ends it, and waits for the proof
                    return request
                if not (gone and again):
                    raise
        return None

    def _free(self, request: Request, until: float) -> bool:
        """Ends it. Whether another one may have its blocks."""
        try:
            request.abort(max(0.0, until - time.monotonic()))
            request.close()
            return True
        except errors.HandleError:  # its group is closed, with the proof
            return True
        except errors.Error:
            return False

    def _know(self, at: tuple[str, int, int], until: float) -> Met:
        """Meets a prefill, once for all that ask at a time, by whatever names."""
        with self._lock:
            for other, future in list(self._known.items()):
                if future.done() and future.result().lost():
                    self._closings.add(self._known.pop(other).result())
            found = self._known.get(self._words.get(at, ""))
        if found is not None:
            return found.result(max(0.0, until - time.monotonic()))
        end = time.monotonic() + 2 * MEETING
        who = self._who(at, end)
        word = str(who[0]["word"])
        with self._lock:
            if len(self._words) >= GROUPS_MAX:
                self._words.clear()  # others are asked for theirs again
            self._words[at] = word
            found = self._known.get(word)
            first = found is None
            if found is None:
                if self._over or len(self._known) + len(self._closings) >= GROUPS_MAX:
                    raise ValueError(f"this decode knows {GROUPS_MAX} prefills already, or is "
                                     f"being closed")
                found = self._known[word] = Future()
        if not first:
            return found.result(max(0.0, until - time.monotonic()))
        known = Met(word, f"{at[0]}:{at[1]}")
        try:
            self._meet(known, at, who, end)
        except BaseException as e:
            with self._lock:
                self._known.pop(word, None)
            self._closings.add(known)
            found.set_exception(e)
            raise
        with self._lock:
            found.set_result(known)
            if self._over:
                self._closings.add(known)
        return known

    def _who(self, at: tuple[str, int, int], end: float) -> list[dict[str, Any]]:
        host, port, ranks = at
        if not 0 < ranks <= RANKS_MAX:
            raise ValueError(f"a prefill of {ranks} ranks")
        return [ask(host, port + k, {"op": "who"}, end) for k in range(ranks)]

    def _meet(self, known: Met, at: tuple[str, int, int], who: list[dict[str, Any]],
              end: float) -> None:
        """Whatever it has made where it fails is closed with the group."""
        (host, port, ranks), engine = at, self._place.engine
        self._closings.wait(known.word, end)
        sides = [w["side"] for w in who]
        for w in who:
            known.peers.append(engine.connect(bytes.fromhex(w["description"]),
                                              max(0.0, end - time.monotonic())))
        me: dict[str, Any] = {"decode": self._word, "rank": self._rank}
        meet = {"op": "meet", **me, "ranks": self._ranks, "told": self._place.told(),
                "prefill": sides}
        answers = []
        for k in range(ranks):
            answers.append(ask(host, port + k, meet, end))
            while "sides" not in answers[k]:
                time.sleep(AGAIN_MET)
                answers[k] = ask(host, port + k, {"op": "met", **me}, end)
        known.rank = Receiver(engine, Plan(sides, answers[0]["sides"]), self._rank,
                              [self._place.region], known.peers, **self._limits)

    def _forget(self, known: Met) -> None:
        with self._lock:
            found = self._known.get(known.word)
            if found is not None and found.done() and found.result() is known:
                del self._known[known.word]
                self._closings.add(known)

    def ended(self) -> set[str]:
        """Requests whose hand-over has ended, well or not. UnprovenError: a prefill may still
        write, so vLLM must not use the blocks again.
        """
        done = set()
        for name, (load, future) in list(self._loads.items()):
            if future.done() and (well := self._look(name, future)) is not None:
                del self._loads[name]
                self._given_up.discard(name)
                if not well:
                    self._failed.update(load.blocks[load.first // self._tokens:].tolist())
                done.add(name)
        return done

    def _look(self, name: str, future: Future[Optional[Request]]) -> Optional[bool]:
        """Whether a request is here; None: it is not known yet."""
        proved = False
        try:
            request = future.result()
            assert request is not None
            if not request.done and name not in self._given_up:
                return None
            request.abort(0)  # of one that has ended: waits for the proof alone
            proved = True
            request.wait(0)
            request.close()
            return True
        except errors.WaitTimeout:
            return None
        except Exception as e:  # a prefill may have answered anything
            if isinstance(e, errors.UnprovenError) and not proved:
                raise
            log.warning("request %s was not handed over, and is computed: %r", name, e)
            return False

    def failed(self) -> set[int]:
        told, self._failed = self._failed, set()
        return told

    def close(self) -> None:
        """In a time that PROOF bounds. UnprovenError: a prefill may write into blocks still."""
        with self._lock:
            self._over = True
            for lane in self._lanes.values():
                while lane.waiting:
                    lane.waiting.popleft()[2].cancel()
            for future in self._known.values():
                if future.done():
                    self._closings.add(future.result())
            self._known.clear()
        self._closings.close()


class SluiceHandoffConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's factory makes it, once for the scheduler and once in each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any,
                 **more: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        self._options = Options.read(transfer.kv_connector_extra_config.get("sluice_handoff", {}))
        specs = supported(vllm_config, kv_cache_config)
        parallel, self._cache = vllm_config.parallel_config, kv_cache_config
        self._ranks = parallel.tensor_parallel_size
        if self._ranks > RANKS_MAX:
            raise errors.NotSupportedError(f"{self._ranks} tensor parallel ranks: servers that "
                                           f"hand requests over have at most {RANKS_MAX}")
        self._rank = parallel.rank % self._ranks
        self._tokens = specs[0].block_size
        same = [model.model, model.revision, str(model.dtype), model.quantization,
                model.hf_overrides, vllm_config.cache_config.cache_dtype]
        self._model = hashlib.sha256(repr(same).encode()).hexdigest()
        self._scheduler: Any = None
        self._engine: Any = None
        self._prefill: Any = None
        self._decode: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(self._options, transfer, self._ranks, self._tokens)

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new(request)

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> tuple[Optional[int], bool]:
        matched: tuple[int, bool] = self._scheduler.matched(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any,
                                 num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.moved(connector_output)

    def has_pending_push_work(self) -> bool:
        return bool(self._scheduler.moving)  # vLLM steps on, and so hears of the end

    def request_finished(self, request: Any,
                         block_ids: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
            self, request: Any,
            block_ids: tuple[list[int], ...]) -> tuple[bool, Optional[dict[str, Any]]]:
        finished: tuple[bool, Optional[dict[str, Any]]] = self._scheduler.finished(
            request, block_ids[0])
        return finished

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the memory, and opens the door of a prefill's rank."""
        transfer, host = self._vllm_config.kv_transfer_config, self._options.host
        self._engine = Engine(f"vllm {transfer.engine_id[:8]} rank {self._rank}",
                              ["shm", Backend("tcp", listen=f"{host}:0")])
        replicas = self._cache.kv_tp_replicas
        place = place_of(self._engine, self._model, self._rank, self._ranks // replicas, replicas,
                         self._cache, kv_caches)
        names = self._cache.kv_cache_groups[0].layer_names
        self._layers = {name: k for k, name in enumerate(names)}
        if transfer.is_kv_producer:
            self._prefill = Prefill(place, self._options, self._rank, self._ranks)
        if transfer.is_kv_consumer:
            self._decode = Decode(place, self._options, transfer.engine_id, self._rank,
                                  self._ranks, self._tokens)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._prefill is not None:
            self._prefill.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._prefill is not None:
            self._prefill.step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._decode is not None:
            self._decode.step(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request of a step waits for a hand-over."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        if self._prefill is not None:
            self._prefill.layer(self._layers[layer_name])

    def wait_for_save(self) -> None:
        if self._prefill is not None:
            self._prefill.computed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Optional[set[str]],
                                                                Optional[set[str]]]:
        sent = self._prefill.ended(finished_req_ids) if self._prefill is not None else set()
        come = self._decode.ended() if self._decode is not None else set()
        return sent or None, come or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._decode.failed() if self._decode is not None else set()

    def shutdown(self) -> None:
        """UnprovenError: a peer may still reach the KV cache of this process."""
        unproven: list[errors.Error] = []
        for side in self._prefill, self._decode, self._engine:
            if side is not None:
                try:
                    side.close()
                except errors.Error as e:
                    unproven.append(e)
        if unproven:
            raise unproven[-1]  # the engine's, if it has one
