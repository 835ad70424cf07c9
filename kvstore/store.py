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

import numpy as np

from kvstore.breaker import Breaker
from kvstore.cache import PagedKVCache
from kvstore.checksum import check_block_hash
from kvstore.config import NO_EVICTION, StoreConfig
from kvstore.errors import ConfigError, InvalidCache, ReadOnlyStore, StoreUnavailable
from kvstore.front import Front
from kvstore.identity import CacheIdentity, Rank
from kvstore.inline import InlineStorage, Opening, open_shard
from kvstore.loading import Load
from kvstore.opening import check_choices, check_layers, check_types, complete_identity, store_root
from kvstore.prefixes import Blocks, PrefixBlocks, PrefixResult, common_block_size, usable_tokens
from kvstore.remote import RemoteStorage
from kvstore.results import GetResult, PutResult
from kvstore.saving import Save
from kvstore.span import as_hashes, check_hashes, check_span
from kvstore.steps import blocks_of, whole_blocks
from kvstore.storage import Question, Storage, Unavailable
from kvstore.views import GroupView

log = logging.getLogger(__name__)
T = TypeVar("T")


class KVStore:
    """One rank's shard of a store of KV blocks, bound to the paged cache that blocks are copied from and to.

    path: the store's folder; the shard is a folder in it. cache: where the engine keeps its blocks. identity: what
    must be equal for KV to be reusable. config: capacity, durability and the like, by default StoreConfig(). rank:
    which worker of a tensor- and pipeline-parallel engine this is, by default the only one; each has a shard of its
    own, and needs an identity with the layers of the unsharded model. mode: "rw", one writer a shard, or "r". io:
    "process", the files are another process's, whose end costs misses and no more: for serving engines; "inline", this one's.
    clock: seconds since 1970, for eviction; replays bring their own.

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
        check_choices(mode, io)
        complete = complete_identity(identity, cache, rank)
        self._rank = rank
        self._bind(cache, complete)
        text, copies = complete.canonical_json().encode(), any(v.written is not v for v in self._views.values())
        opening = Opening(store_root(path) / rank.folder, config, text, mode == "rw", clock, copies=copies)
        storage: Storage
        storage = RemoteStorage(opening) if io == "process" else InlineStorage(open_shard(opening), copies)
        breaker = Breaker(config.max_rejections_per_minute, config.loads_off_s)
        self._front = Front(storage, opening.folder, complete, config, breaker)
        self._writable, self._owner = mode == "rw", True

    def _bind(self, cache: PagedKVCache, identity: CacheIdentity) -> None:
        check_layers(cache, identity)
        self._cache = cache
        self._views = {number: GroupView(cache, number, identity, self._rank) for number in cache.all_groups}

    def attach(self, cache: PagedKVCache) -> KVStore:
        """A KVStore over the same open shard whose blocks lie in another cache of the same model.

        It shares database, counters and refused keys; closing it does nothing, closing this one ends both.
        Raises IdentityError or UnsupportedCache where the cache does not fit the identity, StoreClosed or StoreForked.
        """
        self._front.storage.check_open()
        if not isinstance(cache, PagedKVCache):
            raise InvalidCache(f"cache is a {type(cache).__name__}: expected PagedKVCache.from_tensors(...)")
        other = object.__new__(type(self))
        other._rank = self._rank
        other._bind(cache, self._front.identity)
        other._front, other._writable, other._owner = self._front, self._writable, False
        return other

    @property
    def cache(self) -> PagedKVCache:
        """The cache that this object copies blocks from and to."""
        return self._cache

    @property
    def identity(self) -> CacheIdentity:
        """The identity, with the layers of the unsharded model."""
        return self._front.identity

    @property
    def io_process_id(self) -> int | None:
        """The id of the process that has the shard open for this store; None with io="inline", and while it is being
        started again."""
        return self._front.storage.process_id

    @property
    def folder(self) -> Path:
        """The shard's folder."""
        return self._front.folder

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
        job, turn = self._save(block_hashes, block_ids, start, num_tokens, group, parent), object()
        if isinstance(job, PutResult):
            return job
        try:
            return self._run(job.run) if self._queued(turn) else job.refuse()
        finally:
            self._front.puts.discard(turn)

    def get_blocks(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int = 0,
        num_tokens: int | None = None,
        group: int = 0,
        hash_block_size: int | None = None,
    ) -> GetResult:
        """Load consecutive blocks of one request into the engine's cache, and verify them there.

        Arguments and exceptions as `put_blocks`. Only blocks with `verified` may be used: the others' contents are
        undefined. Slots past the last valid token are never written. A block that is rejected, also for a wrong
        `start`, is a miss from then on, until it is put again.

        Blocks that ranks of another split stored, or that were stored in blocks of another size, are put together.
        hash_block_size: where the engine hashes the request in smaller steps than its blocks, how many tokens; block_hashes
        then has a hash for each step, and blocks of that size are found, too.
        """
        return self._run(self._load(block_hashes, block_ids, start, num_tokens, group, hash_block_size).run)

    def match_prefix(
        self,
        block_hashes: Sequence[bytes] | Mapping[int, Sequence[bytes]],
        group: int = 0,
        hash_block_size: int | None = None,
    ) -> int:
        """How many leading blocks of a request are here, all that this rank needs of each. No side effects; a later get may
        still refuse one, or miss one that was stored with another number of valid tokens.

        block_hashes: from position 0; or {group: hashes} for several groups of one block size, of each of which what the
        prefix needs must be here (`match_tokens`). hash_block_size: as for `get_blocks`; whole blocks count. Raises
        InvalidBlockHash, UnknownGroup, ConfigError for block sizes that differ, StoreClosed or StoreForked.
        """
        self._front.storage.check_open()
        if isinstance(block_hashes, Mapping):
            sizes = {number: self._view(number).shape.block_size for number in block_hashes}
            size = common_block_size(sizes) if sizes else 1
            return self.match_tokens(block_hashes, hash_block_size) // size
        shape, steps = self._view(group).shape, as_hashes(block_hashes)
        hashes, finer = whole_blocks(steps, shape.block_size, hash_block_size)
        if self._front.breaker.off():
            return 0
        return self._ask("match_unavailable", lambda: self._front.storage.match(shape, hashes, finer), 0)

    def match_tokens(self, block_hashes: Mapping[int, Sequence[bytes]], hash_block_size: int | None = None) -> int:
        """How many leading tokens of a request can be had: of full attention every block up to there, of a sliding window
        those that it looks back at, of a state the one at the end. A multiple of every group's block size. No side effects.

        block_hashes: {group: hashes from position 0}, each group's in its own block size. Raises as `match_prefix`.
        """
        self._front.storage.check_open()
        return usable_tokens([self._present(n, hashes, hash_block_size) for n, hashes in block_hashes.items()])

    def _present(self, number: int, block_hashes: Sequence[bytes], hash_block_size: int | None) -> Blocks:
        view, storage, none = self._view(number), self._front.storage, np.zeros(0, bool)
        hashes, finer = whole_blocks(as_hashes(block_hashes), view.shape.block_size, hash_block_size)
        if self._front.breaker.off():
            return view.blocks(none)
        if view.group.looks_back is None:
            leading = self._ask("match_unavailable", lambda: storage.match(view.shape, hashes, finer), 0)
            return view.blocks(np.ones(leading, bool))
        return view.blocks(self._ask("match_unavailable", lambda: storage.present(view.shape, hashes, finer), none))

    def get_prefix(self, blocks: Mapping[int, PrefixBlocks]) -> PrefixResult:
        """Load what `match_tokens` promised, whole blocks of several groups of one request, and tell how many leading tokens
        may be used then. Attention without the state or the window that belongs to it is not usable. Raises as `get_blocks`.
        """
        got = {n: self.get_blocks(b.block_hashes, b.block_ids, b.start, group=n) for n, b in blocks.items()}
        there = [self._view(n).blocks(got[n].verified, b.start) for n, b in blocks.items()]
        return PrefixResult(usable_tokens(there), got)

    def touch(self, block_hashes: Sequence[bytes], group: int = 0) -> None:
        """A request came that wants these blocks, from position 0, here or not: this feeds eviction. Nothing is written.

        Call it once a request, before `get_blocks`. A get of blocks that nobody touched within a minute counts as a
        request of them. Raises InvalidBlockHash, UnknownGroup, StoreClosed or StoreForked.
        """
        self._front.storage.check_open()
        shape, hashes = self._view(group).shape, as_hashes(block_hashes)
        self._front.counters.add("touched", len(hashes))
        if self._writable and hashes:
            self._ask("touch_unavailable", lambda: self._front.storage.touch(shape, hashes), None)

    def evict(self, blocks: int) -> int:
        """Evict so many blocks of the shard, of any identity, those first that eviction would choose. Returns how many
        went: fewer where loads in flight need the rest.

        Raises ConfigError for a number below 0 or a store that does not evict, StorePathError where writing failed (what
        went before is gone), ReadOnlyStore, StoreClosed or StoreForked.
        """
        self._check_writable()
        if self._front.config.eviction == NO_EVICTION:
            raise ConfigError(f'{self.folder} was opened with eviction="none": open it with a policy')
        if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 0:
            raise ConfigError(f"blocks is {blocks!r}: expected how many blocks to evict, 0 or more")
        return self._insist(lambda: self._front.storage.evict(blocks))

    def clear(self) -> int:
        """Delete every record of the shard, of any identity; quarantine stays. Returns how many went.

        Raises StorePathError where writing failed (what went before is gone), ReadOnlyStore, StoreClosed or StoreForked.
        """
        self._check_writable()
        return self._insist(self._front.storage.clear)

    def _check_writable(self) -> None:
        self._front.storage.check_open()
        if not self._writable:
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
        job, turn = self._save(block_hashes, block_ids, start, num_tokens, group, parent), object()
        if isinstance(job, PutResult) or not self._queued(turn):
            refused = Future[PutResult]()
            refused.set_result(job if isinstance(job, PutResult) else job.refuse())
            return refused
        try:
            future = self._front.submit(self._run, job.run)
        except BaseException:
            self._front.puts.discard(turn)
            raise
        future.add_done_callback(lambda done: self._front.puts.discard(turn))
        return future

    def submit_get_blocks(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int = 0,
        num_tokens: int | None = None,
        group: int = 0,
        hash_block_size: int | None = None,
    ) -> Future[GetResult]:
        """`get_blocks` in a thread of the store: arguments are checked and copied now, and exceptions raised; the engine's
        blocks must not be used until the future is done."""
        job = self._load(block_hashes, block_ids, start, num_tokens, group, hash_block_size)
        return self._front.submit(self._run, job.run)

    def _save(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int,
        num_tokens: int | None,
        group: int,
        parent: bytes | None,
    ) -> Save | PutResult:
        """A put, checked, with copies of its arguments: the caller may reuse them at once. Its result where this rank stores
        nothing of the group."""
        self._check_writable()
        view = self._view(group)
        span = check_span(view.group, block_ids, start, num_tokens)
        hashes = check_hashes(block_hashes, len(span))
        before = None if parent is None else check_block_hash(parent)
        if view.written is None:
            self._front.counters.add("put_failed_replica", len(span))
            none = np.zeros(len(span), bool)
            return PutResult(none, none.copy(), dict.fromkeys(range(len(span)), "replica"))
        question = Question(view.written.shape, hashes, span.start, span.valid, before)
        return Save(self._front, view.written, view.written.route.begin_put(), question, span)

    def _load(
        self,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        start: int,
        num_tokens: int | None,
        group: int,
        hash_block_size: int | None,
    ) -> Load:
        """A get, checked, with copies of its arguments."""
        self._front.storage.check_open()
        view = self._view(group)
        span = check_span(view.group, block_ids, start, num_tokens)
        if hash_block_size is None:
            hashes, finer = check_hashes(block_hashes, len(span)), None
        else:
            hashes, finer = blocks_of(check_hashes(block_hashes), span, view.shape.block_size, hash_block_size)
        question = Question(view.shape, hashes, span.start, span.valid, finer=finer)
        return Load(self._front, view, view.route.begin_get(), question, span)

    def _run(self, work: Callable[[], T]) -> T:
        """Do one call's work. A method, so that this object, and with it the cache's memory, outlives the work."""
        storage, token = self._front.storage, object()
        try:
            storage.enter(token)
            return work()
        finally:
            storage.calls.discard(token)

    def _ask(self, name: str, work: Callable[[], T], otherwise: T) -> T:
        """One call's work, and what it comes to where storage cannot be asked, which is counted."""
        try:
            return self._run(work)
        except Unavailable as error:
            self._front.counters.add(name)
            self._front.complain(f"{name}: {error}")
            return otherwise

    def _insist(self, work: Callable[[], T]) -> T:
        """One call's work, which raises where storage cannot be asked."""
        try:
            return self._run(work)
        except Unavailable as error:
            raise StoreUnavailable(f"{self.folder}: {error}: try again in a while") from error

    def _queued(self, turn: object) -> bool:
        """Take a turn in the queue of puts; False where it is full."""
        puts = self._front.puts
        if len(puts) >= self._front.config.put_queue:
            return False
        puts.add(turn)
        return True

    def stats(self) -> dict[str, int]:
        """Counters of this store object (put_*, get_*, io_*) and figures of the shard (records, bytes, quarantine)."""
        return self._front.figures(self._ask("stats_failed", self._front.storage.usage, dict[str, int]()))

    def close(self) -> None:
        """Finish submitted calls, wait for all others, sync and give the shard up. Twice is allowed.

        Raises StoreBusy where calls have not ended after a minute, StorePathError where the last sync fails.
        """
        if self._owner:
            self._front.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _view(self, group: int) -> GroupView:
        return self._views[self._cache.any_group(group).number]
