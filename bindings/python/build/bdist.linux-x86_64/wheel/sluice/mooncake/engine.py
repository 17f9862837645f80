# SPDX-License-Identifier: Apache-2.0
"""Mooncake's TransferEngine, as its Python wheel has it."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any, Optional, Sequence

from .. import errors
from .._patience import CONNECT, transfer_timeout
from .._region import Region
from .._segments import DeviceMemory, HostMemory
from ..engine import Engine
from ..transfer import Transfer
from . import handshake, memory
from .notices import TransferNotify, TransferOpcode, decode, encode
from .ranges import Ranges
from .sessions import Sessions

logger = logging.getLogger("sluice.mooncake")

# What the wheel returns.
_FAILED, _NOT_REGISTERED, _OVERLAPS, _NO_ANSWER = -1, -3, -7, -102
_DONE, _PENDING = 1, 0

# the last two: an answer of another shape
_CANNOT = (errors.Error, OSError, ValueError, KeyError, TypeError, RecursionError)


class TransferEngine:
    """Memory that peers reach by its addresses, and transfers with theirs.

    Any thread may call anything. Sessions are named "host:port", with the port of the peer's
    `get_rpc_port`.
    """

    def __init__(self) -> None:
        self._engine: Optional[Engine] = None
        self._server: Optional[handshake.Server] = None
        self._lock = threading.Lock()  # guards what follows
        self._ranges: Ranges[Region] = Ranges()
        self._numbers = itertools.count(1)
        # asynchronous ones by their numbers, until their end is told
        self._batches: dict[int, Transfer] = {}
        # those whose end is known and was not told, with the code for it
        self._ended: dict[int, int] = {}

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str,
                   device_name: str) -> int:
        """Opens the engine.

        The metadata server is "P2PHANDSHAKE"; a port after the host is ignored, as in the wheel.

        The protocol "tcp" reaches other hosts in plain text; "rdma" uses the devices named, or all.
        """
        try:
            if metadata_server != "P2PHANDSHAKE":
                raise ValueError(f"the metadata server is {metadata_server!r}: P2PHANDSHAKE is the "
                                 f"only one here")
            host, _ = handshake.parse(local_hostname)
            self.close()
            self._engine = Engine(local_hostname, memory.backends(host, protocol, device_name),
                                  transfer_timeout=transfer_timeout(), connect_timeout=CONNECT)
            self._sessions = Sessions(self._engine)
            self._server = handshake.Server(self._offer)
        except _CANNOT as e:
            self.close()
            return _failed("initialize", e)
        return 0

    def initialize_ext(self, local_hostname: str, metadata_server: str, protocol: str,
                       device_name: str, metadata_type: str) -> int:
        """The same: the kind of a metadata server says nothing where there is none."""
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def _opened(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("call initialize first, and see that it returns 0")
        return self._engine

    def get_rpc_port(self) -> int:
        """The port under which peers name this engine."""
        self._opened()
        assert self._server is not None
        return self._server.port

    def get_engine(self) -> Engine:
        """The engine of sluice beneath, for its `stats`."""
        return self._opened()

    def close(self) -> None:
        """Ends everything. The wheel has no such call: it ends with the object."""
        server, self._server = self._server, None
        engine, self._engine = self._engine, None
        if server is not None:
            server.close()
        if engine is not None:
            engine.close()
        self._ranges, self._batches, self._ended = Ranges(), {}, {}

    def __del__(self) -> None:
        try:
            self.close()
        except errors.Error:  # the child of a fork has nothing to close
            pass

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Lets peers reach a range, which must not overlap another."""
        engine = self._opened()
        with self._lock:
            try:
                if capacity <= 0:
                    raise ValueError("the range is empty")
                self._ranges.check(buffer_addr, capacity)
                card = memory.card_of(buffer_addr, location)
                source: Any = HostMemory(buffer_addr, capacity) if card is None else DeviceMemory(
                    buffer_addr, capacity, card)
                region = engine.register(str(next(self._numbers)), source)
                self._ranges.add(buffer_addr, capacity, region)
            except KeyError as e:
                return _failed("register_memory", e, _OVERLAPS)
            except _CANNOT as e:
                return _failed("register_memory", e)
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        """Ends a range by its address: no peer reaches it any more when this returns 0."""
        self._opened()
        with self._lock:
            region = self._ranges.at(buffer_addr)
            if region is None:
                return _failed("unregister_memory", KeyError(f"{buffer_addr:#x} is not registered"),
                               _NOT_REGISTERED)
            try:
                for number in [n for n, transfer in self._batches.items() if transfer.done]:
                    self._end(number)
                region.close()
            except errors.Error as e:
                return _failed("unregister_memory", e)
            self._ranges.drop(buffer_addr)
        return 0

    def _end(self, number: int) -> None:
        """Keeps the outcome of a transfer that has ended, and lets go of what it lists."""
        code = _DONE
        try:
            with self._batches.pop(number) as transfer:
                transfer.wait(0)
        except errors.Error as e:
            code = _failed(f"transfer {number}", e)
        self._ended[number] = code

    def batch_register_memory(self, buffer_addresses: Sequence[int], capacities: Sequence[int],
                              location: str = "*") -> int:
        """Registers all, or none."""
        if len(buffer_addresses) != len(capacities):
            return _failed("batch_register_memory", ValueError("the two lists have "
                "different lengths"), _OVERLAPS)
        done: list[int] = []
        for address, capacity in zip(buffer_addresses, capacities):
            code = self.register_memory(address, capacity, location)
            if code:
                for registered in done:
                    self.unregister_memory(registered)
                return code
            done.append(address)
        return 0

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Ends all. The first failure is the result, and the others are tried all the same."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), 0)

    def _offer(self) -> handshake.Offer:
        with self._lock:
            ranges = [(region.name, address, length) for address, length, region in self._ranges]
            return handshake.Offer(self._opened().describe(), ranges)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Where the peer's first registered range begins, 0 where there is none."""
        try:
            return self._sessions.meet(segment_name).first()
        except _CANNOT as e:
            _failed("get_first_buffer_address", e)
            return 0

    def send_probe(self, peer_server_name: str) -> int:
        """0 when the peer answers."""
        self._opened()
        try:
            handshake.probe(peer_server_name)
        except _CANNOT as e:
            return _failed("send_probe", e, _NO_ANSWER)
        return 0

    def get_notifies(self) -> list[TransferNotify]:
        """The notifications that have come since the last call."""
        engine = self._opened()
        found: list[TransferNotify] = []
        while True:
            try:
                note = engine.receive(0)
            except errors.WaitTimeout:
                return found
            if note.lost:
                continue
            try:
                found.append(decode(note.data))
            except ValueError as e:
                _failed("get_notifies", e)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: Optional[TransferNotify] = None,
        transport_hint: str = "",
    ) -> int:
        """Copies between our memory and the peer's, and waits for the end."""
        return self.batch_transfer_sync(target_hostname, [buffer], [peer_buffer_address], [length],
                                        opcode, notify)

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int,
        transport_hint: str = ""
    ) -> int:
        """Writes to the peer."""
        return self.transfer_sync(target_hostname, buffer, peer_buffer_address, length,
                                  TransferOpcode.Write)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int,
        transport_hint: str = ""
    ) -> int:
        """Reads from the peer."""
        return self.transfer_sync(target_hostname, buffer, peer_buffer_address, length,
                                  TransferOpcode.Read)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: Optional[TransferNotify] = None,
        transport_hint: str = "",
    ) -> int:
        """Several copies as one transfer: 0 when all bytes have arrived. The notification follows
        them.
        """
        self._opened()
        try:
            if not any(lengths) and len(buffers) == len(peer_buffer_addresses) == len(lengths):
                return self._only(target_hostname, notify)
            for fresh in (False, True):
                taken = False
                try:
                    with self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths,
                                        opcode, fresh) as transfer:
                        if notify is not None:
                            transfer.message(encode(notify))
                            taken = True  # perhaps, where the peer is lost then
                        transfer.run()
                    return 0
                except (errors.PeerLostError, errors.RevokedError) as e:
                    # restarted, or registered anew, since we asked it
                    if fresh or (taken and isinstance(e, errors.PeerLostError)):
                        raise
        except _CANNOT as e:
            return _failed(f"transfer with {target_hostname}", e)
        return 0

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Writes to the peer."""
        return self.batch_transfer_sync(target_hostname, buffers, peer_buffer_addresses, lengths,
                                        TransferOpcode.Write)

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Reads from the peer."""
        return self.batch_transfer_sync(target_hostname, buffers, peer_buffer_addresses, lengths,
                                        TransferOpcode.Read)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Starts several copies. The number is for `get_batch_transfer_status`; 0 where they could
        not be started.
        """
        self._opened()
        try:
            transfer = self._transfer(target_hostname, buffers, peer_buffer_addresses, lengths,
                                      opcode, False)
            transfer.post()
        except _CANNOT as e:
            _failed(f"transfer with {target_hostname}", e)
            return 0
        with self._lock:
            number = next(self._numbers)
            self._batches[number] = transfer
        return number

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts writing to the peer."""
        return self.batch_transfer_async(target_hostname, buffers, peer_buffer_addresses, lengths,
                                         TransferOpcode.Write)

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: Sequence[int], peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts reading from the peer."""
        return self.batch_transfer_async(target_hostname, buffers, peer_buffer_addresses, lengths,
                                         TransferOpcode.Read)

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int,
        transport_hint: str = ""
    ) -> int:
        """Starts one write. The number is for `transfer_check_status`; 0 where it could not be
        started.
        """
        return self.batch_transfer_async_write(target_hostname, [buffer], [peer_buffer_address],
                                               [length])

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for all: 0 when each has ended well. The numbers are used up."""
        result = 0
        for number in batch_ids:
            with self._lock:
                transfer = self._batches.get(number)
            try:
                if transfer is not None:
                    transfer.wait()
            except errors.Error:  # transfer_check_status tells it
                pass
            if self.transfer_check_status(number) != _DONE:
                result = _FAILED
        return result

    def transfer_check_status(self, batch_id: int) -> int:
        """1 when it has ended well, 0 while it is under way, -1 when it has failed. Its end is told
        once.
        """
        with self._lock:
            if batch_id in self._batches:
                if not self._batches[batch_id].done:
                    return _PENDING
                self._end(batch_id)
            if batch_id not in self._ended:
                return _failed("transfer_check_status", KeyError(f"there is no transfer "
                    f"{batch_id}, or its end was told"))
            return self._ended.pop(batch_id)

    def _only(self, session: str, notify: Optional[TransferNotify]) -> int:
        """The end of a transfer of no bytes."""
        peer = self._sessions.meet(session).peer
        if notify is not None:
            peer.notify(encode(notify))
        return 0

    def _transfer(
        self, session: str, buffers: Sequence[int], addresses: Sequence[int],
        lengths: Sequence[int], opcode: TransferOpcode, fresh: bool
    ) -> Transfer:
        """A transfer with these copies listed, which the peer knows."""
        if not len(buffers) == len(addresses) == len(lengths):
            raise ValueError("buffers, addresses of the peer and lengths differ in number")
        peer = self._sessions.meet(session, fresh)
        with self._lock:
            local = [self._ranges.find(a, n) for a, n in zip(buffers, lengths)]
        try:
            remote = peer.find_all(addresses, lengths)
        except errors.TokenError:  # another engine has this name, and the loss is not known yet
            peer = self._sessions.meet(session, True)
            remote = peer.find_all(addresses, lengths)
        transfer = peer.peer.transfer("write" if opcode == TransferOpcode.Write else "read")
        try:
            memory.fill(transfer, local, remote, buffers, addresses, lengths)
        except BaseException:
            transfer.close()
            raise
        return transfer


def _failed(what: str, error: Exception, code: int = _FAILED) -> int:
    logger.error("%s: %s", what, error)
    return code
