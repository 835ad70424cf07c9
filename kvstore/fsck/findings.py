"""What a check finds: findings of stable kinds, how far it is, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

QUARANTINE: Final = "quarantine"
RECLAIM: Final = "reclaim"
RECOUNT: Final = "recount"
REBUILD: Final = "rebuild"
SALVAGE: Final = "salvage"
NOTHING: Final = "nothing"


@dataclass(frozen=True)
class Kind:
    """meaning: for the engine, in a sentence; remedy: what a repair does about it; damage: whether it counts as damage."""

    meaning: str
    remedy: str
    damage: bool = True


KINDS: Final = {
    "STORE_FILE": Kind("the STORE file is missing or damaged: the shard cannot be opened", REBUILD),
    "META": Kind("no intact meta page: the database cannot be opened", SALVAGE),
    "FILE_TRUNCATED": Kind("pages in use lie past the end of the file: readers would be ended by SIGBUS", SALVAGE),
    "TREE": Kind("LMDB's trees do not hold together: records may be lost, and LMDB may end the process", SALVAGE),
    "FREELIST": Kind("pages are free and in use at once, or neither: writing would damage the file further", SALVAGE),
    "ACCOUNTING": Kind(
        "counts or bytes are not those of the records: capacity and eviction go by wrong figures", RECOUNT
    ),
    "ORPHAN_CHUNK": Kind("stored bytes that no record names: room is lost, nothing is served wrong", RECLAIM),
    "MISSING_CHUNK": Kind("a record lacks some of its bytes: a load refuses it", QUARANTINE),
    "HEADER": Kind("an index entry is no intact header: a load refuses it", QUARANTINE),
    "KEY": Kind("an index entry lies under another block's key: a load refuses it", QUARANTINE),
    "STORAGE_HASH": Kind("stored bytes changed: a load refuses the record", QUARANTINE),
    "DECODE": Kind("stored bytes do not decode: a load refuses the record", QUARANTINE),
    "LENGTH": Kind("stored lengths contradict each other: a load refuses the record", QUARANTINE),
    "SLICE_TABLE": Kind(
        "the slice table does not sum to the record's checksum: a load in parts refuses it", QUARANTINE
    ),
    "CONTENT": Kind("the decoded bytes do not have the stored checksum: a load refuses the record", QUARANTINE),
    "GEOMETRY": Kind("the geometry is impossible, or not the identity's: no load can use the record", QUARANTINE),
    "UNKNOWN_VERSION": Kind("written by a newer kvstore, or with a codec that this one does not know", NOTHING, False),
}
"""Every kind of finding."""


@dataclass(frozen=True)
class Finding:
    """kind: one of KINDS; key: the index key, empty where it is not about one record; nbytes: stored bytes that it concerns;
    page and pages: where in data.mdb, None where that is not known; persisted: whether a second read found it too, None
    where none was made; sequence: the sequence number of the chunks that it concerns, None where it is not about any."""

    kind: str
    detail: str
    key: bytes = b""
    nbytes: int = 0
    page: int | None = None
    pages: int = 0
    persisted: bool | None = None
    sequence: int | None = None

    @property
    def damage(self) -> bool:
        """Whether it counts as damage."""
        return KINDS[self.kind].damage

    @property
    def remedy(self) -> str:
        """What a repair does about it."""
        return KINDS[self.kind].remedy


@dataclass(frozen=True)
class Progress:
    """How far a check is: records and stored bytes that were looked at, of so many; stage: what is going on."""

    stage: str
    records: int
    nbytes: int
    total_records: int
    total_bytes: int


@dataclass(frozen=True)
class Summary:
    """What a check came to. records and nbytes: looked at; unchecked: sentences, what was not checked and why; cancelled:
    whether it ended before its time, with a checkpoint."""

    records: int
    nbytes: int
    total_records: int
    seconds: float
    findings: dict[str, int] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    cancelled: bool = False


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 record`, `2 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
