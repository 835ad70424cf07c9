"""What producers, consumers and the scheduler of an engine tell each other about checksums, and its form on a wire.

Names and fields are those of vLLM's kv_checksum. docs/protocol.md has the flow, and the form byte by byte. Each class has
`encode()` and `decode(bytes)`; equal messages have equal bytes, since keys are written in ascending order. Both raise
ProtocolError, and `decode` nothing else, whatever it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, TypeVar

import numpy as np

from kvstore.errors import InvalidPosition, ProtocolError
from kvstore.protocol_wire import Reader, UInt64Array, Writer, as_view, message_bytes, seal, text_bytes, unseal

POSITIONS: Final = 2**62
"""Positions and token counts are below this, far inside int64."""
BLOCK_IDS: Final = 2**63
RANKS: Final = 2**16
HAS_STORED: Final = 1
"""A group's flag: stored checksums follow its values."""
HAS_REASON: Final = 1
"""A skipped group's flag: the reason follows."""
Value = TypeVar("Value")


class Kind(IntEnum):
    """What a message holds."""

    BLOCKS = 1
    SCHEDULED = 2
    GROUP = 3
    RECORD = 4


class ReplicaKey(NamedTuple):
    """Which copy of replicated KV a partial checksum covers: one of `replicas`."""

    replicas: int
    replica_index: int


@dataclass(frozen=True)
class KVChecksumBlocks:
    """The blocks of one request: group -> (position of the first block, ids at consecutive positions)."""

    num_tokens: int
    groups: Mapping[int, tuple[int, list[int]]]

    def encode(self) -> bytes:
        """The message's bytes. Raises ProtocolError for values that it cannot hold."""
        return _encoded(Kind.BLOCKS, _write_blocks, self)

    @classmethod
    def decode(cls, data: bytes) -> KVChecksumBlocks:
        """The message that `encode` gave these bytes. Raises ProtocolError."""
        return _decoded(Kind.BLOCKS, _read_blocks, data)


@dataclass(frozen=True)
class KVChecksumScheduled:
    """What a step checksums, by request.

    reqs_to_send: after this step's forward, when the KV is final; reqs_to_recv: once the load that this step
    started has finished; reqs_to_load: loads of offloaded KV, against their stored checksums.
    """

    reqs_to_send: Mapping[str, KVChecksumBlocks] = field(default_factory=dict)
    reqs_to_recv: Mapping[str, KVChecksumBlocks] = field(default_factory=dict)
    reqs_to_load: Mapping[str, KVChecksumBlocks] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The message's bytes. Raises ProtocolError for values that it cannot hold."""
        return _encoded(Kind.SCHEDULED, _write_scheduled, self)

    @classmethod
    def decode(cls, data: bytes) -> KVChecksumScheduled:
        """The message that `encode` gave these bytes. Raises ProtocolError."""
        return _decoded(Kind.SCHEDULED, _read_scheduled, data)


@dataclass(frozen=True, eq=False)
class KVChecksumGroup:
    """Partial checksums of one group of a request, from position `start` on.

    values: (positions, len(replica_keys)) uint64; stored: (positions,) uint64, the untagged checksums that
    offloaded KV was stored with, each the sum over its parts, or None where nothing was loaded.

    Raises InvalidPosition where the shapes, dtypes, the start or the replica keys do not fit.
    """

    start: int
    replica_keys: list[ReplicaKey]
    values: UInt64Array
    stored: UInt64Array | None = None

    def __post_init__(self) -> None:
        if self.start < 0:
            raise InvalidPosition(f"start is {self.start}: expected a block position of at least 0")
        if self.values.ndim != 2 or self.values.shape[1] != len(self.replica_keys):
            raise InvalidPosition(
                f"values has the shape {self.values.shape}: expected (positions, {len(self.replica_keys)}), "
                "a column for each replica key"
            )
        arrays = [self.values] if self.stored is None else [self.values, self.stored]
        if any(array.dtype != np.uint64 for array in arrays):
            raise InvalidPosition(f"values and stored are {[str(a.dtype) for a in arrays]}: expected uint64")
        if self.stored is not None and self.stored.shape != self.values.shape[:1]:
            raise InvalidPosition(f"stored has the shape {self.stored.shape}: expected {self.values.shape[:1]}")
        twice = len(set(self.replica_keys)) != len(self.replica_keys)
        if twice or not all(0 <= index < replicas for replicas, index in self.replica_keys):
            raise InvalidPosition(
                f"replica_keys is {self.replica_keys}: expected different (copies, which of them, from 0)"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVChecksumGroup):
            return NotImplemented
        mine, theirs = (None if s is None else s.tolist() for s in (self.stored, other.stored))
        same = (self.start, self.replica_keys, mine) == (other.start, other.replica_keys, theirs)
        return same and np.array_equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]

    def encode(self) -> bytes:
        """The message's bytes. Raises ProtocolError for values that it cannot hold."""
        return _encoded(Kind.GROUP, _write_group, self)

    @classmethod
    def decode(cls, data: bytes) -> KVChecksumGroup:
        """The message that `encode` gave these bytes. Raises ProtocolError."""
        return _decoded(Kind.GROUP, _read_group, data)


