"""Messages between an engine and its I/O process: framed, hashed, bounded, without pickle; file descriptors beside them.

A message is a head of 32 bytes (little-endian: magic 4, kind 2, number of descriptors 2, number of the request 8, length
of the body 8, XXH3-64 of the 24 bytes before it and the body 8) and a body: length of the JSON 4, the JSON, then byte
strings whose lengths are the JSON's "_"; or, for some kinds, 64-bit words.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

PROTOCOL: Final = 2
"""Raised with every change of what is said: kvstore may have been upgraded since the engine started."""
MAGIC: Final = 0x5653564B
HEAD: Final = struct.Struct("<IHHQQQ")
HASH: Final = struct.Struct("<Q")
LENGTH: Final = struct.Struct("<I")
TIMEVAL: Final = struct.Struct("@ll")
MAX_BODY: Final = 2**28
"""What a put of a hundred thousand blocks needs, and more."""
MAX_DESCRIPTORS: Final = 8
RECEIVED_BYTES: Final = 2**18
NO_LIMIT_S: Final = 0.0


class Kind(IntEnum):
    """What a message is."""

    OPEN, READY, CHANNEL, PING, PONG, CLOSE, CLOSED = range(1, 8)
    PUT, WRITE, END_PUT, GET, PART, TAKEN, DOUBT, REFUSE = range(16, 24)
    MATCH, TOUCH, EVICT, CLEAR, USAGE, PRESENT = range(32, 38)
    DONE, FAILED = range(48, 50)


WORDS: Final = frozenset({Kind.PART, Kind.TAKEN})
"""Kinds whose body is 64-bit words and nothing else, for loops that know no JSON."""


class Lost(Exception):
    """The other side has closed the connection, or sent what is no message."""


class Late(Exception):
    """Nothing came, or could be sent, within the time limit. Receiving may be tried again; sending may not."""


@dataclass(frozen=True, eq=False)
class Message:
    """One message. fields: JSON's types alone; blobs: byte strings; descriptors: the receiver's to close."""

    kind: Kind
    request: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    blobs: Sequence[bytes | memoryview] = ()
    descriptors: Sequence[int] = ()


def encode(message: Message) -> bytes:
    """A message's bytes, without its descriptors."""
    blobs = [memoryview(blob).cast("B") for blob in message.blobs]
    body = b"".join(blobs if message.kind in WORDS else (*_described(message.fields, blobs), *blobs))
    head = HEAD.pack(MAGIC, message.kind, len(message.descriptors), message.request, len(body), 0)[:-8]
    return head + HASH.pack(_hash(head, body)) + body


def _described(fields: Mapping[str, Any], blobs: Sequence[memoryview]) -> tuple[bytes, bytes]:
    text = json.dumps({**fields, "_": [len(blob) for blob in blobs]}, separators=(",", ":")).encode()
    return LENGTH.pack(len(text)), text


def _hash(head: bytes | memoryview, body: bytes | memoryview) -> int:
    state = xxh3_64(head)
    state.update(body)
    return int(state.intdigest())


def decode(head: bytes | memoryview, body: bytes | memoryview) -> Message:
    """The message of these bytes, which are untrusted. Raises Lost."""
    magic, kind, _, request, length, stored_hash = HEAD.unpack(head)
    if magic != MAGIC or length != len(body) or _hash(bytes(head[:-8]), body) != stored_hash:
        raise Lost("what came is no message")
    if kind in WORDS and length % 8 == 0:
        return Message(Kind(kind), request, {}, [body])
    try:
        (text_bytes,) = LENGTH.unpack_from(body)
        fields = json.loads(bytes(body[LENGTH.size : LENGTH.size + text_bytes]))
        lengths, at, blobs = fields.pop("_"), LENGTH.size + text_bytes, []
        for nbytes in lengths:
            blobs.append(memoryview(body)[at : at + nbytes])
            at += nbytes
        if at != len(body):
            raise ValueError("its parts do not fill it")
        return Message(Kind(kind), request, fields, blobs)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise Lost(f"what came is no message: {error}") from None


