"""How likely a block of a class is to be asked for again at each age, learned from resident blocks and ghosts.

The policy `hazard` was chosen on production traces (the Mooncake conversation trace among them); the constants are
those of that comparison, but for buckets up to two weeks where an hour of trace needed 27.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.eviction_table import Ints

Floats = npt.NDArray[np.float64]

NUM_CLASSES: Final = 16
EDGES_S: Final = 2.0 ** (np.arange(42) / 2)
"""Where a bucket of age ends and the next begins, in seconds: 1, 1.4, 2, ... 2**20.5 (17 days). Past the last, age alone
decides."""
NUM_BUCKETS: Final = EDGES_S.size
WIDTHS_S: Final = np.diff(EDGES_S, prepend=0.0)
LEARN_EVERY: Final = 50
WEIGHT: Final = 4000.0
"""How many observations a cell needs to count as much as what is known of its class and its age."""
CLASS_WEIGHT: Final = 20.0
PRIOR: Final = 0.05
MOST_LIKELY: Final = 0.9
HALVE_PAST: Final = 100_000.0
NEW_MUST_EXCEED: Final = 1.3
"""How many times a victim's worth a new block must be worth to be written for it: a write costs too."""

MAGIC: Final = b"\x89KVE"
VERSION: Final = 1
FORM: Final = struct.Struct("<4sHHHHQ")
"""Magic, version, classes, buckets, reserved, XXH3-64 of the counters that follow: `again`, then `passed`."""


class Hazard:
    """again[c, k]: how often a block of class c was asked for again at an age in bucket k; passed[c, k]: how often one
    grew older than that. rank: of each class and bucket (and the one past the last), the lowest is evicted first;
    new_rank: what a new block has instead.

    Owned by one policy, used by one thread at a time.
    """

    def __init__(self) -> None:
        self.again = np.zeros((NUM_CLASSES, NUM_BUCKETS))
        self.passed = np.zeros((NUM_CLASSES, NUM_BUCKETS))
        self.rank = np.empty((NUM_CLASSES, NUM_BUCKETS + 1), np.int64)
        self.new_rank = np.empty((NUM_CLASSES, NUM_BUCKETS + 1), np.int64)
        self._requests = 0
        self._rank()

    def asked(self, classes: Ints, buckets: Ints) -> None:
        """A request asked again for blocks of these classes at these ages."""
        within = buckets < NUM_BUCKETS
        np.add.at(self.again, (classes[within], buckets[within]), 1.0)
        self._requests += 1
        if self._requests % LEARN_EVERY == 0:
            self._learn()

    def aged(self, classes: Ints, buckets: Ints) -> None:
        """Blocks of these classes grew older than these buckets."""
        self.passed += np.bincount(classes * NUM_BUCKETS + buckets, minlength=self.passed.size).reshape(
            self.passed.shape
        )

    def _learn(self) -> None:
        many = self.again + self.passed > HALVE_PAST
        self.again[many] /= 2
        self.passed[many] /= 2
        self._rank()

    def _rank(self) -> None:
        worth = worth_of(likelihood(self.again, self.passed))
        flat = np.concatenate((worth, np.zeros((NUM_CLASSES, 1))), axis=1).ravel()
        order = np.argsort(flat, kind="stable")
        self.rank.ravel()[order] = 2 * np.arange(flat.size) + 1
        self.new_rank.ravel()[:] = 2 * np.searchsorted(flat[order], flat / NEW_MUST_EXCEED)

    def snapshot(self) -> bytes:
        """The counters, 11 kB."""
        data = self.again.astype("<f8").tobytes() + self.passed.astype("<f8").tobytes()
        return FORM.pack(MAGIC, VERSION, NUM_CLASSES, NUM_BUCKETS, 0, xxh3_64_intdigest(data)) + data

    def restore(self, data: bytes) -> bool:
        """Take counters back; False, and nothing is changed, where these bytes are no snapshot of this version."""
        size = NUM_CLASSES * NUM_BUCKETS
        if len(data) != FORM.size + 16 * size:
            return False
        start = FORM.pack(MAGIC, VERSION, NUM_CLASSES, NUM_BUCKETS, 0, xxh3_64_intdigest(data[FORM.size :]))
        counters = np.frombuffer(data, "<f8", offset=FORM.size).astype(np.float64)
        if data[: FORM.size] != start or not np.all((counters >= 0) & (counters <= 1e9)):
            return False
        self.again, self.passed = counters.reshape(2, NUM_CLASSES, NUM_BUCKETS).copy()
        self._learn()
        return True


def likelihood(again: Floats, passed: Floats) -> Floats:
    """The chance that a block of a class, at an age in a bucket, is asked for before it leaves the bucket.

    A cell that saw little is drawn to what its age (over all classes) and its class (over all ages) suggest.
    """
    seen = again + passed
    by_age = (again.sum(axis=0) + PRIOR * WEIGHT) / (seen.sum(axis=0) + WEIGHT)
    padded = np.pad(by_age, 1, mode="edge")
    by_age = padded[:-2] / 4 + padded[1:-1] / 2 + padded[2:] / 4
    by_class = (again.sum(axis=1) + CLASS_WEIGHT) / ((by_age * seen).sum(axis=1) + CLASS_WEIGHT)
    expected = np.minimum(MOST_LIKELY, by_age * by_class[:, None])
    likely: Floats = (again + WEIGHT * expected) / (seen + WEIGHT)
    return likely


def worth_of(likely: Floats) -> Floats:
    """Of each cell the most requests per second of being kept, over all times to stop keeping."""
    worth = np.empty_like(likely)
    for bucket in range(likely.shape[1]):
        later = likely[:, bucket:]
        survival = np.cumprod(np.concatenate((np.ones((later.shape[0], 1)), 1 - later[:, :-1]), axis=1), axis=1)
        hits = np.cumsum(survival * later, axis=1)
        seconds = np.cumsum(survival * WIDTHS_S[bucket:] * (1 - later / 2), axis=1)
        worth[:, bucket] = (hits / seconds).max(axis=1)
    return worth
