"""What the I/O process does for its engine: one thread a channel, one request after another."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.fetching import Fetching
from kvstore.hostpath import CACHED_BYTES
from kvstore.inline import InlineStorage
from kvstore.messages import (
    Connection,
    Kind,
    Late,
    Lost,
    Message,
    as_words,
    signed_words,
    slot_offsets,
    unpack_strings,
    unsigned_words,
)
from kvstore.results import Rejection
from kvstore.shape import GroupShape
from kvstore.sharedmemory import mapped
from kvstore.staging import HostBuffer
from kvstore.steps import finer_hashes
from kvstore.storage import Question
from kvstore.storing import Storing

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

MAX_LINES: Final = 1000
"""Lines for the engine's log that are kept until the next answer; the oldest go first."""


class Beside(logging.Handler):
    """What goes to the engine beside an answer: lines for its log, counts, refused keys. And the engine's clock, as of its
    last request. Any thread may use it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[list[Any]] = deque(maxlen=MAX_LINES)
        self.clock = 0.0

    def begin(self, clock: float, level: int) -> None:
        """Take over all logging from a level on."""
        self.clock = clock
        logging.getLogger().handlers = [self]
        logging.getLogger().setLevel(level)

    def now(self) -> float:
        """The engine's clock."""
        return self.clock

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append([record.name, record.levelno, self.format(record)])

    def take(self) -> dict[str, Any]:
        """Everything since the last time, as an answer's fields."""
        lines = [self.lines.popleft() for _ in range(len(self.lines))]
        return {"log": lines} if lines else {}


def described(error: Exception) -> dict[str, Any]:
    """An exception as the fields of FAILED."""
    return {"error": type(error).__name__, "text": str(error)}


class Server:
    """The shard, and what its channels share. Any thread may use it."""

    def __init__(self, storage: InlineStorage, beside: Beside) -> None:
        self.storage, self.beside = storage, beside
        self._memory: dict[tuple[int, int], HostBuffer] = {}
        self._shapes: dict[bytes, GroupShape] = {}

    def attach(self, connection: Connection) -> None:
        """Serve a channel in a thread of its own, until its other end is closed."""
        threading.Thread(target=Handler(self, connection).run, daemon=True).start()

    def shape(self, blob: bytes | memoryview) -> GroupShape:
        """The shape of these bytes, made once."""
        data = bytes(blob)
        known = self._shapes.get(data)
        return known if known is not None else self._shapes.setdefault(data, GroupShape.decode(data))

    def buffers(self, message: Message) -> list[HostBuffer]:
        """The memory that a request names, mapped once. Its descriptors are closed."""
        try:
            named = [(int(name), int(nbytes)) for name, nbytes in message.fields.get("memory", ())]
            pairs = zip(named, message.descriptors, strict=True)
            return [self._mapped(key, descriptor) for key, descriptor in pairs]
        finally:
            for descriptor in message.descriptors:
                os.close(descriptor)

    def _mapped(self, key: tuple[int, int], descriptor: int) -> HostBuffer:
        known = self._memory.get(key)
        return (
            known if known is not None else self._memory.setdefault(key, HostBuffer(key[1], mapped(descriptor, key[1])))
        )

    def answer_fields(self) -> dict[str, Any]:
        """What goes beside an answer."""
        counts, refused = self.storage.counters.take(), self.storage.refused.take_new()
        fields = self.beside.take()
        if counts:
            fields["counts"] = counts
        if refused:
            fields["refused"] = [[key.hex(), sequence.hex()] for key, sequence in refused]
        return fields


