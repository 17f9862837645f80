# SPDX-License-Identifier: Apache-2.0
"""Both prefill ranks of handoff_sides: says how they are reached, and does what lines tell it."""

from __future__ import annotations

import json
import sys

import sluice
from handoff_sides import BLOCKS_OF_PREFILL, PATIENT, PREFILL, TOKENS, places
from patience import LIMIT
from sluice.handoff import Plan, Push, Sender


def main() -> None:
    engines = [sluice.Engine(f"prefill-{s.rank}", [sys.argv[1]]) for s in PREFILL]
    memories = [e.alloc(s.regions[0].bytes) for e, s in zip(engines, PREFILL)]
    regions = [e.register("kv", m, private=True) for e, m in zip(engines, memories)]
    print(json.dumps({"descriptions": [e.describe().hex() for e in engines],
                      "sides": [s.encode() for s in PREFILL]}), flush=True)
    decode = json.loads(sys.stdin.readline())
    plan = Plan(PREFILL, decode["sides"])
    senders = [Sender(e, plan, k, [regions[k]], [e.connect(bytes.fromhex(decode["description"]),
                                                           LIMIT)], **PATIENT)
               for k, e in enumerate(engines)]
    pushes: list[Push] = []
    for line in sys.stdin:
        what, _, n = line.partition(" ")
        if what == "begin":
            pushes = [s.begin(int(n), [BLOCKS_OF_PREFILL], TOKENS) for s in senders]
        elif what == "layer":  # "computes" it on both ranks
            for k, push in enumerate(pushes):
                for place in places(PREFILL[k], BLOCKS_OF_PREFILL):
                    if place.layer == int(n):
                        memories[k].view[place.at:place.at + len(place.bytes)] = place.bytes
                push.layer(int(n))
        else:
            for push in pushes:
                push.wait(LIMIT)
        print("done", flush=True)


main()
