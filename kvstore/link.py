"""One I/O process as its engine sees it: started, talked to over channels, reaped."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from kvstore.channel import Channel, Notes, failure
from kvstore.errors import StoreUnavailable
from kvstore.inline import Opening
from kvstore.messages import PROTOCOL, Connection, Kind, Late, Lost, Message, pack_strings
from kvstore.sharedmemory import SharedMemory
from kvstore.staging import Buffers, Bytes
from kvstore.storage import Unavailable

log = logging.getLogger(__name__)

START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kvstore.worker import main; main(sys.argv[2:])"
)
MAX_CHANNELS: Final = 64
REAP_PATIENCE_S: Final = 2.0
"""How long a process may take to end after its last message."""
START_PATIENCE_S: Final = 10.0
"""How long a process may take to start on a busy machine, however short the time limit of calls, none of which waits."""
POLL_SECONDS: Final = 0.002


class Link:
    """One I/O process. Made, watched and reaped by one thread, `RemoteStorage`'s; any thread may borrow channels.

    Whatever a call leaves behind, channels with unanswered requests and the buffers that these name, is kept from others
    until the process has closed its end, or has been reaped: then all of the link goes.
    """

    def __init__(self, opening: Opening, refused: Sequence[tuple[bytes, bytes]], notes: Notes) -> None:
        """Start the process and wait until it has opened the shard. Raises what opening a store raises."""
        self.opening, self.notes, self.timeout_s = opening, notes, opening.config.io_timeout_s
        self.users: dict[object, Channel] = {}
        """Which call uses which channel; taking a call out gives its channel back, in one step."""
        # Nothing that a link is referred to by refers to it: its memory goes with it, and not when somebody collects garbage.
        own = weakref.ref(self)
        self._arena = Arena()
        self.buffers = Buffers(self._arena.allocate, lambda: _of(own, Link.sweep))
        self._suspect = lambda: _of(own, Link.suspect)
        self._channels: list[Channel] = []
        self._lock = threading.Lock()
        self._pongs = self._pings = 0
        self._suspected = 0
        self._pinged = 0.0
        self.closed: Message | None = None
        """What the process said last, where it closed the shard."""
        self.process, self._control = self._start()
        _links.add(self)
        try:
            self.ready = self._open(refused)
        except BaseException:
            self.end()
            raise

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        own, other = socket.socketpair()
        with other:
            command = [sys.executable, "-c", START, json.dumps(sys.path), str(other.fileno()), str(os.getpid())]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[other.fileno()]
                )
            except OSError as error:
                own.close()
                raise StoreUnavailable(f"{self.opening.folder}: its I/O process cannot be started: {error}") from error
        return process, Connection(own, self.timeout_s)

    def _open(self, refused: Sequence[tuple[bytes, bytes]]) -> Mapping[str, Any]:
        opening = self.opening
        fields = {
            "protocol": PROTOCOL,
            "folder": str(opening.folder),
            "config": asdict(opening.config),
            "writable": opening.writable,
            "copies": opening.copies,
            "now": opening.clock(),
            "log_level": log.getEffectiveLevel(),
        }
        keys, sequences = pack_strings([k for k, _ in refused]), b"".join(s for _, s in refused)
        self._control.send(Message(Kind.OPEN, 0, fields, [opening.identity_json, *keys, sequences]))
        patience_s = max(self.timeout_s, START_PATIENCE_S)
        while (message := self._heard(patience_s)).kind != Kind.READY:
            self.notes(message.fields)
            if message.kind == Kind.FAILED:
                raise failure(message.fields)
        self.notes(message.fields)
        return message.fields

    def _heard(self, patience_s: float) -> Message:
        """The next message of the process; it may take as long as it likes while it answers a ping in time. Raises
        StoreUnavailable where it does not, or has ended."""
        while True:
            try:
                message = self._control.receive(patience_s)
            except Late:
                waited = time.monotonic() - self._pinged
                if self._pings != self._pongs and waited > patience_s / 2:
                    raise StoreUnavailable(
                        f"{self.opening.folder}: the I/O process {self.process.pid} does not answer"
                    ) from None
                self.ping()
                continue
            except Lost as error:
                raise StoreUnavailable(f"{self.opening.folder}: the I/O process ended: {error}") from None
            if message.kind != Kind.PONG:
                return message
            self._pongs = message.request

    def ping(self) -> int:
        """Ask whether the process lives; the number of the question."""
        with self._lock:
            self._pings += 1
            self._pinged = time.monotonic()
            try:
                self._control.send(Message(Kind.PING, self._pings))
            except (Lost, Late):
                return self._pings
            return self._pings

    def lives(self) -> bool:
        """Whether the process answers a ping in time."""
        number, deadline = self.ping(), time.monotonic() + self.timeout_s
        while self._pongs < number and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self._pongs >= number

    def suspect(self) -> None:
        """The process did not answer in time: ask it nothing until it has shown that it lives."""
        self._suspected = self.ping()

    @property
    def responsive(self) -> bool:
        """Whether there is no reason to believe that the process hangs."""
        return self._pongs >= self._suspected

    def watch(self) -> str:
        """Wait for the end of the process: what it said, or why it was given up. Reaps it."""
        reason = "it closed its connection"
        try:
            while True:
                message = self._heard(self.timeout_s)
                if message.kind == Kind.CLOSED:
                    self.closed = message
        except StoreUnavailable as error:
            reason = str(error)
        self.end()
        return f"{reason}; status {self.process.returncode}"

    def close(self) -> None:
        """Have the process close the shard and end."""
        with self._lock:
            try:
                self._control.send(Message(Kind.CLOSE, 0, {"now": self.opening.clock()}))
            except (Lost, Late):
                self._control.hang_up()

    def end(self) -> None:
        """End the process if it has not, and reap it: from then on nothing uses the shared memory but this process."""
        try:
            self.process.wait(REAP_PATIENCE_S if self.closed else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._lock:
            self._control.close()
            used = {id(channel) for channel in self.users.copy().values()}
            for channel in self._channels:
                # The loop of a get knows its descriptor by number: once closed, that may be another file's of the engine.
                if id(channel) not in used:
                    channel.connection.close()

    def hang_up(self) -> None:
        """Close all connections."""
        self._control.close()
        for channel in self._channels:
            channel.connection.close()

    def borrow(self, user: object) -> Channel:
        """A channel for a call, until it is taken out of `users`. Raises Unavailable."""
        with self._lock:
            self._sweep()
            busy = {id(channel) for channel in self.users.copy().values()}
            free = next((c for c in self._channels if id(c) not in busy and c.clean), None)
            if free is None:
                if len(self._channels) == MAX_CHANNELS:
                    raise Unavailable(f"all {MAX_CHANNELS} channels to the I/O process are in use")
                free = self._new_channel()
            self.users[user] = free
            return free

    def _new_channel(self) -> Channel:
        own, other = socket.socketpair()
        try:
            self._control.send(Message(Kind.CHANNEL, 0, {}, (), [other.fileno()]))
        except (Lost, Late) as error:
            own.close()
            raise Unavailable(f"the I/O process: {error}") from None
        finally:
            other.close()
        channel = Channel(Connection(own, self.timeout_s), self.timeout_s, self.notes, self._suspect)
        self._channels.append(channel)
        return channel

    def sweep(self) -> None:
        """Give back what calls left behind and the process does not use any more."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        used = {id(channel) for channel in self.users.copy().values()}
        for channel in [c for c in self._channels if id(c) not in used and not c.clean]:
            channel.hung_up = True
            channel.connection.hang_up()
            if channel.connection.ended():
                channel.connection.close()
                self._channels.remove(channel)
        live = {id(c) for c in self._channels}
        for pool in list(self.buffers.pools.values()):
            for borrower in list(pool.borrowed):
                channel_of = getattr(borrower, "channel", None)
                if channel_of is None or getattr(borrower, "token", None) in self.users:
                    continue
                if channel_of.clean or id(channel_of) not in live:
                    pool.borrowed.pop(borrower, None)

    def shared(self, memory: Bytes) -> SharedMemory:
        """What a buffer's memory is to both processes."""
        return self._arena.shared[memory.ctypes.data]


class Arena:
    """The shared memory of one link, by its address in this process."""

    def __init__(self) -> None:
        self.shared: dict[int, SharedMemory] = {}

    def allocate(self, nbytes: int) -> Bytes:
        """Memory that both processes can map: (nbytes,) uint8. Raises StagingMemoryError."""
        made = SharedMemory(nbytes)
        self.shared[made.memory.ctypes.data] = made
        return made.memory


def _of(link: weakref.ref[Link], call: Callable[[Link], None]) -> None:
    found = link()
    if found is not None:
        call(found)


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _hang_up_in_child() -> None:
    """A fork's copy of a connection would keep the I/O process from seeing the engine's end."""
    for link in list(_links):
        link.hang_up()


os.register_at_fork(after_in_child=_hang_up_in_child)
