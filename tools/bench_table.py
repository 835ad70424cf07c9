"""What the slice table costs a put: bytes of the directory, and the time to encode and hash them and to write them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.environment import LMDB_ENGINE
from kvstore.geometry import chunk_plan
from kvstore.record import Directory
from kvstore.tools.bench_subject import Geometry

ROUNDS: Final = 9
UInt64s = npt.NDArray[np.uint64]


def table_cost(geometry: Geometry, put_seconds: Sequence[float], folder: Path) -> dict[str, Any]:
    """The cost of the slice table in one put of all blocks. put_seconds: of puts of these without sync.

    bytes: of a block's table over those of the block. time: what a put's directories take with their tables less what they
    take without, encoded, hashed and written to LMDB, over the median put; the sums themselves are not in it, since a block's
    checksum is their weighted sum and costs the same reading.
    """
    cell = geometry.tokens * geometry.cell_bytes
    plan = chunk_plan([cell] * (geometry.layers * geometry.heads))
    rng = np.random.default_rng(geometry.seed)
    sums = rng.integers(0, 2**63, (geometry.blocks, plan.num_slices), np.uint64)
    hashes = rng.integers(0, 2**63, plan.num_chunks, np.uint64)
    found = [
        _seconds(sums, plan.lengths, hashes, folder) - _seconds(sums[:, :0], plan.lengths, hashes, folder)
        for _ in range(ROUNDS)
    ]
    put = median(put_seconds)
    return {
        "table_bytes": 8 * plan.num_slices,
        "bytes": 8 * plan.num_slices / geometry.block_bytes,
        "seconds": median(found),
        "time": median(found) / put,
    }


def _seconds(sums: UInt64s, lengths: npt.NDArray[np.int64], hashes: UInt64s, folder: Path) -> float:
    """Seconds to encode, hash and write one directory a row of sums, (blocks, slices)."""
    place = folder / "tables"
    with lmdb.open(str(place), map_size=2**30, sync=False, meminit=False, lib_version=LMDB_ENGINE, subdir=False) as env:
        began = time.perf_counter()
        with env.begin(write=True) as txn:
            for number, row in enumerate(sums):
                directory = Directory(row, lengths, hashes).encode()
                xxh3_64_intdigest(directory)
                txn.put(number.to_bytes(8, "big") + b"\0\0", directory, append=True)
        seconds = time.perf_counter() - began
    place.unlink()
    Path(f"{place}-lock").unlink()
    return seconds