class Connection:
    """One end of a Unix stream socket. One thread at a time sends, one at a time receives; close from any.

    The socket blocks, with the kernel's own time limits: a call is then one system call, and one turn at the
    interpreter's lock.
    """

    def __init__(self, end: socket.socket, timeout_s: float = NO_LIMIT_S) -> None:
        self.socket = end
        self._limits = {socket.SO_RCVTIMEO: NO_LIMIT_S, socket.SO_SNDTIMEO: NO_LIMIT_S}
        self._received = bytearray()
        self._descriptors: list[int] = []
        end.settimeout(None)
        self._limit(socket.SO_SNDTIMEO, timeout_s)

    def limit_receiving(self, timeout_s: float) -> None:
        """Set how long nothing may come, for those who receive by other means."""
        self._limit(socket.SO_RCVTIMEO, timeout_s)

    def _limit(self, option: int, seconds: float) -> None:
        if self._limits[option] != seconds:
            whole = int(seconds)
            microseconds = max(int((seconds - whole) * 1e6), int(not whole and seconds > 0))
            self.socket.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(whole, microseconds))
            self._limits[option] = seconds

    def send(self, message: Message) -> None:
        """Send a message. Raises Lost or Late: then no other can follow."""
        data = encode(message)
        try:
            if message.descriptors:
                sent = socket.send_fds(self.socket, [data], list(message.descriptors))
                data = data[sent:]
            if data:
                self.socket.sendall(data)
        except BlockingIOError:
            raise Late("the other side does not read") from None
        except OSError as error:
            raise Lost(error.strerror or str(error)) from None

    def receive(self, timeout_s: float = NO_LIMIT_S) -> Message:
        """The next message. Raises Lost or Late; timeout_s: how long nothing may come."""
        self.limit_receiving(timeout_s)
        self._fill(HEAD.size)
        magic, _, descriptors, _, length, _ = HEAD.unpack_from(self._received)
        if magic != MAGIC or length > MAX_BODY or descriptors > MAX_DESCRIPTORS:
            raise Lost("what came is no message")
        end = HEAD.size + length
        self._fill(end)
        taken = bytes(self._received[:end])
        if len(self._descriptors) < descriptors:
            raise Lost("descriptors did not come with their message")
        message = decode(taken[: HEAD.size], memoryview(taken)[HEAD.size :])
        del self._received[:end]
        with_it, self._descriptors = self._descriptors[:descriptors], self._descriptors[descriptors:]
        return Message(message.kind, message.request, message.fields, message.blobs, with_it)

    @property
    def received(self) -> bytearray:
        """What came and belongs to the next messages: who receives by other means begins with this, and leaves here what
        is left."""
        return self._received

    def _fill(self, nbytes: int) -> None:
        while len(self._received) < nbytes:
            wanted = max(RECEIVED_BYTES, nbytes - len(self._received))
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, min(wanted, 2**24), MAX_DESCRIPTORS)
            except BlockingIOError:
                raise Late("no answer in time") from None
            except OSError as error:
                raise Lost(error.strerror or errno.errorcode.get(error.errno or 0, "?")) from None
            self._descriptors += descriptors
            if not data:
                raise Lost("the other side has closed the connection")
            self._received += data

    def readable(self) -> bool:
        """Whether something has come that was not received, if only the end."""
        waiting = select.poll()
        waiting.register(self.socket, select.POLLIN)
        return bool(waiting.poll(0))

    def ended(self) -> bool:
        """Take whatever has come, and forget it; whether the other side has closed the connection."""
        try:
            while data := self.socket.recv(RECEIVED_BYTES, socket.MSG_DONTWAIT):
                del data
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def hang_up(self) -> None:
        """Send nothing more: the other side sees the end of the connection once it has read what was sent."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close this end. Twice is allowed."""
        self.socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def pack_strings(strings: Sequence[bytes]) -> list[bytes]:
    """Byte strings of at most 65,535 bytes as two blobs: their lengths, then all of them."""
    return [np.array([len(s) for s in strings], "<u2").tobytes(), b"".join(strings)]


def unpack_strings(lengths: bytes | memoryview, data: bytes | memoryview) -> list[bytes]:
    """What `pack_strings` was given. Raises ValueError."""
    ends = np.cumsum(np.frombuffer(lengths, "<u2").astype(np.int64)).tolist()
    if (ends[-1] if ends else 0) != len(data):
        raise ValueError("strings do not fill their blob")
    whole = bytes(data)
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def as_words(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Integers of 64 bits as a blob: signed ones or, where that is their type, unsigned ones."""
    array = np.asarray(values)
    return array.astype("<u8" if array.dtype == np.uint64 else "<i8").tobytes()


def signed_words(blob: bytes | memoryview) -> npt.NDArray[np.int64]:
    """Integers from a blob: int64."""
    return np.frombuffer(blob, "<i8").astype(np.int64)


def unsigned_words(blob: bytes | memoryview) -> npt.NDArray[np.uint64]:
    """Integers from a blob: uint64."""
    return np.frombuffer(blob, "<u8").astype(np.uint64)


def slot_offsets(nbytes: int, room: int) -> range:
    """Where the slots of a buffer begin, `room` bytes each: both sides divide buffers in this way."""
    return range(0, nbytes - room + 1, room)
