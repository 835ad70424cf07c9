"""A record taken apart: every field of its header with its meaning, its geometry, its chunks, what is right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.audit import MAX_RAW_BYTES, MAX_SLICES, extent, sound_runs
from kvstore.blockdb import BlockDB
from kvstore.codec import CODECS
from kvstore.errors import UnsupportedCache
from kvstore.geometry import RUN, ChunkPlan
from kvstore.inspect import PREFIX_BYTES, Item, reading
from kvstore.record import (
    CHECKSUM_ALGORITHM,
    FIXED,
    VERSION,
    Directory,
    Header,
    header_hash,
    parse_directory,
)
from kvstore.shape import GroupShape
from kvstore.snapshot import ReadView
from kvstore.stategeometry import STATES, UNSPLIT, state_runs
from kvstore.verify import Checked, Checker

FIELDS: Final = (
    ("magic", "bytes", "tells a header in a raw file"),
    ("version", "", f"of the header's form; this kvstore reads {VERSION}"),
    ("header_length", "length", "the whole header, with key, parent and geometry"),
    ("header_hash", "hash", "XXH3-64 of the header without these 8 bytes"),
    ("codec", "codec", "how chunks are stored"),
    ("algorithm", "", f"of the content checksum; this kvstore knows {CHECKSUM_ALGORITHM}"),
    ("flags", "", "what the geometry is of: 0 heads of tokens, 1 rows of Mamba states"),
    ("block_size", "tokens", "tokens that a block has room for"),
    ("raw_length", "length", "the block in the engine: the sum of its slices"),
    ("stored_length", "length", "in the store: the directory and all chunks"),
    ("sequence", "", "names the record's chunks; grows with every record"),
    ("written", "time", "when the record was written"),
    ("position", "", "the block's index in its request"),
    ("valid_tokens", "tokens", "of the block; the slots after them are zero"),
    ("directory_length", "length", "the slice table and a line for each chunk"),
    ("fingerprint", "hash", "of the group's layers in the model, with the identity"),
    ("tagged_checksum", "hash", "content checksum of this record's slices, XOR the tag of its hash"),
    ("directory_hash", "hash", "XXH3-64 of the directory"),
    ("last_touch", "time", "when the block was last asked for; for eviction"),
    ("accesses", "", "how often it was asked for; for eviction"),
    ("eviction_class", "", "what kind of block eviction took it for, 0 to 15"),
    ("key_length", "length", "the index key"),
    ("parent_length", "length", "the parent's hash; 0 where there is none"),
    ("num_runs", "", "runs of layers of one shape"),
)
"""The fixed part of a header in its order: name, what sort of a value it is, meaning. Sorts: length (bytes), tokens, time
(microseconds since 1970), hash (64 bits), codec (a number), bytes, and plain numbers."""


@dataclass(frozen=True)
class Field:
    """One field of a header: name, sort (as FIELDS), value, meaning."""

    name: str
    sort: str
    value: int | bytes
    meaning: str


@dataclass(frozen=True)
class Run:
    """Layers of one shape: their numbers, the first and the last head, K and V bytes of a token and head."""

    first_layer: int
    count: int
    step: int
    first_head: int
    last_head: int
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True)
class StateRun:
    """Layers whose states have the same rows: the layers' numbers, the first and the last row, elements of a row, bytes of
    each; origin: the state's row 0; range_rows: rows of a range that the slice table sums. Where the split is not known,
    range_rows is 0, origin the state's index and the row the rank."""

    first_layer: int
    count: int
    step: int
    first_row: int
    last_row: int
    elements: int
    itemsize: int
    origin: int
    range_rows: int


AnyRun = Run | StateRun


@dataclass(frozen=True)
class ChunkState:
    """A chunk as it lies: raw and stored bytes as they should be; present: bytes that are there, None where it is missing;
    right: whether its length and hash are those of the directory, or for the directory of the header."""

    number: int
    raw: int
    stored: int
    present: int | None
    right: bool


@dataclass(frozen=True)
class Explained:
    """A record taken apart. fields: of the header, as they stand there, believed or not; hash_right: whether the header has
    its hash; tail: key, parent and geometry; slices: how many, None where that is not known; checked: the whole audit."""

    item: Item
    fields: list[Field]
    hash_right: bool
    runs: Sequence[AnyRun]
    slices: int | None
    directory: ChunkState | None
    chunks: list[ChunkState]
    checked: Checked


def explain(db: BlockDB, item: Item, checker: Checker | None = None) -> Explained | None:
    """The record under an item's key taken apart, None where there is none any more. Raises StoreDamaged."""
    checked = (checker or Checker(db)).check(item.key)
    return None if checked is None else _taken_apart(db, checked)


def explain_condemned(db: BlockDB, item: Item) -> Explained:
    """A record in quarantine taken apart. Raises StoreDamaged."""
    with reading(db) as snapshot:
        wrong = Checker(db).wrong(snapshot, item.key, item.value)
    return _taken_apart(db, Checked(item, wrong))


