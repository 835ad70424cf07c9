"""What a store and an eviction policy tell each other: keys, chains of blocks, admissions, what records remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.eviction_table import Bools as Bools
from kvstore.eviction_table import Ints as Ints
from kvstore.eviction_table import UInt64Array

NO_KEY: Final = 0
"""The parent of a block at position 0, or of one whose parent is unknown."""
TICKS_PER_S: Final = 8
PAST_TICKS: Final = 2**31
MAX_TICK: Final = 2**32 - 2
STEP_BACK_S: Final = 60.0
MAX_SECONDS: Final = 2.0**40
"""Clocks that show more are no clocks; below, ticks are exact."""
LEAP_S: Final = 366 * 86400.0
Floats = npt.NDArray[np.float64]


def key_salt(prefix: bytes) -> int:
    """What tells keys of one identity and group (the front of their index keys) from those of another."""
    return xxh3_64_intdigest(prefix)


def policy_keys(salt: int, block_hashes: Sequence[bytes]) -> UInt64Array:
    """A policy's keys of blocks: the first 8 bytes of each hash, salted.

    Blocks with equal keys share an entry and are evicted together: that costs hits, never a wrong block.
    """
    first = np.frombuffer(b"".join([block_hash[:8] for block_hash in block_hashes]), "<u8")
    keys = first.astype(np.uint64) ^ np.uint64(salt)
    keys[keys == NO_KEY] = 1
    return keys


def hash_start(salt: int, key: int) -> bytes:
    """The first 8 bytes of the block hashes that have this key under this salt: where to look in the index."""
    return (key ^ salt).to_bytes(8, "little")


@dataclass(frozen=True, eq=False)
class Chain:
    """Consecutive blocks of one request. keys: uint64, see `policy_keys`; parent: the key of the block before the first,
    NO_KEY at position 0 or where it is unknown; start: the first block's position. Immutable."""

    keys: UInt64Array
    parent: int = NO_KEY
    start: int = 0

    def parents(self) -> UInt64Array:
        """The key of the block before each. A chain that names one of its own blocks as parent has none."""
        before = np.concatenate((np.array([self.parent], np.uint64), self.keys[:-1]))
        if self.parent != NO_KEY and self.keys.size and (self.keys == np.uint64(self.parent)).any():
            before[0] = NO_KEY
        return before


@dataclass(frozen=True, eq=False)
class Admission:
    """admitted: for each block of a put whether to write it; victims: keys to evict before, in this order. Immutable."""

    admitted: Bools
    victims: UInt64Array


@dataclass(frozen=True, eq=False)
class Touches:
    """What records remember of their blocks: last touch in seconds since 1970, number of requests, class. Immutable."""

    times: Floats
    counts: Ints
    classes: Ints


@dataclass(frozen=True, eq=False)
class Records:
    """All records of a shard, as its index has them, one element a record in each array; nothing in them is trusted.
    parents: NO_KEY for none; sizes in bytes; positions in the request. Immutable."""

    keys: UInt64Array
    parents: UInt64Array
    sizes: Ints
    positions: Ints
    touches: Touches


class Policy(Protocol):
    """Which blocks a store keeps. It knows keys and sizes, never bytes, and does no I/O.

    It believes what it is told with `load`, `written` and `removed`: what it chooses and the store does not do, it
    chooses again. `now` is the wall clock in seconds since 1970; a clock that steps back costs nothing but ages. Equal
    calls in an equal order make equal choices. Owned by one shard; the store calls it under one lock.
    """

    def request(self, chain: Chain, now: float) -> None:
        """A request came that wants these blocks, here or not."""

    def admit(self, chain: Chain, absent: Bools, sizes: int | Ints, room: int, now: float) -> Admission:
        """Which `absent` blocks of a put to write, and what to evict for them. sizes: bytes of each block; room: bytes
        that are free, below 0 where too many are used. Blocks that nobody requested since they were last refused or
        removed count as a request."""

    def victims(self, nbytes: int, now: float) -> UInt64Array:
        """What to evict to free `nbytes`, the worst first; less where no more can be evicted."""

    def expired(self, now: float) -> UInt64Array:
        """What was not requested for longer than the age limit and can be evicted."""

    def written(self, chain: Chain, stored: Bools, sizes: int | Ints, now: float) -> None:
        """These blocks of a put are here now."""

    def removed(self, keys: UInt64Array) -> None:
        """Blocks are here no more: evicted, condemned or dropped."""

    def pin(self, keys: UInt64Array) -> None:
        """Do not evict these (known or not) until they are unpinned as often."""

    def unpin(self, keys: UInt64Array) -> None:
        """End one pin of each."""

    def resident(self, keys: UInt64Array) -> Bools:
        """Whether the policy takes these blocks to be here."""

    def touches(self, keys: UInt64Array, now: float) -> Touches:
        """What a record written now should remember, and `load` gives back."""

    def load(self, records: Records, now: float) -> None:
        """The records that are here at opening. Before any other call but `restore`."""

    def snapshot(self) -> bytes:
        """What was learned, to be kept with the store; small."""

    def restore(self, data: bytes) -> bool:
        """Take a snapshot back. False where it is not one of this policy's: then learning starts afresh."""

    def figures(self) -> dict[str, int]:
        """Counts of blocks, ghosts, bytes of memory."""


class Clock:
    """Ticks of 1/8 s that never decrease, from a wall clock that may jump. A step back by more than a minute, or a leap
    of more than a year, moves the clock's own zero. Belongs to one policy."""

    def __init__(self) -> None:
        self._zero = 0.0
        self._last: float | None = None

    def tick(self, now: float) -> int:
        """The time in ticks."""
        if not 0 <= now < MAX_SECONDS:
            return self._ticks()
        if self._last is None:
            self._last, self._zero = now, now - PAST_TICKS / TICKS_PER_S
        elif not self._last - STEP_BACK_S <= now <= self._last + LEAP_S:
            self._zero += now - self._last
            self._last = now
        self._last = max(self._last, now)
        return self._ticks()

    def _ticks(self) -> int:
        last = 0.0 if self._last is None else self._last
        return max(0, min(int((last - self._zero) * TICKS_PER_S), MAX_TICK))

    def ticks(self, times: Floats) -> npt.NDArray[np.uint32]:
        """Times of the past, or what is taken for it, in ticks."""
        ticks = np.nan_to_num((times - self._zero) * TICKS_PER_S)
        return np.clip(ticks, 0, self._ticks()).astype(np.uint32)

    def seconds(self, ticks: npt.NDArray[np.uint32]) -> Floats:
        """Ticks in seconds since 1970."""
        return ticks / TICKS_PER_S + self._zero
