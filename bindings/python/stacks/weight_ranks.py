# SPDX-License-Identifier: Apache-2.0
"""Ranks of a trainer and of vLLM, each a process: vLLM's own Llama and loaders, with made weights.
The test's process is the control plane between them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Optional

LIMIT = 600.0  # seconds: the machine may be busy
LLAMA = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1408,
         "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
         "max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"],
         "model_type": "llama", "tie_word_embeddings": False, "torch_dtype": "float32"}
OURS = "127.0.0.1"
SCRIBBLE = -1.5  # in no version


def shapes(config: dict[str, Any] = LLAMA) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of a Llama."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for k in range(config["num_hidden_layers"]):
        at = f"model.layers.{k}."
        made |= {at + "self_attn.q_proj.weight": (hidden, hidden),
                 at + "self_attn.k_proj.weight": (kv, hidden),
                 at + "self_attn.v_proj.weight": (kv, hidden),
                 at + "self_attn.o_proj.weight": (hidden, hidden),
                 at + "mlp.gate_proj.weight": (inner, hidden),
                 at + "mlp.up_proj.weight": (inner, hidden),
                 at + "mlp.down_proj.weight": (hidden, inner),
                 at + "input_layernorm.weight": (hidden,),
                 at + "post_attention_layernorm.weight": (hidden,)}
    return made | {"model.norm.weight": (hidden,),
                   "lm_head.weight": (config["vocab_size"], hidden)}


def whole(version: int, name: str, shape: tuple[int, ...]) -> Any:
    """A tensor of a version: whole numbers, so that no two are equal by their bits alone."""
    import numpy as np
    import torch

    rng = np.random.default_rng([version, *name.encode()])
    return torch.from_numpy(rng.integers(-2**20, 2**20, shape).astype(np.float32))


def nested(tensors: dict[str, Any]) -> Any:
    """A module with parameters of these names."""
    import torch

    root = torch.nn.Module()
    for name, tensor in tensors.items():
        at, *path = root, *name.split(".")
        for part in path[:-1]:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(path[-1], torch.nn.Parameter(tensor, requires_grad=False))
    return root


class Trainer:
    """One rank of a trainer, whose parameters are DTensors where there are several."""

    def __init__(self, pipe: Connection, rank: int, ranks: int, port: int, timeout: float) -> None:
        import torch
        from sluice.integrations import vllm_weights

        self.client, made = Client(pipe), {}
        if ranks > 1:
            from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

            torch.distributed.init_process_group("gloo", f"tcp://{OURS}:{port}", rank=rank,
                                                 world_size=ranks)
            mesh = init_device_mesh("cpu", (ranks,))
        for i, (name, shape) in enumerate(shapes().items()):
            made[name] = torch.zeros(shape)
            if ranks > 1 and len(shape) > 1:
                made[name] = distribute_tensor(made[name], mesh, [Shard(i % 2)])
        self.info = vllm_weights.SluiceTrainerInitInfo(rank=rank, world_size=ranks,
                                                       timeout=timeout, host=OURS)
        self.source = vllm_weights.ShardSource(nested(made))
        self.held = list(self.source.shards())
        self.engine: Any = None

    def meet(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self.engine = WeightTransferTrainerFactory.trainer_init(self.info, client=self.client,
                                                                source=self.source)

    def fill(self, version: int) -> None:
        """What a step of the optimizer does: new numbers in the same memory."""
        for shard in self.held:
            full = whole(version, shard.name, tuple(shard.shape))
            for d, (at, n) in enumerate(zip(shard.starts, shard.tensor.shape)):
                full = full.narrow(d, at, n)
            shard.tensor.copy_(full)

    def send(self) -> None:
        self.engine.send_weights()

    def spoil(self) -> None:
        """Has the source have nothing."""
        def nothing() -> Any:
            raise KeyError("nothing")

        self.source.shards = nothing

    def lie(self) -> None:
        """Has the metadata name another type, of as many bytes."""
        import torch

        metadata = self.source.metadata()
        self.source.metadata = lambda: [replace(m, dtype=torch.int32) for m in metadata]

    def send_beside_others(self) -> int:
        """The same, while other memory of this process is registered and taken back: so often."""
        import torch

        over, turns, other = threading.Event(), 0, torch.zeros(1 << 18)

        def work() -> None:
            try:
                self.send()
            finally:
                over.set()

        thread = threading.Thread(target=work)
        thread.start()
        while not over.is_set():
            with self.engine._engine.register("other", other):
                turns += 1
        thread.join(LIMIT)
        return turns

    def send_and_go_on(self) -> None:
        """Gives up while a worker reads, as where the control plane has a limit, and trains on."""
        def go_on() -> None:
            self.engine._serving.words[0] = 0
            for shard in self.held:
                shard.tensor.fill_(SCRIBBLE)

        self.client.meanwhile = go_on
        self.send()

    def send_and_shut_down(self) -> None:
        """Shuts down while a worker reads, and writes to the memory, which is its own again."""
        def shut_down() -> None:
            self.engine.shutdown()
            for shard in self.held:
                shard.tensor.fill_(SCRIBBLE)

        self.client.meanwhile = shut_down
        self.send()


class Client:
    """vLLM's control plane for a trainer: it asks the test's process to call the workers."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.meanwhile: Callable[[], None] = lambda: None

    def _call(self, *call: Any) -> None:
        self._pipe.send(("call", call))
        while True:
            assert self._pipe.poll(LIMIT), f"{call[0]} has no answer"
            failed = self._pipe.recv()
            if failed != "reads":
                break
            self.meanwhile()
            self._pipe.send(None)
        if failed:
            raise RuntimeError(failed)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: Any) -> None:
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: Optional[str] = None) -> None:
        self._call("finish")


