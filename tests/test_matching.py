"""The story: a look-up reads a thousand headers at once. It must find what looking at them one by one finds, whatever one of
them says."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import kvstore.matching
from kvstore import StoreConfig
from tests.support import MIB, Raw, block_hashes, flip, index_key, make_cache, open_store

BLOCKS = 40
HASHES = block_hashes(BLOCKS)
HEADER_BITS = 8 * 100
"""Of the fields before the geometry, and some of it."""


def test_any_flipped_bit_of_any_header_ends_a_match_where_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, ended = random.Random(1), 0
    config = StoreConfig(capacity_bytes=16 * MIB)
    with open_store(tmp_path, make_cache(blocks=BLOCKS), config) as store:
        assert store.put_blocks(HASHES, range(BLOCKS)).stored.all()
        raw = Raw(store)
        assert store.match_prefix(HASHES) == BLOCKS
        for bit in range(HEADER_BITS):
            at = chance.randrange(BLOCKS)
            key = index_key(store, HASHES[at])
            good = raw.entry(key) or b""
            raw.put_entry(key, flip(good, bit))
            found = store.match_prefix(HASHES)
            monkeypatch.setattr(kvstore.matching, "FEW", BLOCKS + 1)
            assert found == store.match_prefix(HASHES), (bit, at)
            monkeypatch.undo()
            assert found in (at, BLOCKS)
            ended += found == at
            raw.put_entry(key, good)
    # Damaged headers count: a get refuses them, and says so. What ends a match is a newer version.
    assert ended < HEADER_BITS


def test_what_is_missing_at_another_position_or_of_another_length_ends_a_match(tmp_path: Path) -> None:
    config = StoreConfig(capacity_bytes=16 * MIB)
    with open_store(tmp_path, make_cache(blocks=BLOCKS), config) as store:
        assert store.put_blocks(HASHES[:30], range(30)).stored.all()
        assert store.put_blocks(HASHES[31:], range(31, BLOCKS), start=31).stored.all()
        assert store.match_prefix(HASHES) == 30
        assert store.match_prefix(HASHES[1:]) == 0
        assert store.match_prefix(list(np.roll(np.array(HASHES[:30], object), 3))) == 0
        mixed = [*HASHES[:20], *HASHES[21:30], HASHES[20]]
        assert store.match_prefix(mixed) == 20
