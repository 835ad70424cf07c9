"""What put and get answer. Damage is a result: nothing here is raised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

REJECTION_KINDS: Final = {
    "header": "the index entry is no intact header",
    "version": "the header is of a newer format",
    "key": "the index entry belongs to another block",
    "storage_hash": "stored bytes do not have their hash, or are missing",
    "decode": "stored bytes do not decode to their length",
    "content": "the bytes in the engine's cache do not have the stored checksum",
    "fingerprint": "the record was stored for other layers",
    "geometry": "the record has another block size, other heads or other sizes of K and V",
    "position": "the record was stored at another position of its request",
    "io": "the database failed to read",
}
"""Every kind of rejection."""

FAILURE_REASONS: Final = {
    "store_full": "the capacity is used up, and nothing in it may be evicted",
    "reader_holds_space": "the room that eviction made is held by a reader's snapshot",
    "not_admitted": "what the store holds is more likely to be asked for than this block",
    "source_changed": "the engine's blocks changed while they were copied, or were not copied right",
    "disk_full": "the file system has no room left",
    "io_error": "the file system or the database failed to write",
    "backpressure": "too many puts were waiting already",
    "io_process": "the process that writes the shard ended or did not answer; the block may be stored all the same",
    "replica": "this rank has copies of heads that other ranks store",
    "no_state": "the cache has the state of another token, and no attention (kvstore.engines.transformers)",
    "slid_out": "the engine's sliding windows do not have the block any more (kvstore.engines.transformers)",
}
"""Every reason for which a block is not stored."""


@dataclass(frozen=True)
class Rejection:
    """Why a record was refused: kind (one of REJECTION_KINDS), a sentence for the log, and whether the record
    itself is to blame: a writer then takes it out of the store."""

    kind: str
    detail: str
    condemned: bool = False


@dataclass(frozen=True)
class PutResult:
    """stored and present: a bool a block; failed: {index: reason}, reasons of FAILURE_REASONS. Every block is one of
    the three. present: a record with the same key, position, valid tokens and geometry was there already."""

    stored: Bools
    present: Bools
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GetResult:
    """verified and missing: a bool a block; rejected: {index: Rejection}. Every block is one of the three.

    The engine's blocks hold good KV where verified is true; elsewhere their contents are undefined.
    """

    verified: Bools
    missing: Bools
    rejected: dict[int, Rejection] = field(default_factory=dict)

    @property
    def num_leading(self) -> int:
        """How many blocks from the first on are verified without a gap: the usable prefix."""
        gaps = np.flatnonzero(~self.verified)
        return int(gaps[0]) if gaps.size else len(self.verified)
