"""A get's storage side: records are looked up, checked, decoded and handed on; what is wrong with one is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.blockdb import ReadView
from kvstore.checksum import weighted_sums
from kvstore.codec import CODECS
from kvstore.record import SEQUENCE_FIELD, Directory, Header, check_chunk, parse_directory, parse_header
from kvstore.results import Rejection
from kvstore.shard import Shard
from kvstore.staging import Buffers
from kvstore.storage import Doubt, Question, Sink

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

CONDEMNING: Final = frozenset({"header", "key", "storage_hash", "decode"})
"""Kinds that blame the record, if a second read agrees."""
DIRECT_BYTES: Final = 2**20
"""Block bytes that are hashed, then scattered, before the next ones: what stays in a core's cache between the two."""


@dataclass(frozen=True, eq=False)
class Found:
    """An intact record in a snapshot; its chunks dangle when the snapshot ends."""

    index: int
    value: bytes
    header: Header
    directory: Directory
    chunks: list[memoryview]

    @property
    def raw(self) -> bool:
        """Whether every chunk is stored raw."""
        return self.header.stored_length - self.header.directory_length == self.header.raw_length


@dataclass(frozen=True)
class Refusal:
    """A record that cannot be loaded; value: its index entry, empty where it could not be read."""

    index: int
    value: bytes
    rejection: Rejection


