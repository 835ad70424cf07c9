"""The frame around a message of the checksum protocol, and the bounds on what is read from one.

docs/protocol.md has every byte. A message comes from another machine: nothing in it is used before its length, version and
hash were checked, and no count before what it counts was seen to fit into the bytes that are left.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import ProtocolError

UInt64Array = npt.NDArray[np.uint64]

MAGIC: Final = b"\x93KVSUM\r\n"
VERSION: Final = 1
HEAD: Final = struct.Struct("<8sHHI")
"""Magic, version, kind, bytes of the body; the hash of these and of the body follows."""
HASH_BYTES: Final = 16
FRAME_BYTES: Final = HEAD.size + HASH_BYTES
MAX_MESSAGE_BYTES: Final = 64 * 2**20
"""A whole message: a longer one is neither made nor read."""
_WIDTHS: Final = {size: struct.Struct(f"<{code}") for size, code in ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))}


def seal(kind: int, body: bytes | bytearray) -> bytes:
    """A body as a message of this kind. Raises ProtocolError where it would be longer than MAX_MESSAGE_BYTES."""
    if FRAME_BYTES + len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {FRAME_BYTES + len(body)} bytes: expected at most {MAX_MESSAGE_BYTES}; "
            "spread the requests over several records"
        )
    head = HEAD.pack(MAGIC, VERSION, kind, len(body))
    return head + _hash(head, body) + body


def unseal(kind: int, data: object) -> Reader:
    """A reader of the body of the one message of this kind that `data` is. Raises ProtocolError."""
    view = as_view(data)
    if (length := message_bytes(view)) != len(view):
        raise ProtocolError(f"{len(view)} bytes where a message of {length} was expected: pass each message by itself")
    _, _, found, _ = HEAD.unpack_from(view)
    body = view[FRAME_BYTES:]
    if bytes(view[HEAD.size : FRAME_BYTES]) != _hash(view[: HEAD.size], body):
        raise ProtocolError("a message that does not have the hash it names: it was damaged on its way; send it again")
    if found != kind:
        raise ProtocolError(
            f"a message of kind {found}: expected kind {kind}; decode it with the class that encoded it"
        )
    return Reader(body)


def as_view(data: object) -> memoryview:
    """The bytes of a message, or of several. Raises ProtocolError for anything else."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ProtocolError(f"a message is a {type(data).__name__}: expected bytes")
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a message cannot be read: {error}: expected contiguous bytes") from None


def message_bytes(view: memoryview) -> int:
    """The length of the message that begins here, its frame included, by what its head says. Raises ProtocolError where
    that is no head of this version, or names a length past MAX_MESSAGE_BYTES or past the bytes that are there."""
    if len(view) < FRAME_BYTES:
        raise ProtocolError(f"{len(view)} bytes: a message has at least {FRAME_BYTES}; pass it whole")
    magic, version, _, body = HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ProtocolError(
            f"a message that begins with {magic!r}: expected {MAGIC!r}; this is no kvstore checksum message"
        )
    if version != VERSION:
        raise ProtocolError(
            f"a message of version {version}: this kvstore reads version {VERSION}; use the same release on both sides"
        )
    length: int = FRAME_BYTES + body
    if length > min(len(view), MAX_MESSAGE_BYTES):
        raise ProtocolError(
            f"a message says that it has {length} bytes, {len(view)} are there: expected at most {MAX_MESSAGE_BYTES}, "
            "and all of them"
        )
    return length


def _hash(head: bytes | memoryview, body: bytes | bytearray | memoryview) -> bytes:
    digest = hashlib.blake2b(head, digest_size=HASH_BYTES)
    digest.update(body)
    return digest.digest()


class Writer:
    """A body that grows. Every method raises ProtocolError for a value of the wrong type or out of its range."""

    def __init__(self) -> None:
        self.body = bytearray()

    def number(self, value: object, size: int, name: str, below: int | None = None) -> int:
        """Append an unsigned integer of `size` bytes; below: a bound of its own. Returns it."""
        end = 1 << 8 * size if below is None else below
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < end:
            raise ProtocolError(f"{name} is {value!r}: expected an integer of 0 to {end - 1}")
        self.body += _WIDTHS[size].pack(int(value))
        return int(value)

    def blob(self, value: object, name: str) -> None:
        """Append bytes behind their number."""
        if not isinstance(value, bytes | bytearray):
            raise ProtocolError(f"{name} is a {type(value).__name__}: expected bytes")
        self.number(len(value), 4, f"the length of {name}")
        self.body += value

    def words(self, values: UInt64Array) -> None:
        """Append an array's numbers, 8 bytes each, row by row."""
        self.body += values.astype("<u8").tobytes()


def text_bytes(value: object, name: str) -> bytes:
    """A str as UTF-8. Raises ProtocolError."""
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is {value!r}: expected a str")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{name} is {value!r}: expected text that UTF-8 can hold ({error.reason})") from None


class Reader:
    """A body that is read from its start. Every method raises ProtocolError where the bytes do not suffice or do not fit;
    what it allocates is no more than what it was given."""

    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    @property
    def left(self) -> int:
        """Bytes that were not read."""
        return len(self._body) - self._at

    def take(self, nbytes: int, name: str) -> memoryview:
        """The next bytes."""
        if nbytes > self.left:
            raise ProtocolError(
                f"{name} takes {nbytes} bytes, {self.left} are left: this is no message of this version"
            )
        found = self._body[self._at : self._at + nbytes]
        self._at += nbytes
        return found

    def number(self, size: int, name: str, below: int | None = None) -> int:
        """An unsigned integer of `size` bytes; below: a bound of its own."""
        value: int = _WIDTHS[size].unpack(self.take(size, name))[0]
        if below is not None and value >= below:
            raise ProtocolError(f"{name} is {value}: expected 0 to {below - 1}")
        return value

    def count(self, name: str, at_least: int) -> int:
        """How many entries follow, each of `at_least` bytes or more."""
        value = self.number(4, f"the number of {name}")
        if value * at_least > self.left:
            raise ProtocolError(f"{value} {name} cannot lie in the {self.left} bytes that are left")
        return value

    def blob(self, name: str) -> bytes:
        """Bytes behind their number."""
        return bytes(self.take(self.number(4, f"the length of {name}"), name))

    def text(self, name: str) -> str:
        """Text behind its number of bytes."""
        try:
            return self.blob(name).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"{name} is no UTF-8: {error.reason} at byte {error.start}") from None

    def words(self, count: int, name: str) -> UInt64Array:
        """(count,) uint64, a copy."""
        return np.frombuffer(self.take(8 * count, name), "<u8").astype(np.uint64)

    def end(self) -> None:
        """Raises where bytes are left."""
        if self.left:
            raise ProtocolError(
                f"{self.left} bytes follow the message's last field: this is no message of this version"
            )
