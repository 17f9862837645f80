# SPDX-License-Identifier: Apache-2.0
"""New weights from two ranks of a trainer to the ranks of a vLLM, by vLLM's own factories, beside a
broadcast of torch.distributed (gloo): python weights.py [MB] [RANKS], with vllm, torch and sluice.
Ranks are processes of this machine. Each has half of a made model or less, and compares each byte.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from types import SimpleNamespace

TRAINERS, ROUNDS, ROWS = 2, 3, 4096


def shapes(megabytes):
    """Matrices of 16 MB, of which trainers have rows and workers columns or rows in turn."""
    return {f"layers.{k}.weight": (ROWS, 1024) for k in range(max(1, megabytes // 16))}


def part(tensor, rank, ranks, dim):
    size = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * size, size)


def value(version, k):
    """What a matrix of a version is filled with: each element is its number, from here on."""
    import torch

    return torch.arange(ROWS * 1024, dtype=torch.int32).reshape(ROWS, 1024) + version * 1000 + k


class Pipes:
    """vLLM's control plane: HTTPVLLMWeightSyncClient calls the same by HTTP."""

    def __init__(self, pipes):
        self.pipes = pipes

    def call(self, method, *args):
        for pipe in self.pipes:
            pipe.send((method, args))
        failures = [f for f in [pipe.recv() for pipe in self.pipes] if f]
        if failures:
            raise RuntimeError(failures)

    def init_weight_transfer_engine(self, info):
        self.call("init", info)

    def start_weight_update(self):
        self.call("start")

    def update_weights(self, info):
        self.call("update", info)

    def finish_weight_update(self, weight_version=None):
        self.call("finish")


