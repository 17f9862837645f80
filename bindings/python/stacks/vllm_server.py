# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers of a made Llama, which hand KV cache over through the NIXL shim, unpatched."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # namespaces and ports lie there

from ports import ports

WORDS = 1024
LIMIT = 120.0  # of one answer: beside other programs vLLM itself may stand still for half a minute
LEASE = 10  # seconds for which a prefill keeps blocks that are not fetched
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
           "remote_block_ids": None, "remote_host": None, "remote_port": None}
# Of a server that shares two processors with others, and asks no other machine for anything.
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
         "VLLM_CPU_OMP_THREADS_BIND": "nobind", "GLOO_SOCKET_IFNAME": "lo",
         "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def make_model(folder: Path) -> None:
    """Writes a Llama of 12 MB with random weights and a tokenizer of one token for each word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>",
                            eos_token="</s>").save_pretrained(folder)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2)).float()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.08)
    model.save_pretrained(folder)


class Failed(Exception):
    """The server answered with an error, or did not answer."""


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


@dataclass
class Answer:
    tokens: list[str]
    logprobs: list[float]
    kv: Any
    seconds: float


def same(got: Answer, want: Answer) -> None:
    assert got.tokens == want.tokens
    assert len(got.logprobs) == len(want.logprobs)
    assert all(abs(a - b) <= 1e-3 for a, b in zip(got.logprobs, want.logprobs))


class Server:
    """One server, in a process group of its own. It is asked over a socket of the file system, so
    that it may live on a host of namespaces.hosts. `more` is for its --kv-transfer-config."""

    def __init__(self, folder: Path, name: str, connector: str = "NixlConnector",
                 host: tuple[str, str] | None = None, ranks: int = 1,
                 on_failure: str = "recompute", shim: bool = True, calm: bool = True,
                 more: dict[str, Any] | None = None) -> None:
        self.name, self.socket, self.log = name, str(folder / name), folder / f"{name}.log"
        transfer = {"kv_connector": connector, "kv_role": "kv_both", "kv_buffer_device": "cpu",
                    "kv_load_failure_policy": on_failure,
                    "kv_connector_extra_config": {"kv_lease_duration": LEASE}, **(more or {})}
        space, address = host or ("", "127.0.0.1")
        inside = ["ip", "netns", "exec", space] if space else []
        self.command = [*inside, sys.executable, "-m", "vllm.entrypoints.openai.api_server",
                        "--model", str(folder / "model"), "--served-model-name", "m",
                        "--uds", self.socket, "--dtype", "float32", "--enforce-eager",
                        "--max-model-len", "4096", "--max-num-seqs", "8",
                        "--tensor-parallel-size", str(ranks), "--no-enable-prefix-caching",
                        "--kv-transfer-config", json.dumps(transfer)]
        path = [str(Path(__file__).parent / "calm")] if calm else []
        if shim:
            path.append(subprocess.run([sys.executable, "-m", "sluice.nixl.shim"], check=True,
                                       capture_output=True, text=True).stdout.strip())
        self.environment = {
            **os.environ, **QUIET, "PYTHONPATH": ":".join(path),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_HOST_IP": address,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": ports(1)[0]}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        Path(self.socket).unlink(missing_ok=True)  # a server that was killed leaves it
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=out,
                                            stderr=out, start_new_session=True)

    def wait(self) -> Server:
        """Returns when it answers; the first start on a machine compiles for a while."""
        end = time.monotonic() + 4 * LIMIT
        while True:
            try:
                self._get("/health", 5)
                return self
            except (OSError, Failed, http.client.HTTPException):
                assert self.process is not None and self.process.poll() is None, self._why()
                assert time.monotonic() < end, self._why()
                time.sleep(0.2)

    def _why(self) -> str:
        return f"{self.name} did not start:\n" + self.log.read_text()[-4000:]

    def complaints(self) -> str:
        """The last warnings and errors of its log."""
        lines = [line for line in self.log.read_text().splitlines()
                 if "WARNING" in line or "ERROR" in line]
        return "\n".join([f"{self.name}:", *lines[-100:]])  # one has a stack of calls

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _get(self, path: str, timeout: float = LIMIT) -> str:
        return self._call("GET", path, None, timeout, "")

    def _call(self, verb: str, path: str, body: Any, timeout: float, name: str) -> str:
        connection = _Unix(self.socket, timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(verb, path, data, {"Content-Type": "application/json",
                                                  **({"X-Request-Id": name} if name else {})})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise Failed(f"{self.name}: {answer.status}: {text[:500]}")
        return text

    def ask(self, prompt: list[int], tokens: int, kv: Any = None, timeout: float = LIMIT,
            name: str = "") -> Answer:
        """Completes a prompt. Raises Failed with vLLM's own error, OSError where it is cut off.

        In push mode the servers know each other's halves of a request by its name.
        """
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": tokens,
                                "temperature": 0, "logprobs": 1, "ignore_eos": True}
        if kv is not None:
            body["kv_transfer_params"] = kv
        begin = time.monotonic()
        answer = json.loads(self._call("POST", "/v1/completions", body, timeout, name))
        choice = answer["choices"][0]
        return Answer(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"],
                      answer.get("kv_transfer_params"), time.monotonic() - begin)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples that have a label."""
        return sum(float(line.rsplit(" ", 1)[1]) for line in self._get("/metrics").splitlines()
                   if line.startswith(name + "{") and label in line)

    def transferred(self) -> int:
        """Prompt tokens whose KV cache came from another server."""
        return int(self.metric("vllm:prompt_tokens_by_source_total", "external_kv_transfer"))

    def sources(self) -> tuple[int, int]:
        """Prompt tokens whose KV cache came from another server, and those that it computed."""
        return self.transferred(), int(self.metric("vllm:prompt_tokens_by_source_total",
                                                   "local_compute"))

    def sources_of(self, before: tuple[int, int], tokens: int) -> tuple[int, int]:
        """The sources of so many tokens since then. vLLM counts them a moment after its answer."""
        end = time.monotonic() + LIMIT
        while sum(now := self.sources()) < sum(before) + tokens and time.monotonic() < end:
            time.sleep(0.05)
        return now[0] - before[0], now[1] - before[1]


def started(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """For fixtures: starts servers beside each other, and ends them."""
    try:
        for s in servers:
            s.start()
        yield tuple(s.wait() for s in servers)
    finally:
        for s in servers:
            s.kill()
