# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache of processed images (`mm_processor_cache_type="shm"`) over our ring: vLLM's own
sender and receivers, in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sluice.errors import BusyError
from sluice.ring import Reader, Writer

HERE = Path(__file__).parent


@pytest.mark.parametrize("over", ["vllm", "sluice"])
def test_scenario(over: str, tmp_path: Path) -> None:
    """One scenario over both, and over ours what vLLM's own cannot: objects that go in any order,
    readers that have ended, tensors without a copy.
    """
    pytest.importorskip("vllm", reason="unavailable: vLLM is not installed: hack/stacks")
    done = subprocess.run([sys.executable, str(HERE / "ring_sides.py"), over], text=True,
                          capture_output=True, timeout=600,
                          env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.stdout.splitlines()[-1:] == ["right"], done.stdout + done.stderr


def test_tensors(tmp_path: Path) -> None:
    with Writer(str(tmp_path / "ring"), 64 << 10) as writer, Reader.join(writer.path, 60) as reader:
        data = torch.arange(24, dtype=torch.float32).view(4, 6)
        view = reader.get(writer.put("a", data.numpy()))
        tensor = view.torch(torch.float32, (4, 6))
        assert torch.equal(tensor, data)
        with pytest.raises(BusyError):
            view.close()
        del tensor
        view.close()
        with reader.get(writer.put("empty")) as view:
            assert view.torch().shape == (0,)
