"""What `kvstore drop` does: which identities a store's shards hold, and one of them deleted, with all its records."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb

from kvstore.blockdb import BlockDB
from kvstore.errors import IdentityError, StoreDamaged, StorePathError
from kvstore.fsck.shards import shards as shard_folders
from kvstore.identity import IDENTITY_ID_BYTES, identity_digest
from kvstore.inspect import opened as open_shards
from kvstore.record import MAX_HEADER_BYTES, Header, parse_header

MAX_SHOWN: Final = 60
UNKNOWN: Final = "?"


@dataclass
class Held:
    """What a store's shards hold of one identity. model, revision: UNKNOWN where the stored identity is missing or damaged;
    nbytes: stored bytes of the records whose index entry is intact; damaged: how many are not."""

    identity_id: bytes
    model: str = UNKNOWN
    revision: str = UNKNOWN
    records: int = 0
    nbytes: int = 0
    damaged: int = 0

    def __str__(self) -> str:
        damaged = f" ({self.damaged:,} damaged)" if self.damaged else ""
        size = f"{self.records:,} records{damaged}, {self.nbytes:,} bytes"
        return f"{self.identity_id.hex()}  {self.model}  {self.revision or '-'}  {size}"


def opened(store: Path, writable: bool) -> AbstractContextManager[list[BlockDB]]:
    """All shards of a store; writable ones hold their writer's lock. Raises what opening a KVStore raises."""
    return open_shards(shard_folders(store), writable)


def held(shards: Sequence[BlockDB]) -> dict[str, Held]:
    """What the shards hold, by identity id in hexadecimal; also identities without records, and records without an
    identity. Raises StoreDamaged where LMDB cannot read."""
    found: dict[str, Held] = {}
    for shard in shards:
        try:
            _add(found, shard)
        except lmdb.Error as error:
            raise StoreDamaged(
                f"{shard.folder}: LMDB cannot read it: {error}; restore it, or remove the folder"
            ) from None
    return dict(sorted(found.items()))


def _add(found: dict[str, Held], shard: BlockDB) -> None:
    for identity_id, text in shard.identities().items():
        if len(identity_id) == IDENTITY_ID_BYTES:
            one = found.setdefault(identity_id.hex(), Held(identity_id))
            if identity_digest(text) == identity_id:
                one.model, one.revision = _names(text)
    for key, value in shard.entries():
        identity_id = bytes(key[:IDENTITY_ID_BYTES])
        # A shorter key belongs to no identity, and as the start of keys it would name others' records.
        if len(identity_id) == IDENTITY_ID_BYTES:
            one = found.setdefault(identity_id.hex(), Held(identity_id))
            header = parse_header(bytes(value[: MAX_HEADER_BYTES + 1]))
            one.records += 1
            one.nbytes += header.stored_length if isinstance(header, Header) else 0
            one.damaged += not isinstance(header, Header)


def _names(text: bytes) -> tuple[str, str]:
    """Model and revision of an identity's JSON, which anyone may have written."""
    try:
        said = json.loads(text)
        return _shown(str(said["model"])), _shown(str(said["revision"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return UNKNOWN, UNKNOWN


def _shown(text: str) -> str:
    """A name for a terminal, on one line and without control characters."""
    printable = "".join(char if char.isprintable() else UNKNOWN for char in text)
    return printable if len(printable) <= MAX_SHOWN else f"{printable[:MAX_SHOWN]}..."


def the_one(found: dict[str, Held], wanted: str, store: Path) -> Held:
    """The identity whose id begins with these hexadecimal digits. Raises IdentityError where that is not exactly one."""
    digits = wanted.lower()
    if not re.fullmatch(f"[0-9a-f]{{1,{2 * IDENTITY_ID_BYTES}}}", digits):
        raise IdentityError(
            f"--identity {wanted!r}: expected the first hexadecimal digits of an identity id, 32 at most"
        )
    matching = [one for name, one in found.items() if name.startswith(digits)]
    if len(matching) != 1:
        known = ", ".join(one.identity_id.hex() for one in matching or found.values()) or "none"
        which = "begins several identity ids" if matching else "begins no identity id"
        raise IdentityError(f"--identity {wanted}: {which} of {store}: {known}: give the one that shall go")
    return matching[0]


def drop(shards: Sequence[BlockDB], identity_id: bytes) -> int:
    """Delete an identity's records, then the identity; how many records went. Being killed leaves some of them, and the
    identity. Raises StorePathError where writing failed."""
    gone = 0
    for shard in shards:
        try:
            gone += len(shard.drop(identity_id))
            shard.forget(identity_id)
        except (lmdb.Error, OSError) as error:
            raise StorePathError(
                f"{shard.folder}: {error}: {gone} records are deleted, others are not: make room on the disk, and do it again"
            ) from None
    return gone
