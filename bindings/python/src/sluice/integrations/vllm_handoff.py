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
    Scheduler the side that plans, of both

A request whose hand-over fails is computed by the decode: its blocks are reported once nothing
lands in them any more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
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
WORD_MAX = 16 << 20  # bytes of what is said at a door
RANKS_MAX = 64  # of a server: a door answers so many at once
GROUPS_MAX = 64  # servers that one knows
TOLD_MAX = 64 << 20  # bytes that a prefill keeps of what all decodes have told it
WANTS_MAX = 4096  # requests of which it knows only that they are wanted
BEGINS = 8  # requests of a decode that are begun at once


@dataclass(frozen=True)
class Options:
    """The table "sluice_handoff" of the configuration."""

    host: str = "127.0.0.1"  # this host's address, for the other servers
    port: int = 14600  # of a prefill's first rank; the others have the next ones
    # seconds for which a prefill keeps blocks that no decode wants, and a decode waits for a
    # prefill to compute what it wants
    timeout: float = 60.0

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
    preempted: set[str] = field(default_factory=set)  # offered before, whose blocks are others' now
    dropped: set[str] = field(default_factory=set)  # requests that nothing is to become of


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

    def finished(self, request: Any) -> tuple[bool, Optional[dict[str, Any]]]:
        """Blocks that were offered stay until all workers are done with them."""
        from vllm.v1.request import RequestStatus

        name = request.request_id
        _, number = self._prefills.pop(name, (None, None))
        if name in self._moving:  # a decode's, which was given up
            self._next.dropped.add(name)
        if name not in self._offered:
            return False, None
        self._offered.discard(name)
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


def ask(host: str, port: int, word: dict[str, Any]) -> dict[str, Any]:
    """Says a word at a door. ValueError, Unknown: what was answered is an error."""
    with socket.create_connection((host, port), MEETING) as s:
        write(s, word)
        answer = read(s, time.monotonic() + 2 * MEETING)
    if "error" in answer:
        kind = Unknown if answer.get("unknown") else ValueError
        raise kind(f"{host}:{port}: {answer['error']}")
    return answer


