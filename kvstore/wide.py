"""A get and a match that also look for what other ranks, other splits and other block sizes stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.covering import Covering, Run, helps
from kvstore.fetching import Fetching, Refusal
from kvstore.matching import Match
from kvstore.record import Header
from kvstore.results import Rejection
from kvstore.shape import GroupShape
from kvstore.shard import Shard
from kvstore.siblings import Siblings
from kvstore.snapshot import ReadView
from kvstore.splicing import Splicing, entered
from kvstore.staging import Buffers
from kvstore.steps import Finer
from kvstore.storage import NO_SEQUENCE, Doubt, Question, Sink

BLOCKS_AT_ONCE: Final = 64
"""Of a match, whose records are looked for at once."""


class WideGet(Fetching):
    """A get whose blocks may be put together from records of several shards. Belongs to the calling thread, as Fetching.

    A block of which the rank's own shard has a record just as it is asked for comes from there.
    """

    def __init__(self, shard: Shard, siblings: Siblings, question: Question, buffers: Buffers) -> None:
        super().__init__(shard, question, buffers)
        self._siblings = siblings
        self._spliced: Splicing | None = None

    def read(self, sink: Sink) -> None:
        super().read(sink)
        left = sorted(self.missing)
        if left:
            with entered(self.shard, self._siblings.shards()) as shards:
                self._spliced = spliced = Splicing(self.question, shards)
                spliced.read(left, sink, self.shard.config.read_batch_bytes)
            self._take(spliced)

    def _unfit(self, snapshot: ReadView, header: Header, refusal: Refusal) -> Refusal | None:
        """A record that has some of the block, or of which the block is a part, is none that was asked for wrongly."""
        if refusal.rejection.kind != "geometry" or helps(self.question.shape, snapshot, header) is None:
            return refusal
        self.missing.add(refusal.index)
        return None

    def _take(self, spliced: Splicing) -> None:
        for index in spliced.entries.keys() & self.missing - spliced.tagged.keys():
            spliced.rejected.setdefault(index, spliced.entries[index])
            self.shard.counters.add(f"get_rejected_{spliced.entries[index].kind}")
        self.tagged |= spliced.tagged
        self.joint |= spliced.joint
        self.rejected |= spliced.rejected
        self.missing -= {*spliced.tagged, *spliced.rejected}
        self.shard.counters.add("get_spliced", len(spliced.tagged))
        self.shard.counters.add("get_spliced_bytes", spliced.read_bytes)

    def sequences(self) -> bytes:
        return b"".join(self.sequence(index) for index in self.tagged)

    def sequence(self, index: int) -> bytes:
        """As the index entry has it; zeros where the block was put together."""
        return NO_SEQUENCE if index not in self._values else super().sequence(index)

    def doubt(self, expected: Mapping[int, int]) -> dict[int, Doubt]:
        own = super().doubt({i: c for i, c in expected.items() if i in self._values})
        spliced = [i for i in expected if i not in self._values]
        if not spliced or self._spliced is None:
            return own
        with entered(self.shard, self._spliced.shards[1:]):
            return own | {index: self._spliced.doubt(index) for index in spliced}

    def refuse(self, rejections: Mapping[int, Rejection]) -> None:
        super().refuse({i: r for i, r in rejections.items() if i in self._values})
        spliced = {i: r for i, r in rejections.items() if i not in self._values}
        if spliced and self._spliced is not None:
            with entered(self.shard, self._spliced.shards[1:]):
                for index, rejection in spliced.items():
                    self._spliced.refuse(index, rejection)
            self.rejected |= spliced


def match(shard: Shard, siblings: Siblings, shape: GroupShape, hashes: list[bytes], finer: Finer | None) -> int:
    """How many leading blocks can be had, from position 0."""
    found = Match(shard, shape, shape.keys(hashes)).run()
    while found < len(hashes):
        more = _spliced(shard, siblings, shape, hashes, finer, found)
        if not more:
            break
        found += more
        found += Match(shard, shape, shape.keys(hashes[found:]), found).run()
    return found


def present(
    shard: Shard, siblings: Siblings, shape: GroupShape, hashes: list[bytes], finer: Finer | None
) -> npt.NDArray[np.bool_]:
    """Which blocks can be had, from position 0: (blocks,) bool."""
    found = np.array(Match(shard, shape, shape.keys(hashes)).each(), bool)
    left = np.flatnonzero(~found).tolist()
    for first in range(0, len(left), BLOCKS_AT_ONCE):
        for run in _runs(shard, siblings, shape, hashes, finer, left[first : first + BLOCKS_AT_ONCE]):
            found[run.indices] = True
    return found


def _spliced(
    shard: Shard, siblings: Siblings, shape: GroupShape, hashes: list[bytes], finer: Finer | None, first: int
) -> int:
    """How many blocks from position `first` on, which the rank's own shard does not have just so, can be put together."""
    indices, at = range(first, min(first + BLOCKS_AT_ONCE, len(hashes))), first
    for run in _runs(shard, siblings, shape, hashes, finer, indices):
        if run.indices[0] != at:
            break
        at += len(run.indices)
    return at - first


def _runs(
    shard: Shard,
    siblings: Siblings,
    shape: GroupShape,
    hashes: list[bytes],
    finer: Finer | None,
    indices: Sequence[int],
) -> list[Run]:
    valid = np.full(len(hashes), shape.block_size, np.int64)
    with entered(shard, siblings.shards()) as shards:
        return Covering(Question(shape, hashes, 0, valid, finer=finer), shards, open_ended=True).plan(indices)
