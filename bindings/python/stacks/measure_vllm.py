# SPDX-License-Identifier: Apache-2.0
"""Times hand-overs between vLLM's servers over sluice and over NIXL's wheel, a pair of servers at a
time and in alternation, on one host and between two.

`build/stacks/bin/python measure_vllm.py FILE.json [rounds]` prints a table and writes the samples.
Transfers are vLLM's own metric; answers are the decode's, from the request to its twelve tokens.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_server import PREFILL, WORDS, Server, make_model, started

import namespaces

LENGTHS, EACH, TOKENS = (1500, 3000), 12, 12


def transfers(server: Server) -> tuple[float, float]:
    """How many there were, and the seconds that they took in all."""
    return (server.metric("vllm:nixl_xfer_time_seconds_count"),
            server.metric("vllm:nixl_xfer_time_seconds_sum"))


def measure(a: Server, b: Server, length: int) -> tuple[list[float], list[float]]:
    """Seconds of transfers and of answers."""
    moved, answers = [], []
    for i in range(EACH + 1):
        prompt = random.Random(i).choices(range(3, WORDS), k=length)
        before = transfers(b)
        answer = b.ask(prompt, TOKENS, a.ask(prompt, 1, PREFILL).kv)
        after = transfers(b)
        if i:  # the first connects, and allocates
            answers.append(answer.seconds)
            if after[0] > before[0]:
                moved.append((after[1] - before[1]) / (after[0] - before[0]))
    return moved, answers


def pairs(folder: Path, shim: bool, where: Any) -> Any:
    names = ("prefill", "decode")
    return started(*(Server(folder, name, host=host, shim=shim)
                     for name, host in zip(names, where or (None, None))))


def main() -> None:
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="v") as name, contextlib.ExitStack() as stack:
        folder, places = Path(name), {"one host": None}
        make_model(folder / "model")
        try:
            places["two hosts"] = stack.enter_context(namespaces.hosts("10.213.7"))
        except (OSError, subprocess.CalledProcessError) as e:
            print(f"without two hosts: {e}", file=sys.stderr)
        for _ in range(rounds):
            for where, made in places.items():
                for transport in ("sluice", "nixl"):
                    for a, b in pairs(folder, transport == "sluice", made):
                        for length in LENGTHS:
                            moved, answers = measure(a, b, length)
                            seen.append({"where": where, "over": transport, "tokens": length,
                                         "transfers": moved, "answers": answers})
                            print(json.dumps(seen[-1]), file=sys.stderr)
    Path(sys.argv[1]).write_text(json.dumps(seen, indent=1) + "\n")
    print("where      tokens  over    transfer ms (worst)  answer ms (worst)  by transfer")
    for where in places:
        for length in LENGTHS:
            for transport in ("sluice", "nixl"):
                of = [s for s in seen if (s["where"], s["over"], s["tokens"]) == (where, transport,
                                                                                  length)]
                moved = [1e3 * x for s in of for x in s["transfers"]] or [float("nan")]
                answers = [1e3 * x for s in of for x in s["answers"]]
                print(f"{where:9}  {length:6}  {transport:6}  {statistics.median(moved):8.1f} "
                      f"({max(moved):8.1f})  {statistics.median(answers):7.0f} "
                      f"({max(answers):7.0f})  {sum(len(s['transfers']) for s in of)} of "
                      f"{len(answers)}")


if __name__ == "__main__":
    main()
