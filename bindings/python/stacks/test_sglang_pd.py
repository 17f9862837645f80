# SPDX-License-Identifier: Apache-2.0
"""SGLang's own classes for prefill and decode hand over between two processes, unpatched."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest
from sluice.nixl import shim
from vllm_server import ports

pytest.importorskip("sglang", reason="unavailable: no sglang: hack/stacks installs it")

PAGES = 64
SOON = 60.0  # a dead prefill is known after five heartbeats of 2 s


class Side:
    def __init__(self, role: str, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sglang_pd.py")), role, str(port)],
            env={**os.environ, "PYTHONPATH": shim.path(), "TORCH_NUM_THREADS": "1",
                 "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
                 "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "5"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the process has ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Pair:
    def __init__(self) -> None:
        self.port = int(ports(1)[0])
        self.prefill, self.decode = Side("prefill", self.port), Side("decode", self.port)
        assert [s.heard()["engine"] for s in (self.prefill, self.decode)] == ["sluice"] * 2

    def hand_over(self, room: int, count: int, chunk: int) -> Any:
        """Scattered pages, which come to other places in another order."""
        pick = random.Random(room).sample
        source, target = pick(range(PAGES), count), pick(range(PAGES), count)
        self.decode.tell(**{"room": room, "pages": target, "from": source})
        self.prefill.tell(room=room, pages=source, chunk=chunk)
        assert self.prefill.heard() == {"status": "success"}
        return self.decode.heard()

    def works(self, room: int, count: int, chunk: int) -> None:
        answer = self.hand_over(room, count, chunk)
        assert (answer["status"], answer["right"], answer["clean"]) == ("success", True, True)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.prefill.kill()
    made.decode.kill()


def test_pages_are_handed_over(pair: Pair) -> None:
    for room, (count, chunk) in enumerate([(1, 1), (10, 10), (10, 3), (60, 60), (60, 7)], 1):
        pair.works(room, count, chunk)


@pytest.mark.soak
def test_a_request_is_given_up(pair: Pair) -> None:
    pair.works(1, 10, 10)
    pair.decode.tell(**{"room": 2, "pages": [1, 2], "from": [3, 4], "abort": True})
    answer = pair.decode.heard()
    assert (answer["status"], answer["right"], answer["clean"]) == ("failed", False, True)
    pair.works(3, 10, 5)


@pytest.mark.soak
def test_the_prefill_is_killed_and_comes_again(pair: Pair) -> None:
    pair.works(1, 10, 10)
    pair.decode.tell(**{"room": 2, "pages": [1, 2], "from": [3, 4]})
    pair.prefill.kill()
    answer = pair.decode.heard()
    assert (answer["status"], answer["right"], answer["clean"]) == ("failed", False, True)
    assert answer["seconds"] < SOON
    pair.prefill = Side("prefill", pair.port)
    assert pair.prefill.heard()["engine"] == "sluice"
    pair.works(3, 10, 5)
