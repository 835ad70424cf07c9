"""Whether KV arrived as it was sent: the checksums of a consumer's ranks against those of a producer's, or those stored.

Only what is shown to be equal is called so. docs/protocol.md says what each result means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.checksum import KVChecksumRecord, ReplicaKey, UInt64Array
from kvstore.comparing_sides import Bools, KVChecksumSide, Partials, Side, Worker, absent_copy
from kvstore.errors import ConfigError, InvalidPosition

MAX_COMBINATIONS: Final = 4096
"""Sums of different copies that are tried for one range."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KVChecksumRange:
    """Tokens first_token to end_token - 1 of a request in one group, which lie in the consumer's blocks first_position to
    end_position - 1. replica: the copy that this is about, None where it is about all; rank: (pp_rank, tp_rank) of the
    one worker that this is about, None where sums of all ranks were compared; reason: empty where it is equal."""

    group: int
    first_token: int
    end_token: int
    first_position: int
    end_position: int
    replica: ReplicaKey | None = None
    rank: Worker | None = None
    reason: str = ""


@dataclass(frozen=True)
class KVChecksumComparison:
    """What was found of a request, in order of group and token. Each token of each group that was asked for is in one of
    the three, for every copy of it."""

    equal: tuple[KVChecksumRange, ...]
    mismatching: tuple[KVChecksumRange, ...]
    unverified: tuple[KVChecksumRange, ...]

    def ok(self, fail_closed: bool = True) -> bool:
        """Whether the KV may be used: nothing mismatches, and nothing is unverified unless that is let through."""
        return not self.mismatching and not (fail_closed and self.unverified)


def compare(
    reported: Iterable[KVChecksumRecord],
    expected: Iterable[KVChecksumRecord] | None,
    request: str,
    *,
    num_tokens: int,
    reported_side: KVChecksumSide,
    expected_side: KVChecksumSide | None = None,
    first_token: int = 0,
) -> KVChecksumComparison:
    """Compare what the consumer's ranks reported of a request with what was expected.

    reported: records of all the consumer's ranks, of one step or of several; expected: records of all the producer's, or
    None: each rank's sums are compared with its own `stored`. num_tokens: the request's, as on both sides; first_token: the
    first that is asked for. reported_side, expected_side: which ranks each side has, and its block sizes by group; the
    groups are those of reported_side.

    Damaged, missing or contradictory reports are a result. Raises ConfigError where expected and expected_side do not come
    together or have other groups, InvalidPosition for tokens that are none.
    """
    if (expected is None) != (expected_side is None):
        raise ConfigError("expected and expected_side: pass both, or neither to compare with the stored checksums")
    if expected_side is not None and set(expected_side.block_sizes) != set(reported_side.block_sizes):
        raise ConfigError(
            f"the sides have the groups {sorted(expected_side.block_sizes)} and {sorted(reported_side.block_sizes)}: "
            "expected the same ones"
        )
    if not reported_side.block_sizes:
        raise ConfigError("reported_side has no block_sizes: expected the block size of each group")
    tokens = (first_token, num_tokens)
    if not all(isinstance(t, int) and not isinstance(t, bool) for t in tokens) or not 0 <= first_token < num_tokens:
        raise InvalidPosition(
            f"first_token {first_token!r}, num_tokens {num_tokens!r}: expected 0 <= first < num_tokens"
        )
    consumer = Side("consumer", reported_side, reported, request)
    if expected is None or expected_side is None:
        found = [_with_stored(consumer, group, tokens) for group in sorted(reported_side.block_sizes)]
    else:
        producer = Side("producer", expected_side, expected, request)
        found = [_with_producer(consumer, producer, group, tokens) for group in sorted(reported_side.block_sizes)]
    return _comparison(itertools.chain.from_iterable(found))


Found = tuple[str, KVChecksumRange]
"""The name of the result's field that a range belongs to, and the range."""
EQUAL: Final = "equal"
MISMATCHING: Final = "mismatching"
UNVERIFIED: Final = "unverified"


