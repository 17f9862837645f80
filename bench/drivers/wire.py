# SPDX-License-Identifier: Apache-2.0
"""What the drivers written in Python share: the protocol, the memory and the loops.

A driver is one end of one peer: a process that reads requests from descriptor 3 and writes
answers to descriptor 4, a JSON object a line. What the libraries print goes elsewhere, so
that it cannot be taken for an answer. See ../doc.go for the requests.
"""

import base64
import json
import os
import select
import sys
import time
import zlib

import numpy as np

SAMPLES_MAX = 4096


class Unsupported(Exception):
    """The peer has nothing of the kind: a row with the reason, no failure."""


class Peer:
    """One end of a peer. A subclass names its library and fills in what it can do."""

    # What is to be known of its messages.
    message_note = ""

    def open(self, lane, role, name, memory):
        """Opens this end over memory (a numpy array of bytes); returns version, settings and card.
        """
        raise NotImplementedError

    def connect(self, card):
        """Makes the other end reachable by its card."""
        raise NotImplementedError

    def prepare(self, op, size, local, remote):
        """Returns a request that can be posted again and again: piece i goes between the slots
        local[i] and remote[i] (numpy arrays), slots being size bytes long."""
        raise NotImplementedError

    def post(self, request):
        """Posts a request and returns when it is done; raises what the library says."""
        raise NotImplementedError

    def release(self, request):
        """Gives a request back."""

    def finish(self):
        """Gives back what prepare made for all requests of a shape."""

    def notify(self, message):
        raise Unsupported("has no notifications")

    def receive(self):
        """Returns the messages that have arrived."""
        raise Unsupported("has no notifications")

    def progress(self):
        """Called again and again at the target while the other end works."""


def serve(peer, progresses=False):
    """Answers requests until the harness closes its end. progresses: the peer needs its progress
    called at the target while the other end works."""
    Server(peer, progresses).run()


class Server:
    def __init__(self, peer, progresses):
        self.peer, self.progresses = peer, progresses
        self.to = os.fdopen(4, "w", buffering=1)
        self.left = b""
        self.busy = False  # the other end works
        self.requests = []
        self.lists = []

    def run(self):
        while True:
            line = self.line()
            if not line:
                return
            request = json.loads(line)
            try:
                answer = getattr(self, "do_" + request["do"])(request) or {}
            except Unsupported as e:
                answer = {"unsupported": str(e)}
            except Exception as e:  # the harness makes a row of it
                answer = {"error": f"{type(e).__name__}: {e}"}
            answer["id"] = request["id"]
            self.to.write(json.dumps(answer) + "\n")

    def line(self):
        while b"\n" not in self.left:
            if self.busy and self.progresses:
                while not select.select([3], [], [], 0)[0]:
                    self.peer.progress()
            part = os.read(3, 1 << 20)
            if not part:
                return b""
            self.left += part
        line, self.left = self.left.split(b"\n", 1)
        return line

    def do_open(self, r):
        if r.get("threads", 1) > 1:
            raise Unsupported("this driver posts from one thread")
        self.memory = aligned(r["bytes"])
        random = np.random.default_rng(1 if r["role"] == "target" else 2)
        whole = r["bytes"] // 8 * 8
        self.memory[:whole].view(np.uint64)[:] = random.integers(0, 1 << 63, whole // 8,
            dtype=np.uint64)
        version, settings, card = self.peer.open(r["lane"], r["role"], r["name"], self.memory)
        return {"version": version, "settings": settings, "card": pack(card)}

    def do_connect(self, r):
        card = unpack(r["card"])
        begin = time.perf_counter_ns()
        self.peer.connect(card)
        return {"ns": time.perf_counter_ns() - begin}

    def do_serve(self, r):
        self.busy = r.get("on", False)  # left out when it is false

    def do_prepare(self, r):
        self.do_drop(r)
        for local, remote in zip(r["local"], r["remote"]):
            self.requests.append(
                self.peer.prepare(r["op"], r["size"], np.array(local, np.int32),
                                  np.array(remote, np.int32)))

    def do_once(self, r):
        begin = time.perf_counter_ns()
        self.peer.post(self.requests[0])
        return {"ns": time.perf_counter_ns() - begin}

    def do_go(self, r):
        post, requests, count = self.peer.post, self.requests, len(self.requests)
        clock, samples = time.perf_counter_ns, []
        begin = last = clock()
        end, least, i = begin + r["ns"], r["least"], 0
        while last < end or i < least:
            start = clock()
            post(requests[i % count])
            last = clock()
            samples.append(last - start)
            i += 1
        return {"samples": thin(samples), "ops": i, "ns": last - begin}

    def do_drop(self, _):
        for request in self.requests:
            self.peer.release(request)
        if self.requests:
            self.peer.finish()
        self.requests = []

    def do_stamp(self, r):
        at = np.array(r["slots"], np.int64) * r["size"]
        for i in range(8):
            self.memory[at + i] = (r["seed"] >> 8 * i) & 255

    def do_digest(self, r):
        size, crc = r["size"], 0
        for slot in r["slots"]:
            crc = zlib.crc32(self.memory[slot * size:(slot + 1) * size], crc)
        return {"crc": crc}

    def do_ping(self, r):
        message, samples = b"p" * r["size"], []
        for _ in range(r["count"]):
            begin = time.perf_counter_ns()
            self.peer.notify(message)
            self.await_message()
            samples.append(time.perf_counter_ns() - begin)
        return {"samples": thin(samples), "ops": r["count"], "text": self.peer.message_note}

    def do_pong(self, r):
        message = b"p" * r["size"]
        for _ in range(r["count"]):
            self.await_message()
            self.peer.notify(message)

    def await_message(self):
        while not self.peer.receive():
            pass


def aligned(count):
    """Memory on a page's border, faulted in."""
    whole = np.zeros(count + 4096, np.uint8)
    begin = -whole.ctypes.data % 4096
    return whole[begin:begin + count]


def thin(samples):
    step = -(-len(samples) // SAMPLES_MAX)
    return samples[::max(step, 1)]


def pack(card):
    return base64.b64encode(json.dumps(card, default=packed).encode()).decode()


def packed(value):
    return {"bytes": base64.b64encode(value).decode()}


def unpack(text):
    return json.loads(base64.b64decode(text), object_hook=unpacked)


def unpacked(value):
    return base64.b64decode(value["bytes"]) if set(value) == {"bytes"} else value


def missing(name, error):
    """Ends a driver whose library cannot be imported: its first answer says why."""
    class Missing(Peer):
        def open(self, *_):
            raise Unsupported(f"{name} cannot be imported: {error}")
    serve(Missing())
    sys.exit(0)
