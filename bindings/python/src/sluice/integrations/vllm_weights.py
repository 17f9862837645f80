# SPDX-License-Identifier: Apache-2.0
"""Weights from the ranks of a trainer to the workers of vLLM, read in place. docs/vllm-weights.md
has the configuration to paste.

    vllm serve … --weight-transfer-config '{"backend": "sluice"}'

    WeightTransferTrainerFactory.trainer_init(
        SluiceTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url),
        source=ShardSource(model))

Each rank of the trainer serves the parts of tensors that it has, where they lie. Each worker asks
the model's own `load_weights` once which part of which tensor goes where, and from then on reads
those bytes alone from the ranks that have them, or from a worker of another replica that has them
already. Where vLLM changes weights after it has loaded them, a worker reads whole tensors instead
and gives them to `load_weights` (_why_not_in_place).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, Iterator, NamedTuple, Optional, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

try:
    from vllm import __version__
    from vllm.distributed.weight_transfer.base import (
        ParamMeta,
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightSource,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
        layerwise_groups,
        materialize_full_tensor,
    )
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_ip
except ImportError as e:
    raise ImportError(f"sluice.integrations.vllm_weights wants vLLM 0.32.0, which has a factory of "
                      f"weight transfer engines for trainers, too: {e}") from e

from .. import errors
from .._region import Region
from ..engine import Engine
from ..peer import Peer, is_lost
from ._tensors import Storage
from ._weights import (
    Box,
    Offer,
    Place,
    Reader,
    Serving,
    Source,
    box_of,
    last_writes,
    open_engine,
)
from .vllm_plugin import register

log = logging.getLogger("sluice.vllm_weights")

RUN_WITH = ("0.32.0",)  # versions of vLLM that the tests have run
if __version__.split(".")[:2] not in [v.split(".")[:2] for v in RUN_WITH]:
    raise ImportError(f"sluice.integrations.vllm_weights runs with vLLM {', '.join(RUN_WITH)} and "
                      f"its patches, and this is {__version__}: vLLM changes weight transfer "
                      f"without notice")

LIMIT = 120.0  # seconds for one update, by default
HELLOS_MAX = 1 << 14  # of workers, before one update


class Shard(NamedTuple):
    """A part of a tensor that this rank has: from `starts` on in each dimension of the whole."""

    name: str
    tensor: torch.Tensor
    starts: Sequence[int]
    shape: Sequence[int]  # of the whole tensor


class ShardSource(WeightSource):  # type: ignore[misc]
    """The parameters of a module, where they lie: of a DTensor the local shard, of others all. Make
    a subclass for a trainer that keeps them in another way.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, p.dtype, tuple(p.shape))
                for name, p in self._module.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self._module.named_parameters():
            yield name, materialize_full_tensor(p)

    def shards(self) -> Iterator[Shard]:
        for name, p in self._module.named_parameters():
            if not hasattr(p, "to_local"):
                yield Shard(name, p.detach(), [0] * p.dim(), p.shape)
                continue
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            local = p.detach().to_local()
            shape, starts = compute_local_shape_and_global_offset(p.shape, p.device_mesh,
                                                                  p.placements)
            if tuple(shape) != tuple(local.shape) or any(s.is_partial() for s in p.placements):
                raise errors.ArgumentError(f"{name}: {p.placements} is no placement in whole "
                                           f"parts: hand over a source with its own shards")
            if local.numel():
                yield Shard(name, local, starts, p.shape)


def _shards(source: WeightSource) -> list[Shard]:
    if hasattr(source, "shards"):
        return list(source.shards())
    return [Shard(name, t, [0] * t.dim(), t.shape) for name, t in source if t is not None]


def _boxes(shards: list[Shard]) -> tuple[dict[Storage, Any], list[Box]]:
    """Where shards lie, and in which storages."""
    storages: dict[Storage, Any] = {}
    numbers: dict[Storage, int] = {}
    boxes = []
    for shard in shards:
        t = shard.tensor
        storage, at = _storage(t)
        number = numbers.setdefault(storage, len(numbers))
        storages[storage] = t.untyped_storage()
        size = t.element_size()
        boxes.append(Box(shard.name, tuple(shard.starts), tuple(t.shape), size, number, at,
                         tuple(n * size for n in t.stride())))
        boxes[-1].check(storage.length)
    return storages, boxes