class Ring:
    """A Sink over the engine's buffers: filled in turn, each again once the engine has taken what lay in it."""

    direct = False

    def __init__(
        self,
        connection: Connection,
        request: int,
        buffers: Sequence[HostBuffer],
        question: Question,
        room: int,
        patience_s: float,
    ) -> None:
        self._connection, self._request = connection, request
        self._block_bytes, self._patience_s = question.shape.plan.raw_length, patience_s
        self.room = room
        self._slots = [b.memory[at : at + room] for b in buffers for at in slot_offsets(b.memory.size, room)]
        self._free = deque(range(len(self._slots)))
        if room < self._block_bytes or not self._slots:
            raise ValueError(f"buffers in slots of {room} bytes have no room for a block of {self._block_bytes}")

    def scatter_from(self, indices: Sequence[int], addresses: npt.NDArray[np.int64]) -> None:
        raise TypeError("the engine's blocks are in another process: ask `direct` first")

    def fill(self, blocks: int, decode: Callable[[Bytes], Sequence[int]]) -> None:
        while not self._free:
            # Inside a snapshot: an engine that does not take what it asked for must not keep pages from being reused.
            self._take()
        slot = self._free.popleft()
        memory = self._slots[slot][: blocks * self._block_bytes]
        indices = decode(memory.reshape(blocks, self._block_bytes))
        if not indices:
            self._free.appendleft(slot)
            return
        self._connection.send(Message(Kind.PART, self._request, {}, [as_words([slot, *indices])]))

    def _take(self) -> None:
        """Wait until the engine has taken what lies in a slot."""
        taken = self._connection.receive(self._patience_s)
        if taken.kind != Kind.TAKEN or taken.request != self._request:
            raise Lost(f"{taken.kind.name} while a get goes on")
        slot = int(signed_words(taken.blobs[0])[0])
        if slot in self._free or not 0 <= slot < len(self._slots):
            raise Lost(f"slot {slot} was taken, where nothing lies")
        self._free.append(slot)

    def settle(self) -> None:
        """Wait until the engine has taken everything."""
        while len(self._free) < len(self._slots):
            self._take()