class Fetching:
    """One get, on the side of the files. Belongs to the calling thread, which has entered the database.

    Records are read, hashed and handed on in snapshots of bounded size.
    """

    owed = 0

    def __init__(self, shard: Shard, question: Question, buffers: Buffers) -> None:
        self.shard, self.question, self.buffers = shard, question, buffers
        self.tagged: dict[int, int] = {}
        self.joint: dict[int, int] = {}
        self.missing: set[int] = set()
        self.rejected: dict[int, Rejection] = {}
        self.token = object()
        self.held: dict[Any, Any] = {} if shard.keeper is None else shard.keeper.pins
        self._values: dict[int, bytes] = {}
        self._condemned: list[tuple[bytes, bytes, str]] = []

    def begin(self) -> None:
        """Nothing need be begun."""

    def read(self, sink: Sink) -> None:
        keeper, question = self.shard.keeper, self.question
        if keeper is not None:
            self.held[self.token] = chain = keeper.chain(question.shape.prefix, question.hashes, question.start, None)
            keeper.asked(chain)
        step = max(1, self.shard.config.read_batch_bytes // question.shape.plan.raw_length)
        for start in range(0, len(question), step):
            for refusal in self._read(sink, range(start, min(start + step, len(question)))):
                self._read_again(sink, refusal)
        self._quarantine()

    def _read(self, sink: Sink, indices: Sequence[int]) -> list[Refusal]:
        """Hand the intact records of one snapshot on; returns those that deserve a second read."""
        try:
            with self.shard.db.read() as snapshot:
                return self._read_snapshot(sink, snapshot, indices)
        except lmdb.Error as error:
            left = [i for i in indices if not (i in self.tagged or i in self.missing or i in self.rejected)]
            for index in left:
                self._refuse(Refusal(index, b"", Rejection("io", f"LMDB: {error}")))
            return []

    def _read_snapshot(self, sink: Sink, snapshot: ReadView, indices: Sequence[int]) -> list[Refusal]:
        suspects: list[Refusal] = []
        pending: list[Found] = []
        limit = self._limit(sink)
        for index in indices:
            found = self._find(snapshot, index)
            if isinstance(found, Found):
                pending.append(found)
            elif found is not None and found.rejection.kind in CONDEMNING:
                suspects.append(found)
            elif found is not None:
                self._refuse(found)
            if len(pending) == limit:
                suspects += self._land(sink, pending)
                pending = []
        return suspects + self._land(sink, pending)

    def _limit(self, sink: Sink) -> int:
        room = min(sink.room, DIRECT_BYTES) if self._direct(sink) else sink.room
        return max(1, room // self.question.shape.plan.raw_length)

    def _direct(self, sink: Sink) -> bool:
        """Whether slices of a raw record can be copied from where LMDB maps them."""
        return sink.direct and self.question.shape.plan.whole_slices

    def _find(self, snapshot: ReadView, index: int) -> Found | Refusal | None:
        """The record for block `index`, checked up to its storage hashes; None, and noted as missing, where none
        answers to the question."""
        question, key = self.question, self.question.keys[index]
        value = snapshot.header(key)
        if value is None or self.shard.refused.holds(key, value):
            self.missing.add(index)
            return None
        header = parse_header(value, key)
        if isinstance(header, Rejection):
            return Refusal(index, value, header)
        if misfit := question.shape.misfit(header, question.start + index):
            return self._unfit(snapshot, header, Refusal(index, value, misfit))
        if header.valid_tokens != question.valid[index]:
            self.missing.add(index)
            return None
        payload = self._payload(snapshot, header)
        if isinstance(payload, Rejection):
            return Refusal(index, value, payload)
        return Found(index, value, header, *payload)

    def _unfit(self, snapshot: ReadView, header: Header, refusal: Refusal) -> Refusal | None:
        """What becomes of a block whose key has an intact record that alone cannot answer for it."""
        return refusal

    def _payload(self, snapshot: ReadView, header: Header) -> tuple[Directory, list[memoryview]] | Rejection:
        plan = self.question.shape.plan
        if header.codec not in CODECS:
            return Rejection("version", f"codec {header.codec}, this kvstore knows {sorted(CODECS)}")
        directory = parse_directory(snapshot.chunk(header.sequence, 0), header, plan)
        if isinstance(directory, Rejection):
            return directory
        if (directory.lengths > plan.lengths).any() or directory.lengths.sum() != (
            header.stored_length - header.directory_length
        ):
            return Rejection(
                "decode", "the directory's stored lengths exceed the raw ones, or are not the header's sum"
            )
        chunks = []
        entries = zip(directory.lengths.tolist(), directory.hashes.tolist(), strict=True)
        for number, (length, stored_hash) in enumerate(entries, 1):
            chunk = snapshot.chunk(header.sequence, number)
            if wrong := check_chunk(chunk, number, length, stored_hash):
                return wrong
            assert chunk is not None
            chunks.append(chunk)
        return directory, chunks

    def _land(self, sink: Sink, pending: list[Found]) -> list[Refusal]:
        """Hand records on; returns those that do not decode."""
        direct = self._direct(sink)
        straight = [found for found in pending if direct and found.raw]
        if straight:
            sink.scatter_from([f.index for f in straight], np.stack([self._addresses(found) for found in straight]))
            self._landed(straight)
        staged = [found for found in pending if not (direct and found.raw)]
        return self._land_staged(sink, staged) if staged else []

    def _landed(self, found: Sequence[Found]) -> None:
        self.tagged.update((f.index, f.header.tagged_checksum) for f in found)
        self._values.update((f.index, f.value) for f in found)

    def _addresses(self, found: Found) -> npt.NDArray[np.int64]:
        chunk_of, offset = self.question.shape.plan.slice_places
        starts = [np.frombuffer(c, np.uint8).__array_interface__["data"][0] for c in found.chunks]
        return np.asarray(np.array(starts, np.int64)[chunk_of] + offset, np.int64)

    def _land_staged(self, sink: Sink, pending: list[Found]) -> list[Refusal]:
        """Decode records into the sink's memory; those that decode go on from there."""
        suspects, good = list[Refusal](), list[Found]()

        def decode(rows: Bytes) -> list[int]:
            for found in pending:
                if wrong := self._decode(found, rows[len(good)]):
                    suspects.append(Refusal(found.index, found.value, wrong))
                else:
                    good.append(found)
            return [found.index for found in good]

        sink.fill(len(pending), decode)
        self._landed(good)
        return suspects

    def _decode(self, found: Found, block: Bytes) -> Rejection | None:
        """Fill a block's raw bytes from its chunks."""
        codec, bounds = CODECS[found.header.codec], self.question.shape.plan.bounds
        for number, chunk in enumerate(found.chunks):
            out = block[bounds[number] : bounds[number + 1]]
            stored_raw = CODECS[0] if len(chunk) == out.size else codec
            if wrong := stored_raw.decode(chunk, out):
                return Rejection("decode", f"chunk {number + 1}: {wrong}")
        return None

    def _read_again(self, sink: Sink, refusal: Refusal) -> None:
        """One second read tells a passing error from a damaged record."""
        index = refusal.index
        try:
            with self.shard.db.read() as snapshot:
                found = self._find(snapshot, index)
                if isinstance(found, Found):
                    again = self._land_staged(sink, [found])
                    found = again[0] if again else None
                    self.shard.counters.add("get_transient", not again)
        except lmdb.Error as error:
            found = Refusal(index, b"", Rejection("io", f"LMDB: {error}"))
        if isinstance(found, Refusal):
            self._refuse(found)

    def sequences(self) -> bytes:
        """The sequence numbers of the blocks that went to the sink, 8 bytes each as the index entry has them, in the order
        of `tagged`."""
        return b"".join(self.sequence(index) for index in self.tagged)

    def sequence(self, index: int) -> bytes:
        """The sequence number of a block that went to the sink, as the index entry has it."""
        return self._values[index][SEQUENCE_FIELD]

    def doubt(self, expected: Mapping[int, int]) -> dict[int, Doubt]:
        """Tell bad records from a bad way: read again, and sum that."""
        return {index: self._doubt(index, checksum) for index, checksum in expected.items()}

    def _doubt(self, index: int, expected: int) -> Doubt:
        try:
            with self.shard.db.read() as snapshot:
                found = self._find(snapshot, index)
                if isinstance(found, Found) and found.value == self._values[index]:
                    return self._sum_again(found, expected)
        except lmdb.Error as error:
            return Doubt(f"LMDB: {error}", False, None)
        self.missing.discard(index)
        return Doubt("replaced by another record meanwhile", False, None)

    def _sum_again(self, found: Found, expected: int) -> Doubt:
        shape = self.question.shape
        rows = np.empty((1, shape.plan.raw_length), np.uint8)
        if wrong := self._decode(found, rows[0]):
            return Doubt(wrong.detail, True, None)
        sums = self.shard.staging_sums(shape)(self.question.span([found.index]), rows)
        total = int(weighted_sums(sums, shape.factors)[0])
        if total != expected:
            return Doubt(f"the record's bytes sum to {total:016x}, its header says {expected:016x}", True, None)
        return Doubt("", False, sums[0])

    def refuse(self, rejections: Mapping[int, Rejection]) -> None:
        for index, rejection in rejections.items():
            self._refuse(Refusal(index, self._values[index], rejection))
        self._quarantine()

    def _refuse(self, refusal: Refusal) -> None:
        """Reject the block, make its key a miss, and condemn the record where it is to blame."""
        index, value, rejection = refusal.index, refusal.value, refusal.rejection
        key = self.question.keys[index]
        condemned = rejection.condemned or rejection.kind in CONDEMNING
        self.rejected[index] = replace(rejection, condemned=condemned)
        self.shard.counters.add(f"get_rejected_{rejection.kind}")
        log.warning(
            "%s: block %s refused: %s: %s", self.shard.db.folder, key[18:].hex(), rejection.kind, rejection.detail
        )
        if value:
            self.shard.refused.add(key, value)
        if value and condemned:
            self._condemned.append((key, value, rejection.kind))

    def _quarantine(self) -> None:
        """Take the condemned records out of the store; they are refused already."""
        condemned, self._condemned = self._condemned, []
        if condemned:
            self.shard.condemn(condemned)
