"""Records that go though nobody needs their room at once: by an operator's wish, or because the capacity shrank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lmdb
import numpy as np

from kvstore.blockdb import NEVER_ENOUGH
from kvstore.errors import ConfigError, KVStoreError, StoreDamaged, StorePathError
from kvstore.keeper import Keeper
from kvstore.record import Header, parse_header
from kvstore.shard import Shard

GUESSED_BYTES = 2**20
"""Of a record, before its size is known."""


@contextmanager
def _deletion_errors(shard: Shard) -> Iterator[None]:
    """What LMDB says as StorePathError. Several transactions may have deleted before one failed, which the keeper was not
    told: it reads the index again."""
    try:
        yield
    except KVStoreError:
        raise
    except (lmdb.Error, OSError) as error:
        if shard.keeper is not None:
            shard.keeper.doubtful = True
        raise StorePathError(
            f"{shard.db.folder}: records could not be deleted: {error}: what went before is gone; look at the disk"
        ) from error


def evict_blocks(shard: Shard, keeper: Keeper, blocks: int) -> int:
    """Evict so many records, the worst first; how many went. Raises StorePathError where writing failed."""
    gone = 0
    while gone < blocks:
        victims = keeper.named(_worst(keeper, blocks - gone))
        with _deletion_errors(shard):
            evicted, tried = shard.db.evict(victims, NEVER_ENOUGH)
        shard.gone(evicted, victims[:tried])
        gone += len(evicted)
        if not victims:
            break
    return gone


def _worst(keeper: Keeper, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Policy keys of the worst blocks: as many, or all that can go."""
    nbytes, before = count * GUESSED_BYTES, -1
    while True:
        chosen = keeper.victims(nbytes)
        if chosen.size >= count or chosen.size == before:
            return chosen[:count]
        nbytes, before = nbytes * 4, chosen.size


def shrink(shard: Shard) -> None:
    """Make a file that is larger than its capacity fit: evict, then compact. Before anyone else uses the shard.

    Raises ConfigError where nothing may be evicted, StorePathError or StoreBusy where the file cannot be compacted,
    StorePathError where evicting failed; what was evicted until then is gone.
    """
    with _deletion_errors(shard):
        _shrink(shard)


def _shrink(shard: Shard) -> None:
    db, spare = shard.db, shard.config.spare_bytes
    db.check_compactable()
    db.trim_quarantine()
    headers = (parse_header(bytes(value)) for _, value in db.entries())
    named = sum(header.stored_length for header in headers if isinstance(header, Header))
    nameless = -db.free_bytes() - 2 * named
    if nameless > 0:
        raise StoreDamaged(
            f"{db.folder}: {nameless} bytes belong to no record, and capacity_bytes {db.capacity_bytes} has no room for "
            "them: keep the larger capacity, or remove the shard's folder to start empty"
        )
    if db.free_bytes() < spare:
        if shard.keeper is None:
            missing = spare - db.free_bytes()
            raise ConfigError(
                f"{db.folder}: capacity_bytes {db.capacity_bytes} is {missing} bytes less than its records need, "
                'and with eviction="none" none may go: choose a policy, or keep the larger capacity'
            )
        victims = shard.keeper.named(shard.keeper.victims(NEVER_ENOUGH - 1))
        evicted, tried = db.evict(victims, spare)
        shard.gone(evicted, victims[:tried])
    db.compact()


def drop_records(shard: Shard, start: bytes) -> int:
    """Delete all records whose index keys begin with `start`; how many there were. Raises StorePathError
    where writing failed."""
    with _deletion_errors(shard):
        gone = shard.db.drop(start)
    shard.gone(gone)
    return len(gone)
