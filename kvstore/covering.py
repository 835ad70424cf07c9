"""Which records of which shards make which blocks of a request. Nothing but headers is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.audit import unlikely
from kvstore.codec import CODECS
from kvstore.cutting import shared_slices
from kvstore.record import MAX_HEADER_BYTES, Header, parse_header
from kvstore.results import Rejection
from kvstore.shape import GroupShape
from kvstore.shard import Shard
from kvstore.snapshot import ReadView
from kvstore.storage import Question

log = logging.getLogger(__name__)

LOOK_AHEAD: Final = 64
"""Hashes behind a block at which a record that holds it may end."""


@dataclass(frozen=True, eq=False)
class Part:
    """A record that has some of what blocks need: the tokens from start to before end, counted from the request's start."""

    shard: Shard
    key: bytes
    value: bytes
    header: Header
    start: int
    end: int
    has: npt.NDArray[np.bool_]
    """Which of the asked slices it has."""


@dataclass(frozen=True, eq=False)
class Damaged:
    """An index entry that is refused. end: the token at which its block ends."""

    shard: Shard
    key: bytes
    value: bytes
    end: int
    rejection: Rejection


@dataclass(frozen=True, eq=False)
class Taken:
    """What is taken of a part. needed: a byte for each asked slice."""

    part: Part
    needed: bytes


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive blocks that are verified together, by index, and the records that make them: more than one block only where
    a record holds more than one."""

    indices: list[int]
    taken: list[Taken]


@dataclass(frozen=True, eq=False)
class Covering:
    """Blocks of one question, looked for in several shards. Belongs to the calling thread, which has entered the shards."""

    question: Question
    shards: Sequence[Shard]
    open_ended: bool = False
    """Whether the last hash may be that of fewer tokens than the question says."""
    damaged: list[Damaged] = field(default_factory=list)
    """Index entries that are no intact headers, or lie under another block's key."""

    @cached_property
    def _last(self) -> int:
        """The token at which the last block ends."""
        return self.question.start * self.question.shape.block_size + int(self.question.valid.sum())

    def plan(self, indices: Sequence[int]) -> list[Run]:
        """The blocks among these that can be put together, in order."""
        if not indices:
            return []
        parts, runs, done = self._parts(indices), list[Run](), set[int]()
        wanted = set(indices)
        for index in sorted(indices, reverse=True):
            if index not in done and (run := self._run(index, parts, wanted)) is not None:
                runs.append(run)
                done.update(run.indices)
        return runs[::-1]

    def _parts(self, indices: Sequence[int]) -> dict[int, list[Part]]:
        """By the token at which they end, the records that may have some of the blocks."""
        steps, shape, last = self.question.steps, self.question.shape, self._last
        begin = self.question.start * shape.block_size
        first_step = (indices[0] * shape.block_size) // steps.tokens
        end_step = -(-(indices[-1] + 1) * shape.block_size // steps.tokens) + LOOK_AHEAD
        hashes = steps.hashes[first_step:end_step]
        ends = [min(begin + (step + 1) * steps.tokens, last) for step in range(first_step, first_step + len(hashes))]
        found: dict[int, list[Part]] = {}
        for shard in self.shards:
            for part in self._parts_in(shard, shape.keys(hashes), ends):
                found.setdefault(part.end, []).append(part)
        return found

    def _parts_in(self, shard: Shard, keys: list[bytes], ends: list[int]) -> Iterator[Part]:
        try:
            with shard.db.read() as snapshot:
                entries = [None if e is None else bytes(e[: MAX_HEADER_BYTES + 1]) for e in snapshot.headers(keys)]
                for key, value, end in zip(keys, entries, ends, strict=True):
                    if value is not None and (part := self._part(shard, snapshot, key, value, end)) is not None:
                        yield part
        except lmdb.Error as error:
            log.error("%s: not looked for blocks: LMDB: %s", shard.db.folder, error)

    def _part(self, shard: Shard, snapshot: ReadView, key: bytes, value: bytes, end: int) -> Part | None:
        """An index entry as a part; None where it answers to another question, or is damaged."""
        if shard.refused.holds(key, value):
            return None
        header = parse_header(value, key)
        if isinstance(header, Rejection):
            self.damaged.append(Damaged(shard, key, value, end, header))
            return None
        if header.codec not in CODECS:
            return None
        start, tokens = header.position * header.block_size, header.valid_tokens
        if self.open_ended and end == self._last:
            tokens = -(-tokens // self.question.steps.tokens) * self.question.steps.tokens
        if header.fingerprint != self.question.shape.fingerprint or start + tokens != end:
            return None
        has = helps(self.question.shape, snapshot, header)
        return None if has is None else Part(shard, key, value, header, start, end, has)

    def _run(self, index: int, parts: Mapping[int, list[Part]], wanted: set[int]) -> Run | None:
        """The blocks that end with this one and their records; None where some of it is not there."""
        size = self.question.shape.block_size
        begin = (self.question.start + index) * size
        at, taken = begin + int(self.question.valid[index]), list[Taken]()
        while at > begin:
            chosen = self._cover(parts.get(at, []), begin)
            if chosen is None:
                return None
            taken += chosen
            at = chosen[0].part.start
        first = at // size - self.question.start
        run = list(range(first, index + 1))
        return Run(run, taken) if at % size == 0 and first >= 0 and wanted.issuperset(run) else None

    def _cover(self, parts: Sequence[Part], begin: int) -> list[Taken] | None:
        """Records of equal tokens that together have every slice: first of those that begin with the block, then of smaller
        ones, then of larger ones."""
        starts = sorted({part.start for part in parts}, key=lambda start: (start < begin, abs(start - begin)))
        for start in starts:
            if (chosen := _choose([part for part in parts if part.start == start])) is not None:
                return chosen
        return None


def helps(shape: GroupShape, snapshot: ReadView, header: Header) -> npt.NDArray[np.bool_] | None:
    """Which slices of a block an intact record has, (slices,) bool; None where it has none, or cannot be put together with
    others to such blocks, or is no block's. A state stands for the tokens up to one place, and for those of no other."""
    if header.flags != shape.flags or unlikely(snapshot, header):
        return None
    sizes = {shape.block_size, header.block_size}
    if max(sizes) % min(sizes) or (shape.of_states and len(sizes) > 1):
        return None
    has = shared_slices(shape, header.block_size, header.geometry) >= 0
    return has if has.any() else None


def _choose(parts: Sequence[Part]) -> list[Taken] | None:
    """Parts that together have every slice, each slice of one of them; those first that have the most."""
    left, chosen = np.ones(parts[0].has.size, bool), list[Taken]()
    for part in sorted(parts, key=lambda part: -int(part.has.sum())):
        needed = part.has & left
        if needed.any():
            chosen.append(Taken(part, needed.astype(np.uint8).tobytes()))
            left &= ~needed
    return None if left.any() else chosen
