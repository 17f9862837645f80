# SPDX-License-Identifier: Apache-2.0
r"""A vLLM server that keeps the KV cache of its prompts in the cache of the node: the second one,
started anew, has the first token of a prompt sooner, since it loads what the first has computed.

    sluice cache serve --config cache.toml
    python prefix.py unix:SOCKET MODEL [--dtype float32 …]      # what follows goes to the servers

On processors:

    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
        python prefix.py unix:SOCKET MODEL --dtype float32 --enforce-eager

Takes vLLM and the wheel of sluice in one environment. Where the cache has the prompt already, the
first server finds it, too: give another salt. Ctrl-C ends the server.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

PROMPT = "The keys and values of a prompt are computed once, and kept for whoever asks next. " * 60
HITS = "vllm:external_prefix_cache_hits_total{"


def transfer(address):
    return {"kv_connector": "SluiceConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "sluice.integrations.vllm_connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"sluice": {"address": address}}}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data,
                                     {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


def first_token(port, model, prompt):
    """Milliseconds until the first token of an answer."""
    begin = time.monotonic()
    with ask(port, "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 8,
                                       "temperature": 0, "stream": True}) as answer:
        answer.readline()
        return 1e3 * (time.monotonic() - begin)


def hits(port):
    """Tokens that vLLM has found in the cache."""
    with ask(port, "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(HITS)))


def serve(address, model, arguments):
    """Starts a server, measures, and ends it with its workers."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host",
         "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer(address)),
         *arguments], start_new_session=True)
    try:
        while server.poll() is None:
            try:
                ask(port, "/health").close()
                break
            except OSError:
                time.sleep(0.5)
        else:
            sys.exit(f"the server ended with status {server.returncode}: see above")
        first_token(port, model, "What a server does at its first request is not measured.")
        took = first_token(port, model, PROMPT)
        print(f"first token after {took:.0f} ms, {hits(port)} tokens from the cache", flush=True)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of the group have ended
        server.wait()


def main(address, model, *arguments):
    for _ in range(2):
        serve(address, model, arguments)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the server, too
    main(*sys.argv[1:])