def _storage(t: torch.Tensor) -> tuple[Storage, int]:
    whole = t.untyped_storage()
    return (Storage(whole.data_ptr(), whole.nbytes(), t.get_device()),
            t.storage_offset() * t.element_size())


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise errors.ArgumentError(f"{name!r} is no type of torch's")
    return found


def _settle(device: torch.device) -> None:
    """Waits for what a card is to write still, or to read of what was there."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _engine(name: str, host: str) -> Engine:
    cards = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    return open_engine(name, host or get_ip(), cards)


# The trainer.


@dataclass
class SluiceTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What a rank of a trainer is told: how many ranks there are, and the group of
    torch.distributed that they are (None: the default one, which one rank alone does not need).
    """

    backend: ClassVar[str] = "sluice"
    world_size: int = 1
    group: Any = None
    timeout: float = LIMIT  # seconds that an update may take at a worker
    host: str = ""  # the address of this host for others; vLLM's own choice where it is empty


class SluiceTrainerWeightTransferEngine(
        TrainerWeightTransferEngine[SluiceTrainerInitInfo]):  # type: ignore[misc]
    """A rank of the trainer, which serves its tensors from `trainer_init` to `shutdown`. They may
    change whenever `send_weights` does not run.
    """

    init_info_cls = SluiceTrainerInitInfo

    def __init__(self, info: SluiceTrainerInitInfo, client: Any, source: Any) -> None:
        if source is None:
            raise errors.ArgumentError("the backend sluice wants a source of weights")
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self.info, self.version, self._session = info, 0, uuid.uuid4().hex
        self._workers: dict[str, tuple[_Hello, Peer]] = {}
        self._engine = _engine(f"trainer-{info.rank}", info.host)
        self._serving = Serving(self._engine)

    @classmethod
    def trainer_init(cls, init_info: SluiceTrainerInitInfo, *, client: Any,
                     source: Any = None) -> SluiceTrainerWeightTransferEngine:
        made = cls(init_info, client, source)
        try:
            offers = made._publish()
            made._together(lambda: client.init_weight_transfer_engine(
                {"session": made._session, "offers": offers, "timeout": init_info.timeout}))
        except BaseException:
            made.shutdown()
            raise
        return made

    def _publish(self) -> list[Any]:
        """Serves what the source has now. Returns the offers of all ranks: where one of them
        fails, each does.
        """
        failed: Optional[Exception] = None
        offers: list[Any] = [None] * self.info.world_size
        try:
            mine: Any = self._offer()
        except Exception as e:
            failed, mine = e, repr(e)
        if self.info.world_size == 1:
            offers = [mine]
        else:
            torch.distributed.all_gather_object(offers, mine, group=self.info.group)
        if failed is not None:
            raise failed
        for rank, offer in enumerate(offers):
            if isinstance(offer, str):
                raise errors.Error(f"rank {rank} has nothing to serve: {offer}")
        return offers

    def _offer(self) -> Offer:
        shards = _shards(self.source)
        for device in {s.tensor.device for s in shards}:
            _settle(device)
        storages, boxes = _boxes(shards)
        regions = self._serving.register(storages)
        told = {m.name: (m.dtype, list(m.shape)) for m in self.source.metadata()}
        for name, tensor, _, shape in shards:
            if told.get(name, (tensor.dtype, list(shape))) != (tensor.dtype, list(shape)):
                raise errors.ArgumentError(f"{name} is {tensor.dtype} of {list(shape)}, and the "
                                           f"source's metadata says {told[name]}")
        meta = [[name, str(dtype).partition(".")[2], shape]
                for name, (dtype, shape) in told.items()]
        return self._serving.publish(regions, boxes, tensors=meta)

    def _together(self, call: Any) -> None:
        """Has the sender call, and all ranks end as that has ended."""
        failed: Optional[BaseException] = None
        if self.is_sender:
            try:
                call()
            except BaseException as e:
                failed = e
        if self.info.world_size > 1:
            said = [None if failed is None else repr(failed)]
            try:
                torch.distributed.broadcast_object_list(said, group=self.info.group, group_src=0)
            except Exception:
                if failed is None:
                    raise
            if failed is None and said[0] is not None:
                raise errors.Error(f"the update failed at rank 0: {said[0]}")
        if failed is not None:
            raise failed

    def send_weights(self) -> None:
        """Has the workers read a new version. When it returns, or raises, no rank's tensors are
        read any more for this version: a worker that reads on finds out that it is over.
        """
        self.version += 1
        self._serving.words[0] = self.version
        try:
            offers = self._publish()
            self._together(lambda: self._send(offers))
        finally:
            self._serving.words[0] = 0

    def _send(self, offers: list[Any]) -> None:
        try:
            self.client.start_weight_update()
        except Exception:
            # For a worker an update is open still that failed at others, or whose trainer died.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            self.client.start_weight_update()
        self.client.update_weights({"session": self._session, "version": self.version,
                                    "offers": offers, "peers": self._peers()})
        self.client.finish_weight_update()

    def _peers(self) -> dict[str, Any]:
        """Whom each worker reads from first: the one before it of those that want the same."""
        end = time.monotonic() + self.info.timeout / 4
        for _ in range(HELLOS_MAX):
            try:
                hello, description = _parsed(self._engine.receive(0).data)
            except errors.TimeoutError:
                break
            except (TypeError, ValueError):  # no word of ours, or the last about a lost peer
                continue
            try:
                peer = self._engine.connect(description, max(0.0, end - time.monotonic()))
                self._workers[hello.worker] = hello, peer
            except errors.Error as e:
                log.warning("no worker will read from one that cannot be reached: %s", e)
        for name, (_, peer) in list(self._workers.items()):
            if is_lost(peer):
                peer.close()
                del self._workers[name]
        before: dict[str, _Hello] = {}
        peers: dict[str, Any] = {}
        for name, (hello, _) in self._workers.items():
            if hello.wants in before:
                peers[name] = before[hello.wants].offer
            before[hello.wants] = hello
        return peers

    def shutdown(self) -> None:
        """Serves no more: a worker that reads just now gets an error, and when this returns the
        tensors are read no more.
        """
        self._serving.words[0] = 0
        self._engine.close()


