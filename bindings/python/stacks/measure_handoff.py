# SPDX-License-Identifier: Apache-2.0
"""Times the first token of prompts that a prefill computes and a decode answers: vLLM's servers
with our hand-over connector, and with NixlConnector over our shim, prompt by prompt in alternation.

`build/stacks/bin/python stacks/measure_handoff.py [prompts]`, some 3 minutes.

The time is the router's: from the moment at which it has the prompt until the decode has answered
its first token. NixlConnector is asked after the prefill has answered, as its router has to. Ours
is asked in both ways: so, and `together`, where the decode is told a number and both are asked at
once, so that each layer goes over while the prefill computes the next ones. `computed` is what the
decode takes without any hand-over.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic
from typing import Any, Callable

from vllm_handed import CONNECTOR, doors
from vllm_server import PREFILL, WORDS, Answer, Server, make_model, started

LENGTHS = (700, 3000, 4000)
WAYS = ("together", "sluice", "nixl", "computed")


def handing(folder: Path, name: str, role: str, port: int) -> Server:
    return Server(folder, name, shim=False, more={
        **CONNECTOR, "kv_role": role,
        "kv_connector_extra_config": {"sluice_handoff": {"host": "127.0.0.1", "port": port}}})


class Asked:
    """A question to a server, on a thread."""

    def __init__(self, call: Callable[[], Answer]) -> None:
        self._call, self._answers = call, list[Answer]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._answers.append(self._call())

    def end(self) -> None:
        self._thread.join()
        assert self._answers, "the prefill has not answered"


class Router:
    """What stands before the servers."""

    def __init__(self, ours: tuple[Server, Server], nixl: tuple[Server, Server],
                 port: int) -> None:
        self.ours, self.nixl, self._port = ours, nixl, port

    def ask(self, way: str, prompt: list[int]) -> tuple[float, list[str]]:
        """Seconds until the first token, and that."""
        prefill, decode = self.nixl if way == "nixl" else self.ours
        begin = monotonic()
        if way == "computed":
            answer = decode.ask(prompt, 1)
        elif way == "together":
            number = random.getrandbits(63)
            other = Asked(lambda: prefill.ask(prompt, 1, {"do_remote_decode": True,
                                                          "sluice_number": number}))
            answer = decode.ask(prompt, 1, {
                "do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": self._port,
                "tp_size": 1, "sluice_number": number})
            took = monotonic() - begin
            other.end()
            return took, answer.tokens
        else:
            answer = decode.ask(prompt, 1, prefill.ask(prompt, 1, PREFILL).kv)
        return monotonic() - begin, answer.tokens

    def moved(self) -> int:
        return self.ours[1].transferred() + self.nixl[1].transferred()


def main() -> None:
    prompts = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers, too
    with tempfile.TemporaryDirectory(prefix="v") as name:
        folder, port = Path(name), doors(1)
        make_model(folder / "model")
        servers: list[Any] = [handing(folder, "prefill", "kv_producer", port),
                              handing(folder, "decode", "kv_consumer", 0),
                              Server(folder, "nixl-prefill"), Server(folder, "nixl-decode")]
        for a, b, c, d in started(*servers):
            router, rng = Router((a, b), (c, d), port), random.Random(1)
            print(f"{'tokens':>8}" + "".join(f"{way:>12}" for way in WAYS) +
                  "   milliseconds to the first token, medians; by transfer", flush=True)
            for length in LENGTHS:
                took: dict[str, list[float]] = {way: [] for way in WAYS}
                for n in range(prompts + 1):
                    prompt = rng.choices(range(3, WORDS), k=length)
                    tokens, before = [], router.moved()
                    for way in WAYS:
                        seconds, said = router.ask(way, prompt)
                        tokens.append(said)
                        if n:  # the first connects, and allocates
                            took[way].append(1e3 * seconds)
                    assert tokens == tokens[:1] * len(WAYS), tokens
                print(f"{length:8}" + "".join(f"{statistics.median(took[way]):12.1f}"
                                              for way in WAYS)
                      + f"   {(router.moved() - before) / 3 / length:.0%}", flush=True)
    print(f"{prompts} prompts each, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