class Handler:
    """One channel. Its thread alone uses it."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self._server, self._connection = server, connection
        self._storing: Storing | None = None
        self._stored: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self._fetching: Fetching | None = None
        self._requests = 0

    def run(self) -> None:
        """Answer requests until the other end is closed."""
        try:
            while True:
                self._serve(self._connection.receive())
        except (Lost, Late):
            pass
        finally:
            self._drop()
            self._connection.close()

    def _serve(self, message: Message) -> None:
        token, storage = object(), self._server.storage
        self._expect(message)
        try:
            if "now" in message.fields:
                self._server.beside.clock = float(message.fields["now"])
            storage.enter(token)
            answer = WORK[message.kind](self, message)
        except (Lost, Late):
            raise
        except Exception as error:
            if not isinstance(error, KVStoreError):
                log.exception("a request failed")
            answer = Message(Kind.FAILED, message.request, described(error))
        finally:
            storage.calls.discard(token)
        if answer is not None:
            fields = {**answer.fields, **self._server.answer_fields()}
            self._connection.send(Message(answer.kind, message.request, fields, answer.blobs))

    def _expect(self, message: Message) -> None:
        """Requests come in order, so that none of an earlier call can change what is done for this one. Raises Lost."""
        self._requests += message.kind != Kind.END_PUT
        if message.request != self._requests:
            raise Lost(f"request {message.request} came in the place of {self._requests}")

    def _drop(self) -> None:
        """End what was cut short."""
        if self._storing is not None:
            self._storing.settle()
            self._storing.held.pop(self._storing.token, None)
            self._storing = None

    def _question(self, message: Message) -> Question:
        shape, lengths, hashes, valid, parent, *finer = message.blobs
        words = signed_words(valid)
        found = unpack_strings(lengths, hashes)
        if len(found) != words.size:
            raise ValueError(f"{len(found)} hashes and {words.size} counts of valid tokens")
        start, before = int(message.fields["start"]), bytes(parent) or None
        return Question(self._server.shape(shape), found, start, words, before, finer_hashes(*finer))

    def put(self, message: Message) -> Message:
        """Begin a put."""
        self._drop()
        question = self._question(message)
        self._storing = self._server.storage.put(question)
        self._stored = np.zeros(len(question), bool)
        outcomes = self._storing.begin()
        if len(outcomes) == len(question):
            self.end_put(message)
        return Message(Kind.DONE, 0, {"outcomes": list(outcomes.items())})

    def write(self, message: Message) -> Message:
        """Write one transaction of the put."""
        storing, (buffer,) = self._storing, self._server.buffers(message)
        if storing is None:
            raise ValueError("no put goes on")
        indices, sums = signed_words(message.blobs[0]).tolist(), unsigned_words(message.blobs[1])
        block_bytes, count = storing.question.shape.plan.raw_length, len(indices)
        batch, table = storing.batch(indices, buffer), sums.reshape(count, -1)
        step = max(1, CACHED_BYTES // block_bytes)
        for first in range(0, count, step):
            end = min(first + step, count)
            batch.stage(first, end, table[first:end])
        outcomes = batch.write(last=True)()
        self._stored[[i for i, o in outcomes.items() if o == "stored"]] = True
        if message.fields["last"]:
            self.end_put(message)
        return Message(Kind.DONE, 0, {"outcomes": list(outcomes.items())})

    def end_put(self, message: Message) -> None:
        """The put is over."""
        if self._storing is not None:
            self._storing.end(self._stored)
            self._storing.held.pop(self._storing.token, None)
            self._storing = None

    def get(self, message: Message) -> Message:
        """Bring blocks to the engine's buffers."""
        storage, question = self._server.storage, self._question(message)
        buffers, patience = self._server.buffers(message), storage.shard.config.io_timeout_s
        ring = Ring(self._connection, message.request, buffers, question, int(message.fields["room"]), patience)
        self._fetching = fetching = storage.get(question)
        try:
            fetching.read(ring)
            ring.settle()
        finally:
            fetching.held.pop(fetching.token, None)
        landed = list(fetching.tagged)
        blobs = [as_words(landed), as_words(np.array(list(fetching.tagged.values()), np.uint64)), fetching.sequences()]
        rejected = [[i, r.kind, r.detail, r.condemned] for i, r in fetching.rejected.items()]
        joint = list(fetching.joint.items())
        return Message(Kind.DONE, 0, {"missing": sorted(fetching.missing), "rejected": rejected, "joint": joint}, blobs)

    def doubt(self, message: Message) -> Message:
        """Read blocks of the last get again."""
        indices, checksums = signed_words(message.blobs[0]).tolist(), unsigned_words(message.blobs[1]).tolist()
        doubts = self._last_get().doubt(dict(zip(indices, checksums, strict=True)))
        blobs = [b"" if doubt.sums is None else as_words(doubt.sums) for doubt in doubts.values()]
        return Message(Kind.DONE, 0, {"doubts": [[i, d.detail, d.condemned] for i, d in doubts.items()]}, blobs)

    def refuse(self, message: Message) -> Message:
        """Refuse blocks of the last get."""
        told: Mapping[int, Rejection] = {
            int(index): Rejection(kind, detail, bool(condemned))
            for index, kind, detail, condemned in message.fields["rejections"]
        }
        self._last_get().refuse(told)
        return Message(Kind.DONE, 0)

    def _last_get(self) -> Fetching:
        if self._fetching is None:
            raise ValueError("no get went before")
        return self._fetching

    def match(self, message: Message) -> Message:
        """Count leading blocks."""
        shape, lengths, hashes, *finer = message.blobs
        asked = unpack_strings(lengths, hashes)
        found = self._server.storage.match(self._server.shape(shape), asked, finer_hashes(*finer))
        return Message(Kind.DONE, 0, {"found": found})

    def present(self, message: Message) -> Message:
        """Tell which blocks are here."""
        shape, lengths, hashes, *finer = message.blobs
        asked = unpack_strings(lengths, hashes)
        found = self._server.storage.present(self._server.shape(shape), asked, finer_hashes(*finer))
        return Message(Kind.DONE, 0, {}, [found.astype(np.uint8).tobytes()])

    def touch(self, message: Message) -> Message:
        """Tell eviction of a request."""
        shape, lengths, hashes = message.blobs
        self._server.storage.touch(self._server.shape(shape), unpack_strings(lengths, hashes))
        return Message(Kind.DONE, 0)

    def evict(self, message: Message) -> Message:
        """Evict blocks."""
        return Message(Kind.DONE, 0, {"gone": self._server.storage.evict(int(message.fields["blocks"]))})

    def clear(self, message: Message) -> Message:
        """Delete every record."""
        return Message(Kind.DONE, 0, {"gone": self._server.storage.clear()})

    def usage(self, message: Message) -> Message:
        """Figures of the shard."""
        return Message(Kind.DONE, 0, {"usage": self._server.storage.usage()})


WORK: Final[Mapping[Kind, Callable[[Handler, Message], Message | None]]] = {
    Kind.PUT: Handler.put,
    Kind.WRITE: Handler.write,
    Kind.END_PUT: Handler.end_put,
    Kind.GET: Handler.get,
    Kind.DOUBT: Handler.doubt,
    Kind.REFUSE: Handler.refuse,
    Kind.MATCH: Handler.match,
    Kind.PRESENT: Handler.present,
    Kind.TOUCH: Handler.touch,
    Kind.EVICT: Handler.evict,
    Kind.CLEAR: Handler.clear,
    Kind.USAGE: Handler.usage,
}
