# SPDX-License-Identifier: Apache-2.0
"""checkpoint-engine's P2PStore over our face of Mooncake, from its wheel, unpatched: a process
reads the tensors of another, which is killed then.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

LIMIT, WORDS, TENSORS = 600.0, 1 << 20, 4


def store(rank: int) -> Any:
    """As a ParameterServer makes it, of a made device: its own wants a card."""
    import mooncake.engine
    from checkpoint_engine import P2PStore

    assert "sluice" in str(mooncake.engine.__file__)
    os.environ["RANK"] = str(rank)
    return P2PStore(SimpleNamespace(
        device_module=SimpleNamespace(device_count=lambda: 1), transfer_engine_protocol="tcp",
        rdma_device=lambda rank: ""))


def own() -> None:
    """The process that has tensors. It says where, and takes one of them back when it is told."""
    import torch

    mine, tensors = store(0), [torch.arange(WORDS, dtype=torch.int32) + k for k in range(TENSORS)]
    mine.register_named_tensors({f"t{k}": t for k, t in enumerate(tensors)})
    print(json.dumps([mine.addr, [t.data_ptr() for t in tensors]]), flush=True)
    for line in sys.stdin:
        print(mine.unregister_named_tensors([line.strip()]), flush=True)


def read() -> None:
    """The process that reads, and starts the other."""
    import torch

    mine, tensors = store(1), [torch.zeros(WORDS, dtype=torch.int32) for _ in range(TENSORS)]
    mine.register_named_tensors({f"b{k}": t for k, t in enumerate(tensors)})
    with subprocess.Popen([sys.executable, __file__, "own"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdin is not None and owner.stdout is not None
            address, there = json.loads(owner.stdout.readline())

            def fetch(first: int) -> None:
                mine.batch_transfer_sync_read(address, [t.data_ptr() for t in tensors[first:]],
                                              there[first:], [4 * WORDS] * (TENSORS - first))

            fetch(0)
            for k, t in enumerate(tensors):
                assert torch.equal(t, torch.arange(WORDS, dtype=torch.int32) + k)
                t.zero_()
            print("t0", file=owner.stdin, flush=True)
            assert owner.stdout.readline() == "1\n"
            fetch(1)  # what is registered still, is read still
            assert torch.equal(tensors[1], torch.arange(WORDS, dtype=torch.int32) + 1)
            with pytest.raises(AssertionError):
                fetch(0)
            owner.kill()
            owner.wait()
            with pytest.raises(AssertionError):
                fetch(1)
        finally:
            owner.kill()
    assert mine.unregister_named_tensors([f"b{k}" for k in range(TENSORS)]) == TENSORS


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("checkpoint_engine") is None,
                    reason="unavailable: checkpoint-engine, see hack/stacks")
def test_tensors_of_another_process() -> None:
    shim = subprocess.run([sys.executable, "-m", "sluice.mooncake.shim"], check=True,
                          capture_output=True, text=True, timeout=LIMIT).stdout.strip()
    result = subprocess.run([sys.executable, __file__, "read"], capture_output=True, text=True,
                            env={**os.environ, "PYTHONPATH": shim}, timeout=LIMIT)
    assert result.returncode == 0, result.stderr[-4000:]


if __name__ == "__main__":
    {"own": own, "read": read}[sys.argv[1]]()
