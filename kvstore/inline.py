"""A shard that is open in this process: opened, asked and closed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import lmdb

from kvstore.blockdb import BlockDB
from kvstore.codec import codec_named
from kvstore.config import NO_EVICTION, StoreConfig
from kvstore.counters import Refused
from kvstore.errors import IdentityError
from kvstore.evicting import drop_records, evict_blocks, shrink
from kvstore.identity import identity_digest
from kvstore.keeper import Keeper
from kvstore.results import Bools
from kvstore.shape import GroupShape
from kvstore.shard import Shard
from kvstore.siblings import Siblings, has_others, owning
from kvstore.staging import Buffers
from kvstore.steps import Finer
from kvstore.storage import Question
from kvstore.storing import Storing
from kvstore.wide import WideGet, match, present

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Opening:
    """What a shard is opened with. identity_json: canonical; clock: seconds since 1970, for eviction; refused: keys that are
    refused already; copies: whether other ranks of this split write some of this one's heads."""

    folder: Path
    config: StoreConfig
    identity_json: bytes
    writable: bool
    clock: Callable[[], float]
    refused: Iterable[tuple[bytes, bytes]] = ()
    copies: bool = False


def open_shard(opening: Opening) -> Shard:
    """Open a shard. Raises what KVStore raises for paths, files, identities and capacities."""
    with owning(opening.folder) as opened:
        opened.append(_open_shard(opening))
        return opened[0]


def _open_shard(opening: Opening) -> Shard:
    config = opening.config
    sizes = config.capacity_bytes, config.sync, opening.writable, config.quarantine_bytes
    db = BlockDB(opening.folder, *sizes, patient=not opening.writable and has_others(opening.folder))
    try:
        shard = Shard(db, opening.identity_json, config, codec_named(config.codec), refused=Refused(opening.refused))
        _check_identity(shard)
        if opening.writable and config.eviction != NO_EVICTION:
            shard.keeper = Keeper(db, config.eviction, config.max_age_s, opening.clock)
            shard.keeper.load()
        if db.oversized:
            shrink(shard)
        if opening.writable:
            _follow_reports(shard)
    except BaseException:
        db.close()
        raise
    return shard


def _follow_reports(shard: Shard) -> None:
    token = object()
    try:
        shard.db.enter(token)
        shard.follow_reports()
    finally:
        shard.db.calls.discard(token)


def _check_identity(shard: Shard) -> None:
    try:
        stored = shard.db.identity(shard.identity_id)
    except lmdb.Error:
        return
    if stored is None or stored == shard.identity_json:
        return
    if identity_digest(stored) != shard.identity_id:
        log.warning("%s: the stored identity is damaged; the next put writes it anew", shard.db.folder)
        return
    raise IdentityError(
        f"{shard.db.folder}: the identity id {shard.identity_id.hex()} belongs to another identity, {stored[:200]!r}: give "
        "this model a path of its own"
    )


class InlineStorage:
    """Storage in this process. Threads, forks and close as Environment."""

    def __init__(self, shard: Shard, copies: bool = False) -> None:
        """copies: whether other ranks of this split write some of this one's heads."""
        self.shard = shard
        self.siblings = Siblings(shard.db.folder, shard.config, copies)
        self.calls = shard.db.calls
        self.counters, self.refused = shard.counters, shard.refused
        self.emptied = shard.db.emptied
        self.buffers = Buffers()
        self.process_id: int | None = None

    @property
    def forked(self) -> bool:
        return self.shard.db.forked

    def check_open(self) -> None:
        self.shard.db.check_open()

    def enter(self, token: object) -> None:
        self.shard.db.enter(token)

    def put(self, question: Question) -> Storing:
        return Storing(self.shard, question, self.buffers)

    def get(self, question: Question) -> WideGet:
        return WideGet(self.shard, self.siblings, question, self.buffers)

    def match(self, shape: GroupShape, hashes: list[bytes], finer: Finer | None = None) -> int:
        return match(self.shard, self.siblings, shape, hashes, finer)

    def present(self, shape: GroupShape, hashes: list[bytes], finer: Finer | None = None) -> Bools:
        return present(self.shard, self.siblings, shape, hashes, finer)

    def touch(self, shape: GroupShape, hashes: list[bytes]) -> None:
        keeper = self.shard.keeper
        if keeper is not None:
            keeper.touch(keeper.chain(shape.prefix, hashes, 0, None))

    def evict(self, blocks: int) -> int:
        assert self.shard.keeper is not None, "KVStore refuses to evict from a shard that was opened without a policy"
        return evict_blocks(self.shard, self.shard.keeper, blocks)

    def clear(self) -> int:
        return drop_records(self.shard, b"")

    def usage(self) -> dict[str, int]:
        return self.shard.usage()

    def close(self) -> None:
        self.shard.close()
        self.siblings.close()