def _taken_apart(db: BlockDB, checked: Checked) -> Explained:
    item = checked.item
    header, value = item.header, item.value
    right = len(value) >= FIXED.size and header_hash(value) == int.from_bytes(value[8:16], "little")
    runs: Sequence[AnyRun] = []
    slices, directory, chunks = None, None, list[ChunkState]()
    if isinstance(header, Header):
        states = bool(header.flags & STATES)
        runs = geometry_states(header.geometry) if states else geometry_runs(header.geometry)
        slices = extent(header.block_size, header.geometry, header.flags)[0]
        with reading(db) as snapshot:
            directory, chunks = _chunks(snapshot, header, slices)
    return Explained(item, header_fields(value), right, runs, slices, directory, chunks, checked)


def header_fields(value: bytes) -> list[Field]:
    """The fields of a header's fixed part as they stand there, none where it is too short to have them."""
    if len(value) < FIXED.size:
        return []
    numbers = FIXED.unpack_from(value)
    return [Field(name, sort, number, meaning) for (name, sort, meaning), number in zip(FIELDS, numbers, strict=True)]


def geometry_runs(geometry: bytes) -> list[Run]:
    """The runs of a geometry."""
    return [
        Run(first, count, step, head, head + more, k, v)
        for first, count, step, head, more, k, v in RUN.iter_unpack(geometry)
    ]


def geometry_states(geometry: bytes) -> list[StateRun]:
    """The runs of a geometry of states."""
    return [
        StateRun(
            *(rows.layer, count, step, rows.first_row, rows.first_row + rows.rows - 1, rows.elements, rows.itemsize),
            *(rows.origin, 0 if rows.grid == UNSPLIT else 1 << rows.grid),
        )
        for count, step, rows in state_runs(geometry)
    ]


def _chunks(snapshot: ReadView, header: Header, slices: int) -> tuple[ChunkState | None, list[ChunkState]]:
    """How directory and chunks of an intact header lie. Of a geometry that is too large to be a block's, only the
    directory."""
    found = snapshot.chunk(header.sequence, 0)
    hashed = found is not None and xxh3_64_intdigest(found) == header.directory_hash
    directory = _state(0, header.directory_length, header.directory_length, found, hashed)
    plan = _plan(header, slices)
    parsed = parse_directory(found, header, plan) if plan is not None else None
    if plan is None or not isinstance(parsed, Directory):
        return directory, []
    states = list[ChunkState]()
    lines = zip(plan.lengths.tolist(), parsed.lengths.tolist(), parsed.hashes.tolist(), strict=True)
    for number, (raw, stored, stored_hash) in enumerate(lines, 1):
        chunk = snapshot.chunk(header.sequence, number)
        hashed = chunk is not None and xxh3_64_intdigest(chunk) == stored_hash
        states.append(_state(number, raw, stored, chunk, hashed))
    return directory, states


def _state(number: int, raw: int, stored: int, found: memoryview | None, hashed: bool) -> ChunkState:
    present = None if found is None else len(found)
    return ChunkState(number, raw, stored, present, hashed and present == stored)


def _plan(header: Header, slices: int) -> ChunkPlan | None:
    """The chunks that a geometry implies, None where it is none of a block's: before anything is made of its numbers."""
    raw = extent(header.block_size, header.geometry, header.flags)[1]
    if not 0 < slices <= MAX_SLICES or not raw == header.raw_length <= MAX_RAW_BYTES:
        return None
    if header.flags & STATES and not sound_runs(header.geometry, header.flags):
        return None
    own = header.fingerprint, header.key[:PREFIX_BYTES], header.flags
    try:
        return GroupShape(header.block_size, header.geometry, *own).plan
    except UnsupportedCache:
        return None


def codec_name(number: int) -> str:
    """A codec's name, its number where it is not known."""
    return CODECS[number].name if number in CODECS else f"codec {number}"


def numbers_in_words(first: int, count: int, step: int) -> str:
    """Evenly stepped numbers: `0`, `0 to 31`, `0, 4, ... 28`."""
    if count < 2:
        return str(first)
    last = first + (count - 1) * step
    return (
        f"{first} to {last}"
        if step == 1
        else f"{first}, {first + step}, ... {last}"
        if count > 2
        else f"{first}, {last}"
    )


def runs_in_words(runs: Sequence[AnyRun]) -> list[str]:
    """A geometry in words, a line a run."""
    return [
        f"layers {numbers_in_words(run.first_layer, run.count, run.step)} ({run.count:,}), "
        + (_heads_in_words(run) if isinstance(run, Run) else _rows_in_words(run))
        for run in runs
    ]


def _heads_in_words(run: Run) -> str:
    heads = numbers_in_words(run.first_head, run.last_head - run.first_head + 1, 1)
    return f"heads {heads}: K of {run.k_bytes:,} and V of {run.v_bytes:,} bytes a token and head"


def _rows_in_words(run: StateRun) -> str:
    sizes = f"{run.elements:,} elements of {run.itemsize} bytes"
    if not run.range_rows:
        return f"state {run.origin} of rank {run.first_row}: {sizes}"
    rows = numbers_in_words(run.first_row, run.last_row - run.first_row + 1, 1)
    return f"rows {rows} of a state that begins at {run.origin}: {sizes} a row, {run.range_rows:,} rows a slice"
