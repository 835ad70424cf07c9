"""What the loads and saves of one open shard share: database, counters, refused keys, pools of staging memory."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeVar

import lmdb

from kvstore.blockdb import BlockDB, Victim
from kvstore.cache import CacheGroup, PagedKVCache
from kvstore.checksum import UInt64Array, block_checksum_tags
from kvstore.codec import Codec
from kvstore.config import StoreConfig
from kvstore.errors import StoreClosed
from kvstore.geometry import ChunkPlan, chunk_plan, describe, encode_geometry
from kvstore.identity import CacheIdentity, group_fingerprint
from kvstore.keeper import Keeper
from kvstore.record import SEQUENCE_FIELD, Header, record_key
from kvstore.results import Rejection
from kvstore.staging import StagingPool
from kvstore.transfer import route_of

log = logging.getLogger(__name__)
MAX_REFUSED: Final = 2**16
T = TypeVar("T")


class Counters:
    """Named counts. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` more."""
        if amount:
            with self._lock:
                self._counts[name] += amount

    def figures(self) -> dict[str, int]:
        """All counts, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))


class Refused:
    """Keys whose record was refused: a miss in this store object until another record lies there.

    Bound to the sequence number in the index entry, and to MAX_REFUSED keys, the oldest going first (such a record
    would be refused again). Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sequences: OrderedDict[bytes, bytes] = OrderedDict()

    def add(self, key: bytes, value: bytes) -> None:
        """Refuse the index entry `value` under this key."""
        with self._lock:
            self._sequences[key] = value[SEQUENCE_FIELD]
            if len(self._sequences) > MAX_REFUSED:
                self._sequences.popitem(last=False)

    def holds(self, key: bytes, value: bytes) -> bool:
        """Whether this index entry was refused."""
        return bool(self._sequences) and self._sequences.get(key) == value[SEQUENCE_FIELD]

    def discard(self, key: bytes) -> None:
        """The key was put again."""
        with self._lock:
            self._sequences.pop(key, None)

    def __len__(self) -> int:
        return len(self._sequences)


@dataclass(eq=False)
class Shard:
    """One open shard, shared by every KVStore that is attached to it."""

    db: BlockDB
    identity: CacheIdentity
    config: StoreConfig
    codec: Codec
    keeper: Keeper | None = None
    """None where nothing is evicted: in a reader, and by configuration."""
    counters: Counters = field(default_factory=Counters)
    refused: Refused = field(default_factory=Refused)
    _pools: dict[Hashable, StagingPool] = field(default_factory=dict)
    _executor: ThreadPoolExecutor | None = None
    _writer: ThreadPoolExecutor | None = None
    _workers: set[threading.Thread] = field(default_factory=set)
    _executor_lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def identity_id(self) -> bytes:
        return self.identity.digest()

    @cached_property
    def identity_json(self) -> bytes:
        return self.identity.canonical_json().encode()

    def submit(self, call: Callable[..., T], *arguments: object) -> Future[T]:
        """Run a call in one of the shard's threads. Raises StoreClosed or StoreForked."""
        self.db.check_open()
        with self._executor_lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(
                    self.config.threads, "kvstore", lambda: self._workers.add(threading.current_thread())
                )
            try:
                return self._executor.submit(call, *arguments)
            except RuntimeError:
                raise StoreClosed(f"{self.db.folder} is being closed: open the store again") from None

    def write_meanwhile(self, call: Callable[..., T], *arguments: object) -> Future[T] | None:
        """Run a call's transaction in the one thread that is kept for that. For calls that have entered the database, and
        leave it after `wait_for_writer`. None where no thread can be had, as when the interpreter ends: nothing is run."""
        given_up = threading.Event()

        def run() -> T:
            if given_up.is_set():
                raise CancelledError
            return call(*arguments)

        try:
            with self._executor_lock:
                if self._writer is None:
                    self._writer = ThreadPoolExecutor(1, "kvstore-writer")
                return self._writer.submit(run)
        except RuntimeError:
            given_up.set()
            return None

    def wait_for_writer(self) -> None:
        """Wait until every transaction that was given to the writer's thread has ended, whatever signals raise meanwhile:
        what they raised last is raised then."""
        raised: BaseException | None = None
        while (writer := self._writer) is not None:
            try:
                wait([writer.submit(int)])
                break
            except RuntimeError:
                # The interpreter ends, and has waited for its threads.
                break
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def close(self) -> None:
        """Finish submitted calls, then close the database. In a fork's child, which has none of the threads, nothing.

        In a callback of a future, which runs in one of the shard's own threads, it does not wait for that thread: calls
        that were submitted and not begun raise StoreClosed then.
        """
        if self.db.forked:
            return
        if self._executor is not None:
            self._executor.shutdown(wait=threading.current_thread() not in self._workers)
        self._write_down()
        try:
            self.db.close()
        finally:
            if self._writer is not None and self.db.closing:
                self._writer.shutdown(wait=False)

    def _write_down(self) -> None:
        """Keep what eviction learned. It is a hint: a store that cannot keep it closes all the same."""
        if self.keeper is None:
            return
        token = object()
        try:
            self.db.enter(token)
            if learned := self.keeper.note(last=True):
                self.db.write_notes(learned)
                self.keeper.noted()
        except StoreClosed:
            pass
        except (lmdb.Error, OSError):
            log.exception("%s: what eviction learned could not be written down", self.db.folder)
        finally:
            self.db.calls.discard(token)

    def usage(self) -> dict[str, int]:
        """The database's figures, none where LMDB cannot read them; that is counted and logged."""
        try:
            kept = self.keeper.figures() if self.keeper is not None else {}
            return self.db.usage() | {f"eviction_{name.removeprefix('eviction_')}": n for name, n in kept.items()}
        except lmdb.Error:
            self.counters.add("stats_failed")
            log.exception("%s: the accounting cannot be read", self.db.folder)
            return {}

    def gone(self, keys: Sequence[bytes], victims: Sequence[Victim] = ()) -> None:
        """Records with these index keys were evicted or dropped. victims: what was to go, and if it was not there, is gone
        as well."""
        self.counters.add("evicted", len(keys))
        if self.keeper is not None:
            self.keeper.removed([*keys, *(victim[0] for victim in victims if victim)])

    def staging(self, view: GroupView, purpose: str) -> StagingPool:
        """The pool for puts ("put"), whose buffers hold one transaction's blocks, or for gets ("get"); at least a block."""
        wanted = view.route.get_bytes if purpose == "get" and self.config.batch_bytes is None else 0
        nbytes = max(self.config.write_batch_bytes, view.plan.raw_length, wanted)
        key = (purpose, view.route.buffer_key, nbytes)
        pool = self._pools.get(key)
        return pool if pool is not None else self._pools.setdefault(key, StagingPool(nbytes, view.route.new_buffer))


class GroupView:
    """One cache group as a shard's records describe it: what its headers must say, and how its bytes travel.

    Immutable after construction: any thread may use it. Raises UnsupportedCache for a group that no record can hold.
    """

    def __init__(self, cache: PagedKVCache, number: int, identity: CacheIdentity) -> None:
        self.group: CacheGroup = cache.group(number)
        self.route = route_of(cache, number)
        self.geometry = encode_geometry(self.group)
        self.plan: ChunkPlan = chunk_plan(self.group.slice_bytes)
        self.direct = self.route.direct and self.plan.whole_slices
        """Whether slices of a raw record can be copied from where LMDB maps them."""
        self.fingerprint = group_fingerprint(identity, number)
        self.prefix = record_key(identity.digest(), number, b"")

    def keys(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """The index keys of block hashes."""
        return [self.prefix + h for h in block_hashes]

    def tags(self, block_hashes: Sequence[bytes]) -> UInt64Array:
        """The tags of block hashes: (blocks,) uint64."""
        return block_checksum_tags(block_hashes, self.fingerprint)

    def same_shape(self, header: Header) -> bool:
        """Whether a record has this group's geometry and lengths."""
        return (
            header.geometry == self.geometry
            and header.block_size == self.group.block_size
            and header.raw_length == self.plan.raw_length
        )

    def misfit(self, header: Header, position: int) -> Rejection | None:
        """Why an intact record cannot answer for a block at this position, None where it can."""
        if header.fingerprint != self.fingerprint:
            return Rejection(
                "fingerprint", f"stored for layers {header.fingerprint:016x}, asked {self.fingerprint:016x}"
            )
        if not self.same_shape(header):
            stored, asked = describe(header.block_size, header.geometry), describe(self.group.block_size, self.geometry)
            return Rejection("geometry", f"stored: {stored}; asked: {asked}")
        if header.position != position:
            return Rejection("position", f"stored at position {header.position}, asked at {position}")
        return None
