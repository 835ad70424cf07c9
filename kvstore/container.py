"""The file of exported records: a head, then frames one after the other, and a last frame that says how many there were.

Little-endian. Every byte is under an XXH3-64, every frame is bound to its file and its place in it. A file is written and
read from its start to its end, one frame at a time. Everything read here is untrusted.

    head    magic (8), version (u32), length of the head (u32), hash (u64: of the head without these 8 bytes), export id
            (16, random), time (u64, microseconds since 1970), shards (u32); per shard tensor-parallel rank and size,
            pipeline-parallel rank and size (u32 each; all 0: not known)
    frame   magic (4), kind (u16), shard (u16), number (u64, from 0), length of the body (u64), hash of the body (u64), hash
            (u64: of the export id and the 32 bytes before it); the body
    bodies  1 identity: identity id (16), canonical JSON
            2 record: length of the header (u32), chunks (u32, the directory is the first), length of each (u32); the header,
              the chunks, all as they were stored
            3 end: frames before it (u64), bytes of their bodies (u64); nothing follows

In every version magic, version, length and hash of the head are at these offsets.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore.errors import ExportDamaged, UnsupportedFormat
from kvstore.record import MAX_HEADER_BYTES

MAGIC: Final = b"\x89kvexprt"
VERSION: Final = 1
HEAD: Final = struct.Struct("<8sIIQ16sQI")
SHARD: Final = struct.Struct("<IIII")
MAX_SHARDS: Final = 4096
FRAME_MAGIC: Final = b"\x89KVF"
FRAME: Final = struct.Struct("<4sHHQQQQ")
IDENTITY, RECORD, END = 1, 2, 3
RECORD_HEAD: Final = struct.Struct("<II")
END_BODY: Final = struct.Struct("<QQ")
MAX_CHUNKS: Final = 2**16
"""Of a record, with the directory."""
MAX_IDENTITY_BYTES: Final = 2**24
MAX_RECORD_BYTES: Final = 2**30 + 2**22
"""More than a record has whose block is of a size that is checked (kvstore.audit)."""
BOUNDS: Final = {IDENTITY: MAX_IDENTITY_BYTES, RECORD: MAX_RECORD_BYTES, END: END_BODY.size}
PIECE_BYTES: Final = 2**20
"""Read at a time: room is made only for what is there."""
Ranks = tuple[int, int, int, int]
"""Tensor-parallel rank and size, pipeline-parallel rank and size of a shard; zeros where they are not known."""
NO_RANK: Final[Ranks] = (0, 0, 0, 0)


@dataclass(frozen=True)
class Head:
    """A file's head. time: when it was begun, microseconds since 1970."""

    export_id: bytes
    time: int
    shards: tuple[Ranks, ...]

    def encode(self) -> bytes:
        """The head's bytes."""
        table = b"".join(SHARD.pack(*shard) for shard in self.shards)
        length = HEAD.size + len(table)
        data = bytearray(HEAD.pack(MAGIC, VERSION, length, 0, self.export_id, self.time, len(self.shards)) + table)
        struct.pack_into("<Q", data, 16, _head_hash(data))
        return bytes(data)


def _head_hash(data: bytes | bytearray) -> int:
    return xxh3_64_intdigest(bytes(data[:16] + data[24:]))


@dataclass(frozen=True)
class Frame:
    """kind: IDENTITY, RECORD, or one that is not known; shard: of the head's, by number; body: None where it changed since it
    was written; offset: where the frame begins in the file."""

    kind: int
    shard: int
    body: bytes | None
    offset: int
    nbytes: int


class Writer:
    """Writes a file of records. Belongs to one thread. Raises OSError where writing fails."""

    def __init__(self, file: BinaryIO, shards: Sequence[Ranks], time: int) -> None:
        self._file, self._export_id = file, os.urandom(16)
        self._frames = self._bytes = 0
        self._write(Head(self._export_id, time, tuple(shards)).encode())

    def identity(self, shard: int, identity_id: bytes, text: bytes) -> None:
        """Add an identity's canonical JSON."""
        self._frame(IDENTITY, shard, [identity_id, text])

    def record(self, shard: int, header: bytes, chunks: Sequence[bytes]) -> None:
        """Add a record: its header, its directory and its chunks as they are stored."""
        lengths = np.array([len(chunk) for chunk in chunks], "<u4").tobytes()
        self._frame(RECORD, shard, [RECORD_HEAD.pack(len(header), len(chunks)), lengths, header, *chunks])

    def end(self) -> None:
        """Say that this was all."""
        self._frame(END, 0, [END_BODY.pack(self._frames, self._bytes)])

    def _frame(self, kind: int, shard: int, parts: Sequence[bytes]) -> None:
        hashed, length = xxh3_64(), sum(map(len, parts))
        for part in parts:
            hashed.update(part)
        fixed = FRAME.pack(FRAME_MAGIC, kind, shard, self._frames, length, hashed.intdigest(), 0)[:-8]
        for piece in (fixed, xxh3_64_intdigest(self._export_id + fixed).to_bytes(8, "little"), *parts):
            self._write(piece)
        self._frames, self._bytes = self._frames + 1, self._bytes + length

    def _write(self, piece: bytes) -> None:
        """All of a piece: a file without a buffer may take a part of it at a time."""
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]


