"""KVStore: KV blocks on disk, given back only when they can be shown to be the ones that were stored."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import lmdb

from kvstore.blockdb import BlockDB
from kvstore.cache import PagedKVCache
from kvstore.checksum import check_block_hash
from kvstore.codec import codec_named
from kvstore.config import NO_EVICTION, StoreConfig
from kvstore.errors import (
    ConfigError,
    IdentityError,
    InvalidCache,
    ReadOnlyStore,
)
from kvstore.evicting import drop_records, evict_blocks, shrink
from kvstore.identity import CacheIdentity, Rank, identity_digest
from kvstore.keeper import Keeper
from kvstore.loading import Load
from kvstore.matching import Match
from kvstore.opening import check_layers, check_types, complete_identity, store_root
from kvstore.results import GetResult, PutResult
from kvstore.saving import Save
from kvstore.shard import GroupView, Shard
from kvstore.span import as_hashes, check_hashes, check_span

log = logging.getLogger(__name__)
T = TypeVar("T")


class KVStore:
    """One rank's shard of a store of KV blocks, bound to the paged cache that blocks are copied from and to.

    path: the store's folder; the shard is a folder in it. cache: where the engine keeps its blocks. identity: what
    must be equal for KV to be reusable. config: capacity, durability and the like, by default StoreConfig(). rank:
    which worker of a tensor- and pipeline-parallel engine this is, by default the only one; each has a shard of its
    own, and needs an identity with the layers of the unsharded model. mode: "rw", one writer a shard, or "r". io:
    "inline", in this process. clock: seconds since 1970, for eviction; replays bring their own.

    The caller owns it and closes it (or uses `with`); close waits for calls in flight. Any thread may call it, also
    several at once, as long as calls in flight at one time do not touch the same engine blocks. After close every
    call raises StoreClosed; in the child of a fork every call raises StoreForked.

    Raises StorePathError, StorePermissionError, StoreLocked, StoreAlreadyOpen, StoreDamaged, UnsupportedFormat,
    IdentityError, ConfigError or UnsupportedCache; then nothing that was stored is changed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache: PagedKVCache,
        identity: CacheIdentity,
        config: StoreConfig | None = None,
        *,
        rank: Rank | None = None,
        mode: str = "rw",
        io: str = "inline",
        clock: Callable[[], float] = time.time,
    ) -> None:
        config, rank = StoreConfig() if config is None else config, Rank() if rank is None else rank
        check_types(cache, identity, config, rank)
        if mode not in ("r", "rw"):
            raise ConfigError(f'mode {mode!r}: expected "r" or "rw"')
        if io != "inline":
            raise ConfigError(f'io {io!r}: expected "inline"')
        complete = complete_identity(identity, cache, rank)
        self._bind(cache, complete)
        folder = store_root(path) / rank.folder
        db = BlockDB(folder, config.capacity_bytes, config.sync, mode == "rw", config.quarantine_bytes)
        self._shard = Shard(db, complete, config, codec_named(config.codec))
        self._owner = True
        try:
            self._check_identity()
            if mode == "rw" and config.eviction != NO_EVICTION:
                self._shard.keeper = Keeper(db, config.eviction, config.max_age_s, clock)
                self._shard.keeper.load()
            if db.oversized:
                shrink(self._shard)
        except BaseException:
            db.close()
            raise

    def _bind(self, cache: PagedKVCache, identity: CacheIdentity) -> None:
        check_layers(cache, identity)
        self._cache = cache
        self._views = {number: GroupView(cache, number, identity) for number in cache.groups}

    def _check_identity(self) -> None:
        try:
            stored = self._shard.db.identity(self._shard.identity_id)
        except lmdb.Error:
            return
        if stored is None or stored == self._shard.identity_json:
            return
        if identity_digest(stored) != self._shard.identity_id:
            log.warning("%s: the stored identity is damaged; the next put writes it anew", self._shard.db.folder)
        else:
            raise IdentityError(
                f"{self._shard.db.folder}: the identity id {self._shard.identity_id.hex()} belongs to another identity, "
                f"{stored[:200]!r}: give this model a path of its own"
            )

    def attach(self, cache: PagedKVCache) -> KVStore:
        """A KVStore over the same open shard whose blocks lie in another cache of the same model.

        It shares database, counters and refused keys; closing it does nothing, closing this one ends both.
        Raises IdentityError or UnsupportedCache where the cache does not fit the identity, StoreClosed or StoreForked.
        """
        self._shard.db.check_open()
        if not isinstance(cache, PagedKVCache):
            raise InvalidCache(f"cache is a {type(cache).__name__}: expected PagedKVCache.from_tensors(...)")
        other = object.__new__(type(self))
        other._bind(cache, self._shard.identity)
        other._shard, other._owner = self._shard, False
        return other

    @property
    def cache(self) -> PagedKVCache:
        """The cache that this object copies blocks from and to."""
        return self._cache

    @property
    def identity(self) -> CacheIdentity:
        """The identity, with the layers of the unsharded model."""
        return self._shard.identity

    @property
    def folder(self) -> Path:
        """The shard's folder."""
        return self._shard.db.folder

    def put_blocks(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int = 0,
        num_tokens: int | None = None,
        group: int = 0,
        parent: bytes | None = None,
    ) -> PutResult:
        """Store consecutive blocks of one request from the engine's cache.

        block_hashes: the chained hash of each block, 8 to 64 bytes, the first 8 of which tell blocks apart; block_ids:
        where each lies in the cache; start: the first block's position in the request; num_tokens: the request's token
        count, by default all blocks are full; parent: the hash before the first. What is `stored` in the result is as
        durable as the configuration says. Raises InvalidBlockHash, LengthMismatch, InvalidBlockId, InvalidPosition,
        NoValidTokens, UnknownGroup, ReadOnlyStore, StoreClosed or StoreForked; then nothing was stored.
        """
        return self._run(self._save(block_hashes, block_ids, start, num_tokens, group, parent).run)

    def get_blocks(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int = 0,
        num_tokens: int | None = None,
        group: int = 0,
    ) -> GetResult:
        """Load consecutive blocks of one request into the engine's cache, and verify them there.

        Arguments and exceptions as `put_blocks`. Only blocks with `verified` may be used: the others' contents are
        undefined. Slots past the last valid token are never written. A block that is rejected, also for a wrong
        `start`, is a miss from then on, until it is put again.
        """
        return self._run(self._load(block_hashes, block_ids, start, num_tokens, group).run)

    def match_prefix(self, block_hashes: Sequence[bytes] | Mapping[int, Sequence[bytes]], group: int = 0) -> int:
        """How many leading blocks of a request are here. No side effects; a later get may still refuse one, or miss one
        that was stored with another number of valid tokens.

        block_hashes: from position 0; or {group: hashes} for several groups, where a prefix ends as soon as one
        group's does. Raises InvalidBlockHash, UnknownGroup, StoreClosed or StoreForked.
        """
        self._shard.db.check_open()
        if isinstance(block_hashes, Mapping):
            return min((self.match_prefix(hashes, number) for number, hashes in block_hashes.items()), default=0)
        view = self._view(group)
        return self._run(Match(self._shard, view, view.keys(as_hashes(block_hashes))).run)

    def touch(self, block_hashes: Sequence[bytes], group: int = 0) -> None:
        """A request came that wants these blocks, from position 0, here or not: this feeds eviction. Nothing is written.

        Call it once a request, before `get_blocks`. A get of blocks that nobody touched within a minute counts as a
        request of them. Raises InvalidBlockHash, UnknownGroup, StoreClosed or StoreForked.
        """
        self._shard.db.check_open()
        view, hashes = self._view(group), as_hashes(block_hashes)
        self._shard.counters.add("touched", len(hashes))
        keeper = self._shard.keeper
        if keeper is not None and hashes:
            self._run(lambda: keeper.touch(keeper.chain(view.prefix, hashes, 0, None)))

    def evict(self, blocks: int) -> int:
        """Evict so many blocks of the shard, of any identity, those first that eviction would choose. Returns how many
        went: fewer where loads in flight need the rest.

        Raises ConfigError for a number below 0 or a store that does not evict, StorePathError where writing failed (what
        went before is gone), ReadOnlyStore, StoreClosed or StoreForked.
        """
        keeper = self._keeper()
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 0:
            raise ConfigError(f"blocks is {blocks!r}: expected how many blocks to evict, 0 or more")
        return self._run(lambda: evict_blocks(self._shard, keeper, blocks))

    def clear(self) -> int:
        """Delete every record of the shard, of any identity; quarantine stays. Returns how many went.

        Raises StorePathError where writing failed (what went before is gone), ReadOnlyStore, StoreClosed or StoreForked.
        """
        self._check_writable()
        return self._run(lambda: drop_records(self._shard, b""))

    def _keeper(self) -> Keeper:
        self._check_writable()
        if self._shard.keeper is None:
            raise ConfigError(f'{self.folder} was opened with eviction="none": open it with a policy')
        return self._shard.keeper

    def _check_writable(self) -> None:
        self._shard.db.check_open()
        if not self._shard.db.writable:
            raise ReadOnlyStore(f'{self.folder} was opened with mode="r": open it with mode="rw" to change it')

    def submit_put_blocks(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int = 0,
        num_tokens: int | None = None,
        group: int = 0,
        parent: bytes | None = None,
    ) -> Future[PutResult]:
        """`put_blocks` in a thread of the store: arguments are checked and copied now, and exceptions raised; the engine's
        blocks must not change until the future is done."""
        job = self._save(block_hashes, block_ids, start, num_tokens, group, parent)
        return self._shard.submit(self._run, job.run)

    def submit_get_blocks(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int = 0,
        num_tokens: int | None = None,
        group: int = 0,
    ) -> Future[GetResult]:
        """`get_blocks` in a thread of the store: arguments are checked and copied now, and exceptions raised; the engine's
        blocks must not be used until the future is done."""
        job = self._load(block_hashes, block_ids, start, num_tokens, group)
        return self._shard.submit(self._run, job.run)

    def _save(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int,
        num_tokens: int | None,
        group: int,
        parent: bytes | None,
    ) -> Save:
        """A put, checked, with copies of its arguments: the caller may reuse them at once."""
        self._check_writable()
        view = self._view(group)
        span = check_span(view.group, block_ids, start, num_tokens)
        hashes = check_hashes(block_hashes, len(span))
        before = None if parent is None else check_block_hash(parent)
        return Save(self._shard, view, view.route.begin_put(), view.keys(hashes), hashes, span, before)

    def _load(
        self, block_hashes: Sequence[bytes], block_ids: Sequence[int], start: int, num_tokens: int | None, group: int
    ) -> Load:
        """A get, checked, with copies of its arguments."""
        self._shard.db.check_open()
        view = self._view(group)
        span = check_span(view.group, block_ids, start, num_tokens)
        hashes = check_hashes(block_hashes, len(span))
        return Load(self._shard, view, view.route.begin_get(), view.keys(hashes), hashes, span)

    def _run(self, work: Callable[[], T]) -> T:
        """Do one call's work. A method, so that this object, and with it the cache's memory, outlives the work."""
        db, token = self._shard.db, object()
        try:
            db.enter(token)
            return work()
        finally:
            db.calls.discard(token)

    def stats(self) -> dict[str, int]:
        """Counters of this store object (put_*, get_*) and figures of the shard (records, bytes, quarantine)."""
        own = {"refused_keys": len(self._shard.refused), "emptied_at_open": int(self._shard.db.emptied)}
        zeros = dict.fromkeys(("put_stored", "put_present", "put_bytes", "get_verified", "get_missing", "get_bytes"), 0)
        return zeros | own | self._run(self._shard.usage) | self._shard.counters.figures()

    def close(self) -> None:
        """Finish submitted calls, wait for all others, sync and give the shard up. Twice is allowed.

        Raises StoreBusy where calls have not ended after a minute, StorePathError where the last sync fails.
        """
        if self._owner:
            self._shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _view(self, group: int) -> GroupView:
        return self._views[self._cache.group(group).number]