class _Hello(NamedTuple):
    """What a worker says to rank 0: who it is, the digest of what it wants, and its own offer."""

    worker: str
    wants: str
    offer: Any


def _parsed(data: bytes) -> tuple[_Hello, bytes]:
    """What a worker says, and its description. TypeError or ValueError where it is something else.
    """
    worker, wants, offer = json.loads(data)
    if not all(isinstance(part, str) for part in (worker, wants, *offer)):
        raise ValueError("no words")
    offer = Offer(*offer)
    return _Hello(worker, wants, offer), base64.b64decode(offer.description)


# The workers.


@dataclass
class SluiceInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    session: str
    offers: list[Any]  # of the trainer's ranks
    timeout: float = LIMIT


@dataclass
class SluiceUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    session: str
    version: int
    offers: list[Any]
    peers: dict[str, Any] = field(default_factory=dict)


class SluiceWeightTransferEngine(
        WeightTransferEngine[SluiceInitInfo, SluiceUpdateInfo]):  # type: ignore[misc]
    """The weights of one worker of vLLM. After an update that failed the model has parts of two
    versions: the next one, of this trainer or of another, makes it whole.
    """

    init_info_cls, update_info_cls = SluiceInitInfo, SluiceUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device,
                 model: torch.nn.Module, **more: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version = 0  # that the model has, of the trainer it was told last
        self.in_place = True
        self._me, self._session, self._limit = uuid.uuid4().hex, "", LIMIT
        self._engine: Optional[Engine] = None
        self._trainers: list[Source] = []
        self._followed: Optional[Source] = None
        self._reader: Optional[Reader] = None
        self._serving: Optional[Serving] = None

    def init_transfer_engine(self, info: SluiceInitInfo) -> None:
        """Meets the ranks of a trainer, finds out where their tensors go, and tells rank 0 that we
        can serve others.
        """
        self._forget()
        self._engine = self._engine or _engine(f"worker-{self._me[:8]}", "")
        self._session, self._limit, self.version = info.session, info.timeout, 0
        self._meet(info.offers, self._limit)
        tensors = self._trainers[0].told["tensors"]
        reason = self._why_not_in_place()
        if not reason:
            try:
                shards = _recorded(self.model, tensors)
            except _NotInPlace as e:
                reason = str(e)
        self.in_place = not reason
        if reason:
            log.warning("weights go through load_weights, whole and by a copy: %s", reason)
            return
        self._recorded_at = self._places()
        storages, boxes = _boxes(shards)
        regions: list[Region] = []
        self._reader = Reader(boxes, regions, self._number())
        self._serving = Serving(self._engine, len(self._reader.groups))
        regions += self._serving.register(storages)
        self._reader.plan(self._trainers)  # an error comes now, not in an update
        offer = self._serving.publish(regions, boxes)
        wants = json.dumps([box[:4] for box in boxes]).encode()
        hello = _Hello(self._me, hashlib.sha256(wants).hexdigest(), offer)
        assert self._trainers[0].peer is not None
        self._trainers[0].peer.notify(json.dumps(hello).encode(), self._limit)

    def _number(self) -> int:
        """This worker's number among those of all replicas of one server."""
        p = self.parallel_config
        return int(p.data_parallel_index * p.world_size + p.rank)

    def _meet(self, offers: list[Any], limit: float) -> None:
        """Reads the tables of trainers' ranks that are new or have changed."""
        assert self._engine is not None
        end = time.monotonic() + limit
        while len(self._trainers) < len(offers):
            self._trainers.append(Source(self._engine, f"trainer rank {len(self._trainers)}"))
        changed = [(source, Offer(*offer)) for source, offer in zip(self._trainers, offers)
                   if source.offer != Offer(*offer) or source.lost()]
        if changed and self._reader is not None:
            self._reader.forget()
        for source, offer in changed:
            source.meet(offer, end - time.monotonic())

    def _why_not_in_place(self) -> str:
        """Why what load_weights writes is not what the model computes with; "": it is."""
        if getattr(self.model_config, "quantization", None):
            return f"the model is quantized ({self.model_config.quantization})"
        if hasattr(self.model, "process_weights_after_loading"):
            return f"{type(self.model).__name__} changes weights after loading"
        packs = current_platform.is_cpu() or current_platform.is_xpu()
        plain = () if packs else (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        nothing = QuantizeMethodBase.process_weights_after_loading
        for name, module in self.model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and not isinstance(method, plain):
                if type(method).process_weights_after_loading is not nothing:
                    return f"{type(method).__name__} of {name} changes weights after loading"
        return ""

    def start_weight_update(self) -> None:
        if not self._trainers:
            raise errors.ArgumentError("no trainer is known: call init_weight_transfer_engine")
        if not self.in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base does it, which wants an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        _settle(self.device)

    def receive_weights(self, info: SluiceUpdateInfo) -> None:
        """Reads a version into the model. When it raises, nothing of it lands any more."""
        try:
            self._receive(info)
        except BaseException:
            if not self.in_place:  # puts the parameters back, so that the next update can start
                finalize_layerwise_reload(self.model, self.model_config)
            raise

    def _receive(self, info: SluiceUpdateInfo) -> None:
        if info.session != self._session:
            raise errors.VersionError("the update is of another trainer than the last that called "
                                      "init_weight_transfer_engine: have it call that first")
        if info.version <= self.version:
            raise errors.VersionError(f"the model has version {self.version}, and the update is of "
                                      f"version {info.version}")
        self.version = 0 if self.in_place else self.version
        _settle(self.device)  # nothing that runs still reads the old weights
        begin = time.monotonic()
        end = begin + self._limit
        self._meet(info.offers, self._limit)
        if self.in_place:
            if self._places() != self._recorded_at:
                raise errors.ArgumentError("the model's parameters have other memory than when the "
                                           "trainer was met: have it call trainer_init again")
            assert self._reader is not None and self._serving is not None
            peer = self._peer(info)
            self._reader.update(self._trainers, info.version, end - time.monotonic(),
                                self._serving.words, peer)
        else:  # whole tensors, a layer at a time, for the model's own loader
            self.model.load_weights(self._whole(info.version, end))
        self.version = info.version
        log.info("version %d in %.3f s", info.version, time.monotonic() - begin)

    def _peer(self, info: SluiceUpdateInfo) -> Optional[Source]:
        """The worker of another replica that we read from first, if it answers."""
        told, peer = info.peers.get(self._me), self._followed
        if told is None:
            return None
        if peer is not None and peer.offer == Offer(*told) and not peer.lost():
            return peer
        assert self._engine is not None and self._reader is not None
        if peer is not None:
            self._reader.forget(peer)
            peer.leave()
        peer, self._followed = Source(self._engine, "a worker of another replica"), None
        try:
            peer.meet(Offer(*told), self._limit / 4)
        except errors.Error as e:
            log.warning("all comes from the trainer: %s", e)
            peer.leave()
            return None
        self._followed = peer
        return peer

    def _places(self) -> list[int]:
        return [p.data_ptr() for p in self.model.parameters()]

    def _whole(self, version: int, end: float) -> Iterator[tuple[str, torch.Tensor]]:
        told = {name: (_dtype(dtype), shape)
                for name, dtype, shape in self._trainers[0].told["tensors"]}
        for names in layerwise_groups(list(told)):
            made = [(name, torch.empty(told[name][1], dtype=told[name][0], device=self.device))
                    for name in names]
            self._fetch([Shard(name, t, [0] * t.dim(), t.shape) for name, t in made if t.numel()],
                        version, end)
            yield from made

    def _fetch(self, shards: list[Shard], version: int, end: float) -> None:
        assert self._engine is not None
        storages, boxes = _boxes(shards)
        sources = [(f"load-{i}", _memory(s)) for i, s in enumerate(storages)]
        regions: list[Region] = self._engine.register_many(sources) if sources else []
        reader = Reader(boxes, regions, self._number())
        try:
            reader.update(self._trainers, version, max(0.0, end - time.monotonic()),
                          reader.state())
        finally:
            reader.forget()
            self._engine.close_many(regions)

    def finish_weight_update(self) -> None:
        if not self.in_place:
            finalize_layerwise_reload(self.model, self.model_config)
            return
        for module in self.model.modules():
            if is_deferred_attention_layer(module):  # it keeps what it computes from weights
                module.process_weights_after_loading(self.model_config.dtype)

    def _forget(self) -> None:
        """Leaves the trainer and the peers; the model's memory stays registered nowhere."""
        if self._reader is not None:
            self._reader.forget()
        for source in [*self._trainers, *([self._followed] if self._followed else [])]:
            source.leave()
        self._trainers.clear()
        self._followed = None
        if self._serving is not None:
            self._serving.close()
        self._reader = self._serving = None

    def shutdown(self) -> None:
        """Ends what runs. The model's memory is its own again when this returns."""
        self._trainers.clear()
        self._followed = self._reader = self._serving = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _memory(s: Storage) -> Any:
    from .._segments import DeviceMemory, HostMemory

    return (HostMemory(s.address, s.length) if s.device < 0
            else DeviceMemory(s.address, s.length, s.device))


class _NotInPlace(Exception):
    """Why a model's loader cannot be replaced by reads into its parameters."""


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes which part of which placeholder a loader copies where, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, tuple[str, torch.Tensor]] = {}
        self.shards: list[Shard] = []

    def placeholder(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        made = torch.empty(list(shape), dtype=dtype, device="meta")
        self.of[made.untyped_storage()._cdata] = name, made
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if target is None or target.is_meta or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._note(target, args[1])
        elif func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # of padding
            raise _NotInPlace(f"its loader calls {func} on a parameter")
        return target

    def _note(self, target: torch.Tensor, part: torch.Tensor) -> None:
        name, whole = self.of.get(part.untyped_storage()._cdata, ("", None))
        if whole is None:
            raise _NotInPlace("its loader computes what it writes into a parameter")
        if target.dtype != whole.dtype or part.dtype != whole.dtype:
            raise _NotInPlace(f"{name} is {whole.dtype} at the trainer, and {target.dtype} here")
        if target.shape != part.shape:
            raise _NotInPlace(f"its loader writes {name} to several places at once")
        if not part.numel():
            return
        box = box_of(whole.shape, part.storage_offset(),
                     zip(part.shape, part.stride(), target.stride()))
        if box is None:
            raise _NotInPlace(f"its loader takes parts of {name} that are no box")
        starts, shape, strides = box
        self.shards.append(Shard(name, target.as_strided(shape, strides), starts, whole.shape))


def _recorded(model: torch.nn.Module, tensors: list[Any]) -> list[Shard]:
    """What the loader of a model writes where, for tensors of these names, types and shapes."""
    recorder = _Recorder()
    weights = [(name, recorder.placeholder(name, _dtype(dtype), shape))
               for name, dtype, shape in tensors]
    before = {p: p.data for p in model.parameters()}
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(weights))
    except _NotInPlace:
        raise
    except Exception as e:  # whatever a loader does with a tensor that has no data
        raise _NotInPlace(f"its loader cannot be asked: {type(e).__name__}: {e}") from None
    finally:
        moved = [p for p, data in before.items() if p.data.data_ptr() != data.data_ptr()]
        for p in moved:
            p.data = before[p]
    if moved:
        raise _NotInPlace("its loader gives parameters other memory")
    try:
        kept = last_writes([Place(t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape),
                                  t.stride()) for t in (s.tensor for s in recorder.shards)])
    except ValueError:
        raise _NotInPlace("its loader writes some of a parameter twice") from None
    return [recorder.shards[k] for k in kept]


register()  # a trainer imports this module, and vLLM loads the plugin in its own processes alone