@dataclass(frozen=True)
class KVChecksumRecord:
    """What one worker reports of one step.

    checksums: request -> group -> its partial checksums; every request that the worker processed has an entry,
    empty if none of its groups is here. skipped_groups: groups that cannot be checksummed. fingerprints: per
    group the sum over this worker's layers, to be summed over pipeline stages. received: checksums that came in
    a connector's own messages, reported by the first worker only. skip_reasons: why a skipped group is.

    Raises ProtocolError where a reason belongs to no skipped group.
    """

    pp_rank: int
    tp_rank: int
    checksums: Mapping[str, Mapping[int, KVChecksumGroup]] = field(default_factory=dict)
    skipped_groups: frozenset[int] = frozenset()
    fingerprints: Mapping[int, int] = field(default_factory=dict)
    received: Mapping[str, bytes] = field(default_factory=dict)
    skip_reasons: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if extra := set(self.skip_reasons) - self.skipped_groups:
            raise ProtocolError(f"skip_reasons names {sorted(extra)}: expected groups of skipped_groups alone")

    def encode(self) -> bytes:
        """The message's bytes. Raises ProtocolError for values that it cannot hold."""
        return _encoded(Kind.RECORD, _write_record, self)

    @classmethod
    def decode(cls, data: bytes) -> KVChecksumRecord:
        """The message that `encode` gave these bytes. Raises ProtocolError."""
        return _decoded(Kind.RECORD, _read_record, data)


def encode_records(records: Iterable[KVChecksumRecord]) -> bytes:
    """Records one after the other, as a connector's own message carries them. Raises ProtocolError."""
    return b"".join(record.encode() for record in records)


def decode_records(data: bytes) -> list[KVChecksumRecord]:
    """The records that `encode_records` gave these bytes. Raises ProtocolError."""
    view, found, at = as_view(data), list[KVChecksumRecord](), 0
    while at < len(view):
        end = at + message_bytes(view[at:])
        found.append(_decoded(Kind.RECORD, _read_record, view[at:end]))
        at = end
    return found


def _encoded(kind: Kind, write: Callable[[Writer, Value], None], value: Value) -> bytes:
    writer = Writer()
    write(writer, value)
    return seal(kind, writer.body)


def _decoded(kind: Kind, read: Callable[[Reader], Value], data: object) -> Value:
    reader = unseal(kind, data)
    value = read(reader)
    reader.end()
    return value


def _write_numbered(writer: Writer, entries: Mapping[int, Value], name: str, write: Callable[[Value], None]) -> None:
    """Entries by group number, in ascending order."""
    if wrong := [number for number in entries if not isinstance(number, int | np.integer)]:
        raise ProtocolError(f"{name} has the group {wrong[0]!r}: expected integers of 0 to 65535")
    writer.number(len(entries), 4, f"the number of {name}")
    for number in sorted(entries):
        writer.number(number, 2, f"a group of {name}")
        write(entries[number])


def _read_numbered(reader: Reader, name: str, at_least: int, read: Callable[[], Value]) -> dict[int, Value]:
    found, last = dict[int, Value](), -1
    for _ in range(reader.count(name, 2 + at_least)):
        number = reader.number(2, f"a group of {name}")
        if number <= last:
            raise ProtocolError(
                f"{name} has group {number} behind group {last}: expected each once, in ascending order"
            )
        found[number], last = read(), number
    return found


def _write_named(writer: Writer, entries: Mapping[str, Value], name: str, write: Callable[[Value], None]) -> None:
    """Entries by request, in ascending order of the bytes of its name."""
    named = {text_bytes(request, f"a request of {name}"): value for request, value in entries.items()}
    writer.number(len(named), 4, f"the number of {name}")
    for request in sorted(named):
        writer.blob(request, f"a request of {name}")
        write(named[request])


def _read_named(reader: Reader, name: str, at_least: int, read: Callable[[], Value]) -> dict[str, Value]:
    found, last = dict[str, Value](), None
    for _ in range(reader.count(name, 4 + at_least)):
        request = reader.text(f"a request of {name}")
        if last is not None and request.encode() <= last:
            raise ProtocolError(f"{name} has {request!r} out of place: expected each once, in ascending order")
        found[request], last = read(), request.encode()
    return found


def _write_blocks(writer: Writer, blocks: KVChecksumBlocks) -> None:
    def placed(entry: tuple[int, list[int]]) -> None:
        start, block_ids = entry
        writer.number(start, 8, "a first position", POSITIONS)
        writer.number(len(block_ids), 4, "the number of block ids")
        for block_id in block_ids:
            writer.number(block_id, 8, "a block id", BLOCK_IDS)

    writer.number(blocks.num_tokens, 8, "num_tokens", POSITIONS)
    _write_numbered(writer, blocks.groups, "groups", placed)


