"""A put of an engine whose shard another process has open."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from kvstore.channel import NO_CHANNEL, question_blobs, understood
from kvstore.checksum import UInt64Array
from kvstore.messages import (
    Kind,
    Message,
    as_words,
)
from kvstore.results import Bools
from kvstore.staging import NO_BUFFERS
from kvstore.storage import Memory, Outcomes, Question, Unavailable
from kvstore.watching import Watch

log = logging.getLogger(__name__)


class RemoteBatch:
    """One transaction's blocks, which lie in shared memory."""

    def __init__(self, put: RemotePut, indices: Sequence[int], buffer: Memory) -> None:
        self._put, self._indices, self._buffer = put, indices, buffer
        self._sums: list[UInt64Array] = []

    def stage(self, first: int, end: int, sums: UInt64Array) -> None:
        self._sums.append(sums)

    def write(self, last: bool) -> Callable[[], Outcomes]:
        channel, link = self._put.channel, self._put.link
        blobs = [as_words(self._indices), as_words(np.concatenate(self._sums))]
        channel.unfinished = not last
        channel.send(Kind.WRITE, {"last": last}, blobs, [link.shared(self._buffer.memory)])
        return lambda: outcomes_of(channel.answer(), self._indices)


def outcomes_of(message: Message, indices: Collection[int], all_of_them: bool = True) -> Outcomes:
    """What an answer says of a put's blocks, which are these, or some of these."""
    outcomes = understood(lambda: {int(index): str(outcome) for index, outcome in message.fields["outcomes"]})
    if not outcomes.keys() <= set(indices) or (all_of_them and len(outcomes) < len(indices)):
        raise Unavailable("the I/O process told of other blocks than it was asked for")
    return outcomes


class RemotePut:
    """One put. Belongs to the calling thread."""

    overlaps = whole = True

    def __init__(self, watch: Watch, question: Question) -> None:
        self._watch, self._question = watch, question
        self.token = object()
        self.held: dict[Any, Any] = {}
        self.buffers = NO_BUFFERS
        self.channel = NO_CHANNEL

    @property
    def owed(self) -> int:
        return self.channel.outstanding

    def begin(self) -> Outcomes:
        self.link = self._watch.serving()
        self.held, self.buffers = self.link.users, self.link.buffers
        self.channel = self.link.borrow(self.token)
        self.channel.unfinished = True
        fields = {"start": self._question.start, "now": self._watch.opening.clock()}
        answer = self.channel.ask(Kind.PUT, fields, question_blobs(self._question))
        outcomes = outcomes_of(answer, range(len(self._question)), all_of_them=False)
        self.channel.unfinished = len(outcomes) < len(self._question)
        return outcomes

    def batch(self, indices: Sequence[int], buffer: Memory) -> RemoteBatch:
        return RemoteBatch(self, indices, buffer)

    def settle(self) -> None:
        raised: BaseException | None = None
        while self.channel.outstanding and not (self.channel.hung_up or self.channel.late):
            try:
                self.channel.answer()
            except Unavailable:
                break
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def end(self, stored: Bools) -> None:
        for index in np.flatnonzero(stored).tolist():
            self._watch.refused.discard(self._question.keys[index])
        channel = self.channel
        if channel.unfinished and not (channel.hung_up or channel.outstanding):
            try:
                channel.say(Kind.END_PUT, {})
                channel.unfinished = False
            except Unavailable as error:
                log.warning("%s: the end of a put was not heard: %s", self._watch.opening.folder, error)