class Worker:
    """One rank of vLLM, without its processes and its cache."""

    def __init__(self, pipe: Connection, rank: int, ranks: int, port: int, folder: str) -> None:
        import torch
        from sluice.integrations import _weights, vllm_plugin
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import (
            init_distributed_environment,
            initialize_model_parallel,
        )
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.v1.worker.gpu_worker import Worker as GPUWorker

        vllm_plugin.register()
        config = EngineArgs(
            model=folder, dtype="float32", tensor_parallel_size=ranks, max_model_len=128,
            enforce_eager=True, skip_tokenizer_init=True,
            weight_transfer_config={"backend": "sluice"}).create_engine_config()
        config.parallel_config.rank = rank
        self._within: Callable[[], Any] = lambda: set_current_vllm_config(config)
        with self._within(), torch.no_grad():
            init_distributed_environment(ranks, rank, f"tcp://{OURS}:{port}", rank, "gloo")
            initialize_model_parallel(ranks)
            self.model = initialize_model(config).requires_grad_(False)
        self.engine = WeightTransferEngineFactory.create_engine(
            config.weight_transfer_config, config, torch.device("cpu"), self.model)
        # vLLM on processors packs weights after loading, which this worker does not.
        self.engine._why_not_in_place = lambda: ""
        # vLLM's own worker around it, which tells whether an update is open
        self.session = GPUWorker.__new__(GPUWorker)
        vars(self.session).update(
            weight_transfer_engine=self.engine, vllm_config=config, rank=rank,
            _weight_update_active=False, _weight_update_is_draft=False,
            model_runner=SimpleNamespace(reset_lora_state=lambda: None))
        self._hold = False
        land, _weights.GROUP = _weights._wait, 4 << 20  # several groups, also of a small model

        def wait(*args: Any) -> None:
            if self._hold:
                self._hold = False
                pipe.send(("reads", None))
                pipe.recv()
            land(*args)

        _weights._wait = wait

    def hold(self) -> None:
        """Stands still once in the next update, between posting reads and their end."""
        self._hold = True

    def init(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))
        assert self.engine.in_place

    def start(self) -> None:
        self.session.start_weight_update()

    def update(self, info: dict[str, Any]) -> None:
        self.session.update_weights(info)

    def finish(self) -> None:
        self.session.finish_weight_update()

    def wrong(self, version: int) -> list[str]:
        """The parameters that differ from what the model's own loader makes of a version."""
        import torch

        mine = {name: p.clone() for name, p in self.model.named_parameters()}
        with torch.no_grad(), self._within():
            self.model.load_weights((name, whole(version, name, shape))
                                    for name, shape in shapes().items())
        return [name for name, p in self.model.named_parameters() if not torch.equal(p, mine[name])]

    def read_from(self) -> dict[str, int]:
        """Bytes that have come from each process, by its engine's name."""
        read: dict[str, int] = {}
        for route in self.engine._engine.stats()["routes"]:
            read[route["peer"]] = read.get(route["peer"], 0) + route["bytes"]
        return read

    def again(self, session: str = "") -> None:
        """An update that a worker must refuse: of the version that it has, or of another trainer.
        """
        self.start()
        self.update({"session": session or self.engine._session, "version": self.engine.version,
                     "offers": []})

    def say_nonsense(self) -> None:
        """Messages to rank 0 of a trainer that are none of ours, or of nobody."""
        for message in (b"5", b"[1]", b'["a", [], ["x", "y"]]', b'["a", "b", [1, 2]]',
                        b'["a", "b", ["!", "y"]]', b'["a", "b", ["AAAA", "y"]]', b"\xff"):
            self.engine._trainers[0].peer.notify(message, LIMIT)

    def move(self) -> None:
        """Gives a parameter other memory."""
        first = next(self.model.parameters())
        first.data = first.data.clone()

    def name(self) -> str:
        return str(self.engine._engine.name)

    def scribbled(self) -> bool:
        return any(bool((p == SCRIBBLE).any()) for p in self.model.parameters())


