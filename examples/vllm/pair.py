# SPDX-License-Identifier: Apache-2.0
r"""Two vLLM servers on this machine: one computes a prompt, the other answers with the KV cache
that it is handed. vLLM's NixlConnector runs over sluice, by the shim in front of NIXL.

    python pair.py MODEL [--dtype float32 …]      # what follows goes to both servers

On processors both share one memory, and neither must take it all:

    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
        python pair.py MODEL --dtype float32 --enforce-eager --gpu-memory-utilization 0.2

Takes vLLM and the wheel of sluice in one environment. Ctrl-C ends both servers.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from sluice.nixl import shim

TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute"}  # leave kv_buffer_device out on cards
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
       "remote_block_ids": None, "remote_host": None, "remote_port": None}
PROMPT = "A prefill server computes the KV cache of a prompt, and a decode server reads it. " * 20


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(model, port, arguments):
    """Starts a server in a process group of its own, whose workers end with it. Where there are
    cards, give each server its own.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
         "--host", "127.0.0.1", "--port", str(port), "--no-enable-prefix-caching",
         "--kv-transfer-config", json.dumps(TRANSFER), *arguments],
        env={**os.environ, "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
             "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}, start_new_session=True)


def end(servers):
    """Asks all servers to end, and kills what is left of them after 20 s."""
    for server in servers:
        server.terminate()
    limit = time.monotonic() + 20
    for server in servers:
        try:
            server.wait(max(0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of the group have ended
        server.wait()


def get(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def wait(port, server):
    while server.poll() is None:
        try:
            get(port, "/health")
            return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"a server ended with status {server.returncode}: its messages stand above")


def complete(port, model, tokens, kv):
    return json.loads(get(port, "/v1/completions", {
        "model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0,
        "kv_transfer_params": kv}))


def main(model, *arguments):
    shim.install()  # for this process and the servers: the same as PYTHONPATH=$(python -m …)
    prefill, decode = free_port(), free_port()
    servers = []
    try:
        for port in prefill, decode:
            servers.append(serve(model, port, arguments))
        for port, server in zip((prefill, decode), servers):
            wait(port, server)
        kv = complete(prefill, model, 1, ASK)["kv_transfer_params"]
        begin = time.monotonic()
        answer = complete(decode, model, 16, kv)
        print(f"\n{time.monotonic() - begin:.3f} s: {answer['choices'][0]['text']!r}")
        for line in get(decode, "/metrics").splitlines():
            if line.startswith("vllm:prompt_tokens_by_source_total{"):
                print(line)  # external_kv_transfer: came from the prefill; local_compute: did not
    finally:
        end(servers)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers, too
    main(*sys.argv[1:])
