"""Keeper: what a shard's eviction policy is told, and what it decides, in terms of index keys."""

from __future__ import annotations

import logging
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import lmdb
import numpy as np

from kvstore.blockdb import BlockDB, Victim
from kvstore.eviction import policy_named
from kvstore.eviction_table import UInt64Array
from kvstore.eviction_types import Chain, Policy, Records, Touches, hash_start, key_salt, policy_keys
from kvstore.results import Bools

log = logging.getLogger(__name__)

PREFIX_BYTES: Final = 18
"""Of an index key: identity id and group. Eight bytes of the block hash follow."""
EVICTION_FIELDS: Final = struct.Struct("<32xQ16xQ32xQIBBB")
"""Of a header: stored length, position, last touch, accesses, class, lengths of key and parent (kvstore.record)."""
HEADER_BYTES: Final = EVICTION_FIELDS.size + 1
"""Of a header before the key that it was written under."""
NOTE: Final = b"eviction:"
NOTE_INTERVAL_S: Final = 60.0
RECENT_S: Final = 60.0
"""A get or put of blocks that were touched so lately belongs to the request that touched them."""
MICROSECONDS: Final = 1_000_000


class Keeper:
    """One writer's eviction policy. Owned by its Shard; any thread may call it, one at a time works.

    The policy is bookkeeping in memory, rebuilt from the index at opening, and whenever a signal cut a change of it
    short. What it believes decides what is kept, never what is given back.
    """

    def __init__(self, db: BlockDB, policy: str, max_age_s: float | None, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._db, self._name, self._max_age_s = db, policy, max_age_s
        self._lock = threading.Lock()
        self._salts: dict[bytes, int] = {}
        self._policy: Policy | None = None
        self.pins: dict[object, Chain] = {}
        """What calls in flight need, by a token of theirs. A call adds and removes its own in one step each: no signal can
        leave a pin behind."""
        self.unaccounted: set[object] = set()
        """Puts that may have written what the policy was not told. One that is here and has no pin was cut short."""
        self._pinned: dict[object, Chain] = {}
        self._noted = clock()
        self._learned = False
        self.doubtful = False
        """Set where what is stored may be other than the policy was told: it is made anew from the index when it is next
        used."""
        self.index_problems = 0
        """Index entries that were missing or misplaced when the index was read."""

    def load(self) -> None:
        """Read what is stored now, and not in an engine's first call."""
        with self._use():
            pass

    # --- keys ----------------------------------------------------------------------------------------------------

    def chain(self, prefix: bytes, hashes: Sequence[bytes], start: int, parent: bytes | None) -> Chain:
        """Consecutive blocks of a request. prefix: of their index keys; parent: the hash before the first."""
        salt = self._salt(prefix)
        above = 0 if parent is None else int(policy_keys(salt, [parent])[0])
        return Chain(policy_keys(salt, hashes), above, start)

    def _salt(self, prefix: bytes) -> int:
        salt = self._salts.get(prefix)
        return salt if salt is not None else self._salts.setdefault(prefix, key_salt(prefix))

    def _policy_keys(self, keys: Iterable[bytes]) -> UInt64Array:
        """What a damaged tree may hold beside index keys is left out."""
        groups: dict[bytes, list[bytes]] = {}
        for key in keys:
            if len(key) >= PREFIX_BYTES + 8:
                groups.setdefault(key[:PREFIX_BYTES], []).append(key[PREFIX_BYTES:])
        made = [policy_keys(self._salt(prefix), hashes) for prefix, hashes in groups.items()]
        return np.concatenate([np.empty(0, np.uint64), *made])

    def named(self, keys: UInt64Array) -> list[Victim]:
        """Policy keys as the database knows them: under each identity and group that is known."""
        prefixes = list(self._salts.items())
        return [tuple(prefix + hash_start(salt, key) for prefix, salt in prefixes) for key in keys.tolist()]

    # --- what happens --------------------------------------------------------------------------------------------

    @contextmanager
    def _use(self) -> Iterator[Policy]:
        """The policy, which is made anew next time if this use is cut short."""
        with self._lock:
            policy, self._policy = self._policy, None
            if cut_short := self.unaccounted.copy() - self.pins.copy().keys():
                self.unaccounted -= cut_short
                self.doubtful = True
            if policy is None or self.doubtful:
                self.doubtful = False
                policy, self._pinned = self._load(), {}
            yield policy
            self._policy = policy

    def _follow_pins(self, policy: Policy) -> None:
        """Tell the policy which loads began and ended since the last choice."""
        pins = dict(self.pins)
        for load in [load for load in self._pinned if load not in pins]:
            policy.unpin(self._pinned.pop(load).keys)
        for load in [load for load in pins if load not in self._pinned]:
            policy.pin(pins[load].keys)
            self._pinned[load] = pins[load]

    def touch(self, chain: Chain) -> None:
        """A request came that wants these blocks."""
        self._learned = True
        with self._use() as policy:
            policy.request(chain, self.clock())

    def asked(self, chain: Chain) -> None:
        """Blocks are loaded: a request, unless it was told already."""
        now = self.clock()
        with self._use() as policy:
            if chain.keys.size and now - float(policy.touches(chain.keys, now).times.max()) > RECENT_S:
                policy.request(chain, now)

    def admit(self, chain: Chain, absent: Bools, size: int, spare: int) -> tuple[Bools, UInt64Array]:
        """Which absent blocks of a put to write, and the policy keys of what to evict for them. size: of each block;
        spare: bytes that must stay free."""
        room = self._db.free_bytes() - spare
        with self._use() as policy:
            self._follow_pins(policy)
            found = policy.admit(chain, absent, size, room, self.clock())
        return found.admitted, found.victims

    def victims(self, nbytes: int) -> UInt64Array:
        """Policy keys of what to evict to free so much."""
        with self._use() as policy:
            self._follow_pins(policy)
            return policy.victims(nbytes, self.clock())

    def touches(self, chain: Chain) -> Touches:
        """What the records of blocks should remember of them."""
        with self._use() as policy:
            return policy.touches(chain.keys, self.clock())

    def written(self, chain: Chain, stored: Bools, size: int) -> None:
        """These blocks of a put are here now."""
        with self._use() as policy:
            policy.written(chain, stored, size, self.clock())

    def removed(self, keys: Sequence[bytes]) -> None:
        """Records whose index keys are these, or begin so, are here no more; unless they were put again meanwhile, which
        the policy may have been told before."""
        if keys:
            with self._use() as policy:
                policy.removed(self._policy_keys(keys))
            if self._db.any_present(keys):
                self.doubtful = True

    def figures(self) -> dict[str, int]:
        """Counts for `stats()`."""
        with self._use() as policy:
            return policy.figures() | {"index_problems": self.index_problems}

    # --- what lasts ----------------------------------------------------------------------------------------------

    def note(self, last: bool = False) -> dict[bytes, bytes]:
        """What to write down of what was learned, once a minute and at the last. Empty where there is nothing new. Say
        `noted` once it is written."""
        if not self._learned or (not last and abs(self.clock() - self._noted) < NOTE_INTERVAL_S):
            return {}
        with self._use() as policy:
            data = policy.snapshot()
        return {NOTE + self._name.encode(): data} if data else {}

    def noted(self) -> None:
        """What `note` gave is written down."""
        self._noted, self._learned = self.clock(), False

    def _load(self) -> Policy:
        policy = policy_named(self._name, self._max_age_s)
        try:
            data = self._db.note(NOTE + self._name.encode())
            if data and not policy.restore(data):
                log.warning("%s: what eviction had learned cannot be read: it starts to learn anew", self._db.folder)
            policy.load(self._records(), self.clock())
        except lmdb.Error as error:
            log.warning("%s: eviction starts without what is stored: %s", self._db.folder, error)
            policy = policy_named(self._name, self._max_age_s)
        return policy

    def _records(self) -> Records:
        """Every record as its index entry describes it; nothing there is trusted."""
        keys, parents = array("Q"), array("Q")
        numbers = [array("Q") for _ in range(5)]
        prefix, salt, seen, astray = b"", 0, 0, 0
        for key, value in self._db.entries():
            seen += 1
            astray += value[HEADER_BYTES : HEADER_BYTES + len(key)] != key
            if len(key) < PREFIX_BYTES + 8:
                continue
            if key[:PREFIX_BYTES] != prefix:
                prefix = bytes(key[:PREFIX_BYTES])
                salt = self._salt(prefix)
            keys.append((int.from_bytes(key[PREFIX_BYTES : PREFIX_BYTES + 8], "little") ^ salt) or 1)
            whole = len(value) > HEADER_BYTES
            *fields, key_bytes, parent_bytes = EVICTION_FIELDS.unpack_from(value) if whole else (0,) * 7
            for column, field in zip(numbers, fields, strict=True):
                column.append(field)
            at = HEADER_BYTES + key_bytes
            above = value[at : at + 8] if parent_bytes >= 8 else b""
            parents.append((int.from_bytes(above, "little") ^ salt) or 1 if len(above) == 8 else 0)
        self.index_problems = astray + abs(self._db.num_entries() - seen)
        if self.index_problems:
            log.warning(
                "%s: %d index entries are missing, or lie under another block's key: the file is damaged",
                self._db.folder,
                self.index_problems,
            )
        sizes, positions, touched, counts, classes = (np.array(n, np.uint64) for n in numbers)
        return Records(
            np.array(keys, np.uint64),
            np.array(parents, np.uint64),
            _bounded(sizes, 2**40),
            _bounded(positions, 2**40),
            Touches(touched / MICROSECONDS, _bounded(counts, 2**31), _bounded(classes, 2**8)),
        )


def _bounded(values: UInt64Array, most: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.minimum(values, np.uint64(most)).astype(np.int64)