def _serve(pipe: Connection, kind: Any, args: tuple[Any, ...]) -> None:
    """What a child does: it makes one of the above, and calls its methods as it is told."""
    os.environ.update(VLLM_HOST_IP=OURS, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    try:
        made = kind(pipe, *args)
        pipe.send(("done", None))
        while True:
            method, given = pipe.recv()
            try:
                pipe.send(("done", getattr(made, method)(*given)))
            except Exception as e:
                pipe.send(("failed", f"{type(e).__name__}: {e}"))
    except EOFError:
        pass


class Failed(Exception):
    """What a process answered: the type of its error, and the text."""


class Rank:
    """A process of either kind, as the test has it."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.engine.arg_utils", "vllm.distributed.parallel_state",
                                    "vllm.model_executor.models.llama",
                                    "vllm.distributed.weight_transfer.factory"])

    def __init__(self, kind: type, *args: Any) -> None:
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=_serve, args=(theirs, kind, args), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def send(self, method: str, *args: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send((method, args))


def answers(ranks: list[Rank], workers: list[Rank], meanwhile: Callable[[Rank], None]
            ) -> Iterator[tuple[Rank, Any, str]]:
    """What each rank answers, or why it does not. Meanwhile it has the workers called for trainers,
    and calls `meanwhile` where a worker stands still in its reads.
    """
    def relay(trainer: Connection, rank: Rank) -> None:
        meanwhile(rank)
        with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError):  # it was killed
            trainer.send("reads")
            trainer.recv()

    left = {r.pipe: r for r in ranks}
    while left:
        ready = wait(list(left), LIMIT)
        assert ready, "no answer"
        for pipe in ready:
            rank = left[pipe]
            try:
                what, said = pipe.recv()
            except (EOFError, ConnectionResetError):
                what, said = "failed", "the process is dead"
            if what == "reads":
                meanwhile(rank)
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(None)
            elif what == "call":
                for w in workers:
                    w.send(said[0], *said[1:])
                failures = "; ".join(why for _, _, why in
                                     answers(workers, [], partial(relay, pipe)) if why)
                with contextlib.suppress(BrokenPipeError):  # the trainer was killed meanwhile
                    pipe.send(failures)
            else:
                del left[pipe]
                yield rank, said if what == "done" else None, said if what == "failed" else ""


def ask(ranks: list[Rank], method: str, *args: Any, workers: Optional[list[Rank]] = None,
        meanwhile: Callable[[Rank], None] = lambda _: None) -> list[Any]:
    """The answers of ranks to the same call. Failed, with all that went wrong, if there is any."""
    for rank in ranks:
        rank.send(method, *args)
    return answered(ranks, workers or [], meanwhile)


def answered(ranks: list[Rank], workers: Optional[list[Rank]] = None,
             meanwhile: Callable[[Rank], None] = lambda _: None) -> list[Any]:
    said = {id(rank): (value, why) for rank, value, why in answers(ranks, workers or [], meanwhile)}
    failures = [why for _, why in said.values() if why]
    if failures:
        raise Failed("; ".join(failures))
    return [said[id(rank)][0] for rank in ranks]
