"""StoreConfig: what an operator chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.codec import codec_named
from kvstore.errors import ConfigError
from kvstore.eviction import POLICIES

MIB: Final = 2**20
MAX_CAPACITY: Final = 2**46
"""64 TiB: what a process can map."""
MAX_BATCH: Final = 2**32
"""4 GiB: each of two staging buffers takes as much."""
BATCH_SHARE: Final = 32
SPARE_SHARE: Final = 20
MOST_SPARE_SHARE: Final = 8
NO_EVICTION: Final = "none"
DURABILITIES: Final = ("commit", "process")


@dataclass(frozen=True)
class StoreConfig:
    """capacity_bytes: the most that the shard's data.mdb may take; at least 1 MiB, and sparse until used.

    durability: "commit", what put reports as stored survives a power loss; "process", it survives the process and
    is faster, and a store that was not closed before the machine went down is emptied at the next opening.
    codec: of what is put from now on; records of any codec are read. "raw", or "bf16-planes": zstd on the exponents, lossless
    whatever the dtype, and worth its time for bfloat16 where room or a slow disk is what counts. batch_bytes: the most
    block bytes a transaction writes (None: 16 MiB in commit mode, where a sync is shared; 4 MiB in process mode, where
    small transactions keep memory warm; a 32nd of the capacity where that is less). read_batch_bytes: the most block
    bytes that one snapshot reads. quarantine_bytes: the bound on condemned records, and at most an eighth of the
    capacity. threads: of the submit_ calls. eviction: what goes where a new block needs room: "hazard", what is least
    likely to be asked for again soon; "lru", what was asked for longest ago; "none", nothing: a full store refuses puts.
    max_age_s: blocks that were not asked for in so many seconds go first (None: no limit). put_queue: how many puts may be
    called or submitted and not have ended; further ones fail with "backpressure". io_timeout_s: how long a call waits for a
    buffer, and with io="process" for an answer, before it gives up: gets miss then, puts fail. max_rejections_per_minute:
    where more blocks are refused within a minute, loads are off for loads_off_s seconds, and every block is a miss (None:
    they stay on).

    Raises ConfigError.
    """

    capacity_bytes: int = 16 * 1024 * MIB
    durability: str = "commit"
    codec: str = "raw"
    batch_bytes: int | None = None
    read_batch_bytes: int = 64 * MIB
    quarantine_bytes: int = 64 * MIB
    threads: int = 2
    eviction: str = "hazard"
    max_age_s: float | None = None
    put_queue: int = 64
    io_timeout_s: float = 10.0
    max_rejections_per_minute: int | None = 1000
    loads_off_s: float = 60.0

    def __post_init__(self) -> None:
        if self.durability not in DURABILITIES:
            raise ConfigError(f"durability {self.durability!r}: expected one of {', '.join(DURABILITIES)}")
        codec_named(self.codec)
        if self.eviction not in (*POLICIES, NO_EVICTION):
            known = ", ".join((*POLICIES, NO_EVICTION))
            raise ConfigError(f"eviction {self.eviction!r}: expected one of {known}")
        if self.max_age_s is not None and not _is_duration(self.max_age_s):
            raise ConfigError(f"max_age_s is {self.max_age_s!r}: expected a number of seconds above 0, or None")
        for name in ("io_timeout_s", "loads_off_s"):
            if not _is_duration(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: expected a number of seconds above 0")
        if self.max_rejections_per_minute is not None:
            _check("max_rejections_per_minute", self.max_rejections_per_minute, 1)
        lowest = {"capacity_bytes": MIB, "read_batch_bytes": 1, "quarantine_bytes": 0, "threads": 1, "put_queue": 1}
        for name, least in lowest.items():
            _check(name, getattr(self, name), least)
        if self.capacity_bytes > MAX_CAPACITY:
            raise ConfigError(f"capacity_bytes is {self.capacity_bytes}: expected at most {MAX_CAPACITY} for one shard")
        if self.batch_bytes is not None:
            _check("batch_bytes", self.batch_bytes, 1)
            if self.batch_bytes > MAX_BATCH:
                raise ConfigError(f"batch_bytes is {self.batch_bytes}: expected at most {MAX_BATCH}")

    @property
    def sync(self) -> bool:
        """Whether every transaction is synced."""
        return self.durability == "commit"

    @property
    def write_batch_bytes(self) -> int:
        """The bound on a transaction's block bytes."""
        if self.batch_bytes is not None:
            return self.batch_bytes
        return min((16 if self.sync else 4) * MIB, self.capacity_bytes // BATCH_SHARE)

    @property
    def spare_bytes(self) -> int:
        """What eviction keeps free, so that a transaction always finds room: its own bytes, those that the two before it
        freed, which LMDB hands out two transactions later, and enough for a chunk to find a run of pages among them."""
        wanted = max(3 * self.write_batch_bytes, self.capacity_bytes // SPARE_SHARE)
        return min(wanted, self.capacity_bytes // MOST_SPARE_SHARE)


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2.0**40


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}: expected an integer of at least {least}")
