# SPDX-License-Identifier: Apache-2.0
"""Between processes: that bytes arrive, and what is left when one dies, stops or forks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import sluice
from conftest import LIMIT, MIB, End, go_on, need_program, stop, until

PLAIN: dict[str, Any] = {"plaintext": True, "listen": "127.0.0.1:0"}


def connect(start: Any, backend: str, options: dict[str, Any], address: str,
            **config: Any) -> tuple[Any, End, sluice.Peer]:
    child = start("target.py", json.dumps({"backend": backend, "options": options,
                                           "address": address, "config": config}))
    bound = child.stdout.readline().strip()
    assert bound.startswith(address.partition(":")[0] + ":")
    end = End("initiator", [sluice.Backend(backend, **options)], **config)
    return child, end, end.engine.dial(bound, LIMIT)


def write_all(end: End, peer: sluice.Peer) -> sluice.Transfer:
    t = peer.transfer("write")
    t.add(end.region, 0, peer.remote("data"), 0, MIB)
    return t


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("network", ["unix", "tcp"])
def test_write_and_messages(start: Any, tmp_path: Path, backend: str, network: str) -> None:
    address = f"unix:{tmp_path}/s" if network == "unix" else "tcp:127.0.0.1:0"
    config = {"plaintext": True} if network == "tcp" else {}
    child, end, peer = connect(start, backend, PLAIN if backend == "tcp" else {}, address, **config)
    end.bytes[:] = os.urandom(MIB)
    t = write_all(end, peer)
    t.message(b"all of it")
    t.run(LIMIT)
    child.stdin.write("message\n")
    child.stdin.flush()
    assert child.stdout.readline() == "all of it\n"
    note = end.engine.receive(LIMIT)
    assert note.data == b"thanks" and note.sender is peer and not peer.lost
    child.stdin.write("digest\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == hashlib.sha256(end.bytes).hexdigest()
    child.stdin.write("origin\n")
    child.stdin.flush()
    assert child.stdout.readline().startswith("127.0.0.1:" if network == "tcp" else "@")
    child.stdin.close()
    assert child.wait(LIMIT) == 0
    assert end.engine.receive(LIMIT).lost
    t.close()
    end.close()


def test_the_socket_of_a_killed_program_stops_none(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with sluice.Engine("a", [sluice.Backend("shm")]) as engine:
        engine.serve(f"unix:{path}").close()


def test_certificates(start: Any, tmp_path: Path) -> None:
    openssl = need_program("openssl", "apt-get install openssl")
    options = certificates(openssl, tmp_path)
    identity = sluice.Identity(options["certificate"], options["key"], options["authority"])
    child, end, peer = connect(start, "tcp", options, "tcp:127.0.0.1:0", identity=identity)
    write_all(end, peer).run(LIMIT)
    end.close()
    open_to_all = End("plain", [sluice.Backend("tcp", **options)])
    with pytest.raises(sluice.Error, match="in plaintext where"):
        open_to_all.engine.serve("tcp:127.0.0.1:0")
    open_to_all.close()
    with pytest.raises(sluice.Error, match="no-such-file"):
        sluice.Engine("lost", ["shm"], identity=identity._replace(key="no-such-file"))
    stranger = End("stranger", [sluice.Backend("tcp", **PLAIN)])
    owner = End("owner", [sluice.Backend("tcp", **options)])
    with pytest.raises(sluice.Error):
        stranger.engine.connect(owner.engine.describe(), LIMIT)
    stranger.close()
    owner.close()
    with pytest.raises(sluice.ArgumentError, match="go together"):
        sluice.Engine("half", [sluice.Backend("tcp", certificate="x")])


def test_a_key_in_the_description(start: Any, tmp_path: Path) -> None:
    """Over tcp of which nothing is said, peers know each other by the key in the description."""
    _, end, peer = connect(start, "tcp", {"listen": "127.0.0.1:0"}, f"unix:{tmp_path}/s")
    write_all(end, peer).run(LIMIT)
    remote = peer.remote("data")
    assert "by the key in its address" in peer.explain(end.region, remote)
    end.close()


def certificates(openssl: str, folder: Path) -> dict[str, Any]:
    import subprocess

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], check=True, cwd=folder, capture_output=True)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    run(*new, "-x509", "-days", "1", "-subj", "/CN=authority", "-keyout", "ca.key", "-out",
        "ca.pem")
    run(*new, "-subj", "/CN=member", "-keyout", "key.pem", "-out", "member.csr")
    (folder / "uses").write_text(
        "extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=DNS:member.test\n")
    run("x509", "-req", "-days", "1", "-in", "member.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
        "-CAcreateserial", "-extfile", "uses", "-out", "c.pem")
    files = {"certificate": "c.pem", "key": "key.pem", "authority": "ca.pem"}
    return {**{k: str(folder / name) for k, name in files.items()}, "listen": "127.0.0.1:0"}


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_killed_peer(start: Any, tmp_path: Path, backend: str) -> None:
    child, end, peer = connect(start, backend, PLAIN if backend == "tcp" else {},
                               f"unix:{tmp_path}/s")
    t = write_all(end, peer)
    t.run(LIMIT)
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(ConnectionError) as e:
        while True:
            t.run(LIMIT)
    assert isinstance(e.value, sluice.PeerLostError)
    assert end.engine.receive(LIMIT).lost
    until(lambda: peer.lost)
    with pytest.raises(sluice.PeerLostError):
        t.run(LIMIT)
    t.close()
    end.close()


def test_a_frozen_peer(start: Any, tmp_path: Path) -> None:
    """Writes that a stopped owner's program has to land end by abort, and nothing of them lands
    when it goes on.
    """
    child, end, peer = connect(start, "tcp", PLAIN, f"unix:{tmp_path}/s")
    end.bytes[:] = b"1" * MIB
    t = write_all(end, peer)
    t.run(LIMIT)
    stop(child)
    end.bytes[:] = b"2" * MIB
    many = [write_all(end, peer) for _ in range(64)]
    for late in many:
        late.post()
    with pytest.raises(sluice.WaitTimeout):
        many[0].wait(0.3)  # so that bytes are on their way, mostly
    for late in many:
        late.abort(LIMIT)
        assert late.done
    lost = peer.lost
    go_on(child)
    if lost:  # for the proof: the owner reads all that came, and the end of the connection
        child.stdin.write("lost\n")
        child.stdin.flush()
        assert child.stdout.readline() == "lost\n"
    else:  # the owner has read all that came before this write
        end.bytes[:] = b"1" * MIB
        with peer.transfer("write") as behind:
            behind.add(end.region, 0, peer.remote("data"), 0, 1)
            behind.run(LIMIT)
    child.stdin.write("digest\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == hashlib.sha256(b"1" * MIB).hexdigest()
    end.close()


def test_fork(start: Any) -> None:
    child = start("forked.py")
    out, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 0 and out == "ok\n"


def test_a_signal_ends_a_wait(start: Any) -> None:
    child = start("waiting.py")
    assert child.stdout.readline() == "waiting\n"
    until(lambda: asleep(child.pid))
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=LIMIT)
    assert child.returncode == 0 and out == "interrupted\n"


def asleep(pid: int) -> bool:
    """Whether the first thread of a process sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
