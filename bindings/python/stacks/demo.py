# SPDX-License-Identifier: Apache-2.0
"""Two vLLM servers on this machine: one computes prompts, the other answers with what it is handed.

Prints the time to the first token with and without the hand-over, over sluice and, where its wheel
is installed, over NIXL; then what the second server does when the first is killed. `make demo`
runs it.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import tempfile
from pathlib import Path

from vllm_server import PREFILL, WORDS, Answer, Server, make_model, started

LENGTHS, EACH, TOKENS = (500, 1500, 3000), 5, 12


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, WORDS), k=length)


def alike(one: Answer, other: Answer) -> str:
    return "the same tokens" if one.tokens == other.tokens else "OTHER TOKENS"


def hand_over(prefill: Server, decode: Server, prompt: list[int], tokens: int) -> Answer:
    """The decode's answer to a prompt that the prefill has computed."""
    return decode.ask(prompt, tokens, prefill.ask(prompt, 1, PREFILL).kv)


def compare(prefill: Server, decode: Server, over: str) -> None:
    print(f"\nOver {over}: time to the first token at the decode, median of {EACH} prompts")
    print("  prompt tokens   computed there   handed over   by transfer   answers of 12 tokens")
    hand_over(prefill, decode, prompt_of(0, 64), 1)  # the first one connects
    for length in LENGTHS:
        alone, handed = [], []
        before, told = decode.transferred(), "the same tokens"
        for i in range(EACH):
            prompt = prompt_of(length + i, length)
            handed.append(hand_over(prefill, decode, prompt, 1).seconds)
            alone.append(decode.ask(prompt, 1).seconds)
        moved = decode.transferred() - before
        prompt = prompt_of(length - 1, length)
        told = alike(decode.ask(prompt, TOKENS), hand_over(prefill, decode, prompt, TOKENS))
        print(f"  {length:13}   {1e3 * statistics.median(alone):11.0f} ms   "
              f"{1e3 * statistics.median(handed):8.0f} ms   {moved / EACH / length:11.0%}   {told}",
              flush=True)


def lose(prefill: Server, decode: Server) -> None:
    prompt = prompt_of(1, 1500)
    right, kv = decode.ask(prompt, TOKENS), prefill.ask(prompt, 1, PREFILL).kv
    prefill.kill()
    answer = decode.ask(prompt, TOKENS, kv)
    print(f"\nThe prefill is killed before the decode has fetched: the decode computes the prompt "
          f"itself and answers after {answer.seconds:.2f} s: {alike(right, answer)}", flush=True)


def main() -> None:
    wheel = importlib.util.find_spec("nixl") is not None
    with tempfile.TemporaryDirectory(prefix="v") as name:
        folder = Path(name)
        print("A Llama of 12 MB with made weights, float32, on processors alone", flush=True)
        make_model(folder / "model")
        for over in ("sluice", *(("NIXL's wheel",) if wheel else ())):
            servers = (Server(folder, n, shim=over == "sluice") for n in ("prefill", "decode"))
            print(f"\nStarting two vLLM servers over {over} ...", flush=True)
            for prefill, decode in started(*servers):
                compare(prefill, decode, over)
                if over == "sluice":
                    lose(prefill, decode)
    if not wheel:
        print("\nNIXL's wheel is not installed: nothing is beside")


if __name__ == "__main__":
    main()