def meet(where, rank, ranks):
    """The group of the trainers, which sluice's backend wants; and of each of them with all
    workers, for the broadcast.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{where}/all", rank=rank, world_size=ranks)
    trainers, workers = list(range(TRAINERS)), list(range(TRAINERS, ranks))
    return dist.new_group(trainers), [dist.new_group([t, *workers]) for t in trainers]


def trainer(rank, pipes, megabytes, where):
    import torch
    import torch.distributed as dist
    from sluice.integrations.vllm_weights import Shard, ShardSource, SluiceTrainerInitInfo
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    torch.set_num_threads(1)
    trainers, groups = meet(where, rank, TRAINERS + len(pipes))
    full = shapes(megabytes)
    mine = {n: torch.empty(s[0] // TRAINERS, s[1], dtype=torch.int32) for n, s in full.items()}

    class Rows(ShardSource):
        """A rank has some rows of each matrix."""

        def metadata(self):
            return [ParamMeta(name, torch.int32, shape) for name, shape in full.items()]

        def shards(self):
            return [Shard(n, t, (rank * t.shape[0], 0), full[n]) for n, t in mine.items()]

    client = Pipes(pipes)
    engine = WeightTransferTrainerFactory.trainer_init(
        SluiceTrainerInitInfo(rank=rank, world_size=TRAINERS, group=trainers, host="127.0.0.1"),
        client=client, source=Rows(None))
    size, best = sum(4 * a * b for a, b in full.values()), {}
    for version in range(1, 1 + ROUNDS):
        for k, t in enumerate(mine.values()):
            t.copy_(part(value(version, k), rank, TRAINERS, 0))
        dist.barrier(trainers)
        begin = time.perf_counter()
        engine.send_weights()
        took = {"sluice": time.perf_counter() - begin}
        if rank == 0:
            client.call("check", version)
            client.call("receive_broadcast")
        dist.barrier()
        begin = time.perf_counter()
        for t in mine.values():
            dist.broadcast(t, rank, group=groups[rank])
        dist.barrier()
        took["gloo broadcast"] = time.perf_counter() - begin
        if rank == 0:
            client.call("check", version)
        begin = time.perf_counter()
        for t in mine.values():
            t.clone()
        took["memory copy in one process"] = (time.perf_counter() - begin) * TRAINERS
        for what, seconds in took.items():
            best[what] = min(seconds, best.get(what, seconds))
    if rank == 0:
        print(f"{size >> 20} MB from {TRAINERS} ranks to {len(pipes)}, best of {ROUNDS}, every "
              f"byte compared")
        for what, seconds in best.items():
            print(f"{what:27} {seconds:7.3f} s  {size / seconds / 1e9:6.2f} GB/s of the model")
        client.call("end")
    engine.shutdown()


def worker(rank, ranks, pipe, megabytes, where):
    import torch
    import torch.distributed as dist
    from sluice.integrations.vllm_plugin import register
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()  # vLLM does so itself in its own processes
    torch.set_num_threads(1)
    _, groups = meet(where, TRAINERS + rank, TRAINERS + ranks)
    full = shapes(megabytes)

    class Model(torch.nn.Module):
        """Loads its part of each matrix, as the layers of vLLM do."""

        def __init__(self):
            super().__init__()
            self.mine = {n: part(torch.empty(s, dtype=torch.int32, device="meta"), rank, ranks,
                                 k % 2) for k, (n, s) in enumerate(full.items())}
            self.mine = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in self.mine.items()}

        def load_weights(self, weights):
            for k, (name, tensor) in enumerate(weights):
                self.mine[name].copy_(part(tensor, rank, ranks, k % 2))

    model = Model()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=ranks, rank=rank),
        model_config=SimpleNamespace(quantization=None, dtype=torch.int32))
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="sluice"), config, torch.device("cpu"), model)

    def receive_broadcast():
        pipe.send("")  # before it begins
        dist.barrier()
        for holder in range(TRAINERS):
            for k, (name, shape) in enumerate(full.items()):
                rows = torch.empty(shape[0] // TRAINERS, shape[1], dtype=torch.int32)
                dist.broadcast(rows, holder, group=groups[holder])
                mine, begin, size = model.mine[name], holder * rows.shape[0], rows.shape[0]
                if k % 2:  # columns, of which each holder has some rows
                    mine[begin : begin + size] = part(rows, rank, ranks, 1)
                    continue
                lo = max(begin, rank * mine.shape[0])
                hi = min(begin + size, (rank + 1) * mine.shape[0])
                if lo < hi:
                    at = rank * mine.shape[0]
                    mine[lo - at : hi - at] = rows[lo - begin : hi - begin]
        dist.barrier()

    def check(version):
        for k, mine in enumerate(model.mine.values()):
            assert torch.equal(mine, part(value(version, k), rank, ranks, k % 2)), "other bytes"
            mine.zero_()

    calls = {"init": lambda info: engine.init_transfer_engine(engine.parse_init_info(info)),
             "start": engine.start_weight_update, "update": engine.update_weights,
             "finish": engine.finish_weight_update, "check": check}
    while True:
        method, args = pipe.recv()
        if method == "receive_broadcast":
            receive_broadcast()
            continue
        try:
            if method in calls:
                calls[method](*args)
            pipe.send("")
        except Exception as e:
            pipe.send(f"rank {rank}: {e!r}")
        if method == "end":
            break
    engine.shutdown()


def main():
    megabytes, ranks = [*map(int, sys.argv[1:3]), *(512, 2)[len(sys.argv) - 1:]]
    os.environ.update(VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", VLLM_LOGGING_LEVEL="ERROR")
    processes = multiprocessing.get_context("spawn")
    pipes = [processes.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as where:
        started = [processes.Process(target=trainer, args=(r, [p[0] for p in pipes], megabytes,
                                                           where)) for r in range(TRAINERS)]
        started += [processes.Process(target=worker, args=(r, ranks, pipes[r][1], megabytes, where))
                    for r in range(ranks)]
        for p in started:
            p.start()
        while any(p.is_alive() for p in started) and not any(p.exitcode for p in started):
            time.sleep(0.1)
        for p in started:  # where one has failed, the others wait for it
            p.terminate()
            p.join()
    sys.exit(any(p.exitcode for p in started))


if __name__ == "__main__":
    main()
