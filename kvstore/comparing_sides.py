"""One side of a comparison: what its ranks reported of a group, added up by position, and what is missing from that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.checksum import MASK64, KVChecksumGroup, KVChecksumRecord, ReplicaKey, UInt64Array
from kvstore.errors import ConfigError

Bools = npt.NDArray[np.bool_]
Worker = tuple[int, int]
"""(pp_rank, tp_rank)."""


@dataclass(frozen=True)
class KVChecksumSide:
    """Which ranks one side of a transfer has, and the block size of each group. Raises ConfigError."""

    tp_size: int
    pp_size: int
    block_sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        numbers = (self.tp_size, self.pp_size, *self.block_sizes.values())
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
            raise ConfigError(f"{self}: expected positive integers")

    @property
    def workers(self) -> Iterator[Worker]:
        """Every rank, stage by stage."""
        return ((pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))


@dataclass
class Partials:
    """Sums of a group by position, by one rank or by all of a side. sums: (positions,) uint64 for each replica key; covered:
    where everything was reported; conflicting: where one rank reported two values; both (positions,) bool. stored: the
    stored checksums, with where there are any."""

    positions: int
    sums: dict[ReplicaKey, UInt64Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.covered: Bools = np.zeros(self.positions, np.bool_)
        self.conflicting: Bools = np.zeros(self.positions, np.bool_)
        self.stored: UInt64Array = np.zeros(self.positions, np.uint64)
        self.has_stored: Bools = np.zeros(self.positions, np.bool_)

    def of(self, key: ReplicaKey) -> UInt64Array:
        """The sums of a key, zero at first."""
        return self.sums.setdefault(key, np.zeros(self.positions, np.uint64))

    def take(self, group: KVChecksumGroup) -> None:
        """Note what one record has; blocks past the request's end are not asked for."""
        end = min(self.positions, group.start + len(group.values))
        here, rows = slice(group.start, end), max(0, end - group.start)
        again, columns = self.covered[here].copy(), dict(zip(group.replica_keys, group.values.T, strict=True))
        for key in {*columns, *self.sums}:
            found = columns[key][:rows] if key in columns else np.zeros(rows, np.uint64)
            own = self.of(key)[here]
            self.conflicting[here] |= again & (own != found)
            own[...] = found
        self.covered[here] = True
        if group.stored is not None:
            self.conflicting[here] |= self.has_stored[here] & (self.stored[here] != group.stored[:rows])
            self.stored[here], self.has_stored[here] = group.stored[:rows], True

    @property
    def total(self) -> UInt64Array:
        """All parts together: (positions,) uint64."""
        return np.asarray(sum(self.sums.values(), np.zeros(self.positions, np.uint64)), np.uint64)


class Side:
    """The records that one side's ranks made of a request. name: what reasons call it."""

    def __init__(self, name: str, ranks: KVChecksumSide, records: Iterable[KVChecksumRecord], request: str) -> None:
        self.name, self.ranks, self._request = name, ranks, request
        self._records: dict[Worker, list[KVChecksumRecord]] = {}
        for record in records:
            self._records.setdefault((record.pp_rank, record.tp_rank), []).append(record)

    def block_size(self, group: int) -> int:
        """Tokens a block."""
        return self.ranks.block_sizes[group]

    def disagreement(self, group: int) -> str | None:
        """Why the fingerprints that its own ranks reported of a group cannot all be right; None where they can."""
        for stage in range(self.ranks.pp_size):
            found = {
                record.fingerprints.get(group)
                for (pp_rank, _), records in self._records.items()
                for record in records
                if pp_rank == stage and group not in record.skipped_groups
            }
            if len(found - {None}) > 1:
                return f"the {self.name}'s tensor-parallel ranks of stage {stage} have different fingerprints"
        return None

    def fingerprint(self, group: int) -> int:
        """The sum over stages, of a side that is complete and agrees."""
        stages = [self._records[stage, 0][0].fingerprints.get(group, 0) for stage in range(self.ranks.pp_size)]
        return sum(stages) & MASK64

    def incomplete(self, group: int) -> str | None:
        """Why not everything was reported that the group's checksums need; None where it was."""
        workers = set(self.ranks.workers)
        if unknown := sorted(set(self._records) - workers):
            return f"the {self.name} has a record of {_rank(unknown[0])}, which is none of its {len(workers)} ranks"
        for worker in sorted(workers):
            if not any(self._request in record.checksums for record in self._records.get(worker, [])):
                return f"the {self.name}'s {_rank(worker)} reported nothing of the request"
        for worker, records in sorted(self._records.items()):
            if reason := _skipped(records, group):
                return f"the {self.name}'s {_rank(worker)} skips the group: {reason}"
        holders = self.holders(group)
        for worker, records in sorted(self._records.items()):
            known = all(group in record.fingerprints for record in records)
            if worker not in holders and (known or any(stage == worker[0] for stage, _ in holders)):
                return f"the {self.name}'s {_rank(worker)} has layers of the group, and reported no checksums of it"
            if worker in holders and not known:
                return f"the {self.name}'s {_rank(worker)} reported no fingerprint of the group"
        return None if holders else f"no rank of the {self.name} has the group"

    def holders(self, group: int) -> list[Worker]:
        """The ranks that reported checksums of a group."""
        return sorted(worker for worker in self._records if self._groups(worker, group))

    def partials(self, worker: Worker, group: int, positions: int) -> Partials:
        """What one rank reported."""
        found = Partials(positions)
        for part in self._groups(worker, group):
            found.take(part)
        return found

    def added(self, group: int, positions: int) -> Partials:
        """What its ranks reported, added up by replica key."""
        parts = [self.partials(worker, group, positions) for worker in self.holders(group)]
        whole = Partials(positions)
        for part in parts:
            for key, sums in part.sums.items():
                whole.of(key)[...] += sums
        whole.covered = np.logical_and.reduce([part.covered for part in parts])
        whole.conflicting = np.logical_or.reduce([part.conflicting for part in parts])
        return whole

    def _groups(self, worker: Worker, group: int) -> list[KVChecksumGroup]:
        entries = (record.checksums.get(self._request, {}) for record in self._records[worker])
        return [entry[group] for entry in entries if group in entry]


def absent_copy(keys: Iterable[ReplicaKey], every: bool) -> ReplicaKey | None:
    """A copy that nobody reported of a count that somebody did, (1, 0) where nobody reported any; None where there is none.
    every: also past copy 0."""
    found = set(keys)
    if not found:
        return ReplicaKey(1, 0)
    for replicas in sorted({key.replicas for key in found}):
        for index in range(replicas if every else 1):
            if (replicas, index) not in found:
                return ReplicaKey(replicas, index)
    return None


def _skipped(records: Sequence[KVChecksumRecord], group: int) -> str | None:
    reasons = [
        record.skip_reasons.get(group, "no reason given") for record in records if group in record.skipped_groups
    ]
    return reasons[0] if reasons else None


def _rank(worker: Worker) -> str:
    return f"rank pp {worker[0]}, tp {worker[1]}"