def _read_blocks(reader: Reader) -> KVChecksumBlocks:
    def placed() -> tuple[int, list[int]]:
        start = reader.number(8, "a first position", POSITIONS)
        block_ids = reader.words(reader.count("block ids", 8), "block ids").tolist()
        if block_ids and max(block_ids) >= BLOCK_IDS:
            raise ProtocolError(f"a block id is {max(block_ids)}: expected 0 to {BLOCK_IDS - 1}")
        return start, block_ids

    num_tokens = reader.number(8, "num_tokens", POSITIONS)
    return KVChecksumBlocks(num_tokens, _read_numbered(reader, "groups", 12, placed))


def _write_scheduled(writer: Writer, scheduled: KVChecksumScheduled) -> None:
    for name in ("reqs_to_send", "reqs_to_recv", "reqs_to_load"):
        _write_named(writer, getattr(scheduled, name), name, lambda blocks: _write_blocks(writer, blocks))


def _read_scheduled(reader: Reader) -> KVChecksumScheduled:
    names = ("reqs_to_send", "reqs_to_recv", "reqs_to_load")
    return KVChecksumScheduled(*(_read_named(reader, name, 12, lambda: _read_blocks(reader)) for name in names))


def _write_group(writer: Writer, group: KVChecksumGroup) -> None:
    writer.number(group.start, 8, "start", POSITIONS)
    writer.number(len(group.values), 4, "the number of positions")
    writer.number(len(group.replica_keys), 4, "the number of replica keys")
    writer.number(0 if group.stored is None else HAS_STORED, 1, "flags")
    for replicas, index in group.replica_keys:
        writer.number(replicas, 4, "replicas")
        writer.number(index, 4, "replica_index")
    writer.words(group.values)
    if group.stored is not None:
        writer.words(group.stored)


def _read_group(reader: Reader) -> KVChecksumGroup:
    start, positions = reader.number(8, "start", POSITIONS), reader.number(4, "the number of positions")
    columns = reader.count("replica keys", 8 + 8 * positions)
    stored = reader.number(1, "flags", HAS_STORED + 1)
    keys = [ReplicaKey(reader.number(4, "replicas"), reader.number(4, "replica_index")) for _ in range(columns)]
    values = reader.words(positions * columns, "values").reshape(positions, columns)
    try:
        return KVChecksumGroup(start, keys, values, reader.words(positions, "stored") if stored else None)
    except InvalidPosition as error:
        raise ProtocolError(str(error)) from None


def _write_record(writer: Writer, record: KVChecksumRecord) -> None:
    def groups(entry: Mapping[int, KVChecksumGroup]) -> None:
        _write_numbered(writer, entry, "groups", lambda group: _write_group(writer, group))

    reasons = {number: record.skip_reasons.get(number) for number in record.skipped_groups}
    writer.number(record.pp_rank, 4, "pp_rank", RANKS)
    writer.number(record.tp_rank, 4, "tp_rank", RANKS)
    _write_named(writer, record.checksums, "checksums", groups)
    _write_numbered(writer, reasons, "skipped groups", lambda reason: _write_reason(writer, reason))
    _write_numbered(writer, record.fingerprints, "fingerprints", lambda value: _write_word(writer, value))
    _write_named(writer, record.received, "received", lambda blob: writer.blob(blob, "a received checksum"))


def _read_record(reader: Reader) -> KVChecksumRecord:
    def groups() -> dict[int, KVChecksumGroup]:
        return _read_numbered(reader, "groups", 17, lambda: _read_group(reader))

    pp_rank, tp_rank = reader.number(4, "pp_rank", RANKS), reader.number(4, "tp_rank", RANKS)
    checksums = _read_named(reader, "checksums", 4, groups)
    skipped = _read_numbered(reader, "skipped groups", 1, lambda: _read_reason(reader))
    fingerprints = _read_numbered(reader, "fingerprints", 8, lambda: reader.number(8, "a fingerprint"))
    received = _read_named(reader, "received", 4, lambda: reader.blob("a received checksum"))
    reasons = {number: reason for number, reason in skipped.items() if reason is not None}
    return KVChecksumRecord(pp_rank, tp_rank, checksums, frozenset(skipped), fingerprints, received, reasons)


def _write_reason(writer: Writer, reason: str | None) -> None:
    writer.number(int(reason is not None), 1, "flags")
    if reason is not None:
        writer.blob(text_bytes(reason, "a reason"), "a reason")


def _read_reason(reader: Reader) -> str | None:
    return reader.text("a reason") if reader.number(1, "flags", HAS_REASON + 1) else None


def _write_word(writer: Writer, value: int) -> None:
    writer.number(value, 8, "a fingerprint")
