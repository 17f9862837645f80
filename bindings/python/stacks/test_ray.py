# SPDX-License-Identifier: Apache-2.0
"""Tensors between actors of a real Ray, also while an actor is killed and while objects are freed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
import ray
import ray.cloudpickle
import torch
from cache_node import Cluster
from ray.exceptions import RayDirectTransportError
from sluice.integrations.ray import SluiceTransport

LIMIT = 180.0
MIB = 1 << 20

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Arrays(SluiceTransport):
    """The same for arrays of numpy: Ray has one type of data for each name."""

    name = "SLUICE_ARRAYS"


ray.experimental.register_tensor_transport("sluice", ["cpu", "cuda"], SluiceTransport, torch.Tensor)
ray.experimental.register_tensor_transport("sluice_arrays", ["cpu"], Arrays, np.ndarray)


def transport() -> SluiceTransport:
    from ray.experimental.rdt.util import get_tensor_transport_manager

    return get_tensor_transport_manager("SLUICE")


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Actor:
    def pid(self) -> int:
        return os.getpid()

    @ray.method(tensor_transport="sluice")
    def full(self, n: int, value: float) -> torch.Tensor:
        return torch.full((n,), value)

    @ray.method(tensor_transport="sluice")
    def views(self, n: int) -> list[torch.Tensor]:
        whole = torch.arange(n * 16.0)
        return [whole[16 * i : 16 * i + 10] for i in range(n)]

    @ray.method(tensor_transport="sluice_arrays")
    def arrays(self) -> dict[str, np.ndarray]:
        return {"a": np.arange(10), "b": np.ones((2, 3), np.float32)}

    def sums(self, tensors: Any) -> list[float]:
        return [float(t.sum()) for t in (tensors.values() if isinstance(tensors, dict)
                                         else tensors)]

    def sum(self, tensor: torch.Tensor) -> float:
        return float(tensor.double().sum())

    def arm(self, pid: int) -> None:
        """Kills the process of that number when the next read is posted."""
        t = transport()
        begin = t.fetch_multiple_tensors

        def fetch(*args: Any) -> Any:
            del t.fetch_multiple_tensors  # type: ignore[method-assign]
            begun = begin(*args)
            os.kill(pid, signal.SIGKILL)
            return begun

        t.fetch_multiple_tensors = fetch  # type: ignore[method-assign]

    def left(self) -> list[int]:
        t = transport()
        return [len(t._exports), len(t._registered), len(t._fetches)]


@pytest.fixture
def actors(cluster: None) -> Iterator[list[Any]]:
    made = [Actor.remote() for _ in range(3)]
    yield made
    for actor in made:
        ray.kill(actor)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=LIMIT)


def freed(actor: Any) -> None:
    """Waits until an actor holds nothing: Ray frees in the background."""
    end = time.monotonic() + LIMIT
    while (left := get(actor.left.remote())) != [0, 0, 0]:
        assert time.monotonic() < end, f"exports, registrations and fetches are left: {left}"


@pytest.mark.soak
def test_the_example() -> None:
    """The first test, before a Ray of ours runs."""
    program = Path(__file__).parents[3] / "examples" / "ray" / "weights.py"
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True,
                            timeout=3 * LIMIT)
    want = ("{'layer 0': 1.0, 'layer 1': 2.0, 'layer 2': 3.0, 'layer 3': 4.0}\n"
            "[2.0, 3.0, 4.0, 5.0]")
    assert want in result.stdout, result.stderr


@pytest.mark.soak
def test_the_example_of_blocks() -> None:
    """Actors load from a cluster by the keys by which others have stored."""
    program = Path(__file__).parents[3] / "examples" / "ray" / "blocks.py"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        nodes = Cluster(folder)
        try:
            result = subprocess.run([sys.executable, str(program), nodes.address],
                                    capture_output=True, text=True, timeout=3 * LIMIT)
        finally:
            nodes.kill()
    assert "(8, True)" in result.stdout, result.stderr


def test_actors_and_the_driver(actors: list[Any]) -> None:
    a, b, _ = actors
    assert get(b.sum.remote(a.full.remote(1000, 2.0))) == 2000
    assert get(b.sums.remote(a.arrays.remote())) == [45, 6]
    ref = a.full.remote(MIB, 3.0)
    assert bool((get(ref) == 3).all())
    del ref
    for actor in (a, b):
        freed(actor)


@pytest.mark.soak
def test_ten_thousand_views(actors: list[Any]) -> None:
    a, b, _ = actors
    sums = get(b.sums.remote(a.views.remote(10000)))
    assert sums == [sum(16.0 * i + j for j in range(10)) for i in range(10000)]


@pytest.mark.soak
def test_target_buffers(actors: list[Any]) -> None:
    ref, buffer = actors[0].full.remote(MIB, 2.0), torch.zeros(MIB)
    ray.experimental.set_target_for_ref(ref, [buffer])
    assert get(ref).data_ptr() == buffer.data_ptr() and bool((buffer == 2).all())


def test_a_sender_that_is_killed_in_mid_pull(actors: list[Any]) -> None:
    """The receiver gets an error of its own, lives on, and goes on with the third actor."""
    _, b, c = actors
    other, lost = c.full.remote(MIB, 1.0), False
    for _ in range(20):  # on a busy machine a read may end before the kill
        victim = Actor.remote()
        get(b.arm.remote(get(victim.pid.remote())))
        try:
            assert get(b.sum.remote(victim.full.remote(64 * MIB, 3.0))) == 3 * 64 * MIB
        except RayDirectTransportError:
            lost = True
        assert get(b.sum.remote(other)) == MIB
        if lost:
            break
    assert lost
    del other
    freed(b)


@pytest.mark.soak
def test_objects_are_freed_beside_pulls(actors: list[Any]) -> None:
    """Each freed object ends a registration of the sender's, and no pull of another object notices.
    """
    a, b, c = actors
    kept = a.full.remote(4 * MIB, 1.0)
    pulls = []
    for i in range(30):
        short = a.full.remote(MIB, float(i))
        pulls += [b.sum.remote(kept), c.sum.remote(kept), b.sum.remote(short)]
        del short
    sums = [get(p) for p in pulls]
    assert sums == [s for i in range(30) for s in (4.0 * MIB, 4.0 * MIB, float(i) * MIB)]
    assert get(a.left.remote())[0] >= 1
    del kept
    freed(a)
