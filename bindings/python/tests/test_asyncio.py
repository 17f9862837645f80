# SPDX-License-Identifier: Apache-2.0
"""Outcomes and messages in asyncio loops."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any, Coroutine

import pytest
import sluice
from conftest import LIMIT, MIB, Pair, descriptors, no_more_descriptors


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT))


def test_await_many_at_once_and_again(pair: Pair) -> None:
    async def work() -> None:
        many = [pair.write((0, i, MIB - 300 if i % 2 else 8)) for i in range(200)]
        for _ in range(3):
            for t in many:
                t.post()

            async def outcome(t: sluice.Transfer) -> None:
                await t
                assert t.test()

            await asyncio.gather(*map(outcome, many))
        await many[0]  # its outcome is still there

    run(work())


def test_many_who_await_one(narrow: Pair) -> None:
    async def work() -> None:
        t = narrow.stuck()

        async def outcome() -> None:
            with pytest.raises(sluice.AbortedError):
                await t

        waiting = [asyncio.ensure_future(outcome()) for _ in range(10)]
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, t.abort, LIMIT)
        await asyncio.gather(*waiting)

    run(work())


def test_an_abort_holds_up_no_task(narrow: Pair) -> None:
    async def work() -> None:
        t = narrow.stuck()
        seen: list[str] = []
        asyncio.get_running_loop().call_soon(seen.append, "another task")
        await t.abort_async(LIMIT)
        assert seen
        with pytest.raises(sluice.AbortedError):
            t.test()

    run(work())


def test_an_idle_transfer_is_misuse(pair: Pair) -> None:
    async def work() -> None:
        with pytest.raises(sluice.BusyError):
            await pair.write((0, 0, 8))

    run(work())


def test_cancel_ends_the_wait_and_not_the_transfer(narrow: Pair) -> None:
    async def work() -> None:
        t = narrow.stuck()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(awaited(t)), 0.05)
        assert not t.test()
        task = asyncio.ensure_future(awaited(t))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not t.test()
        again = asyncio.ensure_future(awaited(t))
        await asyncio.sleep(0)
        while not t.test():  # until there is room for its message
            with suppress(sluice.WaitTimeout):
                narrow.b.engine.receive(0)
            await asyncio.sleep(0)
        await again
        assert t.test()

    run(work())


async def awaited(t: sluice.Transfer) -> None:
    await t


def test_closing_the_engine_wakes(narrow: Pair) -> None:
    async def work() -> None:
        t = narrow.stuck()

        async def outcome() -> None:
            with pytest.raises(sluice.ClosedError):
                await t

        async def message() -> None:
            with pytest.raises(sluice.ClosedError):
                await narrow.a.engine.next_notification()

        waiting = [asyncio.ensure_future(outcome()), asyncio.ensure_future(message())]
        arrivals = narrow.a.engine._arrivals
        while not arrivals._futures or not arrivals._readers:  # until both wait
            await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, narrow.a.engine.close)
        await asyncio.gather(*waiting)
        with pytest.raises(sluice.ClosedError):
            await narrow.a.engine.next_notification()

    run(work())


def test_messages(pair: Pair) -> None:
    async def work() -> None:
        async def gather(n: int) -> list[bytes]:
            return [(await pair.b.engine.next_notification()).data for _ in range(n)]

        readers = [asyncio.ensure_future(gather(50)) for _ in range(2)]
        await asyncio.sleep(0)
        for i in range(100):
            pair.peer.notify(b"%d" % i, LIMIT)
            if i % 10 == 0:
                await asyncio.sleep(0)
        got = [int(m) for messages in await asyncio.gather(*readers) for m in messages]
        assert sorted(got) == list(range(100))

    run(work())


def test_loops_of_several_threads(pair: Pair) -> None:
    failed: list[BaseException] = []

    def thread() -> None:
        async def work() -> None:
            t = pair.write((0, 0, MIB))
            for _ in range(50):
                t.post()
                await t

        try:
            run(work())
        except BaseException as e:  # told to the thread of the test
            failed.append(e)

    threads = [threading.Thread(target=thread) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT)
    assert not failed and not any(t.is_alive() for t in threads)


def test_loops_leave_no_descriptor(pair: Pair) -> None:
    async def work() -> None:
        t = pair.write((0, 0, MIB))
        for _ in range(10):
            t.post()
            await t
        t.close()

    run(work())
    before = descriptors()
    for _ in range(5):
        run(work())
    no_more_descriptors(before)