class Reader:
    """Reads a file of records. Belongs to one thread. Raises ExportDamaged, UnsupportedFormat, OSError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.offset = file, 0
        self.head = self._head()
        self._frames = self._bytes = 0

    def _head(self) -> Head:
        fixed = self._read(HEAD.size)
        if len(fixed) < HEAD.size or not fixed.startswith(MAGIC):
            raise ExportDamaged(f"{len(fixed)} bytes, and not those that `kvstore export` begins a file with")
        _, version, length, stored_hash, export_id, time, count = HEAD.unpack(fixed)
        if not HEAD.size <= length <= HEAD.size + MAX_SHARDS * SHARD.size:
            raise ExportDamaged(f"its head says that it has {length} bytes: it changed since it was written")
        data = fixed + self._read(length - HEAD.size)
        if len(data) < length or _head_hash(data) != stored_hash:
            raise ExportDamaged("its head changed since it was written, or ends early")
        if version != VERSION:
            raise UnsupportedFormat(
                f"exported in version {version}, this kvstore reads version {VERSION}: upgrade kvstore"
            )
        shards = tuple(SHARD.iter_unpack(data[HEAD.size :])) if length == HEAD.size + count * SHARD.size else ()
        if not shards:
            raise ExportDamaged(f"its head has no room for the {count} shards that it names, or names none")
        return Head(export_id, time, shards)

    def frames(self) -> Iterator[Frame]:
        """All frames up to the end. Raises ExportDamaged where the file ends early, or a frame's place cannot be told; what
        was given before stands."""
        while (frame := self._next()).kind != END:
            yield frame
        if frame.body != END_BODY.pack(self._frames - 1, self._bytes - END_BODY.size):
            raise self._damaged(frame.offset, "its last frame does not count what came before")
        if self._file.read(1):
            raise self._damaged(self.offset, "something follows its end")

    def _next(self) -> Frame:
        start = self.offset
        fixed = self._read(FRAME.size)
        if len(fixed) < FRAME.size:
            raise self._damaged(start, "it ends there, and is not whole: it was cut short")
        magic, kind, shard, number, length, body_hash, frame_hash = FRAME.unpack(fixed)
        hashed = xxh3_64_intdigest(self.head.export_id + fixed[:-8])
        if magic != FRAME_MAGIC or hashed != frame_hash or number != self._frames or shard >= len(self.head.shards):
            raise self._damaged(start, "no frame of this file, or not the next one")
        if length > BOUNDS.get(kind, MAX_RECORD_BYTES):
            raise self._damaged(start, f"a frame of kind {kind} with {length} bytes")
        body = self._read(length)
        if len(body) < length:
            raise self._damaged(self.offset, "it ends there, and is not whole: it was cut short")
        self._frames, self._bytes = number + 1, self._bytes + length
        return Frame(kind, shard, body if xxh3_64_intdigest(body) == body_hash else None, start, FRAME.size + length)

    def _read(self, nbytes: int) -> bytes:
        """So many bytes, fewer where the file ends before."""
        pieces, left = [], nbytes
        while left and (piece := self._file.read(min(left, PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
        self.offset += nbytes - left
        return b"".join(pieces)

    def _damaged(self, offset: int, why: str) -> ExportDamaged:
        return ExportDamaged(f"at byte {offset:,}: {why}")


def parse_record(body: bytes) -> tuple[bytes, list[memoryview]] | None:
    """Header, and directory and chunks, of a RECORD's body, None where its lengths do not fit."""
    if len(body) < RECORD_HEAD.size:
        return None
    header, count = RECORD_HEAD.unpack_from(body)
    start = RECORD_HEAD.size + 4 * count
    if header > MAX_HEADER_BYTES or not 0 < count <= MAX_CHUNKS or start > len(body):
        return None
    lengths = np.frombuffer(body, "<u4", count, RECORD_HEAD.size).astype(np.int64)
    ends = (start + header + np.cumsum(lengths)).tolist()
    if ends[-1] != len(body):
        return None
    view = memoryview(body)
    return body[start : start + header], [view[a:b] for a, b in zip([start + header, *ends], ends, strict=False)]
