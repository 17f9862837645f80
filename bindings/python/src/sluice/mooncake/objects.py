# SPDX-License-Identifier: Apache-2.0
"""Objects by name in a sluice cache, of any size up to that of the cache.

An object is a head and pieces. The head is a block of HEAD bytes whose key is the hash of the name:
it has the name, the size, and the key of the first piece. The others count up from it, and the
first one is random: two processes that store one name at a time never mix their pieces, and what is
left of an object whose head was evicted is never found under a new one. A head without its pieces
is no object, and makes way for the next put; a put stores it beside the pieces, and of several at
a time the first head wins. An upsert replaces the head once its pieces are there, so that at each
moment, also of a kill, others find one of the two objects.

A get of names whose heads were seen before loads the pieces by those and the heads anew at the same
time: what it has loaded counts where the two are alike.

The memory of an object that lies evenly in one registered range is read and written in place. What
does not is copied by way of memory of ours.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import threading
import time
from contextlib import contextmanager, suppress
from typing import Callable, Iterator, NamedTuple, Optional, Sequence, Union

import numpy as np

from .. import errors
from .._config import is_cluster
from .._segments import HostMemory
from ..cache import KEY_BYTES, Blocks, Found, Namespace, Op, Outcome, key_of
from ..integrations import _pages
from ..integrations._pages import DETACH, KEYS_MAX, Options, PageStore, Pool, geometry
from .memory import card_of
from .ranges import Ranges

HEAD = 512
PIECE = 2 << 20  # the least default extent of a cache
PIECE_MIN = 64 << 10
PIECES_MAX = 1 << 20  # of an object
NAME_MAX = PIECE_MIN  # bytes; a name that has no room in the head is a piece of its own
STAGED_MAX = 64 << 20  # bytes that one pass copies by way of our memory
OPS_MAX = 256  # that run at a time
TRIES = 16  # to read an object that others replace meanwhile
SEEN_MAX = 1 << 14  # heads that are remembered

# What the wheel's calls return.
OK, INTERNAL, NO_ROOM, INVALID = 0, -1, -200, -600
NOT_FOUND, FAILED, LOST = -704, -800, -900

_FORM = struct.Struct("<4sIQI16s")  # magic, bytes of the name, size, piece, key of the first
_MAGIC = b"slm1"
_Shape = tuple[int, tuple[tuple[int, int], ...]]  # a run, and loops of it
_KEYS, _SLOTS = 1 << 8 * KEY_BYTES, 1 << 32
_THERE = Found.IN_MEMORY | Found.ON_DISK
_STORED = bytes(o in (Outcome.DONE, Outcome.KNOWN, Outcome.PENDING) for o in range(256))
_CODES = {Outcome.NO_ROOM: NO_ROOM, Outcome.BUSY: NO_ROOM, Outcome.MISSING: NOT_FOUND,
          Outcome.PENDING: NOT_FOUND, Outcome.DAMAGED: NOT_FOUND, Outcome.UNLIKE: NOT_FOUND}
_UNSURE = {Outcome.LATE, Outcome.FAILED}  # the cache may do it yet
_NOT_READ = {Outcome.UNDONE, Outcome.NO_ROOM, Outcome.LATE, Outcome.FAILED, Outcome.BUSY}


class Value(NamedTuple):
    """Where an object lies: addresses and lengths of runs that follow each other in it."""

    at: Sequence[int]
    lengths: Sequence[int]

    def cut(self, size: int) -> Value:
        """The runs of its first bytes."""
        at, lengths = [], []
        for address, n in zip(self.at, self.lengths):
            if size <= 0:
                break
            at.append(address)
            lengths.append(min(n, size))
            size -= n
        return Value(at, lengths)


class Head(NamedTuple):
    """What is known of an object."""

    size: int
    piece: int
    first: int
    name: int  # bytes

    def keys(self) -> list[bytes]:
        return [_key(self.first + k) for k in range(-(-self.size // self.piece))]

    @property
    def spilled(self) -> bool:
        return _FORM.size + self.name > HEAD

    def all_keys(self) -> list[bytes]:
        return self.keys() + [_key(self.first - 1)] * self.spilled


class _Block(NamedTuple):
    """A block of the cache, and where it lies in a memory that is attached."""

    key: bytes
    memory: HostMemory
    offset: int
    run: int
    loops: tuple[tuple[int, int], ...] = ()


class _Beside:
    """Heads that move at the same time as the pieces of their objects."""

    def __init__(self, move: Callable[..., Op], blocks: dict[int, _Block]) -> None:
        self.move, self.blocks = move, blocks
        self.said: dict[int, int] = {}  # what became of those that have moved


def _key(number: int) -> bytes:
    return (number % _KEYS).to_bytes(KEY_BYTES, "little")


class Objects(PageStore):
    """The objects of one process. Close it. Any thread may call anything."""

    def __init__(self, options: Options, namespace: str, kept: int) -> None:
        super().__init__(options, namespace)
        self._kept = kept  # bytes of ours that stay attached
        self._piece = PIECE
        self._held = threading.Condition()  # guards what follows
        self._staged: list[Value] = []  # which calls copy by way of our memory now
        self._ranges: Ranges[Pool] = Ranges()
        self._free: list[tuple[int, mmap.mmap, Pool]] = []
        self._seen: dict[bytes, Head] = {}  # the last heads that were read or stored, by their keys
        self._known: Optional[tuple[_pages._Session, Namespace, Namespace]] = None

    # Memory

    def register(self, address: int, length: int) -> None:
        """Lets the cache reach a range of the host's memory. KeyError: it overlaps another."""
        _check_host(address)
        with self._held:
            self._ranges.check(address, length)
            pool = Pool("range", [HostMemory(address, length)], [], [])
            self.add(pool)
            self._ranges.add(address, length, pool)

    def unregister(self, address: int) -> None:
        """Ends a range: when this returns the cache reaches it no more. KeyError: there is none."""
        with self._held:
            self._await_staged(address)
            pool = self._ranges.at(address)
            if pool is None:
                raise KeyError(f"{address:#x} is not registered")
            self.drop(pool)
            self._ranges.drop(address)

    def close(self) -> None:
        """As of a PageStore. No call copies to or from the program's memory behind it."""
        super().close()
        with self._held:
            self._await_staged(None)

    def _await_staged(self, address: Optional[int]) -> None:
        """Waits for the calls that copy by way of our memory to or from a range, or any, which
        were there before this one.
        """
        begin, length = self._ranges.whole(address) if address is not None else (0, 1 << 64)
        others = [v for v in self._staged if any(
            at < begin + length and begin < at + n for at, n in zip(v.at, v.lengths))]
        while any(v is other for v in self._staged for other in others):
            self._held.wait()

    @contextmanager
    def _ours(self, length: int) -> Iterator[HostMemory]:
        """Memory of ours for a while. Without the proof that nothing writes there any more it is
        not used again.
        """
        with self._held:
            fit = [k for k, (n, _, _) in enumerate(self._free) if n >= length]
            one = self._free.pop(min(fit, key=lambda k: self._free[k][0])) if fit else None
        if one is None:
            size = max(1 << 20, 1 << (length - 1).bit_length())
            data = mmap.mmap(-1, size)
            memory = HostMemory(ctypes.addressof(ctypes.c_char.from_buffer(data)), size)
            one = size, data, Pool("ours", [memory], [], [], data)
            self.add(one[2])
        try:
            yield one[2].memories[0]
        except errors.UnprovenError:
            raise
        except errors.Error:
            self._give_back(one)
            raise
        self._give_back(one)

    def _give_back(self, one: tuple[int, mmap.mmap, Pool]) -> None:
        with self._held:
            keep = one[0] + sum(n for n, _, _ in self._free) <= self._kept
            if keep:
                self._free.append(one)
        if not keep:
            self.drop(one[2])

    def _block(self, head: Head, value: Value) -> Optional[list[_Block]]:
        """Where the pieces lie, None where they have to be copied. KeyError: partly outside a
        range.
        """
        at = value.at[0]
        shape: Optional[_Shape] = head.size, ()
        if len(value.at) > 1:
            alike = len(set(value.lengths)) == 1
            shape = _even(tuple([a - at for a in value.at]), value.lengths[0]) if alike else None
        if shape and (not shape[1] or head.size <= head.piece):
            run, loops = shape
            try:
                start, pool = self._ranges.find(at, run + sum([(n - 1) * by for n, by in loops]))
            except KeyError:
                pass
            else:
                if not loops:
                    return _pieces(head, pool.memories[0], at - start)
                return [_Block(_key(head.first), pool.memories[0], at - start, run, loops)]
        for address, n in zip(value.at, value.lengths):
            try:
                self._ranges.find(address, n)
            except KeyError:
                self._ranges.check(address, n)
                _check_host(address)
        return None

    # Blocks

    def _spaces(self, session: _pages._Session) -> tuple[Namespace, Namespace]:
        """The namespaces of heads and of pieces."""
        known = self._known
        if known is None or known[0] is not session:
            one, other = (session.cache.namespace(
                self._namespace, geometry("mooncake.store", kind, 1), timeout=self._options.timeout)
                for kind in ("heads", "pieces"))
            known = self._known = session, one, other
        return known[1:]

    def _move_blocks(self, session: _pages._Session, move: Callable[..., Op],
                     blocks: Sequence[_Block], beside: Optional[Callable[..., Op]] = None,
                     others: Sequence[_Block] = ()) -> bytes:
        """Copies blocks, and others beside them, and says what became of each. When it ends none
        moves any more. It raises where the cache is lost.
        """
        of, moves = len(blocks), (move, beside or move)
        blocks = [*blocks, *others]
        outcomes = np.zeros(len(blocks), np.uint8)
        alike: dict[tuple[bool, HostMemory, int, tuple[tuple[int, int], ...], int],
                    list[int]] = {}
        for k, b in enumerate(blocks):  # a slot has 32 bits
            base = b.offset - b.offset // b.run % _SLOTS * b.run
            alike.setdefault((k >= of, b.memory, b.run, b.loops, base), []).append(k)
        waiting = [(at, ks[k:k + KEYS_MAX]) for at, ks in alike.items()
                   for k in range(0, len(ks), KEYS_MAX)]
        timeout, failed = self._options.timeout, list[errors.Error]()
        for first in range(0, len(waiting), OPS_MAX):
            begun: list[tuple[list[int], Op]] = []
            for (other, memory, run, loops, base), ks in waiting[first:first + OPS_MAX]:
                try:
                    place = _attached(session, memory).place(base, run, run, loops)
                    keys = b"".join([blocks[k].key for k in ks])
                    slots = [blocks[k].offset // run % _SLOTS for k in ks]
                    begun.append((ks, moves[other](keys, place, slots, timeout)))
                except errors.Error as e:
                    outcomes[ks] = Outcome.BUSY if isinstance(e, errors.BusyError) else 0
                    failed.append(e)
            limit = time.monotonic() + timeout + DETACH
            for ks, op in begun:
                try:
                    said = op.wait(max(0.0, limit - time.monotonic()))
                except errors.Error as e:
                    failed.append(e)
                    said = _pages._outcomes_of(op)
                outcomes[ks] = np.frombuffer(said, np.uint8)
                op.close()
            for error in failed:
                if isinstance(error, errors.BoundsError):
                    raise error
                self._failed(session, error)
            if failed and self._session is not session:
                raise failed[-1]
            failed.clear()
        return outcomes.tobytes()

    def _heads(self, session: _pages._Session, keys: Sequence[bytes]) -> list[Optional[Head]]:
        return [head for head, _, _ in self._read(session, keys)]

    def _read(self, session: _pages._Session, keys: Sequence[bytes],
              names: bool = False) -> list[tuple[Optional[Head], bytes, int]]:
        """Of each the head, the name, and what became of the head's block."""
        heads, pieces = self._spaces(session)
        found: list[tuple[Optional[Head], bytes, int]] = []
        with self._ours(max(1, len(keys)) * HEAD) as memory:
            said = self._move_blocks(session, heads.load, [
                _Block(key, memory, k * HEAD, HEAD) for k, key in enumerate(keys)])
            for k, outcome in enumerate(said):
                head, name = self._head_at(memory.address + k * HEAD, keys[k], outcome)
                found.append((head, name, outcome))
        if not names:
            return found
        for k, (head, _, outcome) in enumerate(found):
            if head is not None and head.spilled:
                with self._ours(head.name) as memory:
                    said = self._move_blocks(session, pieces.load, [
                        _Block(_key(head.first - 1), memory, 0, head.name)])
                    there = said[0] == Outcome.DONE
                    name = ctypes.string_at(memory.address, head.name) if there else b""
                    found[k] = head if there else None, name, outcome
        return found

    def _head_at(self, address: int, key: bytes, outcome: int) -> tuple[Optional[Head], bytes]:
        """The head that was loaded to an address, and the name."""
        head, name = None, b""
        if outcome == Outcome.DONE:
            raw = ctypes.string_at(address, HEAD)
            magic, n, size, piece, first = _FORM.unpack_from(raw)
            if magic == _MAGIC and 0 < size <= piece * PIECES_MAX and n <= NAME_MAX:
                head = Head(size, piece, int.from_bytes(first, "little"), n)
                name = raw[_FORM.size:_FORM.size + n]
        self._remember(key, head)
        return head, name

    def _remember(self, key: bytes, head: Optional[Head]) -> None:
        with self._held:
            self._seen.pop(key, None)
            if head is not None:
                self._seen[key] = head
            if len(self._seen) > SEEN_MAX:
                del self._seen[next(iter(self._seen))]

    def _match(self, space: Namespace, keys: Sequence[bytes]) -> bytes:
        """Bits of Found for each key."""
        return b"".join(space.match(keys[k:k + KEYS_MAX], self._options.lookup_timeout).found
                        for k in range(0, len(keys), KEYS_MAX))

    def _whole(self, session: _pages._Session, names: Sequence[str]) -> list[tuple[
            Optional[Head], int]]:
        """The heads that are there, and of each the tiers in which all of its pieces are, as bits
        of Found.
        """
        space, pieces = self._spaces(session)
        hashes = [key_of(_bytes(name)) for name in names]
        there = self._match(space, hashes)
        known = [k for k, bits in enumerate(there) if bits & _THERE]
        heads: list[Optional[Head]] = [None] * len(names)
        tiers = [0] * len(names)
        for _ in range(TRIES):
            if not known:  # nothing has to be read, as before most puts
                break
            read = self._heads(session, [hashes[k] for k in known])
            # A head without its pieces may have been replaced since.
            fresh = [(k, head) for k, head in zip(known, read) if head != heads[k]]
            for (k, head), tier in zip(fresh, self._tiers(pieces, [h for _, h in fresh])):
                heads[k], tiers[k] = head, tier
            known = [k for k, head in fresh if head and not tiers[k]]
        return list(zip(heads, tiers))

    def _tiers(self, pieces: Namespace, heads: Sequence[Optional[Head]]) -> list[int]:
        """Of each the tiers in which all of its pieces are, as bits of Found."""
        keys = [head.keys() if head else [] for head in heads]
        tiers = self._match(pieces, [key for some in keys for key in some])
        found, at = list[int](), 0
        for some in keys:
            here = tiers[at:at + len(some)]
            at += len(some)
            memory = bool(some) and all(t & Found.IN_MEMORY for t in here)
            there = bool(some) and all(t & _THERE for t in here)
            found.append(int(Found.IN_MEMORY if memory else Found.ON_DISK if there else 0))
        return found

    # Objects

    def _each(self, n: int, act: Callable[[_pages._Session], list[int]]) -> list[int]:
        """What becomes of n objects: where the cache is lost, the code for that."""
        session = self._usable()
        if session is None:
            return [LOST] * n
        try:
            return act(session)
        except errors.BoundsError:
            raise
        except errors.OperatingSystemError as e:
            _pages.log.error("the cache refuses this: %s", e)
            return [INTERNAL] * n
        except errors.Error as e:
            self._failed(session, e)
            return [FAILED if self._session is session else LOST] * n

    def exist(self, names: Sequence[str]) -> list[int]:
        """1 for each that is there whole, 0 for others."""
        return self._each(len(names), lambda session: [
            int(bool(tier)) for _, tier in self._whole(session, names)])

    def tiers(self, names: Sequence[str]) -> list[int]:
        """Bits of Found for each that is there whole."""
        return self._each(len(names), lambda session: [
            tier for _, tier in self._whole(session, names)])

    def sizes(self, names: Sequence[str]) -> list[int]:
        """In bytes."""
        return self._each(len(names), lambda session: [
            head.size if head and tier else NOT_FOUND
            for head, tier in self._whole(session, names)])

    def put(self, names: Sequence[str], values: Sequence[Value],
            anew: bool = False) -> list[int]:
        """Stores those that are not there: 0 for each that is there then. With anew all, in place
        of what their names have, which others find until all of the other is there.
        """
        while True:
            piece = self._piece
            try:
                return self._each(len(names), lambda session: self._put(session, names, values,
                                                                        anew))
            except errors.BoundsError as e:  # the extents of this cache are shorter
                if piece <= PIECE_MIN:
                    _pages.log.error("objects are not stored: %s", e)
                    return [NO_ROOM] * len(names)
                self._piece = piece // 2

    def _put(self, session: _pages._Session, names: Sequence[str], values: Sequence[Value],
             anew: bool, tries: int = TRIES) -> list[int]:
        if anew and is_cluster(self._options.address):  # before pieces are stored in vain
            raise errors.NotSupportedError("a cluster replaces nothing: remove the object, and put "
                                           "it anew")
        heads, pieces = self._spaces(session)
        codes, fresh, broken = [OK] * len(names), dict[str, int](), dict[int, Head]()
        # Of a lone short value the store of its head tells whether there is one; of a longer one
        # the cache is asked first, so that nothing is copied in vain.
        lone = tries == TRIES and len(names) == 1 and sum(values[0].lengths) <= self._piece and (
            key_of(_bytes(names[0])) not in self._seen)
        for k, (head, tier) in enumerate([(None, 0)] * len(names) if anew or lone else
                                         self._whole(session, names)):
            size = sum(values[k].lengths)
            if not _storable(names[k], values[k]):
                codes[k] = INVALID
            elif size > self._piece * PIECES_MAX:
                codes[k] = NO_ROOM
            elif (anew or not tier) and fresh.setdefault(names[k], k) == k and head:
                broken[k] = head
        if broken and is_cluster(self._options.address):  # which replaces nothing
            self._discard(session, heads, [key_of(_bytes(names[k])) for k in broken])
            broken.clear()
        random = os.urandom(KEY_BYTES * len(fresh))
        made: dict[int, Head] = {}
        for n, (name, k) in enumerate(fresh.items()):
            first = int.from_bytes(random[n * KEY_BYTES:(n + 1) * KEY_BYTES], "little")
            made[k] = Head(sum(values[k].lengths), self._piece, first, len(_bytes(name)))
        beside = {k: head for k, head in made.items()
                  if not (anew or k in broken or head.spilled)}
        try:
            codes_of, said = self._put_pieces(session, names, made, values, beside)
        except errors.BoundsError:
            self._remove(pieces, [key for head in made.values() for key in head.all_keys()])
            raise
        ready = {k: head for k, head in made.items() if codes_of[k] == OK and k not in said}
        former, over = dict[int, Head](), dict[int, Head]()
        some = {k: key_of(_bytes(names[k])) for k in ready if anew or k in broken}
        read = self._read(session, list(some.values())) if some else []
        tiers = [0] * len(read) if anew else self._tiers(pieces, [head for head, _, _ in read])
        for (k, (head, _, outcome)), tier in zip(zip(some, read), tiers):
            if anew and outcome in _NOT_READ:  # whose pieces nobody would know
                codes_of[k] = _code(outcome)
                del ready[k]
            elif anew or head == broken[k] and not tier:  # no other that came since, or its pieces
                over[k] = ready.pop(k)
                if head:
                    former[k] = head
        said.update(self._put_heads(session, names, ready, heads.store))
        said.update(self._put_heads(session, names, over, heads.replace))
        gone = [head for k, head in made.items() if said.get(k) not in _UNSURE
                and (said.get(k) != Outcome.DONE or codes_of[k] != OK)]  # or it was slower
        gone += [head for k, head in former.items() if said[k] == Outcome.DONE]
        self._discard(session, pieces, [key for head in gone for key in head.all_keys()])
        beaten = list[int]()
        for k, outcome in said.items():
            if not _STORED[outcome]:
                codes_of[k] = _code(outcome)
            elif outcome != Outcome.DONE:
                beaten.append(k)
            elif outcome == Outcome.DONE and codes_of[k] == OK:
                self._remember(key_of(_bytes(names[k])), made[k])
        for k, (_, tier) in zip(beaten, self._whole(session, [names[k] for k in beaten])
                                if beaten else []):
            codes_of[k] = OK
            if not tier:  # the head of another put, which has not all of its pieces, or never will
                codes_of[k], = self._put(session, [names[k]], [values[k]], anew, tries - 1) if (
                    tries > 0) else [FAILED]
        return [codes_of.get(fresh.get(name, k), OK) if c == OK else c
                for k, (name, c) in enumerate(zip(names, codes))]

    def _put_pieces(self, session: _pages._Session, names: Sequence[str], made: dict[int, Head],
                    values: Sequence[Value], with_heads: dict[int, Head]) -> tuple[
                        dict[int, int], dict[int, int]]:
        """Stores all of objects but their heads, and at the same time some of these, and says what
        became of them.
        """
        heads, pieces = self._spaces(session)
        with self._forms(names, with_heads) as blocks:
            beside = _Beside(heads.store, blocks)
            codes = self._copy(session, made, values, True, beside)
        # The cache may have evicted first pieces of a large object to have room for its last ones.
        long = [k for k, head in made.items() if codes[k] == OK and head.size > head.piece]
        for k, tier in zip(long, self._tiers(pieces, [made[k] for k in long])):
            if not tier:
                codes[k] = NO_ROOM
        for k, head in made.items():
            if codes[k] == OK and head.spilled:
                with self._ours(head.name) as spill:
                    ctypes.memmove(spill.address, _bytes(names[k]), head.name)
                    said = self._move_blocks(session, pieces.store, [
                        _Block(_key(head.first - 1), spill, 0, head.name)])
                    codes[k] = OK if _STORED[said[0]] else _code(said[0])
        return codes, beside.said

    @contextmanager
    def _forms(self, names: Sequence[str], made: dict[int, Head]) -> Iterator[dict[int, _Block]]:
        """Heads in memory of ours."""
        if not made:
            yield {}
            return
        with self._ours(len(made) * HEAD) as memory:
            blocks = dict[int, _Block]()
            for n, (k, head) in enumerate(made.items()):
                raw = _bytes(names[k])
                form = _FORM.pack(_MAGIC, head.name, head.size, head.piece, _key(head.first))
                ctypes.memmove(memory.address + n * HEAD, (form + raw).ljust(HEAD, b"\0"), HEAD)
                blocks[k] = _Block(key_of(raw), memory, n * HEAD, HEAD)
            yield blocks

    def _put_heads(self, session: _pages._Session, names: Sequence[str], made: dict[int, Head],
                   move: Callable[..., Op]) -> dict[int, int]:
        """Stores heads, and says what became of them."""
        if not made:
            return {}
        with self._forms(names, made) as blocks:
            return dict(zip(made, self._move_blocks(session, move, list(blocks.values()))))

    def get(self, names: Sequence[str],
            into: Callable[[int, int], Union[Value, int]]) -> list[int]:
        """Loads objects to where `into` says, which is asked with the index and the size of each
        that is there, or answers with a code. It is asked again for one that is replaced meanwhile.
        It returns sizes, or codes; INVALID for the second of two at one address.
        """
        def act(session: _pages._Session) -> list[int]:
            codes, before = [NOT_FOUND] * len(names), dict[int, Optional[Head]]()
            taken = dict[int, int]()
            keys = [key_of(_bytes(name)) for name in names]

            def take(of: dict[int, Optional[Head]], beside: Optional[_Beside] = None) -> list[int]:
                """Loads objects by their heads. Returns those of which pieces are gone."""
                values, found = dict[int, Value](), dict[int, Head]()
                for at in [at for at, k in taken.items() if k in of]:
                    del taken[at]  # `into` may name others now, or free it
                for k, head in of.items():
                    if head is None or head == before.get(k):
                        continue
                    to = into(k, head.size)
                    if isinstance(to, int):
                        codes[k] = to
                    elif taken.setdefault(to.at[0], k) != k:
                        codes[k] = INVALID
                    else:
                        values[k], found[k] = to.cut(head.size), head
                    before[k] = head
                for k, code in self._copy(session, found, values, False, beside).items():
                    codes[k] = found[k].size if code == OK else code
                return [k for k in found if codes[k] == NOT_FOUND]

            seen = {k: head for k, key in enumerate(keys) if (head := self._seen.get(key))}
            all_seen = 0 < len(seen) == len(keys)
            fresh = self._take_seen(session, keys, seen, take) if all_seen else {}
            for k, one in seen.items():
                if fresh.get(k) != one:
                    codes[k] = NOT_FOUND
                    before.pop(k, None)
            fresh = {k: head for k, head in fresh.items() if head != seen[k]}
            left = [k for k, code in enumerate(codes) if code == NOT_FOUND]
            for _ in range(TRIES):
                if not left:
                    break
                look = [k for k in left if k not in fresh]
                read = self._heads(session, [keys[k] for k in look]) if look else []
                left = take({**{k: fresh[k] for k in left if k in fresh}, **dict(zip(look, read))})
                fresh = {}
            return codes

        try:
            return self._each(len(names), act)
        except errors.BoundsError as e:  # two of them overlap
            _pages.log.error("objects are not loaded: %s", e)
            return [INVALID] * len(names)

    def _take_seen(self, session: _pages._Session, keys: Sequence[bytes], seen: dict[int, Head],
                   take: Callable[..., list[int]]) -> dict[int, Optional[Head]]:
        """Loads objects by the heads that were seen, and returns those that they have now. None of
        an object is of use that is not among them.
        """
        with self._ours(len(keys) * HEAD) as memory:
            beside = _Beside(self._spaces(session)[0].load, {
                k: _Block(key, memory, k * HEAD, HEAD) for k, key in enumerate(keys)})
            with suppress(errors.BoundsError):  # as they were two may overlap
                take(seen, beside)
            return {k: self._head_at(memory.address + k * HEAD, keys[k], outcome)[0]
                    for k, outcome in beside.said.items()}

    def _copy(self, session: _pages._Session, heads: dict[int, Head],
              values: Union[Sequence[Value], dict[int, Value]], store: bool,
              beside: Optional[_Beside] = None) -> dict[int, int]:
        """Copies the pieces of objects, in passes for what goes by way of our memory, and what is
        beside them.
        """
        codes: dict[int, int] = {}
        direct: list[tuple[int, list[_Block]]] = []
        staged: list[list[int]] = []
        room, mine = 0, list[Value]()
        try:
            for k, head in heads.items():
                try:
                    with self._held:
                        blocks = self._block(head, values[k])
                        if blocks is None:
                            mine.append(values[k])
                            self._staged.append(values[k])
                except (KeyError, ValueError):
                    codes[k] = INVALID
                    continue
                if blocks is not None:
                    direct.append((k, blocks))
                elif staged and room + head.size <= STAGED_MAX:
                    staged[-1].append(k)
                    room += head.size
                else:
                    staged.append([k])
                    room = head.size
            if direct:
                codes.update(self._moved(session, direct, store, beside))
            for some in staged:
                codes.update(self._copy_staged(session, some, heads, values, store, beside))
        finally:
            with self._held:
                self._staged = [v for v in self._staged if not any(v is own for own in mine)]
                self._held.notify_all()
        return codes

    def _copy_staged(self, session: _pages._Session, some: Sequence[int], heads: dict[int, Head],
                     values: Union[Sequence[Value], dict[int, Value]], store: bool,
                     beside: Optional[_Beside]) -> dict[int, int]:
        with self._ours(sum(heads[k].size for k in some)) as memory:
            at, blocks_of = 0, []
            for k in some:
                if store:
                    _gather(values[k], memory.address + at)
                blocks_of.append((k, _pieces(heads[k], memory, at)))
                at += heads[k].size
            said = self._moved(session, blocks_of, store, beside)
            at = 0
            for k in some:
                if not store and said[k] == OK:
                    _scatter(values[k], memory.address + at)
                at += heads[k].size
        return said

    def _moved(self, session: _pages._Session, of: Sequence[tuple[int, list[_Block]]],
               store: bool, beside: Optional[_Beside]) -> dict[int, int]:
        _, space = self._spaces(session)
        flat = [b for _, blocks in of for b in blocks]
        move = space.store if store else space.load
        heads = {k: beside.blocks[k] for k, _ in of if beside and k in beside.blocks}
        said, at, codes = self._move_blocks(session, move, flat, beside.move if beside else None,
                                            list(heads.values())), 0, {}
        if beside:
            beside.said.update(zip(heads, said[len(flat):]))
        for k, blocks in of:
            here = said[at:at + len(blocks)]
            at += len(blocks)
            bad = [o for o in here if o != Outcome.DONE]
            codes[k] = OK if not bad else _code(bad[0])
        return codes

    def remove(self, names: Sequence[str]) -> list[int]:
        """Forgets objects: when this returns no restart finds them."""
        def act(session: _pages._Session) -> list[int]:
            keys = [key_of(_bytes(name)) for name in names]
            found = self._read(session, keys)
            self._forget(session, [(key, head) for key, (head, _, _) in zip(keys, found) if head])
            return [OK if head else _code(outcome) if outcome in _NOT_READ else NOT_FOUND
                    for head, _, outcome in found]

        return self._each(len(names), act)

    def _forget(self, session: _pages._Session, of: Sequence[tuple[bytes, Head]]) -> None:
        heads, pieces = self._spaces(session)
        self._remove(heads, [key for key, _ in of])
        for key, _ in of:
            self._remember(key, None)
        self._remove(pieces, [key for _, head in of for key in head.all_keys()])

    def _discard(self, session: _pages._Session, space: Namespace, keys: Sequence[bytes]) -> None:
        """Forgets what is of no use. A node of a cluster that is not reached may keep it."""
        try:
            self._remove(space, keys)
        except errors.Error as e:
            if not is_cluster(self._options.address):
                raise
            self._failed(session, e)

    def _remove(self, space: Namespace, keys: Sequence[bytes]) -> None:
        for k in range(0, len(keys), KEYS_MAX):
            space.remove(keys[k:k + KEYS_MAX], self._options.timeout)

    def remove_where(self, chosen: Callable[[str], bool]) -> int:
        """Forgets the objects of such names, and says how many."""
        def act(session: _pages._Session) -> list[int]:
            removed = 0
            for some in self._spaces(session)[0].keys(self._options.timeout):
                keys = [some[k:k + KEY_BYTES] for k in range(0, len(some), KEY_BYTES)]
                which = [(key, head) for key, (head, name, _) in zip(
                    keys, self._read(session, keys, names=True))
                    if head and chosen(name.decode("utf-8", "surrogateescape"))]
                self._forget(session, which)
                removed += len(which)
            return [removed]

        return self._each(1, act)[0]

    def remove_everything(self) -> int:
        """Forgets all objects, and what is left of others, and says how many there were."""
        def act(session: _pages._Session) -> list[int]:
            heads, pieces = self._spaces(session)
            n = sum(len(some) for some in heads.keys(self._options.timeout)) // KEY_BYTES
            heads.clear(self._options.timeout)
            pieces.clear(self._options.timeout)
            return [n]

        return self._each(1, act)[0]


def _code(outcome: int) -> int:
    """What a call returns for a block that has failed."""
    return _CODES.get(Outcome(outcome), FAILED)


def _check_host(address: int) -> None:
    if card_of(address, "*") is not None:
        raise ValueError(f"{address:#x} lies on a card: only memory of the host can be used here")


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _storable(name: str, value: Value) -> bool:
    return (0 < len(_bytes(name)) <= NAME_MAX and sum(value.lengths) > 0
            and min(value.lengths) >= 0 and min(value.at) > 0)


def _pieces(head: Head, memory: HostMemory, at: int) -> list[_Block]:
    """The pieces of an object that lies there in one run."""
    keys = head.keys()
    return [_Block(key, memory, at + k * head.piece, min(head.piece, head.size - k * head.piece))
            for k, key in enumerate(keys)]


@functools.lru_cache(256)
def _even(offsets: tuple[int, ...], run: int) -> Optional[_Shape]:
    """The run and the loops of runs that lie evenly."""
    fits = _pages._fit(offsets, run, run)
    return (fits[0].run, tuple(fits[0].loops)) if len(fits) == 1 else None


def _attached(session: _pages._Session, memory: HostMemory) -> Blocks:
    try:
        return session._attached[memory.address, memory.length]
    except KeyError:
        raise errors.UnavailableError("the cache is back, but does not reach this memory yet"
                                      ) from None


def _gather(value: Value, to: int) -> None:
    for address, n in zip(value.at, value.lengths):
        ctypes.memmove(to, address, n)
        to += n


def _scatter(value: Value, source: int) -> None:
    for address, n in zip(value.at, value.lengths):
        ctypes.memmove(address, source, n)
        source += n
