"""Which staging memory an I/O process may still touch, kept beside the store, from what goes over its channels: none of it
may be lent to anybody before the answer came, the process closed the channel, or it was reaped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.channel import Channel
from kvstore.link import Link
from kvstore.messages import Kind, Message
from kvstore.sharedmemory import SharedMemory
from kvstore.staging import Buffer, StagingPool


@dataclass
class Leases:
    """Channels with unanswered requests, and the memory that each request names, by its address."""

    odd: list[str] = field(default_factory=list)
    lent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _named: dict[Channel, dict[int, set[int]]] = field(default_factory=dict)
    _reaped: weakref.WeakSet[Channel] = field(default_factory=weakref.WeakSet)
    """Channels of links that were reaped. A call that still holds one may try to send: nobody reads that, and the memory's
    address may be another link's by then."""

    def named(self, channel: Channel, memory: Sequence[SharedMemory]) -> None:
        """A request will be sent that names memory."""
        with self._lock:
            if channel in self._reaped:
                return
            self._named.setdefault(channel, {})[channel.requests + 1] = {m.memory.ctypes.data for m in memory}

    def answered(self, channel: Channel) -> None:
        """Forget the requests that were answered."""
        last = channel.requests - channel.outstanding
        with self._lock:
            requests = self._named.get(channel, {})
            for number in [n for n in requests if n <= last]:
                del requests[number]

    def reaped(self, link: Link) -> None:
        """Forget all of a link."""
        with self._lock:
            for channel in link._channels:
                self._named.pop(channel, None)
                self._reaped.add(channel)

    def borrowed(self, buffer: Buffer | None) -> None:
        """Somebody was lent a buffer."""
        if buffer is None:
            return
        with self._lock:
            self.lent += 1
            # A link closes its end of a channel when the process has closed the other one.
            for channel in [c for c in self._named if c.connection.socket.fileno() >= 0]:
                for number, memory in self._named[channel].items():
                    if buffer.memory.ctypes.data in memory:
                        where = f"request {number} of {channel.requests}, late {channel.late}"
                        self.odd.append(f"a buffer was lent while the I/O process may touch it: {where}")

    def watch(self) -> None:
        """Have everything that this process does from now on looked at."""
        watched = {
            (Channel, "send"): self._sending,
            (Channel, "receive"): self._receiving,
            (Link, "end"): self._ending,
            (StagingPool, "try_borrow"): self._borrowing,
        }
        for (owner, name), wrapped in watched.items():
            setattr(owner, name, wrapped(getattr(owner, name)))

    def _sending(self, send: Callable[..., None]) -> Callable[..., None]:
        def sending(
            channel: Channel,
            kind: Kind,
            fields: Mapping[str, Any],
            blobs: Sequence[Any] = (),
            memory: Sequence[SharedMemory] = (),
        ) -> None:
            self.named(channel, memory)
            send(channel, kind, fields, blobs, memory)

        return sending

    def _receiving(self, receive: Callable[..., Message]) -> Callable[..., Message]:
        def receiving(channel: Channel, *arguments: Any) -> Message:
            try:
                return receive(channel, *arguments)
            finally:
                self.answered(channel)

        return receiving

    def _ending(self, end: Callable[[Link], None]) -> Callable[[Link], None]:
        def ending(link: Link) -> None:
            end(link)
            self.reaped(link)

        return ending

    def _borrowing(self, borrow: Callable[..., Buffer | None]) -> Callable[..., Buffer | None]:
        def borrowing(pool: StagingPool, borrower: object) -> Buffer | None:
            buffer = borrow(pool, borrower)
            self.borrowed(buffer)
            return buffer

        return borrowing
