"""A get of an engine whose shard another process has open."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from kvstore.channel import NO_CHANNEL, Channel, question_blobs, understood
from kvstore.checksum import UInt64Array
from kvstore.link import Link
from kvstore.messages import (
    HEAD,
    RECEIVED_BYTES,
    Kind,
    Message,
    as_words,
    encode,
    signed_words,
    slot_offsets,
    unsigned_words,
)
from kvstore.results import Rejection
from kvstore.route import Feed
from kvstore.staging import NO_BUFFERS
from kvstore.storage import NO_SEQUENCE, Doubt, EngineSink, Question, Unavailable
from kvstore.watching import Watch

log = logging.getLogger(__name__)

SLOT_BYTES: Final = 2 * 2**20
"""Block bytes of one part of a get, where taking it costs no turn at the interpreter's lock: it stays in a core's cache."""


class Ring:
    """The buffers of one get, in slots that the I/O process fills in turn; each again once it was told that what lay there
    is taken. The process divides the buffers in the same way (kvstore.serving.Ring)."""

    def __init__(self, sink: EngineSink, link: Link, blocks: int) -> None:
        self._sink, self._buffers, self._blocks = sink, sink.borrow(), blocks
        self.room = min(sink.room, max(sink.block_bytes, SLOT_BYTES)) if sink.direct else sink.room
        self.memory = [link.shared(buffer.memory) for buffer in self._buffers]
        self._slots = sum(len(slot_offsets(m.nbytes, self.room)) for m in self.memory)

    def feed(self, channel: Channel) -> Feed:
        """What a loop needs to take parts from the channel."""
        starts = [m.memory.ctypes.data + at for m in self.memory for at in slot_offsets(m.nbytes, self.room)]
        number = channel.requests
        taken = [encode(Message(Kind.TAKEN, number, {}, [as_words([slot])])) for slot in range(len(starts))]
        head = np.frombuffer(encode(Message(Kind.PART, number))[:16], np.uint64).copy()
        received = np.empty(HEAD.size + 8 * (1 + self._blocks) + RECEIVED_BYTES, np.uint8)
        table = np.frombuffer(b"".join(taken), np.uint8).reshape(len(starts), -1).copy()
        return Feed(channel.connection.socket.fileno(), head, np.array(starts, np.int64), table, received)

    def land(self, feed: Feed, channel: Channel) -> None:
        """Take parts in a loop without the interpreter's lock. What ended it is left for `receive`."""
        waiting, begun = channel.connection.received, time.monotonic()
        if len(waiting) > feed.received.size:
            return
        channel.connection.limit_receiving(channel.timeout_s)
        feed.received[: len(waiting)] = np.frombuffer(waiting, np.uint8)
        filled = len(waiting)
        waiting[:] = b""
        filled = self._sink.land(feed, filled)
        waiting[:] = feed.received[:filled].tobytes()
        if filled < HEAD.size and time.monotonic() - begun >= channel.timeout_s and not channel.connection.readable():
            raise channel.too_late()

    def take(self, message: Message, channel: Channel) -> None:
        """Take one part: a slot, and the indices of the blocks there."""
        words = signed_words(message.blobs[0])
        slot, indices = int(words[0]) if words.size > 1 else -1, words[1:]
        if not 0 <= slot < self._slots or not 0 <= indices.min() <= indices.max() < self._blocks:
            raise Unavailable("the I/O process named blocks or buffers that it was not given")
        if self._sink.direct:
            # A signal had ended the loop, which takes this part when it goes on.
            channel.connection.received[:0] = encode(message)
            return
        self._sink.scatter(indices.tolist(), self._buffers[slot])
        channel.say(Kind.TAKEN, {}, [as_words([slot])])


class RemoteGet:
    """One get. Belongs to the calling thread."""

    def __init__(self, watch: Watch, question: Question) -> None:
        self._watch, self._question = watch, question
        self.token = object()
        self.held: dict[Any, Any] = {}
        self.buffers = NO_BUFFERS
        self.tagged: dict[int, int] = {}
        self.joint: dict[int, int] = {}
        self.missing: set[int] = set()
        self.rejected: dict[int, Rejection] = {}
        self.channel = NO_CHANNEL
        self._sequences: dict[int, bytes] = {}

    @property
    def owed(self) -> int:
        return self.channel.outstanding

    def begin(self) -> None:
        self.link = self._watch.serving()
        self.held, self.buffers = self.link.users, self.link.buffers
        self.channel = self.link.borrow(self.token)

    def read(self, sink: EngineSink) -> None:
        ring = Ring(sink, self.link, len(self._question))
        fields = {"start": self._question.start, "now": self._watch.opening.clock(), "room": ring.room}
        self.channel.send(Kind.GET, fields, question_blobs(self._question), ring.memory)
        feed = ring.feed(self.channel) if sink.direct else None
        while True:
            if feed is not None:
                ring.land(feed, self.channel)
            message = self.channel.answer()
            if message.kind != Kind.PART:
                break
            ring.take(message, self.channel)
        understood(lambda: self._take(message))

    def _take(self, message: Message) -> None:
        indices, tagged, sequences = (message.blobs[0], message.blobs[1], message.blobs[2])
        landed = signed_words(indices).tolist()
        rejected = {int(i): Rejection(str(k), str(d), bool(bad)) for i, k, d, bad in message.fields["rejected"]}
        if not {*landed, *rejected} <= set(range(len(self._question))) or not rejected.keys().isdisjoint(landed):
            raise ValueError("blocks that were not asked for")
        self.tagged = dict(zip(landed, unsigned_words(tagged).tolist(), strict=True))
        self._sequences = {i: bytes(sequences[8 * n : 8 * n + 8]) for n, i in enumerate(landed)}
        self.missing, self.rejected = set(message.fields["missing"]), rejected
        self.joint = {int(last): int(count) for last, count in message.fields["joint"]}
        if any(not set(range(last + 1 - count, last + 1)) <= set(landed) for last, count in self.joint.items()):
            raise ValueError("blocks that belong together, and did not all come")

    def doubt(self, expected: Mapping[int, int]) -> dict[int, Doubt]:
        checksums = as_words(np.array(list(expected.values()), np.uint64))
        answer = self.channel.ask(
            Kind.DOUBT, {"now": self._watch.opening.clock()}, [as_words(list(expected)), checksums]
        )
        doubts = understood(lambda: self._doubts(answer))
        if doubts.keys() != expected.keys():
            raise Unavailable("the I/O process told of other blocks than it was asked for")
        return doubts

    def _doubts(self, answer: Message) -> dict[int, Doubt]:
        told = zip(answer.fields["doubts"], answer.blobs, strict=True)
        return {
            int(index): Doubt(str(detail), bool(condemned), self._sums(sums))
            for (index, detail, condemned), sums in told
        }

    def _sums(self, blob: bytes | memoryview) -> UInt64Array | None:
        sums = unsigned_words(blob)
        if sums.size not in (0, self._question.shape.plan.num_slices):
            raise ValueError(f"{sums.size} sums of slices")
        return sums if sums.size else None

    def refuse(self, rejections: Mapping[int, Rejection]) -> None:
        for index in rejections:
            if self._sequences[index] != NO_SEQUENCE:
                self._watch.refused.add_sequence(self._question.keys[index], self._sequences[index])
        try:
            told = [[i, r.kind, r.detail, r.condemned] for i, r in rejections.items()]
            self.channel.ask(Kind.REFUSE, {"rejections": told, "now": self._watch.opening.clock()})
        except Unavailable as error:
            log.warning("%s: blocks are refused here, and not condemned: %s", self._watch.opening.folder, error)
