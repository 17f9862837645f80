# SPDX-License-Identifier: Apache-2.0
"""The transport for Ray without actors: what it registers, what it promises, what it gives back."""

from __future__ import annotations

import gc
import pickle
from typing import Any, Callable

import numpy as np
import pytest
import torch
from ray.exceptions import RayDirectTransportError
from sluice import Backend, errors
from sluice.integrations import _tensors
from sluice.integrations.ray import SluiceTransport
from sluice.transfer import Transfer

MIB = 1 << 20


def handed(pair: Any, tensors: list[Any], targets: Any = None) -> list[Any]:
    sender, receiver = pair
    metadata = pickle.loads(pickle.dumps(sender.extract_tensor_transport_metadata("o", tensors)))
    got: list[Any] = receiver.recv_multiple_tensors("o", metadata, None, targets)
    sender.garbage_collect("o", metadata, tensors)
    assert not sender._registered and not receiver._registered and not receiver._fetches
    return got


def mixed_torch() -> list[torch.Tensor]:
    base = torch.arange(10000.0)
    return [
        base[5000:6000], base[100:200], base[150:250], torch.ones(3, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.empty(0, 3), torch.tensor(5), torch.randn(1 << 18), torch.ones(7, dtype=torch.int8),
        torch.randn(9, dtype=torch.float64),
        torch.randn(4, dtype=torch.complex64), torch.randn(5, requires_grad=True),
    ]  # fmt: skip


def mixed_numpy() -> list[Any]:
    base = np.arange(10000.0)
    frozen = np.arange(5)
    frozen.flags.writeable = False
    return [base[5000:6000], base[100:200].reshape(10, 10), np.zeros((0, 2)), np.float16([1, 2]),
            np.array(3), frozen, np.frombuffer(b"ab", "u1")]


def same(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype and (a == b).all())


@pytest.mark.parametrize("make", [mixed_torch, mixed_numpy, lambda: [], lambda: [torch.randn(3) + i
    for i in range(1000)]])
def test_all_kinds(pair: Any, make: Callable[[], list[Any]]) -> None:
    given = make()
    got = handed(pair, given)
    assert len(got) == len(given) and all(map(same, given, got))


def test_metadata_is_a_few_bytes_a_tensor(pair: Any) -> None:
    whole = torch.arange(10000 * 16.0)
    for tensors in ([torch.randn(100) for _ in range(1000)], [whole[16 * i : 16 * i + 10]
        for i in range(10000)]):
        metadata = pair[0].extract_tensor_transport_metadata(str(len(tensors)), tensors)
        assert len(pickle.dumps(metadata)) < 12 * len(tensors) and len(metadata.leases) == 1


def test_target_buffers_are_filled_in_place(pair: Any) -> None:
    given = [torch.randn(MIB), torch.arange(5)] + [torch.full((7,), i) for i in range(20)]
    buffers = [torch.zeros_like(t) for t in given]
    got = handed(pair, given, buffers)
    assert all(g is b for g, b in zip(got, buffers)) and all(map(same, given, buffers))
    assert _tensors.plan([torch.zeros(MIB) for _ in range(100)]).copies == [
    ], "large buffers are read into directly"


def test_only_the_part_of_a_storage_that_is_handed_over_is_leased(pair: Any) -> None:
    whole = torch.arange(10000.0)
    metadata = pair[0].extract_tensor_transport_metadata("o", [whole[2000:3000]])
    remote = pair[1]._peer(metadata.description).lease(metadata.leases[0])
    assert remote.length == 4000
    remote.close()


def test_what_cannot_be_handed_over(pair: Any) -> None:
    for bad in (torch.zeros(4, 4).t(), np.zeros((4, 4)).T, np.array([object()])):
        with pytest.raises(ValueError, match="hand"):
            pair[0].extract_tensor_transport_metadata("o", [bad])
    assert not pair[0]._exports and not pair[0]._registered


def test_a_freed_object_is_out_of_reach_and_others_are_not(pair: Any) -> None:
    sender, receiver = pair
    weights = torch.arange(1000.0)
    first, second = (sender.extract_tensor_transport_metadata(o, [weights])
                     for o in ("first", "second"))
    sender.garbage_collect("first", first, [weights])
    sender.garbage_collect("first", first, [weights])
    with pytest.raises(RayDirectTransportError, match="first"):
        receiver.recv_multiple_tensors("first", first, None)
    assert same(receiver.recv_multiple_tensors("second", second, None)[0], weights)
    again = sender.extract_tensor_transport_metadata("second", [weights])
    assert again is second, "a task that was tried again"


def test_a_fetch_is_asynchronous(pair: Any) -> None:
    sender, receiver = pair
    given = [torch.randn(8 * MIB)]
    metadata = sender.extract_tensor_transport_metadata("o", given)
    fetches = [receiver.fetch_multiple_tensors("o", metadata, None) for _ in range(3)]
    for fetch in fetches:
        try:
            receiver.wait_fetch_complete(fetch, 0)
        except TimeoutError:
            pass
        assert same(receiver.wait_fetch_complete(fetch, -1)[0], given[0])
        assert same(receiver.wait_fetch_complete(fetch)[0], given[0]), "asked once more"
    assert not receiver._fetches and not receiver._registered


def test_a_fetch_that_is_dropped_ends(pair: Any) -> None:
    sender, receiver = pair
    metadata = sender.extract_tensor_transport_metadata("o", [torch.randn(8 * MIB)])
    fetch = receiver.fetch_multiple_tensors("o", metadata, None)
    del fetch
    gc.collect()
    assert not receiver._fetches and not receiver._registered and not receiver._unproven


def test_after_an_abort_no_byte_lands(pair: Any) -> None:
    sender, receiver = pair
    given = [torch.ones(64 * MIB)]
    metadata = sender.extract_tensor_transport_metadata("o", given)
    probe = sender.extract_tensor_transport_metadata("probe", [torch.ones(16 * MIB)])
    aborted = 0
    for _ in range(20):  # on a busy machine one may end before its abort
        target = torch.zeros(64 * MIB)
        fetch = receiver.fetch_multiple_tensors("o", metadata, None, [target])
        receiver.abort_transport("o", None)
        landed = int(target.count_nonzero())
        receiver.recv_multiple_tensors("probe", probe, None)
        assert int(target.count_nonzero()) == landed
        try:
            receiver.wait_fetch_complete(fetch)
            assert landed == 64 * MIB
        except RayDirectTransportError as e:
            assert "o was not handed over" in str(e)
            aborted += 1
            break
    assert aborted
    receiver.abort_transport("o", None)  # what is not under way
    assert same(receiver.recv_multiple_tensors("o", metadata, None)[0],
                given[0]), "the next fetch is another"


@pytest.mark.parametrize("where", ["connect", "copy"])
def test_an_abort_at_any_moment(pair: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """While the fetch connects, and between the end of its transfer and the copy of what was
    packed."""
    sender, receiver = pair
    given = [torch.full((16,), 7.0) for _ in range(8)]
    targets = [torch.zeros(16) for _ in given]
    metadata = sender.extract_tensor_transport_metadata("o", given)
    owner, name = (receiver, "_peer") if where == "connect" else (Transfer, "wait")
    real = getattr(owner, name)

    def beside(*args: Any) -> Any:
        result = real(*args)
        receiver.abort_transport("o", None)
        return result

    monkeypatch.setattr(owner, name, beside)
    with pytest.raises(RayDirectTransportError):
        receiver.recv_multiple_tensors("o", metadata, None, targets)
    assert not any(t.any() for t in targets)
    assert not receiver._fetches and not receiver._registered
    sender.garbage_collect("o", metadata, given)


def test_a_lease_without_proof_leaves_the_others_no_longer(pair: Any,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = pair
    given = [torch.randn(MIB), torch.randn(MIB)]
    metadata = sender.extract_tensor_transport_metadata("o", given)
    first, second = sender._exports["o"].leases

    def unproven() -> None:
        raise errors.UnprovenError("made up")

    monkeypatch.setattr(first, "revoke", unproven)
    with pytest.raises(errors.UnprovenError):
        sender.garbage_collect("o", metadata, given)
    assert second.ended and not sender._registered


def test_a_refused_read_keeps_nothing(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = pair
    metadata = sender.extract_tensor_transport_metadata("o", [torch.randn(1000)])

    def refused(_: Any) -> None:
        raise errors.NoRouteError("no backend")

    monkeypatch.setattr("sluice.transfer.Transfer.post", refused)
    with pytest.raises(RayDirectTransportError, match="no backend"):
        receiver.fetch_multiple_tensors("o", metadata, None)
    assert not receiver._fetches and not receiver._registered


class OverTcp(SluiceTransport):
    """As between hosts that have no devices of RDMA."""

    plaintext = True

    def backends(self) -> list[Backend]:
        return [b for b in super().backends() if b.name == "tcp"]


def test_between_hosts() -> None:
    given, pair = mixed_torch(), (OverTcp(), OverTcp())
    got = handed(pair, given)
    assert len(got) == len(given) and all(map(same, given, got))
    for transport in pair:
        transport.engine().close()


def test_tensors_of_an_object_lie_on_one_kind_of_device(pair: Any) -> None:
    """What fills those of a card is waited for, and they come as what they were."""
    with pytest.raises(ValueError, match=r"\['cpu', 'meta'\]"):
        pair[0].extract_tensor_transport_metadata("o", [torch.zeros(4),
                                                        torch.zeros(4, device="meta")])
