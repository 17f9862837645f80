# SPDX-License-Identifier: Apache-2.0
"""A reader of a ring, in a process of its own: a line "ROW GENERATION" has it hold an object and
say which bytes that has, "close" has it let go of all that it holds.
"""

from __future__ import annotations

import sys

from sluice.errors import Error
from sluice.ring import Handle, Reader, View


def act(reader: Reader, views: list[View], line: str) -> str:
    try:
        if line == "close":
            while views:
                views.pop(0).close()
            return "closed"
        row, generation = map(int, line.split())
        views.append(reader.get(Handle(row, generation)))
        return str(sorted(set(views[-1].memory)))
    except Error as e:
        return type(e).__name__


def main() -> None:
    reader, views = Reader.join(sys.argv[1], 60), list[View]()
    print("joined", flush=True)
    for line in sys.stdin:
        print(act(reader, views, line.strip()), flush=True)


main()
