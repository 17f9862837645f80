# SPDX-License-Identifier: Apache-2.0
"""The part of an agent that sends messages and collects them."""

from __future__ import annotations

from typing import Iterable, Optional, Union

from .. import errors
from . import bindings as b
from . import messages
from .bindings import as_text
from .handles import as_nixl
from .meeting import Meeting, Name


class Notifications(Meeting):
    """Messages by the names of their senders."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.notifs: dict[str, list[bytes]] = {}

    def get_new_notifs(self, backends: Iterable[str] = ()) -> dict[str, list[bytes]]:
        """Messages that have come since this was last asked, by the names of their senders."""
        return self._collect({}, backends)

    def update_notifs(self, backends: Iterable[str] = ()) -> dict[str, list[bytes]]:
        """Adds new messages to those that were not taken, and returns all."""
        self.notifs = self._collect(self.notifs, backends)
        return self.notifs

    def _collect(self, into: dict[str, list[bytes]], backends: Iterable[str]) -> dict[str,
        list[bytes]]:
        if backends:
            self._handles(backends)
        if self._engine is None:
            return into
        more = True
        while more:
            try:
                note, more = self._engine._next(0)
            except errors.Error as e:
                raise as_nixl(e) from e
            if note is None:
                break
            found = None if note.lost else messages.unframe(note.data)
            if found is not None:
                into.setdefault(found[0], []).append(found[1])
        return into

    def check_remote_xfer_done(
        self, remote_agent_name: Name, lookup_tag: bytes, backends: Iterable[str] = (),
        tag_is_prefix: bool = True
    ) -> bool:
        """Whether a message that begins with the tag, or has it in it, has come; that one is taken
        then.
        """
        tag, kept = b.as_bytes(lookup_tag), self.update_notifs(backends).get(
            as_text(remote_agent_name), [])
        for i, message in enumerate(kept):
            if message.startswith(tag) if tag_is_prefix else tag in message:
                del kept[i]
                return True
        return False

    def send_notif(self, remote_agent_name: Name, notif_msg: Union[str, bytes],
                   backend: Optional[str] = None) -> None:
        """Sends a message without a transfer, and without waiting for the peer."""
        if backend:
            self._handles([backend])
        message, name = messages.frame(self.name, notif_msg), as_text(remote_agent_name)
        try:
            if name == self.name:
                self._open().self_peer().notify(message)
            else:
                self._live(name).outbox.send(message)
        except errors.NoRouteError as e:  # what connected us is gone
            raise b.nixlRemoteDisconnectError(str(e)) from e
        except errors.Error as e:
            raise as_nixl(e) from e
