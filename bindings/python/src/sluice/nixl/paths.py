# SPDX-License-Identifier: Apache-2.0
"""Files that are registered by their paths: "rw,create,direct:/path" in place of a descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import Optional

from .._segments import File, Located, locate, open_file
from . import bindings as b

_ACCESS = {b"ro": False, b"rw": True}
_WORDS = (b"create", b"direct")  # direct: whole blocks go past the page cache


@dataclass(frozen=True)
class Named:
    """A file by its path, and how it is opened."""

    path: bytes
    writable: bool
    create: bool
    direct: bool

    def open(self) -> _Opened:
        """The open file, which is made where it may be created. Where the filesystem has no
        O_DIRECT, it is opened without.
        """
        flags = (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC
        flags |= os.O_CREAT if self.create else 0
        try:
            if not self.direct:
                return _Opened(os.open(self.path, flags, 0o600))
            try:
                return _Opened(os.open(self.path, flags | os.O_DIRECT, 0o600))
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                return _Opened(os.open(self.path, flags, 0o600))
        except OSError as e:
            raise b.nixlBackendError(f"register {os.fsdecode(self.path)}: {e.strerror}") from e


class _Opened:
    """A descriptor that is closed when it is garbage."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


_ALL = 1 << 62  # bytes of a range that has no length: of as much as is ever written


def file(number: int, named: Optional[Named], offset: int, length: int) -> Located:
    """A range of a file, which a write makes as long as NIXL's POSIX does. 0: all from the offset.
    """
    opened = None if named is None else named.open()
    if named is not None and opened is not None and 0 < length < _ALL and offset < _ALL:
        return open_file(opened.fd, offset, length, named.writable, not named.direct, opened,
                         named.writable)
    at = number if opened is None else opened.fd
    try:
        flags, mode = fcntl.fcntl(at, fcntl.F_GETFL), os.fstat(at).st_mode
    except OSError as e:
        raise b.nixlBackendError(f"register descriptor {at}: {e.strerror}") from e
    writable = flags & os.O_ACCMODE != os.O_RDONLY
    # A write makes it longer. That says nothing of a device: its size is known.
    extends = writable and (stat.S_ISREG(mode) or bool(named and length))
    direct = bool(flags & os.O_DIRECT) if named is None else named.direct
    located = locate(File(at, offset, length or (_ALL - offset if extends else None), extends,
                          buffered=not direct))
    return Located(located.segment, located.keep if opened is None else opened, writable)


def parse(meta: bytes) -> Optional[Named]:
    """What a registration says of a path; None where it has none, and the number is a descriptor.
    """
    words, colon, path = meta.partition(b":")
    access, *others = words.lower().split(b",")
    if not colon or access not in _ACCESS:
        return None
    for word in others:
        if word not in _WORDS:
            raise b.nixlInvalidParamError(f"{os.fsdecode(words)!r} before a path: there are ro or "
                                          f"rw, and then create and direct")
    writable = _ACCESS[access]
    if not path or b"\0" in path or (b"create" in others and not writable):
        raise b.nixlInvalidParamError(
            f"{os.fsdecode(meta)!r} names no file that could be opened so")
    return Named(path, writable, b"create" in others, b"direct" in others)
