"""Blocks put together from records of other ranks' shards, other splits and other block sizes, each part verified by its
record's slice table."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.audit import shape_of
from kvstore.checksum import UInt64Array, weighted_sums
from kvstore.codec import CODECS
from kvstore.covering import Covering, Damaged, Part, Run, Taken
from kvstore.cutting import Cut, cut_of
from kvstore.errors import StoreClosed, StoreForked, UnsupportedCache
from kvstore.fetching import CONDEMNING
from kvstore.record import Directory, check_chunk, parse_directory
from kvstore.results import Rejection
from kvstore.shard import Shard
from kvstore.snapshot import ReadView
from kvstore.storage import Doubt, Question, Sink

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wrong:
    """What is wrong with a record, as far as it was read."""

    part: Part
    rejection: Rejection


@dataclass(eq=False)
class Splicing:
    """Blocks of one question, from several shards. Belongs to the calling thread, which has entered the shards. shards: the
    rank's own first."""

    question: Question
    shards: Sequence[Shard]
    tagged: dict[int, int] = field(default_factory=dict)
    joint: dict[int, int] = field(default_factory=dict)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    entries: dict[int, Rejection] = field(default_factory=dict)
    """By block, what was refused for its index entry alone: the block is rejected where it cannot be had otherwise."""
    read_bytes: int = 0
    _runs: dict[int, Run] = field(default_factory=dict)
    _guilty: dict[int, list[Part]] = field(default_factory=dict)

    def read(self, indices: Sequence[int], sink: Sink, most_bytes: int) -> None:
        """Bring every block of these that can be put together to the sink, in snapshots of about most_bytes block bytes.
        Raises Unavailable."""
        covering = Covering(self.question, self.shards)
        runs = covering.plan(indices)
        for damaged in covering.damaged:
            self._damaged(damaged)
        raw = self.question.shape.plan.raw_length
        while runs:
            batch, blocks = list[Run](), 0
            while runs and (not batch or (blocks + len(runs[0].indices)) * raw <= most_bytes):
                batch.append(runs.pop(0))
                blocks += len(batch[-1].indices)
            for run, wrong in self._read(batch, sink):
                self._read_again(run, wrong, sink)

    def _damaged(self, entry: Damaged) -> None:
        """Refuse an index entry that is the same on a second read."""
        try:
            with entry.shard.db.read() as snapshot:
                again = snapshot.header(entry.key)
        except lmdb.Error:
            return
        if again == entry.value:
            rejection = refuse(entry, entry.rejection)
            size = self.question.shape.block_size
            self.entries[(entry.end - 1) // size - self.question.start] = rejection

    def _read(self, runs: Sequence[Run], sink: Sink) -> list[tuple[Run, list[Wrong]]]:
        """Hand runs on; those that are not as their records say, with what is wrong."""
        with self._views(runs) as views:
            reader = Reader(self.question, views)
            bad = [(run, wrong) for run in runs if (wrong := reader.check(run)) is not None]
            good = [run for run in runs if all(run is not other for other, _ in bad)]
            for group in _fitting(good, max(1, sink.room // self.question.shape.plan.raw_length)):
                self._land(group, reader, sink, bad)
            self.read_bytes += reader.read_bytes
        return bad

    @contextmanager
    def _views(self, runs: Iterable[Run]) -> Iterator[dict[Shard, ReadView]]:
        shards = {id(taken.part.shard): taken.part.shard for run in runs for taken in run.taken}
        with ExitStack() as stack:
            views = dict[Shard, ReadView]()
            for shard in shards.values():
                # Maps that are too small are made larger here, where this call has no snapshot that others wait for.
                with suppress(lmdb.Error), shard.db.read():
                    pass
            for shard in shards.values():
                try:
                    views[shard] = stack.enter_context(shard.db.read(wait=False))
                except lmdb.Error as error:
                    log.error("%s: not read: LMDB: %s", shard.db.folder, error)
            yield views

    def _land(
        self,
        group: Sequence[tuple[Run, int, int]],
        reader: Reader,
        sink: Sink,
        bad: list[tuple[Run, list[Wrong]]],
    ) -> None:
        """Hand some blocks of runs on, (run, first, end) each, those of runs that are bad left out; bad: grows."""
        landed = list[int]()

        def decode(rows: Bytes) -> list[int]:
            for run, first, end in group:
                if any(run is other for other, _ in bad):
                    continue
                chosen = run.indices[first:end]
                wrong = reader.fill(run, chosen, rows[len(landed) : len(landed) + len(chosen)])
                if wrong:
                    bad.append((run, wrong))
                else:
                    landed.extend(chosen)
            return list(landed)

        sink.fill(sum(end - first for _, first, end in group), decode)
        for run, _, end in group:
            if end == len(run.indices) and all(run is not other for other, _ in bad):
                self._landed(run, reader)

    def _landed(self, run: Run, reader: Reader) -> None:
        total = int(weighted_sums(reader.expected(run)[None], self.question.shape.factors)[0])
        last = run.indices[-1]
        self.tagged |= dict.fromkeys(run.indices[:-1], 0)
        self.tagged[last] = total ^ int(self.question.shape.tags([self.question.hashes[last]])[0])
        if len(run.indices) > 1:
            self.joint[last] = len(run.indices)
        self._runs |= dict.fromkeys(run.indices, run)

    def _read_again(self, run: Run, first: list[Wrong], sink: Sink) -> None:
        """One second read tells a passing error from a damaged record. first: what was wrong; empty where records were
        replaced or deleted meanwhile, so that the blocks are missing."""
        again = self._read([run], sink) if first else []
        if first and not again:
            self.shards[0].counters.add("get_transient")
        for wrong in again[0][1] if again else ():
            rejection = refuse(wrong.part, wrong.rejection)
            self.rejected |= dict.fromkeys(run.indices, rejection)
            self.shards[0].counters.add(f"get_rejected_{rejection.kind}", len(run.indices))

    # --- blocks that did not arrive ----------------------------------------------------------------------------------

    def doubt(self, index: int) -> Doubt:
        """Tell bad records from a bad way: read the block's run again, and sum that."""
        run, shape = self._runs[index], self.question.shape
        rows = np.empty((len(run.indices), shape.plan.raw_length), np.uint8)
        with self._views([run]) as views:
            reader = Reader(self.question, views)
            wrong = reader.check(run)
            if wrong is None:
                wrong = reader.fill(run, run.indices, rows)
            if wrong is not None and wrong:
                self._guilty[index] = [w.part for w in wrong]
                return Doubt(wrong[0].rejection.detail, True, None)
            if wrong is not None:
                return Doubt("replaced by another record meanwhile", False, None)
            sums = self.shards[0].staging_sums(shape)(self.question.span(run.indices), rows)
            astray = np.flatnonzero(sums.sum(axis=0, dtype=np.uint64) != reader.expected(run))
        if not astray.size:
            return Doubt("", False, sums[run.indices.index(index)])
        guilty = [t.part for t in run.taken if np.frombuffer(t.needed, np.uint8)[astray].any()]
        self._guilty[index] = guilty
        folders = ", ".join(sorted({str(part.shard.db.folder) for part in guilty}))
        return Doubt(f"{astray.size} slices do not sum to what their records in {folders} say", True, None)

    def refuse(self, index: int, rejection: Rejection) -> None:
        """Make a block that went to the sink a miss, and condemn its records where they are to blame."""
        self.rejected[index] = rejection
        self.shards[0].counters.add(f"get_rejected_{rejection.kind}")
        blamed = self._guilty.get(index) or [taken.part for taken in self._runs[index].taken]
        for part in blamed:
            refuse(part, rejection)


class Reader:
    """Records of some runs in one snapshot of each shard."""

    def __init__(self, question: Question, views: Mapping[Shard, ReadView]) -> None:
        self._question, self._views = question, views
        self._directories: dict[tuple[int, bytes], Directory] = {}
        self.read_bytes = 0

    def check(self, run: Run) -> list[Wrong] | None:
        """Check the directories of a run's records; what is wrong, empty where one was replaced or deleted; None where all
        are right."""
        wrong = list[Wrong]()
        for taken in run.taken:
            part = taken.part
            view = self._views.get(part.shard)
            if view is None or view.header(part.key) != part.value:
                return []
            found = self._directory(view, part)
            if isinstance(found, Rejection):
                wrong.append(Wrong(part, found))
            else:
                self._directories[id(part.shard), part.key] = found
        return wrong or None

    def _directory(self, view: ReadView, part: Part) -> Directory | Rejection:
        header, asked = part.header, self._question.shape
        stored = shape_of(header.block_size, header.geometry, asked.fingerprint, asked.prefix, asked.flags)
        try:
            plan = stored.plan
        except UnsupportedCache as error:
            return Rejection("geometry", str(error))
        chunk = view.chunk(header.sequence, 0)
        found = parse_directory(chunk, header, plan)
        if isinstance(found, Rejection):
            return found
        self.read_bytes += header.directory_length
        total = int(weighted_sums(found.slice_sums[None], stored.factors)[0])
        if total ^ int(stored.tags([part.key[len(asked.prefix) :]])[0]) != header.tagged_checksum:
            return Rejection("content", "its slice table does not sum to its checksum under the tag of its key", True)
        if (found.lengths > plan.lengths).any():
            return Rejection("decode", "the directory's stored lengths exceed the raw ones")
        return found

    def fill(self, run: Run, indices: Sequence[int], rows: Bytes) -> list[Wrong] | None:
        """Put blocks of a checked run together, (blocks, block bytes); what is wrong, None where nothing is."""
        wrong = list[Wrong]()
        for taken in run.taken:
            if (rejection := self._copy(taken, indices, rows)) is not None:
                wrong.append(Wrong(taken.part, rejection))
        return wrong or None

    def _copy(self, taken: Taken, indices: Sequence[int], rows: Bytes) -> Rejection | None:
        part, size = taken.part, self._question.shape.block_size
        cut = self._cut(taken)
        directory, bounds = self._directories[id(part.shard), part.key], cut.stored.plan.bounds
        before = [part.start - (self._question.start + index) * size for index in indices]
        for source in cut.sources:
            raw = np.empty(bounds[source.end] - bounds[source.first], np.uint8)
            for number in range(source.first, source.end):
                out = raw[bounds[number] - bounds[source.first] : bounds[number + 1] - bounds[source.first]]
                if rejection := self._decode(part, directory, number, out):
                    return rejection
            for row, tokens in zip(rows, before, strict=True):
                cut.copy(source, raw, row, tokens)
        return None

    def _cut(self, taken: Taken) -> Cut:
        header = taken.part.header
        return cut_of(self._question.shape, header.block_size, header.geometry, taken.needed)

    def _decode(self, part: Part, directory: Directory, number: int, out: Bytes) -> Rejection | None:
        """Fill the raw bytes of payload chunk `number`, counted from 0."""
        chunk = self._views[part.shard].chunk(part.header.sequence, number + 1)
        length, stored_hash = int(directory.lengths[number]), int(directory.hashes[number])
        if wrong := check_chunk(chunk, number + 1, length, stored_hash):
            return wrong
        assert chunk is not None
        self.read_bytes += length
        codec = CODECS[0] if length == out.size else CODECS[part.header.codec]
        why = codec.decode(chunk, out)
        return Rejection("decode", f"chunk {number + 1}: {why}") if why else None

    def expected(self, run: Run) -> UInt64Array:
        """s of each asked slice over all tokens of a checked run, by its records' tables: (slices,) uint64."""
        sums = np.zeros(len(self._question.shape.slices), np.uint64)
        for taken in run.taken:
            cut, part = self._cut(taken), taken.part
            sums[cut.own_slices] += self._directories[id(part.shard), part.key].slice_sums[cut.stored_slices]
        return sums


def _fitting(runs: Sequence[Run], room: int) -> Iterator[list[tuple[Run, int, int]]]:
    """Runs, or parts of them, in groups of at most `room` blocks, a run's last blocks last."""
    group, blocks = list[tuple[Run, int, int]](), 0
    for run in runs:
        for first in range(0, len(run.indices), room):
            end = min(first + room, len(run.indices))
            if group and blocks + end - first > room:
                yield group
                group, blocks = [], 0
            group.append((run, first, end))
            blocks += end - first
    if group:
        yield group


def refuse(part: Part | Damaged, rejection: Rejection) -> Rejection:
    """Make a record a miss in this process, and condemn it where it is to blame; the rejection that says so."""
    condemned = rejection.condemned or rejection.kind in CONDEMNING
    found = Rejection(rejection.kind, f"{part.shard.db.folder.name}: {rejection.detail}", condemned)
    log.warning(
        "%s: block %s refused: %s: %s", part.shard.db.folder, part.key[18:].hex(), rejection.kind, rejection.detail
    )
    part.shard.refused.add(part.key, part.value)
    if condemned:
        part.shard.condemn([(part.key, part.value, rejection.kind)])
    return found


@contextmanager
def entered(own: Shard, others: Sequence[Shard]) -> Iterator[list[Shard]]:
    """A rank's own shard, which its call has entered already, and once only, and those of the others that are open, held open
    meanwhile: `Environment` counts the calls that wait for a larger map."""
    token, held = object(), [own]
    try:
        for shard in others:
            try:
                shard.db.enter(token)
            except (StoreClosed, StoreForked):
                continue
            held.append(shard)
        yield held
    finally:
        for shard in others:
            shard.db.calls.discard(token)