class _Cuts:
    """A group's tokens between the boundaries that all block sizes have. tokens: the first that is asked for, and the
    request's end. starts: (segments,) int64, the first token of each."""

    def __init__(self, group: int, tokens: tuple[int, int], own: int, other: int) -> None:
        (self._first, self.end), self._own, self.group = tokens, own, group
        self.step = math.lcm(own, other)
        self.starts: Ints = np.arange(self._first // self.step, -(-self.end // self.step), dtype=np.int64) * self.step

    def positions(self, block_size: int) -> int:
        """Blocks of this size that the request has."""
        return -(-self.end // block_size)

    def __len__(self) -> int:
        return self.starts.size

    def at(self, first: int, end: int | None = None) -> KVChecksumRange:
        """The range of the segments first to end - 1; by default of one."""
        low = max(int(self.starts[first]), self._first)
        high = min(int(self.starts[first if end is None else end - 1]) + self.step, self.end)
        return KVChecksumRange(self.group, low, high, low // self._own, -(-high // self._own))

    def whole(self, reason: str) -> KVChecksumRange:
        """All that is asked for."""
        return replace(self.at(0, len(self)), reason=reason)

    def sums(self, values: UInt64Array, block_size: int) -> UInt64Array:
        """A side's sums by position, added up for each segment."""
        return np.add.reduceat(values, self.starts // block_size)

    def all(self, values: Bools, block_size: int) -> Bools:
        """Whether it holds for each position of a segment."""
        return np.logical_and.reduceat(values, self.starts // block_size)

    def any(self, values: Bools, block_size: int) -> Bools:
        """Whether it holds for some position of a segment."""
        return np.logical_or.reduceat(values, self.starts // block_size)

    def runs(self, marks: Iterable[object]) -> Iterator[tuple[object, int, int]]:
        """(mark, first segment, end) of segments in a row that have the same mark."""
        first = 0
        for mark, same in itertools.groupby(marks):
            end = first + sum(1 for _ in same)
            yield mark, first, end
            first = end


def _comparison(found: Iterable[Found]) -> KVChecksumComparison:
    kinds: dict[str, list[KVChecksumRange]] = {EQUAL: [], MISMATCHING: [], UNVERIFIED: []}
    for kind, part in found:
        kinds[kind].append(part)
    order = [sorted(parts, key=lambda part: (part.group, part.first_token)) for parts in kinds.values()]
    return KVChecksumComparison(*map(tuple, order))


def _with_producer(consumer: Side, producer: Side, group: int, tokens: tuple[int, int]) -> list[Found]:
    cuts = _Cuts(group, tokens, consumer.block_size(group), producer.block_size(group))
    if reason := consumer.disagreement(group) or producer.disagreement(group):
        return [(MISMATCHING, cuts.whole(reason))]
    if reason := consumer.incomplete(group) or producer.incomplete(group):
        return [(UNVERIFIED, cuts.whole(reason))]
    own, other = consumer.fingerprint(group), producer.fingerprint(group)
    if own != other:
        reason = f"the consumer's fingerprint is {own:016x}, the producer's {other:016x}: these are other layers"
        return [(MISMATCHING, cuts.whole(reason))]
    ours = consumer.added(group, cuts.positions(consumer.block_size(group)))
    theirs = producer.added(group, cuts.positions(producer.block_size(group)))
    for side, sums, every in ((consumer, ours, True), (producer, theirs, False)):
        if absent := absent_copy(sums.sums, every):
            reason = f"no rank of the {side.name} reported copy {absent.replica_index} of {absent.replicas}"
            return [(UNVERIFIED, cuts.whole(reason))]
    return _segments(cuts, consumer, ours, producer, theirs)


def _segments(cuts: _Cuts, consumer: Side, ours: Partials, producer: Side, theirs: Partials) -> list[Found]:
    reasons = _why_not(cuts, consumer, ours)
    for index, reason in enumerate(_why_not(cuts, producer, theirs)):
        reasons[index] = reasons[index] or reason
    size, other = consumer.block_size(cuts.group), producer.block_size(cuts.group)
    zero = np.zeros(len(cuts), np.uint64)
    copies = {key: cuts.sums(sums, size) for key, sums in sorted(ours.sums.items())}
    total = sum((sums for key, sums in copies.items() if not key.replica_index), zero)
    sent = sum((cuts.sums(sums, other) for key, sums in theirs.sums.items() if not key.replica_index), zero)
    off = {key: sums - copies[ReplicaKey(key.replicas, 0)] for key, sums in copies.items()}
    left = np.asarray(sent - total, np.uint64)
    clean = np.logical_and.reduce([left == 0, *(d == 0 for d in off.values())])
    found: list[Found] = []
    for mark, first, end in cuts.runs(reason or bool(good) for reason, good in zip(reasons, clean, strict=True)):
        if isinstance(mark, str):
            found.append((UNVERIFIED, replace(cuts.at(first, end), reason=mark)))
        elif mark:
            found += [(EQUAL, replace(cuts.at(first, end), replica=key)) for key in copies]
        else:
            for index in range(first, end):
                here = {key: int(d[index]) for key, d in off.items()}
                found += judge(cuts.at(index), here, int(left[index]))
    return found


def _why_not(cuts: _Cuts, side: Side, sums: Partials) -> list[str]:
    """For each segment why a side's sums of it cannot be compared, empty where they can."""
    size = side.block_size(cuts.group)
    reported, some = cuts.all(sums.covered, size), cuts.any(sums.covered, size)
    reasons = np.full(len(cuts), "", object)
    reasons[~reported & some] = (
        f"the {side.name} reported some blocks of these tokens alone, which are compared together: no boundary between them "
        "is common to both block sizes and all ranks"
    )
    reasons[~some] = f"not all ranks of the {side.name} reported these blocks"
    reasons[cuts.any(sums.conflicting, size)] = (
        f"a rank of the {side.name} reported these blocks twice, and differently"
    )
    return list(reasons)


def judge(part: KVChecksumRange, off: Mapping[ReplicaKey, int], left: int) -> list[Found]:
    """Which copies are right where not all are. off: what each copy has more than copy 0 of its count; left: what the
    producer's total has more than the sum of all copies 0; all mod 2**64.

    A copy is right if one copy of every count, it among them, adds up to the producer's total (docs/checksum.md, section 4,
    with any copy in the place of copy 0). Where none does, the counts whose copies all agree are not blamed, if others
    can be.
    """
    counts = sorted({key.replicas for key in off})
    kinds = {count: {off[key] for key in off if key.replicas == count} for count in counts}
    good = {key for key in off if (left - off[key]) % 2**64 in _reachable(kinds, key.replicas)}
    blamed = [count for count in counts if count == 1 or len(kinds[count]) > 1] or counts
    found: list[Found] = []
    for key in sorted(off):
        if key in good:
            found.append((EQUAL, replace(part, replica=key)))
        elif good or key.replicas in blamed:
            reason = f"copy {key.replica_index} of {key.replicas} does not add up to the producer's checksum"
            found.append((MISMATCHING, replace(part, replica=key, reason=reason)))
        else:
            reason = "its copies agree, and what lies beside them does not add up to the producer's checksum"
            found.append((UNVERIFIED, replace(part, replica=key, reason=reason)))
    return found


def _reachable(kinds: Mapping[int, set[int]], count: int) -> set[int]:
    """Sums of one copy of each other count; of copies 0 where there are too many."""
    others = [values for other, values in kinds.items() if other != count]
    if math.prod(map(len, others)) > MAX_COMBINATIONS:
        return {0}
    return {sum(choice) % 2**64 for choice in itertools.product(*others)}


def _with_stored(consumer: Side, group: int, tokens: tuple[int, int]) -> list[Found]:
    cuts = _Cuts(group, tokens, consumer.block_size(group), consumer.block_size(group))
    if reason := consumer.disagreement(group):
        return [(MISMATCHING, cuts.whole(reason))]
    if reason := consumer.incomplete(group):
        return [(UNVERIFIED, cuts.whole(reason))]
    return [found for worker in consumer.holders(group) for found in _stored_by(consumer, worker, cuts)]


def _stored_by(consumer: Side, worker: Worker, cuts: _Cuts) -> list[Found]:
    size = consumer.block_size(cuts.group)
    sums = consumer.partials(worker, cuts.group, cuts.positions(size))
    reasons = _why_not(cuts, consumer, sums)
    kept = cuts.all(sums.has_stored, size)
    same = cuts.sums(sums.total, size) == cuts.sums(sums.stored, size)
    replica = next(iter(sums.sums)) if len(sums.sums) == 1 else None
    marks = [
        r or (bool(s) if k else "no stored checksums were reported")
        for r, k, s in zip(reasons, kept, same, strict=True)
    ]
    found: list[Found] = []
    for mark, first, end in cuts.runs(marks):
        if mark is False:
            reason = "the blocks do not have the checksums that they were stored with"
            parts = [replace(cuts.at(index), reason=reason) for index in range(first, end)]
        else:
            parts = [replace(cuts.at(first, end), reason=mark if isinstance(mark, str) else "")]
        kind = UNVERIFIED if isinstance(mark, str) else EQUAL if mark else MISMATCHING
        found += [(kind, replace(part, replica=replica, rank=worker)) for part in parts]
    return found
