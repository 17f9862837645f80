# SPDX-License-Identifier: Apache-2.0
"""Times what vLLM's scheduler waits for in our tier and in our connector, for requests of 1,000
blocks that the cache has, by vLLM's classes in one process: of each call the least, the median and
the longest, in microseconds.

`build/stacks/bin/python stacks/measure_calls.py [rounds]`, some 2 minutes.

`lookup` of the tier is called once a block, and is shown as what 1,000 calls take together.
"answer" is the time from the end of the step that asks until the cache has answered, looked at each
50 us; `_hear` is what a call of the scheduler then takes to learn of it.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")

import vllm_made as made
from cache_node import LIMIT, Node
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm_server import QUIET, WORDS, make_model

sys.path.append(str(Path(__file__).parents[3] / "examples/vllm"))
import tier as example  # type: ignore[import-not-found]

BLOCKS, PAUSE = 1000, 50e-6
TIER = ("on_new_request", "on_schedule_end", "submit_load", "submit_store", "get_finished_jobs",
        "on_request_finished")
CONNECTOR = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
             "update_connector_output", "request_finished")
# Calls of one name that do different things, by their results.
KINDS: dict[str, Callable[[Any], str]] = {
    "get_num_new_matched_tokens": lambda said: " asks" if said[0] is None else " answers",
    "build_connector_meta": lambda said: (" loads" if said.loads else "") + (
        " stores" if said.store else "")}


class Times:
    """Seconds of calls by their names."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def call(self, name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        took = time.perf_counter() - begin
        self.of.setdefault(name + KINDS.get(name, lambda _: "")(result), []).append(took)
        return result

    def watch(self, what: Any, names: tuple[str, ...]) -> None:
        for name in names:
            def timed(*words: Any, _name: str = name, _call: Any = getattr(what, name),
                      **more: Any) -> Any:
                return self.call(_name, lambda: _call(*words, **more))
            setattr(what, name, timed)

    def show(self, title: str) -> None:
        print(f"\n{title:42} least     median    longest      calls")
        for name, each in self.of.items():
            print(f"  {name:36}" + "".join(f" {1e6 * some(each):9.1f} " for some in (
                min, statistics.median, max)) + f" {len(each):9}", flush=True)


def await_answer(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, "the cache does not answer"
        time.sleep(PAUSE)


def measure_tier(address: str, rounds: int) -> Times:
    example.CHUNK, times = 8192, Times()
    for _ in range(rounds):
        keys = [make_offload_key(random.randbytes(32), 0) for _ in range(BLOCKS)]
        first = example.offloading(address, BLOCKS)
        times.watch(first.secondary_tiers[0], TIER)
        request = ReqContext("first")
        first.on_new_request(request)
        first.prepare_store(keys, request)
        first.complete_store(keys, request)
        example.steps(first, lambda: not first.has_pending_work())
        first.on_request_finished(request)
        first.shutdown()

        second = example.offloading(address, BLOCKS)
        tier, request = second.secondary_tiers[0], ReqContext("second")
        times.watch(tier, TIER)
        second.on_new_request(request)
        tier._store.wait(LIMIT)

        def lookup() -> list[Any]:
            return [tier.lookup(key, request) for key in keys]

        said = times.call("1,000 lookup, RETRY", lookup)
        assert said == [LookupResult.RETRY] * BLOCKS
        tier.on_schedule_end(example.STEP)

        times.call("answer", lambda: await_answer(lambda: tier._questions[0].answer))
        times.call("_hear", tier._hear)
        said = times.call("1,000 lookup, HIT", lookup)
        assert said == [LookupResult.HIT] * BLOCKS
        for key in keys:
            second.lookup(key, request)
        second.on_schedule_end(example.STEP)  # begins the load
        example.steps(second, lambda: not second.has_pending_work())
        second.on_request_finished(request)
        second.shutdown()
    return times


def measure_connector(folder: Path, address: str, rounds: int) -> Times:
    times, length = Times(), BLOCKS * made.TOKENS + 1
    words: dict[str, Any] = {"blocks": 5 * BLOCKS, "max_model_len": 2 * length,
                             "max_num_batched_tokens": 4096}
    for n in range(rounds):
        prompt = random.Random(n).choices(range(3, WORDS), k=length)
        first = made.Made(folder, address, **words)
        times.watch(first.scheduler.connector, CONNECTOR)
        first.ask("a", prompt, 1)
        first.close()
        second = made.Made(folder, address, **words)
        connector = second.scheduler.connector
        times.watch(connector, CONNECTOR)
        second.add("b", prompt, 1)
        second.scheduler.schedule()  # asks
        answer = connector._scheduler._tracked["b"].answer
        if answer is not None:  # else the cache had answered within the step
            times.call("answer", lambda: await_answer(answer.done))
        second.run()
        assert second.hits == BLOCKS * made.TOKENS
        second.close()
    return times


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    os.environ.update(QUIET)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        node = Node(folder, "1GiB").start()
        try:
            measure_tier(node.address, rounds).show("Our tier, microseconds")
            make_model(Path(folder) / "model")
            measure_connector(Path(folder), node.address, rounds).show(
                "Our connector, microseconds")
        finally:
            node.kill()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