class Met:
    """A decode that a prefill has met, or meets."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.told: dict[int, dict[str, Any]] = {}  # by rank, until all have come
        self.peers: list[Peer] = []
        self.sender: Optional[Sender] = None
        self.ready = threading.Event()
        self.error = ""

    def size(self) -> int:
        return sum(len(t["description"]) + len(t["side"]) for t in self.told.values())

    def lost(self) -> bool:
        return any(map(is_lost, self.peers))

    def close(self) -> None:
        """Another meeting may be of the same peers, but for those that are lost."""
        if self.sender is not None:
            self.sender.close()
        for peer in filter(is_lost, self.peers):
            peer.close()


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
    """A prefill's worker."""

    def __init__(self, place: Place, options: Options, rank: int, ranks: int) -> None:
        self._place, self._rank, self._ranks = place, rank, ranks
        self._timeout = options.timeout
        self._layers = [v.layer for v in place.side.views]
        self._lock = threading.Lock()  # guards what follows
        self._met: dict[str, Met] = {}  # by the decode's own word
        self._wants: dict[int, Want] = {}  # by number
        self._offers: dict[str, Offered] = {}  # by request
        self._computing: list[Offered] = []  # of this step
        self._ended: set[str] = set()  # requests that vLLM has ended
        self._door = Callers(options.port + rank, "sluice-vllm-door", self._answer)

    def _answer(self, caller: socket.socket) -> None:
        word = read(caller, time.monotonic() + MEETING)
        caller.settimeout(2 * MEETING)
        try:
            answers: dict[str, Callable[..., dict[str, Any]]] = {
                "who": self._who, "meet": self._meet, "want": self._want}
            answer = answers[word.pop("op")](**word)
        except (errors.Error, KeyError, TypeError, ValueError) as e:
            answer = {"error": f"{type(e).__name__}: {e}", "unknown": isinstance(e, Unknown)}
        write(caller, answer)

    def _who(self) -> dict[str, Any]:
        return {**self._place.told(), "rank": self._rank, "ranks": self._ranks}

    def _meet(self, decode: str, rank: int, ranks: int, told: dict[str, Any],
              prefill: list[str]) -> dict[str, Any]:
        """A rank of a decode, which knows all sides of this prefill. The last to come has the
        group made.
        """
        if not 0 <= rank < ranks <= RANKS_MAX or len(prefill) != self._ranks:
            raise ValueError(f"rank {rank} of {ranks}, and {len(prefill)} ranks of this prefill")
        told = {name: str(told[name]) for name in ("description", "side")}
        with self._lock:
            gone = [self._forget(n) for n, m in list(self._met.items())
                    if m.lost() or m.error or n == decode and rank in m.told]
        for met in gone:
            met.close()
        with self._lock:
            if decode not in self._met and len(self._met) >= GROUPS_MAX:
                raise ValueError(f"this prefill knows {GROUPS_MAX} decodes already")
            if sum(m.size() for m in self._met.values()) > TOLD_MAX:
                raise ValueError(f"decodes have told this prefill more than {TOLD_MAX} bytes")
            met = self._met.setdefault(decode, Met(ranks))
            met.told[rank] = told
            last = len(met.told) == met.ranks
        if last:
            try:
                self._make(met, prefill)
            except Exception as e:
                met.error = f"{type(e).__name__}: {e}"
            met.ready.set()
        if not met.ready.wait(MEETING) or met.error:
            met.error = met.error or f"not all ranks of the decode came within {MEETING} s"
            raise ValueError(met.error)
        return {"sides": [met.told[k]["side"] for k in range(ranks)]}

    def _make(self, met: Met, prefill: list[str]) -> None:
        engine, told = self._place.engine, [met.told[k] for k in range(met.ranks)]
        met.peers = [engine.connect(bytes.fromhex(t["description"]), MEETING) for t in told]
        plan = Plan(prefill, [t["side"] for t in told])
        met.sender = Sender(engine, plan, self._rank, [self._place.region], met.peers,
                            meet_timeout=self._timeout)

    def _forget(self, decode: str) -> Met:
        """Precondition: the lock is held."""
        met = self._met.pop(decode)
        for offered in self._offers.values():
            if offered.push is not None and offered.push.rank is met.sender:
                offered.over = True
        return met

    def _want(self, decode: str, rank: int, number: int, first: int,
              tokens: int) -> dict[str, Any]:
        """A rank of a decode expects the request, or, of no tokens, says that none does."""
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (rank, number, first, tokens)):
            raise ValueError(f"rank {rank} wants tokens {first} to {tokens} of request {number}")
        with self._lock:
            met = self._met.get(decode)
            if (met is None or met.sender is None or met.error or met.lost()
                    or rank >= met.ranks):
                raise Unknown("this prefill does not know the decode")
            now = time.monotonic()
            for other in [n for n, w in self._wants.items() if now > w.until]:
                del self._wants[other]
            if number not in self._wants and len(self._wants) >= WANTS_MAX:
                raise ValueError(f"{WANTS_MAX} requests are wanted already")
            want = self._wants.setdefault(number, Want(decode, first, tokens, set(),
                                                         now + 2 * self._timeout))
            if (want.group, want.first, want.tokens) != (decode, first, tokens):
                raise ValueError(f"others want other tokens of request {number}")
            want.ranks.add(rank)
            for offered in self._offers.values():
                if offered.offer.number == number:
                    self._begin(offered)
        return {}

    def _begin(self, offered: Offered) -> None:
        """Begins a request that all ranks of a decode want, and tells the layers that are computed.
        Precondition: the lock is held.
        """
        offer = offered.offer
        want = self._wants.get(offer.number)
        met = self._met.get(want.group) if want else None
        if want is None or met is None or met.sender is None or offered.push is not None or (
                len(want.ranks) < met.ranks):
            return
        del self._wants[offer.number]
        if not want.first < want.tokens <= offer.tokens:
            offered.over = True
            return
        try:
            offered.push = met.sender.begin(offer.number, [offer.blocks], want.tokens, want.first)
        except errors.Error as e:
            offered.over = True
            log.warning("request %s is not handed over: %s", offer.name, e)
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
            self._computing = []
            for offer in made.offers:
                offered = self._offers[offer.name] = Offered(offer)
                self._computing.append(offered)
                self._begin(offered)
            for name in made.dropped & set(self._offers):
                self._offers[name].over = True

    def preempted(self, made: StepMetadata) -> None:
        """Returns once nobody reads the blocks of requests that are preempted. UnprovenError and
        WaitTimeout: that cannot be said.
        """
        for name in made.preempted:
            with self._lock:
                offered = self._offers.pop(name)
            if offered.push is not None:
                try:
                    offered.push.abort(PROOF)
                except errors.HandleError:  # its group was forgotten: nobody reads them
                    pass

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
            for name in finished & set(self._offers):
                self._offers[name].until = now + self._timeout
                self._ended.add(name)
            for name in list(self._ended):
                offered = self._offers[name]
                late = now > offered.until
                if offered.push is None and not offered.over and not late:
                    continue
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
                self._ended.discard(name)
                done.add(name)
        return done

    def close(self) -> None:
        self._door.close()
        with self._lock:
            gone = [self._forget(name) for name in list(self._met)]
        for met in gone:
            met.close()


class Known:
    """A prefill that a decode has met."""

    def __init__(self, peers: list[Peer], receiver: Receiver) -> None:
        self.peers, self.receiver = peers, receiver

    def lost(self) -> bool:
        return any(map(is_lost, self.peers))

    def close(self) -> None:
        self.receiver.close()
        for peer in filter(is_lost, self.peers):
            peer.close()


