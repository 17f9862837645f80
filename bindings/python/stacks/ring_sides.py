# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache of processed images over our ring or over vLLM's own: a frontend and readers, which
are forked before the library is loaded.

ring_sides.py sluice|vllm    what both promise, and of ours what vLLM's cannot; "right" at the end
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import sys
import time
from types import SimpleNamespace
from typing import Any, Callable, Optional, Union

import torch
from vllm.multimodal.cache import shm
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

MIB = 1 << 20
GIB = 1 << 30
FORK = multiprocessing.get_context("fork")
LIMIT = 120.0  # seconds of one step, on a machine that others keep busy

THEIRS = {name: getattr(shm, name) for name in (
    "SingleWriterShmRingBuffer", "SingleWriterShmObjectStorage", "MsgpackSerde")}


def use(over: str) -> None:
    """Has the caches that are made from here on use one or the other."""
    if over == "sluice":
        from sluice.integrations import vllm_plugin

        os.environ["SLUICE_VLLM_RING"] = "1"
        vllm_plugin.register()
        assert shm.MsgpackSerde.__module__ == "sluice.integrations.vllm_ring"
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    else:
        for name, kind in THEIRS.items():
            setattr(shm, name, kind)


def config(name: str, readers: int, size: int, most: int) -> Any:
    os.environ["VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"] = name
    multimodal = SimpleNamespace(mm_processor_cache_gb=size / GIB,
                                 mm_shm_cache_max_object_size_mb=most / MIB)
    return SimpleNamespace(parallel_config=SimpleNamespace(world_size=readers),
                           model_config=SimpleNamespace(
                               get_multimodal_config=lambda: multimodal))


