"""What a shard holds: its records by identity and group, its quarantine, its room."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import lmdb

from kvstore.blockdb import BlockDB
from kvstore.errors import StoreDamaged
from kvstore.identity import IDENTITY_ID_BYTES, identity_digest
from kvstore.inspect import Item, condemned, items, reading
from kvstore.record import Header
from kvstore.reports import Reports
from kvstore.results import Rejection
from kvstore.storefile import StoreState

UNKNOWN: Final = ""


@dataclass
class GroupSum:
    """The records of one identity and group. raw_bytes and stored_bytes: of the intact index entries; oldest and newest:
    written, touched: last asked for, microseconds since 1970, 0 where there is none; accesses: how often eviction counted
    that they were asked for; codecs: records by codec number; damaged: entries that are no intact header; unknown: entries
    of a version that is not known."""

    records: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    oldest: int = 0
    newest: int = 0
    touched: int = 0
    accesses: int = 0
    codecs: Counter[int] = field(default_factory=Counter)
    damaged: int = 0
    unknown: int = 0

    def add(self, item: Item) -> None:
        """Count an index entry."""
        self.records += 1
        header = item.header
        if isinstance(header, Rejection):
            self.damaged += header.kind != "version"
            self.unknown += header.kind == "version"
        else:
            self._add(header)

    def _add(self, header: Header) -> None:
        self.raw_bytes += header.raw_length
        self.stored_bytes += header.stored_length
        self.oldest = min(self.oldest, header.written) if self.oldest else header.written
        self.newest = max(self.newest, header.written)
        self.touched = max(self.touched, header.last_touch)
        self.accesses += header.accesses
        self.codecs[header.codec] += 1

    def merge(self, other: GroupSum) -> None:
        """Add another shard's part of the group."""
        for name in ("records", "raw_bytes", "stored_bytes", "accesses", "damaged", "unknown"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.oldest = min(filter(None, (self.oldest, other.oldest)), default=0)
        self.newest, self.touched = max(self.newest, other.newest), max(self.touched, other.touched)
        self.codecs += other.codecs


@dataclass(frozen=True)
class Names:
    """What an identity says of itself; empty where it is missing or damaged."""

    model: str = UNKNOWN
    revision: str = UNKNOWN
    dtype: str = UNKNOWN
    quantization: str = UNKNOWN
    layers: int = 0


@dataclass(frozen=True)
class Survey:
    """One shard. state: its STORE file's; figures: as BlockDB.usage, what the accounting says; groups: counted from the
    index, by identity id and group; condemned: the quarantine's records by kind; reported: what readers refused and the
    writer has not looked at, by kind; settled: whether nothing was written while the index was read."""

    folder: Path
    state: StoreState | None
    figures: dict[str, int]
    groups: dict[tuple[bytes, int], GroupSum]
    identities: dict[bytes, Names]
    condemned: Counter[str]
    reported: Counter[str]
    settled: bool

    @property
    def total(self) -> GroupSum:
        """All groups together."""
        whole = GroupSum()
        for one in self.groups.values():
            whole.merge(one)
        return whole

    @property
    def accounts_differ(self) -> list[str]:
        """Which figures of the accounting are not those that were counted. Of damaged entries the bytes are not known, and of
        an index that was written meanwhile nothing is."""
        total = self.total
        if not self.settled:
            return []
        counted = {"records": total.records}
        if not total.damaged and not total.unknown:
            counted |= {"raw_bytes": total.raw_bytes, "stored_bytes": total.stored_bytes}
        return [name for name, number in counted.items() if self.figures[name] != number]


def survey(db: BlockDB) -> Survey:
    """What an open shard holds. Raises StoreDamaged where LMDB cannot read it."""
    with _readable(db):
        with reading(db) as snapshot:
            before = snapshot.transaction
        groups: dict[tuple[bytes, int], GroupSum] = {}
        for item in items(db):
            groups.setdefault((item.identity_id, item.group), GroupSum()).add(item)
        figures, kinds = db.usage(), Counter(one.entry.kind if one.entry else "?" for one in condemned(db))
        names = {name: names_of(name, text) for name, text in db.identities().items()}
        reported = Counter(report.kind for report in Reports(db.folder).peek())
        with reading(db) as snapshot:
            settled = snapshot.transaction == before
    return Survey(db.folder, db.store_file.state, figures, groups, names, kinds, reported, settled)


@contextmanager
def _readable(db: BlockDB) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise StoreDamaged(
            f"{db.folder}: LMDB cannot read it: {error}: `kvstore-fsck {db.folder}` tells more"
        ) from None


def names_of(identity_id: bytes, text: bytes | None) -> Names:
    """What an identity's canonical JSON says, which anyone may have written."""
    if text is None or len(identity_id) != IDENTITY_ID_BYTES or identity_digest(text) != identity_id:
        return Names()
    try:
        said = json.loads(text)
        words = {name: str(said[name]) for name in ("model", "revision", "dtype", "quantization")}
        return Names(**words, layers=len(said["layers"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Names()
