"""Models with several kinds of groups: a prefix ends where the first group lacks what it needs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import KVStore, PagedKVCache
from kvstore.errors import ConfigError
from kvstore.prefixes import Blocks, PrefixBlocks, usable_tokens
from tests.support import Raw, block_hashes, flip, layer_tensors, open_store

FULL, WINDOW, OTHER = 0, 1, 2
BLOCKS = 8
HASHES = block_hashes(BLOCKS)


def needed(end: int, looks_back: int | None) -> range:
    """The tokens that a prefix needs of a group, token by token: what the definition says."""
    return range(0 if looks_back is None else max(0, end - looks_back), end)


def expected(groups: Sequence[Blocks]) -> int:
    """usable_tokens, token by token."""
    there = [
        {g.start * g.block_size + t for t in range(g.there.size * g.block_size) if g.there[t // g.block_size]}
        for g in groups
    ]
    ends = [e for e in range(min(g.end for g in groups) + 1) if all(e % g.block_size == 0 for g in groups)]
    good = [e for e in ends if all(there[i].issuperset(needed(e, g.looks_back)) for i, g in enumerate(groups))]
    return max(good)


def test_the_usable_prefix_is_the_longest_of_which_every_group_has_what_it_needs() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        groups = []
        for _ in range(rng.randrange(1, 4)):
            size, start = rng.choice((1, 2, 3, 4)), rng.choice((0, 0, 0, 1, 3))
            there = np.array([rng.random() < 0.8 for _ in range(rng.randrange(9))], bool)
            groups.append(Blocks(size, rng.choice((None, None, 0, 1, 2, 5, 9)), there, start))
        assert usable_tokens(groups) == expected(groups), groups
    assert usable_tokens([]) == 0


def hybrid(window: int = 6, sizes: dict[int, int] | None = None, seed: int = 0) -> PagedKVCache:
    """Two layers of full attention, one of a sliding window, one more of full attention in a group of its own."""
    every = {FULL: 4, WINDOW: 4, OTHER: 4} | (sizes or {})
    first, tensors, groups = 0, dict[str, Any](), dict[int, list[str]]()
    for group, layers in ((FULL, 2), (WINDOW, 1), (OTHER, 1)):
        made = layer_tensors("BHNC", layers, blocks=12, tokens=every[group], first_layer=first, seed=seed + group)
        tensors |= made
        groups[group] = list(made)
        first += layers
    types = dict.fromkeys(groups[WINDOW], "sliding")
    return PagedKVCache.from_tensors(tensors, "BHNC", groups, layer_types=types, windows={WINDOW: window})


def put(store: KVStore, group: int, blocks: Sequence[int]) -> None:
    """Store some blocks of a group."""
    for block in blocks:
        result = store.put_blocks(HASHES[block : block + 1], [block], start=block, group=group)
        assert not result.failed


CASES = {
    "everything": (range(8), range(8), range(8), 8),
    "the window alone is enough": (range(8), (6, 7), range(8), 8),
    "the last block of the window is missing": (range(8), (5, 6), range(8), 7),
    "the first block of the window is missing": (range(8), (0, 1, 2, 7), range(8), 3),
    "full attention ends first": (range(5), range(8), range(8), 5),
    "the other group ends first": (range(8), range(8), range(2), 2),
    "no window": (range(8), (), range(8), 0),
}


@pytest.mark.both
@pytest.mark.parametrize("case", CASES)
def test_a_prefix_needs_of_a_window_what_it_looks_back_at(tmp_path: Path, case: str) -> None:
    full, window, other, blocks = CASES[case]
    cache = hybrid()
    with open_store(tmp_path, cache) as store:
        for group, there in ((FULL, full), (WINDOW, window), (OTHER, other)):
            put(store, group, list(there))
        asked = dict.fromkeys((FULL, WINDOW, OTHER), HASHES)
        assert store.match_prefix(asked) == blocks
        assert store.match_tokens(asked) == 4 * blocks
        assert store.match_prefix({FULL: HASHES}) == len(full)
        assert store.match_prefix({}) == store.match_tokens({}) == 0


@pytest.mark.both
def test_what_is_loaded_is_usable_up_to_where_every_group_was_verified(tmp_path: Path) -> None:
    source, target = hybrid(), hybrid(seed=50)
    with open_store(tmp_path, source) as store:
        for group in (FULL, WINDOW, OTHER):
            put(store, group, range(BLOCKS))
        bound = store.attach(target)
        wanted = {FULL: PrefixBlocks(HASHES, range(8)), WINDOW: PrefixBlocks(HASHES[4:], range(4, 8), 4)}
        assert bound.get_prefix(wanted | {OTHER: PrefixBlocks(HASHES, range(8))}).tokens == 32
        raw, key = Raw(store), store._views[WINDOW].shape.keys(HASHES[6:7])[0]
        entry = raw.entry(key)
        assert entry is not None
        chunk = next(k for k in reversed(raw.payload()) if k[:8] == entry[40:48][::-1])
        raw.put_chunk(chunk, flip(raw.chunk(chunk), 99))
        got = bound.get_prefix(wanted | {OTHER: PrefixBlocks(HASHES, range(8))})
        assert list(got.groups[WINDOW].rejected) == [2]
        assert got.tokens == 24
        assert got.groups[FULL].verified.all()
        assert store.match_tokens(dict.fromkeys((FULL, WINDOW, OTHER), HASHES)) == 24


@pytest.mark.both
def test_groups_of_several_block_sizes_end_together(tmp_path: Path) -> None:
    cache = hybrid(sizes={WINDOW: 8, OTHER: 6})
    hashes = {FULL: HASHES, WINDOW: block_hashes(4, "w"), OTHER: block_hashes(5, "o")}
    with open_store(tmp_path, cache) as store:
        for group, own in hashes.items():
            assert store.put_blocks(own, range(len(own)), group=group).stored.all()
        assert store.match_tokens(hashes) == 24
        assert store.match_tokens({FULL: HASHES, WINDOW: hashes[WINDOW]}) == 32
        with pytest.raises(ConfigError, match=r"block sizes differ.*match_tokens"):
            store.match_prefix(hashes)


def test_groups_have_their_own_fingerprints_and_keys(tmp_path: Path) -> None:
    """Blocks of one group never answer for another's, though the hashes are the same."""
    cache = hybrid()
    with open_store(tmp_path, cache, io="inline") as store:
        put(store, FULL, range(BLOCKS))
        for group in (WINDOW, OTHER):
            assert store.get_blocks(HASHES, range(BLOCKS), group=group).missing.all()
        raw = Raw(store)
        for block, group in itertools.product((0, 3), (WINDOW, OTHER)):
            source = raw.entry(store._views[FULL].shape.keys(HASHES)[block])
            assert source is not None
            raw.put_entry(store._views[group].shape.keys(HASHES)[block], source)
            got = store.get_blocks(HASHES[block : block + 1], [block], start=block, group=group)
            assert got.rejected[0].kind == "key"


def test_a_window_that_is_not_known_needs_every_block(tmp_path: Path) -> None:
    tensors = {"layers.0": torch.zeros(12, 1, 4, 32, dtype=torch.uint8)}
    cache = PagedKVCache.from_tensors(tensors, "BHNC", layer_types={"layers.0": "sliding"})
    with open_store(tmp_path, cache, io="inline") as store:
        put(store, 0, (5, 6, 7))
        assert store.match_prefix({0: HASHES}) == 0
