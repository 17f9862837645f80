# SPDX-License-Identifier: Apache-2.0
"""Ray Direct Transport over sluice: actors hand tensors to each other, read from memory to memory.

    ray.experimental.register_tensor_transport("sluice", ["cpu", "cuda"], SluiceTransport,
    torch.Tensor)

before the actors are made; then `@ray.method(tensor_transport="sluice")`. Ray 2.55 or later.
"""

from __future__ import annotations

import array
import itertools
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import ray
from ray.exceptions import RayDirectTransportError
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from .. import errors
from .._config import Backend, Identity
from .._patience import CONNECT
from .._region import Lease, Memory, Region
from .._segments import DeviceMemory, HostMemory
from ..engine import Engine
from ..peer import Peer, Remote
from ..transfer import Transfer
from . import _tensors



@dataclass
class SluiceMetadata(TensorTransportMetadata):  # type: ignore[misc]
    """What a receiver needs: the sender's engine, a lease a span of its memory, and each tensor's
    span and offset.
    """

    description: bytes = b""
    leases: tuple[bytes, ...] = ()
    spans: bytes = b""  # an unsigned int a tensor; nothing where there is one span
    offsets: bytes = b""  # eight bytes a tensor


class SluiceTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport of one process. Make a subclass to change what it opens.

    Between hosts it takes RDMA where there is a device, and else tcp: encrypted, by the key that
    comes with the metadata, or by an `identity`, or in `plaintext` on a network that is trusted.
    """

    name = "SLUICE"
    identity: Optional[Identity] = None
    plaintext = False

    def __init__(self) -> None:
        # guards what follows; the collector may close a fetch in between
        self._lock = threading.RLock()
        self._engine: Optional[Engine] = None
        self._numbers = itertools.count(1)
        self._registered: dict[_tensors.Storage, _Registered] = {}
        self._exports: dict[str, _Export] = {}
        # under way; one that is dropped ends
        self._fetches: dict[str, weakref.WeakSet[SluiceFetch]] = {}
        self._unproven: list[Any] = []  # what holds memory in which bytes may land still
        self._peers: dict[bytes, Peer] = {}
        self._reach: dict[Any, bool] = {}

    def tensor_transport_backend(self) -> str:
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def backends(self) -> list[Backend]:
        """What the engine opens. On one host shm is enough."""
        opened = [Backend("shm"), Backend("rdma", optional=True)]
        cards = _cards()
        if cards:
            opened.insert(1, Backend("cuda", optional=True, devices=cards))
        listen = f"{ray.util.get_node_ip_address()}:0"
        files: dict[str, Any] = {} if self.identity is None else dict(zip(("certificate", "key",
            "authority"), self.identity))
        opened.append(Backend("tcp", listen=listen, plaintext=self.plaintext, **files))
        return opened

    def engine(self) -> Engine:
        """The engine of this process, opened at first use."""
        with self._lock:
            if self._engine is None:
                self._engine = Engine(f"ray-{self.name.lower()}", self.backends(),
                                      connect_timeout=CONNECT)
                self._description = self._engine.describe()
            return self._engine

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Whether an engine can be opened there. Ray asks before each task: the answer is kept."""
        name = self.name

        def opens(_: Any) -> bool:
            from ray.experimental.rdt.util import get_tensor_transport_manager

            get_tensor_transport_manager(name).engine()
            return True

        key = actor._actor_id
        if key not in self._reach:
            self._reach[key] = ray.get(actor.__ray_call__.options(
                concurrency_group="_ray_system").remote(opens))
        return self._reach[key]

    def extract_tensor_transport_metadata(self, obj_id: str,
                                          rdt_object: list[Any]) -> SluiceMetadata:
        """Leases the memory of an object to whichever process Ray gives the metadata to. Many small
        tensors are copied.
        """
        with self._lock:
            known = self._exports.get(obj_id)
        if known is not None:  # a task that was tried again
            return known.metadata
        kinds = {str(getattr(t, "device", "cpu")).partition(":")[0] for t in rdt_object} or {"cpu"}
        if len(kinds) > 1:
            raise ValueError(f"tensors of one object lie on {sorted(kinds)}: put those of each "
                             f"kind of device into an object of their own")
        kind = kinds.pop()
        if kind != "cpu":
            _synchronize(rdt_object)
        metadata = SluiceMetadata(tensor_meta=_tensors.describe(rdt_object), tensor_device=kind)
        export = _Export(metadata)
        try:
            self._lease(export, _tensors.plan(rdt_object))
        except BaseException:
            self._end(export)
            raise
        with self._lock:
            self._exports[obj_id] = export
        return metadata

    def _lease(self, export: _Export, plan: _tensors.Plan) -> None:
        engine = self.engine()
        for storage, keep in plan.storages:
            export.registered.append(self._register(storage, keep))
        regions = [r.region for r in export.registered]
        if plan.packed:
            export.memory = engine.alloc(plan.packed, huge=False)
            plan.copy_in(export.memory.address)
            export.packed = engine.register(self._new_name(), export.memory, private=True)
            regions.append(export.packed)
        used = plan.used(len(regions))
        for region, (start, end) in zip(regions, used):
            export.leases.append(region.lease(start, end - start, read_only=True))
        m = export.metadata
        m.description, m.leases = self._description, tuple(lease.token() for lease in export.leases)
        m.offsets = array.array("Q", [offset - used[i][0] if n else 0 for (i, offset),
                                      n in zip(plan.where, plan.lengths)]).tobytes()
        if len(regions) > 1:
            m.spans = array.array("I", [span for span, _ in plan.where]).tobytes()

    def _new_name(self) -> str:
        return str(next(self._numbers))

    def _register(self, storage: _tensors.Storage, keep: Any) -> _Registered:
        """The region of a storage, which objects and fetches share."""
        engine = self.engine()
        with self._lock:
            found = self._registered.get(storage)
            if found is None:
                source: Any = HostMemory(storage.address, storage.length, storage.writable)
                if storage.device >= 0:
                    source = DeviceMemory(storage.address, storage.length, storage.device)
                found = _Registered(storage, engine.register(self._new_name(), source,
                    private=True), keep)
                self._registered[storage] = found
            found.users += 1
            return found

    def _unregister(self, registered: _Registered) -> None:
        with self._lock:
            registered.users -= 1
            if registered.users:
                return
            del self._registered[registered.storage]
        try:
            registered.region.close()
        except errors.Error:
            self._unproven.append(registered)

    def _end(self, export: _Export) -> None:
        """Ends leases first: when one is revoked, no reader's access lands any more."""
        failed: Optional[errors.Error] = None
        for lease in export.leases:
            try:
                lease.revoke()
            except errors.Error as e:  # the others end all the same
                failed = failed or e
        try:
            if export.packed is not None:
                export.packed.close()
            export.memory = None
        except errors.Error as e:
            failed = failed or e
            self._unproven.append(export)
        for registered in export.registered:
            self._unregister(registered)
        if failed is not None:
            raise failed

    def garbage_collect(self, obj_id: str, tensor_transport_meta: TensorTransportMetadata,
                        tensors: list[Any]) -> None:
        """Ends the leases of an object, and of no other."""
        with self._lock:
            export = self._exports.pop(obj_id, None)
        if export is not None:
            self._end(export)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any,
                                  backend: Optional[str] = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def send_multiple_tensors(self, tensors: list[Any], tensor_transport_metadata: Any,
                              communicator_metadata: Any) -> None:
        raise NotImplementedError("receivers read: Ray does not call this for a transport that is "
                                  "one-sided")

    def fetch_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any,
        target_buffers: Optional[list[Any]] = None
    ) -> SluiceFetch:
        """Begins to read, into the buffers where there are some."""
        m: SluiceMetadata = tensor_transport_metadata
        spans = array.array("I", m.spans or bytes(4 * len(m.tensor_meta)))
        if target_buffers:
            tensors, plan = target_buffers, _tensors.plan(target_buffers)
        else:
            tensors, plan = _tensors.fresh(m.tensor_meta, spans, m.tensor_device)
        fetch = SluiceFetch(obj_id, tensors, plan, self)
        try:
            fetch.begin(m, spans)
        except Exception:
            fetch.close()
            raise _failed(obj_id) from None
        return fetch

    def wait_fetch_complete(self, fetch_request: SluiceFetch, timeout: float = -1) -> list[Any]:
        """The tensors, once they are there. TimeoutError ends the wait, not the fetch."""
        try:
            fetch_request.wait(None if timeout < 0 else timeout)
        except errors.WaitTimeout:
            raise TimeoutError(
                f"object {fetch_request.obj_id} has not arrived within {timeout} s") from None
        except Exception:
            fetch_request.close()
            raise _failed(fetch_request.obj_id) from None
        tensors: list[Any] = fetch_request.tensors
        return tensors

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any,
        target_buffers: Optional[list[Any]] = None
    ) -> list[Any]:
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata,
                                            communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Ends the fetches of an object that are under way: no byte of theirs lands any more when
        this returns.
        """
        with self._lock:
            fetches = list(self._fetches.get(obj_id, ()))
        for fetch in fetches:
            fetch.abort()

    def _peer(self, description: bytes) -> Peer:
        engine = self.engine()
        with self._lock:
            known = self._peers.get(description)
            if known is not None and not known.lost:
                return known
            lost = [(d, p) for d, p in self._peers.items() if p.lost]
            for d, p in lost:
                del self._peers[d]
        for _, p in lost:
            p.close()
        peer = engine.connect(description, CONNECT)
        with self._lock:
            return self._peers.setdefault(description, peer)


class _Registered:
    """A storage that is registered while `users` of it are left."""

    def __init__(self, storage: _tensors.Storage, region: Region, keep: Any) -> None:
        self.storage, self.region, self.keep, self.users = storage, region, keep, 0


class _Export:
    """What an object holds at its sender."""

    def __init__(self, metadata: SluiceMetadata) -> None:
        self.metadata = metadata
        self.registered: list[_Registered] = []
        self.memory: Optional[Memory] = None
        self.packed: Optional[Region] = None
        self.leases: list[Lease] = []


class SluiceFetch(FetchRequest):  # type: ignore[misc]
    """A read of one object, under way or done. It lets go of everything when its end is known, or
    when it is dropped.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__  # each is itself alone

    def __init__(self, obj_id: str, tensors: list[Any], plan: _tensors.Plan,
                 transport: SluiceTransport) -> None:
        super().__init__(obj_id=obj_id, tensors=tensors)
        self._transport, self._plan = transport, plan
        self._transfer: Optional[Transfer] = None
        self._remotes: list[Remote] = []
        self._registered: list[_Registered] = []
        self._memory: Optional[Memory] = None
        self._packed: Optional[Region] = None
        self._lock = threading.RLock()  # one thread at a time posts, copies, aborts or closes
        self._aborted = False

    def begin(self, m: SluiceMetadata, spans: Sequence[int]) -> None:
        """Lists a piece a tensor, and posts."""
        if not m.leases:
            return
        t, plan = self._transport, self._plan
        with t._lock:  # first: an abort that does not find it would promise too much
            t._fetches.setdefault(self.obj_id, weakref.WeakSet()).add(self)
        peer = t._peer(m.description)
        for storage, keep in plan.storages:
            self._registered.append(t._register(storage, keep))
        regions = [r.region for r in self._registered]
        if plan.packed:
            self._memory = t.engine().alloc(plan.packed, huge=False)
            self._packed = t.engine().register(t._new_name(), self._memory, private=True)
            regions.append(self._packed)
        for token in m.leases:
            self._remotes.append(peer.lease(token))
        self._transfer = peer.transfer("read")
        lists: dict[tuple[int, int], array.array[int]] = {}
        for (here, at), span, there, length in zip(plan.where, spans, array.array("Q", m.offsets),
                                                   plan.lengths):
            if length:
                lists.setdefault((here, span), array.array("Q")).extend((at, there, length))
        for (here, span), flat in lists.items():
            rows = memoryview(flat).cast("B").cast("Q", (len(flat) // 3, 3))
            self._transfer.add_many(regions[here], self._remotes[span], rows)
        with self._lock:
            self._check()
            self._transfer.post()

    def _check(self) -> None:
        """Preconditions: _lock is held: abort has not returned, or nothing follows."""
        if self._aborted:
            raise errors.AbortedError(f"the fetch of {self.obj_id} was aborted")

    def wait(self, timeout: Optional[float]) -> None:
        """Waits for the outcome, and keeps nothing when it is success."""
        transfer = self._transfer
        if transfer is None:
            return
        transfer.wait(timeout)
        with self._lock:
            self._check()
            if self._memory is not None:
                self._plan.copy_out(self._memory.address)
            self.close()

    def abort(self) -> None:
        """Ends it: its `wait` then raises."""
        with self._lock:  # behind a post, or a copy, in hand
            self._aborted = True
            transfer = self._transfer
        try:
            if transfer is not None:
                transfer.abort()
        except errors.ClosedError:  # it has ended meanwhile
            pass

    def close(self) -> None:
        """Ends it where it is under way, and lets go of memory and leases."""
        with self._lock:
            transfer, self._transfer = self._transfer, None
            self._forget()
            if transfer is not None:
                transfer.close()
            for remote in self._remotes:
                remote.close()
            self._remotes = []
            if self._packed is not None:
                self._packed.close()
            self._packed = self._memory = None
            for registered in self._registered:
                self._transport._unregister(registered)
            self._registered = []

    def _forget(self) -> None:
        t = self._transport
        with t._lock:
            left = t._fetches.get(self.obj_id)
            if left is not None:
                left.discard(self)
                if not left:
                    del t._fetches[self.obj_id]

    def __del__(self) -> None:
        try:
            self.close()
        except errors.Error:  # the engine is closed: it holds nothing either
            pass


def _failed(obj_id: str) -> Exception:
    error: Exception = RayDirectTransportError(f"object {obj_id} was not handed over: is its "
                                               f"sender alive?\n{traceback.format_exc()}")
    return error


def _cards() -> list[int]:
    """The cards that Ray lets this process use."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return list(range(cuda.device_count())) if cuda is not None and cuda.is_available() else []


def _synchronize(tensors: Sequence[Any]) -> None:
    """Waits for what is to fill the tensors."""
    import torch

    for device in {t.device for t in tensors}:
        torch.cuda.synchronize(device)