class Decode:
    """A decode's worker."""

    def __init__(self, place: Place, options: Options, word: str, rank: int, ranks: int,
                 tokens: int) -> None:
        self._place, self._rank, self._ranks, self._tokens = place, rank, ranks, tokens
        self._word = word  # which all ranks of this decode share
        self._timeout = options.timeout
        self._beginner = ThreadPoolExecutor(BEGINS, "sluice-vllm-begin")
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, int], Future[Known]] = {}  # guarded by lock
        self._loads: dict[str, tuple[Load, Future[Optional[Request]]]] = {}
        self._given_up: set[str] = set()
        self._failed: set[int] = set()  # blocks, not told yet

    def step(self, made: StepMetadata) -> None:
        for load in made.loads:
            future = self._beginner.submit(self._begin, load, time.monotonic() + self._timeout)
            if load.first < load.tokens:
                self._loads[load.name] = load, future
        self._given_up |= made.dropped & set(self._loads)

    def _begin(self, load: Load, until: float) -> Optional[Request]:
        """Expects a request, and says so at all doors of the prefill. A prefill that does not know
        this decode is met again, once. What goes wrong behind that is of this request alone.
        """
        host, port, ranks = load.at
        word = {"op": "want", "decode": self._word, "rank": self._rank, "number": load.number,
                "first": load.first, "tokens": load.tokens}
        for again in (True, False):
            if time.monotonic() > until:  # it has waited for others, whose prefill stands still
                raise TimeoutError(f"{host}:{port} was not asked within {self._timeout} s")
            known, request = self._know(load.at), None
            if load.first < load.tokens:
                request = known.receiver.begin(load.number, [load.blocks], load.tokens, load.first)
            try:
                for k in range(ranks):
                    ask(host, port + k, word)
                return request
            except (OSError, Unknown):
                self._forget(load.at, known)
                if not again:
                    raise
            except Exception as e:
                if request is None:
                    raise
                log.warning("request %s is given up: %s", load.name, e)
                self._given_up.add(load.name)  # _look ends it, and waits for the proof
                return request
        return None

    def _know(self, at: tuple[str, int, int]) -> Known:
        """Meets a prefill, once for all that ask at a time."""
        with self._lock:
            for other, future in list(self._known.items()):
                if future.done() and future.result().lost():
                    del self._known[other]
                    try:
                        future.result().close()
                    except errors.UnprovenError as e:  # as its own requests say
                        log.warning("%s: %s", other, e)
            found = self._known.get(at)
            first = found is None
            if found is None:
                if len(self._known) >= GROUPS_MAX:
                    raise ValueError(f"this decode knows {GROUPS_MAX} prefills already")
                found = self._known[at] = Future()
        if first:
            try:
                known = self._meet(*at)
            except BaseException as e:
                with self._lock:
                    del self._known[at]
                found.set_exception(e)
            else:
                found.set_result(known)
        return found.result()

    def _meet(self, host: str, port: int, ranks: int) -> Known:
        if not 0 < ranks <= RANKS_MAX:
            raise ValueError(f"a prefill of {ranks} ranks")
        engine = self._place.engine
        who = [ask(host, port + k, {"op": "who"}) for k in range(ranks)]
        sides = [w["side"] for w in who]
        peers = [engine.connect(bytes.fromhex(w["description"]), MEETING) for w in who]
        word = {"op": "meet", "decode": self._word, "rank": self._rank, "ranks": self._ranks,
                "told": self._place.told(), "prefill": sides}
        answers = [ask(host, port + k, word) for k in range(ranks)]
        plan = Plan(sides, answers[0]["sides"])
        return Known(peers, Receiver(engine, plan, self._rank, [self._place.region], peers,
                                     meet_timeout=self._timeout))

    def _forget(self, at: tuple[str, int, int], known: Known) -> None:
        with self._lock:
            found = self._known.get(at)
            if found is not None and found.done() and found.result() is known:
                del self._known[at]
                known.close()

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
        try:
            request = future.result()
            assert request is not None
            if not request.done and name not in self._given_up:
                return None
            request.abort(0)  # of one that has ended: waits for the proof alone
            request.wait(0)
            request.close()
            return True
        except errors.UnprovenError:
            raise
        except errors.WaitTimeout:
            return None
        except Exception as e:  # a prefill may have answered anything
            log.warning("request %s was not handed over, and is computed: %s", name, e)
            return False

    def failed(self) -> set[int]:
        told, self._failed = self._failed, set()
        return told

    def close(self) -> None:
        self._beginner.shutdown(cancel_futures=True)
        with self._lock:
            for future in self._known.values():
                future.result().close()
            self._known.clear()


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
        finished: tuple[bool, Optional[dict[str, Any]]] = self._scheduler.finished(request)
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
        for side in self._prefill, self._decode, self._engine:
            if side is not None:
                side.close()
