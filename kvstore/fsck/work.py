"""The ranges of the index that a check has still to read: in which order, how much of them, and what was done."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.fsck.checkpoint import Checkpoint, Part, added
from kvstore.fsck.options import STAGES, Options, Range

ALL: Final = 2**62


@dataclass
class Work:
    """A range that is to be read. at: what comes next; records and nbytes: what it has, as far as is known; skip: records
    that ended a scanning process; plain: whether plain reads are to tell what LMDB can be asked for; damaged: whether
    something was found."""

    start: bytes
    end: bytes
    records: int = ALL
    nbytes: int = ALL
    at: bytes = b""
    skip: set[bytes] = field(default_factory=set)
    plain: bool = False
    damaged: bool = False
    reserved: tuple[int, int] = (0, 0)
    done: tuple[int, int] = (0, 0)

    def task(self) -> dict[str, object]:
        """What a scanning process is told."""
        skip = sorted(key.hex() for key in self.skip)
        records, nbytes = self.reserved
        bounds = {"start": self.at.hex(), "end": self.end.hex(), "records": records, "nbytes": nbytes}
        return {"task": "range", **bounds, "skip": skip, "plain": self.plain}


class Plan:
    """What of the ranges is to be read, and what was. now: seconds since 1970."""

    def __init__(self, options: Options, checkpoint: Checkpoint, now: int) -> None:
        self._options, self._checkpoint, self._now = options, checkpoint, now
        self._stage = STAGES.index(options.stage)
        self._begun, self._done = now, list[Part]()
        self._left = (ALL, ALL)
        self._todo: list[Work] = []

    def boundaries(self) -> list[bytes]:
        """Index keys at which ranges are to begin."""
        return self._checkpoint.boundaries()

    def take_ranges(self, ranges: Sequence[Range]) -> None:
        """Put ranges in order, and leave out those that this pass did already."""
        self._left = self._part(sum(r.records for r in ranges))
        seen = {r: self._checkpoint.checked(r.start, r.end, self._stage) for r in ranges}
        goes_on = self._checkpoint.begun and self._checkpoint.stage == self._stage
        if self._options.resume and goes_on and any(time < self._checkpoint.begun for time in seen.values()):
            self._begun = self._checkpoint.begun
            ranges = [r for r in ranges if seen[r] < self._begun]
        order = list(ranges)
        if self._options.resume:
            order.sort(key=lambda r: seen[r])
        elif self._options.sample is not None:
            random.shuffle(order)
        self._todo = [Work(r.start, r.end, r.records, r.nbytes, at=r.start) for r in order]

    def _part(self, records: int) -> tuple[int, int]:
        """How many records, and how many bytes, are to be read."""
        sample = self._options.sample
        share = None if sample is None else sample.share
        wanted = ALL if share is None else math.ceil(share * records)
        return wanted, ALL if sample is None or sample.nbytes is None else sample.nbytes

    @property
    def total(self) -> tuple[int, int]:
        """How many records and bytes are to be read still, at most."""
        records, nbytes = sum(w.records for w in self._todo), sum(w.nbytes for w in self._todo)
        most, most_bytes = min(records, self._left[0]), min(nbytes, self._left[1])
        share = most / records if records else 0
        return most, min(most_bytes, round(nbytes * share))

    def next(self) -> Work | None:
        """What is to be read next, with its part of the sample reserved; None where there is nothing."""
        if not self._todo or min(self._left) <= 0:
            return None
        work = self._todo.pop(0)
        work.done = (0, 0)
        records, nbytes = self._left
        work.reserved = (_least(work.records, records), _least(max(1, work.nbytes), nbytes))
        self._left = (_less(records, work.reserved[0]), _less(nbytes, work.reserved[1]))
        return work

    def give_back(self, work: Work, again: bool = False) -> None:
        """A range was read, or is to be read on from where it is. What was reserved and not read is free again."""
        unread = [max(0, reserved - done) for reserved, done in zip(work.reserved, work.done, strict=True)]
        self._left = (_less(self._left[0], -unread[0]), _less(self._left[1], -unread[1]))
        if again:
            self._todo.insert(0, work)

    def read(self, work: Work, upto: bytes, ended: bool, records: int, nbytes: int) -> None:
        """A range was read from where it was up to a key."""
        work.done = (work.done[0] + records, work.done[1] + nbytes)
        if not work.damaged and (ended or upto > work.at):
            self._done.append(Part(work.at, upto, self._now, self._stage))
        work.at, work.damaged = upto, False
        work.records, work.nbytes = max(0, work.records - records), max(0, work.nbytes - nbytes)

    def checkpoint(self) -> Checkpoint:
        """The checkpoint that there was, with what was read since."""
        parts: Iterable[Part] = self._checkpoint.parts
        return Checkpoint(added(parts, self._done), self._begun, self._stage, self._options.prefix)


def _least(wanted: int, left: int) -> int:
    """What may be taken of what is left: all where that has no bound, since a range may have grown."""
    return ALL if left == ALL else min(wanted, left)


def _less(left: int, taken: int) -> int:
    return ALL if left == ALL else left - taken
