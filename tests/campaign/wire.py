"""Something between an engine and its I/O process that spoils messages. Every connection of theirs leads through it, with
the descriptors that are sent along, in both directions."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from xxhash import xxh3_64

import kvstore.link
from kvstore.link import Link
from kvstore.messages import HEAD, MAX_BODY, MAX_DESCRIPTORS
from tests.support import flip

KEPT = 64
"""Messages of a direction that may be replayed."""
DIRECTIONS = ("to_child", "to_engine")


@dataclass(frozen=True)
class Frame:
    """A message on its way. The descriptors are this process's to close."""

    data: bytes
    descriptors: tuple[int, ...] = ()

    def renumbered(self, number: int) -> Frame:
        """With another request number, and the hash that belongs to it."""
        magic, kind, descriptors, _, length, _ = HEAD.unpack_from(self.data)
        head = HEAD.pack(magic, kind, descriptors, number % 2**64, length, 0)[:-8]
        body = self.data[HEAD.size :]
        state = xxh3_64(head)
        state.update(body)
        return replace(self, data=head + state.intdigest().to_bytes(8, "little") + body)

    @property
    def request(self) -> int:
        return int(HEAD.unpack_from(self.data)[3])


@dataclass
class Plan:
    """What is done to one message: the n-th that goes in a direction from now on."""

    direction: str
    countdown: int
    name: str
    chance: Random
    pause_s: float
    """How long a message is held back where one is."""
    done: threading.Event = field(default_factory=threading.Event)


class Hangup(Exception):
    """Nothing more goes this way."""


class Wire:
    """Makes the socket pairs of this process's links, once `watch` was called. One plan at a time, for one shard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._folder: Path | None = None
        self._here = threading.local()
        self._kept: dict[str, deque[Frame]] = {direction: deque(maxlen=KEPT) for direction in DIRECTIONS}

    def watch(self) -> None:
        """Have all links made from now on lead through here."""
        kvstore.link.socket = SimpleNamespace(socketpair=self._pair)  # type: ignore[assignment]
        for name in ("_start", "_new_channel"):
            setattr(Link, name, self._in_folder(getattr(Link, name)))

    def _in_folder(self, make: Callable[[Link], Any]) -> Callable[[Link], Any]:
        def making(link: Link) -> Any:
            self._here.folder = link.opening.folder
            return make(link)

        return making

    def arm(self, plan: Plan, folder: Path) -> None:
        """Spoil a message of this shard's."""
        with self._lock:
            self._plan, self._folder = plan, folder
            for kept in self._kept.values():
                kept.clear()

    def disarm(self) -> None:
        with self._lock:
            self._plan = None

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        own, near = socket.socketpair()
        far, other = socket.socketpair()
        for source, sink, direction in ((near, far, "to_child"), (far, near, "to_engine")):
            arguments = (source, sink, direction, self._here.folder)
            threading.Thread(target=self._pump, args=arguments, daemon=True).start()
        return own, other

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str, folder: Path) -> None:
        with suppress(Hangup, OSError):
            for frame in frames(source):
                try:
                    self._pass_on(frame, sink, direction, folder)
                finally:
                    for descriptor in frame.descriptors:
                        os.close(descriptor)
        for end, how in ((source, socket.SHUT_RD), (sink, socket.SHUT_WR)):
            with suppress(OSError):
                end.shutdown(how)

    def _pass_on(self, frame: Frame, sink: socket.socket, direction: str, folder: Path) -> None:
        plan = self._due(direction, folder)
        with self._lock:
            kept = list(self._kept[direction])
            if folder == self._folder:
                self._kept[direction].append(replace(frame, descriptors=()))
        if plan is None:
            transmit(sink, frame)
            return
        try:
            SPOILS[plan.name](plan, frame, sink, kept)
        finally:
            plan.done.set()

    def _due(self, direction: str, folder: Path) -> Plan | None:
        with self._lock:
            plan = self._plan
            if plan is None or plan.direction != direction or folder != self._folder:
                return None
            plan.countdown -= 1
            if plan.countdown >= 0:
                return None
            self._plan = None
            return plan


def frames(source: socket.socket) -> Iterator[Frame]:
    """What comes, message by message."""
    received, descriptors = bytearray(), list[int]()
    while True:
        while len(received) >= HEAD.size:
            _, _, count, _, length, _ = HEAD.unpack_from(received)
            end = HEAD.size + min(length, MAX_BODY)
            if len(received) < end:
                break
            yield Frame(bytes(received[:end]), tuple(descriptors[:count]))
            del received[:end], descriptors[:count]
        data, with_it, _, _ = socket.recv_fds(source, 2**18, MAX_DESCRIPTORS)
        if not data:
            return
        received += data
        descriptors += with_it


def transmit(sink: socket.socket, frame: Frame) -> None:
    data = frame.data
    if frame.descriptors:
        data = data[socket.send_fds(sink, [data], list(frame.descriptors)) :]
    sink.sendall(data)


# --- what is done to a message ---------------------------------------------------------------------------------------


def flipped(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """One bit, in the head as often as in the body."""
    size = plan.chance.choice((HEAD.size, len(frame.data)))
    transmit(sink, replace(frame, data=flip(frame.data, plan.chance.randrange(8 * size))))


def garbage(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """Random bytes in a message's place, or behind a good beginning."""
    keep = plan.chance.choice((0, 4, 16, HEAD.size, plan.chance.randrange(len(frame.data))))
    transmit(sink, replace(frame, data=frame.data[:keep] + plan.chance.randbytes(max(1, len(frame.data) - keep))))


def cut(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """The connection is closed half-way through a message."""
    sink.sendall(frame.data[: plan.chance.randrange(len(frame.data))])
    raise Hangup


def stalled(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """Half a message, and its rest after a while."""
    half = plan.chance.randrange(len(frame.data))
    sink.sendall(frame.data[:half])
    time.sleep(plan.pause_s)
    transmit(sink, replace(frame, data=frame.data[half:]))


def dropped(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """The message never comes."""


def delayed(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    time.sleep(plan.pause_s)
    transmit(sink, frame)


def twice(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    transmit(sink, frame)
    transmit(sink, frame)


def replayed(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """A message that went before, of whichever connection, in its place or before it. One that happens to have the
    number that is awaited gets another."""
    old = plan.chance.choice(kept) if kept else frame
    transmit(
        sink, old if old.request != frame.request else old.renumbered(frame.request + 1 + plan.chance.randrange(9))
    )
    if plan.chance.random() < 0.5:
        transmit(sink, frame)


def renumbered(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """Another request number, and a hash that agrees."""
    shift = plan.chance.choice((-2, -1, 1, 2, plan.chance.getrandbits(63)))
    transmit(sink, frame.renumbered(frame.request + shift))


def stripped(plan: Plan, frame: Frame, sink: socket.socket, kept: list[Frame]) -> None:
    """The message without its descriptors, or another that has some to spare."""
    extra = frame.descriptors + frame.descriptors
    transmit(sink, replace(frame, descriptors=plan.chance.choice(((), frame.descriptors[:1], extra))))


SPOILS: dict[str, Callable[[Plan, Frame, socket.socket, list[Frame]], None]] = {
    made.__name__: made
    for made in (flipped, garbage, cut, stalled, dropped, delayed, twice, replayed, renumbered, stripped)
}