def image(n: int, length: int) -> MultiModalKwargsItem:
    """A tensor of float32 and a small one."""
    pixels = torch.full((length // 4,), float(n))
    grid = torch.tensor([1, n, n])
    return MultiModalKwargsItem({
        key: MultiModalFieldElem(data=data, field=MultiModalBatchedField())
        for key, data in (("pixel_values", pixels), ("grid", grid))})


class Side:
    """A reader's process: calls of Receiver's methods by name."""

    def __init__(self, lock: Any) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=Receiver(lock).serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, name: str, *words: Any) -> None:
        self._pipe.send((name, words))

    def end(self) -> Any:
        assert self._pipe.poll(LIMIT), "a reader does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __call__(self, name: str, *words: Any) -> Any:
        self.begin(name, *words)
        return self.end()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class Receiver:
    def __init__(self, lock: Any) -> None:
        self.lock, self.kept = lock, list[Any]()
        self.caches: dict[str, Any] = {}

    def serve(self, pipe: Any) -> None:
        while True:
            name, words = pipe.recv()
            try:
                pipe.send(getattr(self, name)(*words))
            except Exception as e:
                pipe.send(e)

    def join(self, over: str, *words: Any) -> None:
        use(over)
        self.caches[over] = shm.ShmObjectStoreReceiverCache(config(*words), self.lock)

    def get(self, over: str, item: Any, key: str, keep: bool = False) -> list[float]:
        cache = self.caches[over]
        cache.touch_receiver_cache_item(key, item)
        got = cache.get_and_update_item(item, key)
        pixels = got["pixel_values"].data
        if keep:
            self.kept.append(pixels)
        return [pixels.shape[0], pixels.min().item(), pixels.max().item(),
                *got["grid"].data.tolist()]

    def timed(self, over: str, item: Any, key: str) -> float:
        """Seconds until the tensors are there."""
        before = time.perf_counter()
        got = self.caches[over].get_and_update_item(item, key)
        took = time.perf_counter() - before
        assert got["pixel_values"].data[-1].item() >= 0
        return took

    def in_ring(self) -> bool:
        """Whether what is kept lies in the ring's memory, where nothing can be written."""
        at = self.kept[-1].data_ptr()
        with open("/proc/self/maps") as maps:
            for line in maps:
                first, last = (int(n, 16) for n in line.split()[0].split("-"))
                if first <= at < last:
                    return "sluice-ring" in line and " r--s " in line
        return False

    def drop(self) -> bool:
        """Whether what was kept is as it was."""
        alike = all(bool((k == k[0]).all()) for k in self.kept)
        self.kept.clear()
        return alike


class Scene:
    def __init__(self, over: str, readers: int, size: int, most: int,
                 sides: Optional[list[Side]] = None) -> None:
        self.over, lock = over, FORK.Lock()
        self.sides = sides or [Side(lock) for _ in range(readers)]
        words = "ring-" + secrets.token_hex(8), readers, size, most
        use(over)
        self.sender = shm.ShmObjectStoreSenderCache(config(*words))
        self.storage = self.sender._shm_cache
        for side in self.sides:
            side("join", over, *words)

    def put(self, n: int, length: int = MIB) -> Any:
        item = image(n, length)
        sent, _ = self.sender.get_and_update_item((item, []), str(n))
        return sent

    def get(self, sent: Any, n: int, keep: bool = False,
            sides: Optional[list[Side]] = None) -> list[Any]:
        return [side("get", self.over, sent, str(n), keep) for side in sides or self.sides]


def refuses(text: str, call: Callable[[], Any], kind: Union[type, None] = None) -> None:
    try:
        call()
    except (kind or ValueError) as e:
        assert text in str(e), e
    else:
        raise AssertionError(f"nothing said {text!r}")


def sent(item: Any) -> bool:
    """Whether an item is one of the shared memory, and not the image itself."""
    return "address" in item


def changed(item: Any, key: str, data: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({**item, key: MultiModalFieldElem(
        data=data, field=MultiModalBatchedField())})


def both(s: Scene) -> None:
    """What vLLM's own storage does."""
    right = [MIB // 4, 1, 1, 1, 1, 1]
    first = s.put(1)
    assert sent(first) and s.sender.is_cached_item("1") and not s.sender.is_cached_item("2")
    assert s.get(first, 1) == [right] * len(s.sides)
    again = s.put(1)
    assert again["address"].data == first["address"].data
    assert s.get(again, 1) == [right] * len(s.sides)
    assert s.sender.make_stats().hits == 1
    assert s.storage.get(first["address"].data, first["monotonic_id"].data)["grid"].data[1] == 1

    refuses("already exists", lambda: s.storage.put("1", image(1, MIB)))
    refuses("exceeds max object size", lambda: s.storage.put("large", image(1, 5 * MIB)))
    assert not sent(s.put(99, 5 * MIB)) and not s.sender.is_cached_item("99")

    s.sender.validate_input_item(first, "1")
    number, signature = first["monotonic_id"].data, first["signature"].data
    for forged, key in ((first, "2"), (changed(first, "monotonic_id", number + 1), "1"),
                        (changed(first, "address", first["address"].data + 64), "1"),
                        (changed(first, "signature", signature[::-1]), "1"),
                        (changed(first, "signature", [256] * 32), "1"),
                        (changed(first, "signature", []), "1")):
        text = "Invalid SHM handle signature"
        refuses(text, lambda: s.sender.validate_input_item(forged, key))
        refuses(text, lambda: s.sides[0]("get", s.over, forged, key))

    waiting = {}  # until there is no room
    for n in range(2, 40):
        item = s.put(n)
        if not sent(item):
            break
        waiting[n] = item
    else:
        raise AssertionError("16 MiB have room for more than that")
    refuses("Not enough space", lambda: s.storage.put("more", image(1, MIB)), MemoryError)
    for n, item in waiting.items():
        for pixels, *_ in s.get(item, n):
            assert pixels == MIB // 4
    s.sender.touch_sender_cache_item("not there")
    newest = str(max(waiting))  # vLLM's own lets nothing go behind one that is touched
    s.sender.touch_sender_cache_item(newest)
    for n in range(40, 44):
        item = s.put(n)
        assert sent(item), "all had got what was there"
        assert s.get(item, n)[0][1] == n
    assert s.sender.is_cached_item(newest)
    s.sender.release_sender_touches()
    for n in range(44, 64):
        item = s.put(n)
        assert sent(item) and s.get(item, n)[0][1] == n
    assert not s.sender.is_cached_item("1") and not s.sender.is_cached_item(newest)
    assert len(s.storage.key_index) < 17 and len(s.sender._p0_cache) <= 34
    refuses("has been modified or is invalid", lambda: s.sides[0]("get", s.over, first, "1"))

    item = s.put(70)
    s.sender.clear_cache()
    assert s.get(item, 70)[0][1] == 70, "a request that drains"
    assert not s.sender.is_cached_item("70") and len(s.storage.key_index) == 0
    item = s.put(70)
    assert sent(item) and s.get(item, 70)[0][1] == 70


def ours(s: Scene) -> None:
    """What vLLM's own cannot."""
    s.sender.clear_cache()
    last = s.put(100)
    s.get(last, 100, sides=s.sides[1:])  # one has not got the oldest of all
    for n in range(101, 140):
        item = s.put(n)
        assert sent(item), "others go in its place"
        s.get(item, n)
    assert s.get(last, 100, sides=s.sides[:1])[0][1] == 100
    s.sender.touch_sender_cache_item("100")
    for n in range(140, 180):
        item = s.put(n)
        assert sent(item) and s.get(item, n)[0][1] == n
    assert s.sender.is_cached_item("100")
    s.sender.release_sender_touches()
    item = s.put(200)
    s.get(item, 200, keep=True)
    assert s.sides[0]("in_ring"), "a tensor without a copy"
    for n in range(201, 240):
        later = s.put(n)
        assert sent(later)
        s.get(later, n)
    assert all(side("drop") for side in s.sides), "what is held stays"
    item = s.put(300)
    s.get(item, 300, keep=True)
    s.sides.pop().kill()
    for n in range(301, 360):
        end = time.monotonic() + LIMIT
        while not sent(item := s.put(n)):  # its end is seen soon
            assert time.monotonic() < end
        s.get(item, n)


def main() -> None:
    scene = Scene(sys.argv[1], 3, 16 * MIB, 4 * MIB)
    both(scene)
    if scene.over == "sluice":
        ours(scene)
    for side in scene.sides:
        side.kill()
    scene.sender.close()
    print("right", flush=True)


if __name__ == "__main__":
    main()
